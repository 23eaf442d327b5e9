"""Building the package: setuptools, and a C++ compiler for the kernels, which this finds or asks the package index for.

Most machines that train have a compiler; a slim container has none, and its user should not need to care. Where none
compiles what we need, the build environment gets the `ziglang` package, a C++ compiler in a wheel. Where that fails
too, the package is installed without compiled kernels: runs can be compared and shown there, not captured.

The sources are compiled once for each level of the processor, in the limited API, so that one wheel serves every
Python from 3.10 on and every processor, and asks for no newer C library than its compiler cannot avoid.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from setuptools import Extension, build_meta
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
build_sdist = build_meta.build_sdist
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist

FOLDER: Final = "introspect_cli/tensors"
PROBES: Final = "introspect_cli/capture/probes"
_BOTH: Final = (
    "intake",
    "memory",
    "lock",
    "numbers",
    "large",
    "team",
    "pace",
    "step",
    "strided",
    "tensor",
    "generators",
    "columns",
    "kernels",
)
EXTENSIONS: Final = [
    Extension(
        "introspect_cli.tensors._kernels",
        [
            *(f"{PROBES}/{name}.cpp" for name in ("gradients", "held", "section")),
            *(f"{FOLDER}/{name}.cpp" for name in ("module", *_BOTH)),
        ],
        depends=[
            f"{PROBES}/probes.h",
            *(f"{FOLDER}/{name}.h" for name in ("calls", "lanes", "limited", "objects", "room", *_BOTH)),
        ],
        py_limited_api=True,
        optional=True,
    ),
]

_ZIG: Final = "ziglang"
_ZIG_MACHINES: Final = {"x86_64", "aarch64", "arm64"}
"""Processors with a wheel of `ziglang`, on Linux and macOS, among those that torch has wheels for."""

_FLAGS: Final = (
    *("-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # No fast math: NaN and infinity count, and every level of the processor has to compute the same bits.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-sanitize=undefined"),
)
_X86_LEVELS: Final = {"level_v3": ("-march=x86-64-v3",), "level_v4": ("-march=x86-64-v4", "-mprefer-vector-width=512")}


def levels() -> dict[str, tuple[str, ...]]:
    """What `kernels.cpp` is compiled for on this machine: the name of the entry point, and its compiler's flags."""
    more = _X86_LEVELS if platform.machine().lower() in {"x86_64", "amd64"} else {}
    return {"level_baseline": (), **more}


def _works(command: list[str]) -> bool:
    """Whether a compiler is there and knows all that is asked of it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text("#include <cstring>\n#include <type_traits>\nint main() { return 0; }\n")
        for flags in levels().values():
            try:
                arguments = [*command, *_FLAGS, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
                done = subprocess.run(arguments, check=False, capture_output=True, timeout=120)  # noqa: S603  # a compiler
            except (OSError, subprocess.TimeoutExpired):
                return False
            if done.returncode:
                return False
    return True


def _zig() -> list[str]:
    """The compiler of the package index, for the oldest C library that Linux wheels are built for."""
    libc = "musl" if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "") else "gnu.2.17"
    target = ["-target", f"{platform.machine()}-linux-{libc}"] if sys.platform == "linux" else []
    return [sys.executable, "-m", _ZIG, "c++", *target]


def _spelt(flag: str, command: list[str]) -> str:
    """A flag as a compiler spells it: zig has its own names of processors."""
    return flag.replace("x86-64-v", "x86_64_v") if _ZIG in command else flag


def installed_compiler() -> list[str] | None:
    """The command of a C++ compiler of this machine's that can compile the kernels; None if there is none."""
    wanted = [os.environ.get("CXX", ""), sysconfig.get_config_var("CXX") or "", "c++", "g++", "clang++"]
    for text in wanted:
        command = shlex.split(text)[:1]
        if command and shutil.which(command[0]) and _works(command):
            return command
    return None


def _compiler_requirement() -> list[str]:
    served = sys.platform in {"linux", "darwin"} and platform.machine().lower() in _ZIG_MACHINES
    return [_ZIG] if served and installed_compiler() is None else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What the build environment needs: a compiler too, where the machine has none."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler_requirement()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """The same for `pip install -e`."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler_requirement()]


class BuildKernels(build_ext):
    """Compiles `kernels.cpp` for each level and the other sources once, and links those of an extension together."""

    def build_extension(self, ext: Extension) -> None:
        """Build an extension.

        Raises:
            CompileError: no compiler, or it failed; setuptools prints a warning and goes on, as `optional` says.
        """
        command = installed_compiler() or _zig()
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        headers = [f"-I{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}]
        sources = runpy.run_path("introspect_cli/machine.py")["digest"]()
        common = (*headers, f"-I{FOLDER}", f"-I{PROBES}", f'-DSOURCES="{sources}"')
        jobs = []
        for source in ext.sources:
            if Path(source).stem == "kernels":
                jobs += [(source, level, (f"-DLEVEL={level}", *flags)) for level, flags in levels().items()]
            else:
                jobs.append((source, Path(source).stem, common))
        made = [str(objects / f"{name}.o") for _, name, _ in jobs]
        target.unlink(missing_ok=True)  # what an earlier build made of other sources
        commands = [
            [*command, *_FLAGS, *(_spelt(flag, command) for flag in flags), "-c", source, "-o", out]
            for (source, _, flags), out in zip(jobs, made, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            list(workers.map(_run, commands))  # the first failure is raised here
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-s"]
        as_needed = ["-Wl,--as-needed"] if sys.platform == "linux" else []
        _run([*command, *shared, *as_needed, *made, "-o", str(target)])


def _run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)  # noqa: T201  # what the build's log is for
    try:
        done = subprocess.run(command, check=False)  # noqa: S603  # a compiler
    except OSError as error:
        raise CompileError(f"the kernels are not compiled: {error}") from error
    if done.returncode:
        raise CompileError(f"the kernels are not compiled: {command[0]} ended with {done.returncode}")
