"""Loading the jitted kernels: when, from which cache, and what if they cannot be had.

The problem: compiling takes seconds and must neither land on the first step's clock nor be repeated by every
process; the package may lie in a directory that cannot be written, several processes start at once, and numba may
be missing or broken. The way: `warm_up` loads on request and says how long it took; what is not in the cache, a
process of its own compiles (see `library`), while others that need the same wait for it. The cache is a directory of
ours, named by a hash of the kernels' sources, the versions of what compiles them and the processor: the user's cache
directory, or else a private one under the temporary directory. Its files are named by their contents and appear
whole. Without a writable directory the kernels are compiled and not kept; without numba there are none and `engine`
uses the reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from introspect_cli.tensors.binaries import Binaries, private
from introspect_cli.tensors.machine_code import BEGINNING, Code, function, in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISABLE_VARIABLE: Final = "INTROSPECT_NO_JIT"
"""Environment variable that, set to anything but 0, keeps the jitted kernels from being used."""

_COMPILER: Final = "introspect_cli.tensors.library"
_SOURCES: Final = (
    "library.py",
    "machine_code.py",
    "kernels.py",
    "teamwork.py",
    "summation.py",
    "moments.py",
    "strided.py",
    "widen.py",
    "vector.py",
    "codes.py",
    "rows.py",
    "checksum.py",
    "sketch.py",
)


@dataclass
class _Loaded:
    """What a first attempt to load came to."""

    tried: bool = False
    enter: Callable[..., int] | None = None
    code: Code | None = None
    reason: str = ""


_LOADED = _Loaded()


def enter() -> Callable[..., int] | None:
    """The kernels' entry point, see `kernels.enter`; None if there are none. Loads them if need be."""
    if not _LOADED.tried:
        warm_up()
    return _LOADED.enter


def part() -> int:
    """C address of what the threads of a team run; 0 if there are no kernels."""
    return _LOADED.code.part if _LOADED.code else 0


def reason() -> str:
    """Why there are no jitted kernels; "" if there are, or nobody asked yet."""
    return _LOADED.reason


def warm_up(before_compiling: Callable[[], None] = lambda: None) -> float:
    """Load the kernels from the cache, or have them compiled, unless that was done.

    Args:
        before_compiling: called once it is known that this will take a while.

    Returns:
        Seconds spent. Nothing is raised: without kernels the reference is used, and `reason` says why.
    """
    if _LOADED.tried:
        return 0.0
    start = time.perf_counter()
    _LOADED.tried = True
    if os.environ.get(DISABLE_VARIABLE, "0") not in {"", "0"}:
        _LOADED.reason = f"{DISABLE_VARIABLE} is set"
        return 0.0
    try:
        _LOADED.code = _load(before_compiling)
        _LOADED.enter = function(_LOADED.code.call)
    except Exception as error:  # a broken numba, LLVM or linker fails in ways of its own
        _LOADED.reason = f"{type(error).__name__}: {error}"
    return time.perf_counter() - start


def _load(before_compiling: Callable[[], None]) -> Code:
    """The kernels from the first cache directory that works, compiled where they are not there yet."""
    binary = b""
    for directory in _directories():
        binaries = Binaries(directory)
        with contextlib.suppress(OSError), binaries.alone():
            code = binaries.load()
            if code is None:
                binary = binary or _compile(before_compiling)
                binaries.keep(binary)
                code = binaries.load()
            if code is not None:
                return code
    return in_memory(binary or _compile(before_compiling))


def _compile(before: Callable[[], None]) -> bytes:
    """Have the kernels compiled by a process of its own, without the script's settings of numba.

    Raises:
        RuntimeError: it failed, with the last line that it wrote.
    """
    before()
    root = Path(__file__).parents[2]
    done = subprocess.run(  # noqa: S603  # this interpreter, a module of ours
        [sys.executable, "-m", _COMPILER],
        check=False,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd=root,
        env={key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")},
    )
    _, found, binary = done.stdout.partition(BEGINNING)
    if done.returncode or not found:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"compiling ended with {done.returncode}")
    return binary


def _directories() -> Iterator[Path]:
    """Candidate cache directories that can be written."""
    name = f"kernels-{_digest()}"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(RuntimeError, OSError):
        found = private(Path(base).expanduser() / "introspect-cli", name)
        if found:
            yield found
    with contextlib.suppress(OSError):
        owner = os.getuid() if hasattr(os, "getuid") else "user"
        found = private(Path(tempfile.gettempdir()) / f"introspect-cli-{owner}", name)
        if found:
            yield found


def _digest() -> str:
    """Of everything that compiled kernels depend on."""
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    for package in ("numba", "llvmlite"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(package).encode())
    digest.update(f"{sys.version} {_processor()}".encode())
    return digest.hexdigest()


def _processor() -> str:
    """What tells this machine's sort of processor from others that may share the cache."""
    about = platform.machine()
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")
        wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
        about += "".join(line for line in first.splitlines() if line.startswith(wanted))
    return about
