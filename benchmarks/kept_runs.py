"""Runs that are made once and kept: whatever asks for one again reads it, until something changes that it rests on.

A captured run rests on the code that records, on its script and on torch; not on what compares, checks or renders.
The key of a run is a digest of all that. A folder is made where it stays, as runs name the place where they were made;
others wait at a lock until a file beside it says that it is complete.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import introspect_cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(introspect_cli.__file__).parent
_RECORDS = ("capture", "tensors", "script")
_READS = {"store.reader", "store.run", "store.remote", "store.pack", "store.verify"}
"""What a capture needs to read another run (`--against`) writes nothing."""
_WEEKS = 2 * 7 * 86400


@functools.cache
def recorder_key() -> str:
    """A digest of all that decides what a capture writes: python, torch, the code that records without docstrings."""
    about = hashlib.sha256(f"{sys.version_info[:3]} {version('torch')} {version('numpy')}".encode())
    sources = [
        path for folder in _RECORDS for path in (PACKAGE / folder).rglob("*") if path.suffix in {".cpp", ".h", ".so"}
    ]
    for path in sorted({*_recorders(), *sources}):
        about.update(f"\0{path.relative_to(PACKAGE).as_posix()}\0".encode())
        about.update(_code(path) if path.suffix == ".py" else path.read_bytes())
    return about.hexdigest()[:16]


def _code(path: Path) -> bytes:
    """What a file of python does: its syntax tree without docstrings, so that neither they nor comments count."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]
    return ast.dump(tree).encode()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _recorders() -> set[Path]:
    """The files of what records, and of all of the package that they import, at any place."""
    found: set[Path] = set()
    waiting = [path for folder in _RECORDS for path in (PACKAGE / folder).rglob("*.py")]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path)
    return found


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            inside = name.removeprefix("introspect_cli.")
            if inside == name or ".".join(inside.split(".")[:2]) in _READS:
                continue
            place = PACKAGE.joinpath(*inside.split("."))
            yield from (each for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists())


def key_of(*parts: object) -> str:
    """A digest of the recorder and of these: of a path the contents of the file or folder, of all else its `repr`."""
    about = hashlib.sha256(recorder_key().encode())
    for part in parts:
        about.update(b"\0")
        if isinstance(part, Path):
            for path in sorted(part.rglob("*.py")) if part.is_dir() else [part]:
                about.update(f"{path.name}\0".encode())
                about.update(path.read_bytes())
        else:
            about.update(repr(part).encode())
    return about.hexdigest()[:24]


def kept(root: Path, name: str, key: str, make: Callable[[Path], object]) -> Path:
    """The folder of a key below `root`, which `make` fills where nobody has before, and nobody alters after that."""
    place, complete = root / f"{name}-{key}", root / f"{name}-{key}.complete"
    root.mkdir(parents=True, exist_ok=True)
    if not complete.exists():
        with (root / f"{name}-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                forget(root)
                shutil.rmtree(place, ignore_errors=True)  # of a process that was interrupted
                place.mkdir()
                make(place)
                complete.touch()
    os.utime(place)
    os.utime(complete)
    return place


def forget(root: Path) -> None:
    """Remove what nobody asked for in two weeks."""
    for path in root.iterdir():
        if time.time() - path.stat().st_mtime > _WEEKS:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
