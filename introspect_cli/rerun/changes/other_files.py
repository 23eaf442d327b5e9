"""Files that are no sources and hold something else for b: in its own directory, or at the commit that it was at."""

from __future__ import annotations

import filecmp
import os
from typing import TYPE_CHECKING, TypeAlias

from introspect_cli.errors import UsageError
from introspect_cli.rerun.git import Repository

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from introspect_cli.rerun.place import Around

_LARGEST = 256 * 2**20
_MOST_FILES = 200

OtherFile: TypeAlias = "tuple[str, Path | None, Path | None]"
"""A file that is no source and holds something else in b's directory: its path in the project, where a's lies, where
b's does; None where one directory alone has it."""


def in_directories(around_a: Around, around_b: Around) -> tuple[OtherFile, ...]:
    """(name, path in a, path in b) of files that differ between the projects of a and b; None for a missing file."""
    one, two = (_by_name(around) for around in (around_a, around_b))
    return tuple(
        (name, one.get(name), two.get(name))
        for name in sorted({*one, *two})
        if not _equal(one.get(name, _younger(around_a, name)), two.get(name, _younger(around_b, name)))
    )


def _younger(around: Around, name: str) -> Path | None:
    """Path of a file that exists but was left out as newer than the run; None where there is none."""
    path = around.tops[0] / name
    return path if path.is_file() else None


def _by_name(around: Around) -> dict[str, Path]:
    files = [path for path in around.files if path.is_relative_to(around.tops[0]) and path.is_file()]
    return {os.path.relpath(path, around.tops[0]): path for path in files}


def _equal(one: Path | None, two: Path | None) -> bool:
    """Whether two files have equal bytes (above `_LARGEST`, equal sizes).

    False where one is missing, True if unreadable.
    """
    if one is None or two is None:
        return False
    try:
        size = one.stat().st_size
        return size == two.stat().st_size and (size > _LARGEST or filecmp.cmp(one, two, shallow=False))
    except OSError:
        return True


def at_commits(
    root: Path, commits: tuple[str, str], sources: Collection[Path], around: Around, place: Path
) -> tuple[OtherFile, ...]:
    """Files, not sources, that differ between the runs' commits, written below `place`; () for equal commits.

    Raises:
        OSError: they cannot be written.
    """
    if not all(commits) or commits[0] == commits[1]:
        return ()
    try:
        repository = Repository(root)
        if repository.root != root or not all(map(repository.has, commits)):
            return ()
        different = repository.names("diff", "--name-only", "--no-renames", *commits)
    except UsageError:
        return ()
    names = [name for name in different if root / name not in sources]
    files = []
    for name in names[:_MOST_FILES]:
        a, b = (_written(repository, f"{commit}:{name}", place / commit / name) for commit in commits)
        files.append((os.path.relpath(around.root / name, around.tops[0]), a, b))
    return tuple(files)


def _written(repository: Repository, blob: str, path: Path) -> Path | None:
    """Write a git blob to `path`; None where the commit has no such file."""
    data = repository.blob(blob)
    if data is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
