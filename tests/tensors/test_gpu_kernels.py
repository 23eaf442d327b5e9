"""The GPU kernels without a GPU: what they compute, by Triton's interpreter; what they compile to, by its compilers."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from artefacts import ROOT as ROOT_OF_RUNS
from sweeps import sliced

pytestmark = pytest.mark.gpu

pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")
if "constexprs" not in inspect.signature(compiler.ASTSource).parameters:
    pytest.skip("the kernels are for a newer triton than this one", allow_module_level=True)

ROOT = Path(__file__).parents[2]
_SOURCE = ROOT / "benchmarks" / "gpu_offline.py"


def interpreted(*options):
    """Run the tests of the kernels where Triton interprets them: it decides that when it is imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(ROOT / "tests" / "support" / "gpu_interpreted.py"),
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_kernels_compute_what_the_torch_operations_do():
    interpreted()


@pytest.mark.sweep
def test_the_kernels_compute_it_for_every_type_and_many_sizes():
    interpreted("-m", "sweep")


@pytest.fixture(scope="module")
def offline():
    spec = importlib.util.spec_from_file_location("gpu_offline", _SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_offline"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _compiled_before():
    """What Triton compiled of the same source for the same device; it finds that by a digest of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(ROOT_OF_RUNS / "triton"))
        yield


USUAL = ("all three, float32", "lean, float32", "checksum, float32", "a table of bfloat16", "matrices of bfloat16")


@pytest.mark.parametrize("target", sliced(["sm_80", "sm_90", "sm_100", "gfx942"], ("sm_90", "gfx942")))
def test_the_usual_kernels_take_128_registers_and_spill_next_to_nothing_on_every_gpu(offline, target):
    of_amd = target == "gfx942"  # whose threads have 512, and whose compiler takes no limit
    for what in (USUAL[0], USUAL[-1]) if of_amd else (*USUAL, "rows of programs"):
        used = offline.compiled(offline.VARIANTS[what], target)
        assert used.registers <= (144 if of_amd else 128), what
        assert used.spilled <= 8, what


SPILLED = 200
"""Bytes that a thread of another kernel may spill for want of registers: what tiles with NaN need may lie there."""


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_variant_compiles_and_spills_little(offline, target):
    spilled = {what: offline.compiled(variant, target).spilled for what, variant in offline.VARIANTS.items()}
    assert max(spilled.values()) <= SPILLED, spilled


def test_elements_are_read_in_vectors_where_all_is_aligned(offline):
    aligned, unaligned = (
        offline.assembly(offline.VARIANTS[f"checksum, float32{how}"], "sm_90").count("ld.global.v4.b32")
        for how in ("", ", unaligned")
    )
    assert aligned >= unaligned + 4, "four rows of a tile, each in vectors of four"
    for what in ("checksum, bfloat16", "matrices of bfloat16"):
        assert "ld.global.v2.b32" in offline.assembly(offline.VARIANTS[what], "sm_90")


def test_no_thread_of_a_lean_pass_waits_for_another_from_tile_to_tile(offline):
    counted = {what: offline.of_an_element(offline.VARIANTS[f"{what}, float32"]) for what in ("lean", "all three")}
    assert counted["lean"].barriers == 0 < counted["all three"].barriers
    assert counted["lean"].instructions < 0.55 * counted["all three"].instructions
