"""What this machine has for us: memory, and what the C++ sources were compiled to.

Whoever works on a checkout changes the sources and the Python that calls them together, and may forget to compile: the
old extension then takes other arguments than it is given, and captures record nothing. So an extension holds a sum of
all sources, and it is used only where that is the sum of those that lie here. A wheel has none.

The build runs this file by its path, before the package is installed, so it imports nothing of it.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

_FOLDERS: Final = ("tensors", "capture/probes")


def free_memory() -> int:
    """Bytes of memory that this process may still take, 0 or more; 4 GiB where unknown.

    The less of what is available on the machine (Linux) and what the container's cgroup (version 2) leaves.
    """
    free = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, ValueError, KeyError):
        pass
    try:
        most, taken = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        free.append(int(most) - int(taken))
    except (OSError, ValueError):  # no limit is the word `max`
        pass
    return max(min(free, default=4 << 30), 0)


def digest() -> str:
    """Digest of the names and text of the C++ sources and headers of the package, 16 hex digits; "" without sources."""
    package = Path(__file__).resolve().parent
    files = sorted(
        path for folder in _FOLDERS for path in (package / folder).glob("*") if path.suffix in {".cpp", ".h"}
    )
    total = hashlib.blake2b(digest_size=8)
    for path in files:
        total.update(f"{path.name}\n".encode() + path.read_bytes())
    return total.hexdigest() if files else ""


def load(name: str) -> ModuleType:
    """Import a compiled extension, if it was built from the present sources; without sources (a wheel) in any case.

    Raises:
        ImportError: it was not compiled, cannot be loaded, or was compiled from other sources.
    """
    remedy = "with a C++ compiler on this machine, install introspect-cli again"
    try:
        extension = import_module(name)
    except ModuleNotFoundError:
        why = "they were not compiled when introspect was installed"
    except ImportError as error:
        why = str(error)
    else:
        if digest() in {"", getattr(extension, "SOURCES", None)}:
            return extension
        why, remedy = "their sources changed after they were compiled", "run `python setup.py build_ext --inplace`"
    raise ImportError(f"no compiled kernels: {why}; {remedy}")
