"""Loading the kernels: caches that cannot be written, many processes at once, no linker, and no numba at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import introspect_cli
from introspect_cli.tensors import jit
from introspect_cli.tensors.binaries import _name, private

ROOT = Path(introspect_cli.__file__).parent.parent

SCRIPT = """
import json, sys
import torch
from introspect_cli.tensors import jit
from introspect_cli.tensors.summarize import Summarizer
announced = []
seconds = jit.warm_up(lambda: announced.append("compiling"))
made = Summarizer(threads=2)
generator = torch.Generator().manual_seed(1)
x = torch.randn(300_000, generator=generator)
for tensor in (x, x[:1000].half(), x.view(500, 600).t(), x[:77].to(torch.float8_e5m2), x.to(torch.complex64)):
    made.add(tensor)
table = made.take()
made.close()
json.dump({
    "seconds": seconds,
    "announced": announced,
    "again": jit.warm_up(),
    "reason": jit.reason(),
    "checksums": [int(value) for value in table.checksum],
    "means": table.floats["mean"].tolist(),
    "compiler": sorted({"numba", "llvmlite"} & set(sys.modules)),
}, sys.stdout)
"""


def start(tmp_path, path=ROOT, **environment):
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "INTROSPECT_"))}
    settings |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), "PYTHONPATH": str(path)}
    settings |= {key: str(value) for key, value in environment.items()}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=settings,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert errors == ""
    return json.loads(out)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A directory with a filled cache, and what the process that filled it said."""
    path = tmp_path_factory.mktemp("warm")
    return path, finish(start(path))


def binaries(path):
    """The files in a filled cache, by suffix."""
    return {file.suffix: file for file in (path / "cache" / "introspect-cli").rglob("*.*o")}


def test_the_first_process_compiles_and_the_next_loads(warm):
    path, first = warm
    second = finish(start(path))
    assert first["reason"] == second["reason"] == ""
    assert first["announced"] == ["compiling"]
    assert second["announced"] == []
    assert first["again"] == 0.0
    assert second["seconds"] < first["seconds"] / 2
    assert second["checksums"] == first["checksums"]
    assert second["means"] == first["means"]
    assert ".o" in binaries(path)


@pytest.mark.skipif(shutil.which("ld") is None, reason="without a linker, LLVM loads the kernels")
def test_the_compiler_is_not_in_the_process(warm):
    path, first = warm
    assert first["compiler"] == finish(start(path))["compiler"] == []
    assert ".so" in binaries(path)


def test_without_a_linker_llvm_loads_the_kernels(warm, tmp_path):
    path, wanted = warm
    binary = binaries(path)[".o"]
    target = tmp_path / "cache" / "introspect-cli" / binary.parent.name
    target.mkdir(mode=0o700, parents=True)
    shutil.copy(binary, target)
    found = finish(start(tmp_path))
    assert found["reason"] == ""
    assert found["compiler"] == ["llvmlite"]
    assert found["checksums"] == wanted["checksums"]


def test_a_library_that_cannot_be_loaded(warm, tmp_path):
    path, wanted = warm
    shutil.copytree(path / "cache", tmp_path / "cache")
    for file in (tmp_path / "cache").rglob("*.so"):
        content = b"as where nothing may be executed"
        (file.parent / _name(content, ".so")).write_bytes(content)
        file.unlink()
    found = finish(start(tmp_path))
    assert found["reason"] == ""
    assert found["checksums"] == wanted["checksums"]


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_without_numba_the_checksums_are_the_same(warm, tmp_path, package):
    _, wanted = warm
    broken = tmp_path / "site" / package
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not for this processor')")
    found = finish(start(tmp_path, path=os.pathsep.join([str(broken.parent), str(ROOT)])))
    assert found["reason"] == "RuntimeError: ImportError: not for this processor"
    assert found["checksums"] == wanted["checksums"]
    assert found["means"] == pytest.approx(wanted["means"], rel=1e-6, abs=1e-6)


@pytest.mark.sweep
def test_a_site_that_prints_does_no_harm(warm, tmp_path):
    _, wanted = warm
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nif 'library' in ' '.join(sys.orig_argv): print('welcome')\n")
    found = finish(start(tmp_path, path=os.pathsep.join([str(site), str(ROOT)])))
    assert found["reason"] == ""
    assert found["checksums"] == wanted["checksums"]


def test_kernels_can_be_switched_off(warm, tmp_path):
    _, wanted = warm
    found = finish(start(tmp_path, **{jit.DISABLE_VARIABLE: 1}))
    assert jit.DISABLE_VARIABLE in found["reason"]
    assert found["checksums"] == wanted["checksums"]


@pytest.mark.sweep
def test_several_processes_at_once(warm, tmp_path):
    _, wanted = warm
    for found in [finish(process) for process in [start(tmp_path, NUMBA_DISABLE_JIT=1) for _ in range(3)]]:
        assert found["reason"] == ""
        assert found["checksums"] == wanted["checksums"]
    assert sorted(file.suffix for file in (tmp_path / "cache").rglob("*.*")) == sorted(binaries(tmp_path))


def test_a_package_that_cannot_be_written_and_a_cache_that_is_a_file(warm, tmp_path):
    path, wanted = warm
    package = tmp_path / "site" / "introspect_cli"
    shutil.copytree(ROOT / "introspect_cli", package, ignore=shutil.ignore_patterns("__pycache__"))
    for directory in (package, *(item for item in package.rglob("*") if item.is_dir())):
        directory.chmod(0o555)
    (tmp_path / "cache").write_text("in the way")
    name = next((path / "cache" / "introspect-cli").iterdir()).name
    found = finish(start(tmp_path, path=tmp_path / "site"))
    assert found["reason"] == ""
    assert found["checksums"] == wanted["checksums"]
    assert not list(package.rglob("*.o"))
    made = tmp_path / f"introspect-cli-{os.getuid()}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert list((made / name).rglob("*.o"))
    for directory in (package, *(item for item in package.rglob("*") if item.is_dir())):
        directory.chmod(0o755)


@pytest.mark.sweep
def test_a_damaged_cache_is_not_used(warm, tmp_path):
    path, wanted = warm
    shutil.copytree(path / "cache", tmp_path / "cache")
    for number, file in enumerate(sorted((tmp_path / "cache").rglob("*.*o"))):
        file.write_bytes(b"" if number % 2 else file.read_bytes()[:-100])
    found = finish(start(tmp_path))
    assert found["reason"] == ""
    assert found["checksums"] == wanted["checksums"]


def test_directories_of_others_are_not_trusted(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert private(open_to_all, "kernels") is None
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert private(link, "kernels") is None
    own = tmp_path / "own"
    assert private(own, "kernels") == own / "kernels"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
