"""The compiled extension: how it is built and loaded, every level of the processor, and what is said without it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import introspect_cli
from introspect_cli.tensors import cpu, kernels
from introspect_cli.tensors import rows as r

ROOT = Path(introspect_cli.__file__).parent.parent
BACKEND = ROOT / "build_backend.py"


def run(*command, path=ROOT, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("INTROSPECT_")}
    env |= {"PYTHONPATH": str(path), **environment}
    return subprocess.run([sys.executable, *command], env=env, cwd=path, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A directory with the package as it is where nothing could compile it."""
    path = tmp_path_factory.mktemp("without")
    shutil.copytree(
        ROOT / "introspect_cli", path / "introspect_cli", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return path


def failing(*command, path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("INTROSPECT_")}
    done = subprocess.run(
        [sys.executable, *command],
        env=env | {"PYTHONPATH": str(path)},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_a_capture_without_kernels_says_so_in_one_line_before_the_script_runs(without, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('it ran')\n")
    line = failing("-m", "introspect_cli", "capture", "-o", str(tmp_path / "run"), str(script), path=without)
    assert "no compiled kernels: they were not compiled" in line
    assert "install introspect-cli again" in line
    assert not (tmp_path / "run").exists()


def test_kernels_older_than_their_sources_are_not_used(tmp_path):
    shutil.copytree(ROOT / "introspect_cli", tmp_path / "introspect_cli", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "script.py").write_text("")
    command = ("-m", "introspect_cli", "capture", "-q", "-o", str(tmp_path / "run"), str(tmp_path / "script.py"))
    with (tmp_path / "introspect_cli" / "tensors" / "intake.cpp").open("a") as source:
        source.write("// another line\n")
    assert "their sources changed after they were compiled" in failing(*command, path=tmp_path)
    for pattern in ("*.cpp", "*.h"):  # as a wheel leaves it
        for path in (tmp_path / "introspect_cli").rglob(pattern):
            path.unlink()
    run("-c", "from introspect_cli.tensors import kernels", path=tmp_path)


def every_sort():
    """Tensors whose summaries take every way through the kernels."""
    generator = torch.Generator().manual_seed(3)
    for count in (0, 1, 33, 1000, 20_011):
        x = torch.randn(count, generator=generator) * 3 + 0.5
        yield from (x.to(dtype) for dtype, code in cpu.CODES.items() if code < kernels.OPAQUE8)
        yield x.relu()
        yield x * 1e38
        yield x.double() * 1e308
        yield torch.complex(x.double() * 1e200, x.double())
        yield x.masked_fill(torch.arange(count) % 700 == 5, float("nan")).masked_fill(x > 5, float("inf"))
        yield x.half().masked_fill(x > 5, -float("inf")) * 1e-6
        # which zero is the smallest, and which the largest, where there are both
        yield -x.relu()
        yield x.abs().masked_fill(x > 3, -0.0)
        yield (-x.abs()).masked_fill(x > 3, 0.0).masked_fill(x < -3, -0.0)
        yield torch.where(x > 0, 0.0, -0.0)


def test_every_level_of_the_processor_computes_the_same_bits():
    levels = kernels.KERNELS.levels()
    assert levels[0] == "baseline"
    found = {}
    for level in levels:
        kernels.KERNELS.use(level)
        try:
            engine = cpu.Engine(alone=True)
            rows = []
            for tensor in every_sort():
                rows.append(r.empty(1))
                engine.fill(rows[-1][0], tensor, kernels.STATS | kernels.SKETCH)
        finally:
            kernels.KERNELS.use(levels[-1])
        found[level] = [row.tobytes() for row in rows]
    assert len(set(found[levels[0]])) > 90
    for level in levels[1:]:
        different = [number for number, row in enumerate(found[level]) if row != found[levels[0]][number]]
        assert different == [], level


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("objdump"), reason="reads the symbols of an ELF file")
def test_the_extension_needs_no_newer_library_than_a_manylinux_wheel_may():
    extension = kernels.KERNELS
    listed = subprocess.run(["objdump", "-T", "-p", extension.__file__], capture_output=True, text=True, check=True)
    listed = listed.stdout
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", listed)]
    assert max(versions) <= (2, 17)
    needed = {name for name in re.findall(r"NEEDED +(\S+)", listed) if not name.startswith("ld-linux-")}
    assert needed <= {"libc.so.6", "libm.so.6"}, "beside the loader, which every process has"
    assert ".abi3." in extension.__file__


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("setuptools", minversion="77")
    spec = importlib.util.spec_from_file_location("build_backend", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_compiler_is_asked_of_the_package_index_where_there_is_none(backend, monkeypatch):
    monkeypatch.setattr(backend.sys, "platform", "linux")
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backend, "installed_compiler", lambda: None)
    assert backend._compiler_requirement() == ["ziglang"]
    monkeypatch.setattr(backend.platform, "machine", lambda: "s390x")
    assert backend._compiler_requirement() == []
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backend, "installed_compiler", lambda: ["c++"])
    assert backend._compiler_requirement() == []
