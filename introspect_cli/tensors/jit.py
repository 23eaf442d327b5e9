"""Loading the jitted kernels: when, from which cache, and what if they cannot be had.

The problem: compiling takes seconds and must neither land on the first step's clock nor be repeated by every
process; the package may lie in a directory that cannot be written, several processes start at once, and numba may
be missing or broken. The way: `warm_up` compiles or loads on request and says how long it took. The cache is a
directory of ours, named by a hash of the kernels' sources and the versions of what compiles them: the user's cache
directory, or else a private one under the temporary directory; numba writes it by renaming finished files, so
readers never see half of one. Without a writable one the kernels are compiled and not kept; without numba there are
none and `engine` uses the reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISABLE_VARIABLE: Final = "INTROSPECT_NO_JIT"
"""Environment variable that, set to anything but 0, keeps the jitted kernels from being used."""

_MODULE: Final = "introspect_cli.tensors.kernels"
_SOURCES: Final = (
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
    addresses: tuple[int, int] = (0, 0)
    reason: str = ""


_LOADED = _Loaded()


def enter() -> Callable[..., int] | None:
    """The kernels' entry point, see `kernels.enter`; None if there are none. Loads them if need be."""
    if not _LOADED.tried:
        warm_up()
    return _LOADED.enter


def addresses() -> tuple[int, int]:
    """C addresses of `kernels.take_part` and `kernels.enter`; zeros if there are no kernels."""
    return _LOADED.addresses


def reason() -> str:
    """Why there are no jitted kernels; "" if there are, or nobody asked yet."""
    return _LOADED.reason


def warm_up() -> float:
    """Compile the kernels, or load them from the cache, unless that was done.

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
        _LOADED.enter = _load()
    except Exception as error:  # a broken numba or LLVM fails in ways of its own
        _LOADED.reason = f"{type(error).__name__}: {error}"
    return time.perf_counter() - start


def _load() -> Callable[..., int]:
    """Import the kernels with their cache in the first directory that works."""
    import numba

    if numba.config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    failure: Exception | None = None
    for directory in _directories(numba.__version__):
        try:
            with _cache_in(numba.config, directory):
                module = importlib.import_module(_MODULE)
        except Exception as error:  # a damaged or unwritable cache; the next place, or no cache, may do
            failure = error
            sys.modules.pop(_MODULE, None)
            continue
        _LOADED.addresses = (_c_address(module.take_part), _c_address(module.enter))
        direct: Callable[..., int] = _only(module.enter).entry_point
        return direct
    assert failure is not None
    raise failure


def _only(compiled: Any) -> Any:
    """What a function with one signature was compiled to."""
    return compiled.overloads[compiled.signatures[0]]


def _c_address(compiled: Any) -> int:
    """Address of a jitted function as C calls it."""
    result = _only(compiled)
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


def _directories(version: str) -> Iterator[Path | None]:
    """Candidate cache directories, None (no cache) last."""
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    digest.update(f"{version} {sys.version}".encode())
    name = f"kernels-{digest.hexdigest()}"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(RuntimeError, OSError):
        found = _private(Path(base).expanduser() / "introspect-cli", name)
        if found:
            yield found
    with contextlib.suppress(OSError):
        owner = os.getuid() if hasattr(os, "getuid") else "user"
        found = _private(Path(tempfile.gettempdir()) / f"introspect-cli-{owner}", name)
        if found:
            yield found
    yield None


def _private(parent: Path, name: str) -> Path | None:
    """A directory that exists, is ours alone to write and can be written; None otherwise.

    What is cached is machine code: nobody else may have put it there.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = parent.lstat()
    if not stat.S_ISDIR(about.st_mode):
        return None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        return None
    path = parent / name
    path.mkdir(mode=0o700, exist_ok=True)
    return path if os.access(path, os.W_OK | os.X_OK) else None


@contextlib.contextmanager
def _cache_in(config: Any, directory: Path | None) -> Iterator[None]:
    """Have numba cache what is compiled meanwhile in a directory; the setting is put back."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory or "")
    try:
        yield
    finally:
        config.CACHE_DIR = before
