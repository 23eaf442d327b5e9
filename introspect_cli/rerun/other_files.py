"""Files that are no sources and differ between two runs: in their projects, or in the commits that these were at."""

from __future__ import annotations

import filecmp
import os
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.rerun.element import OtherFile
from introspect_cli.rerun.worktree import Repository

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.rerun.elements import Sides
    from introspect_cli.rerun.ground import Ground

_LARGEST = 256 * 2**20
_MOST = 200


def in_directories(ground_a: Ground, ground_b: Ground) -> tuple[OtherFile, ...]:
    """Files that are others in the project of b, where that is another directory."""
    one, two = (_by_name(ground) for ground in (ground_a, ground_b))
    return tuple(
        OtherFile(name, one.get(name), two.get(name))
        for name in sorted({*one, *two})
        if not _equal(one.get(name, _younger(ground_a, name)), two.get(name, _younger(ground_b, name)))
    )


def _younger(ground: Ground, name: str) -> Path | None:
    """A file that the ground leaves out as younger than the run: it may be the same in both directories."""
    path = ground.tops[0] / name
    return path if path.is_file() else None


def _by_name(ground: Ground) -> dict[str, Path]:
    files = [path for path in ground.files if path.is_relative_to(ground.tops[0]) and path.is_file()]
    return {os.path.relpath(path, ground.tops[0]): path for path in files}


def _equal(one: Path | None, two: Path | None) -> bool:
    """Whether two files hold the same; where they are too large to be read, whether they are as long."""
    if one is None or two is None:
        return False
    try:
        size = one.stat().st_size
        return size == two.stat().st_size and (size > _LARGEST or filecmp.cmp(one, two, shallow=False))
    except OSError:
        return True


def tracked(root: Path) -> frozenset[Path]:
    """The files of a project that git knows: no run wrote them."""
    try:
        return frozenset(root / name for name in Repository(root).names("ls-files"))
    except UsageError:
        return frozenset()


def at_commits(sides: Sides, ground: Ground, place: Path) -> tuple[OtherFile, ...]:
    """Files that are no sources and differ between the commits of the runs, written out below a directory.

    Raises:
        OSError: they cannot be written.
    """
    if not all(sides.commits) or sides.commits[0] == sides.commits[1]:
        return ()
    try:
        repository = Repository(sides.root)
        if repository.root != sides.root or not all(map(repository.has, sides.commits)):
            return ()
        different = repository.names("diff", "--name-only", "--no-renames", *sides.commits)
    except UsageError:
        return ()
    names = [name for name in different if sides.root / name not in sides.places.values()]
    return tuple(
        OtherFile(
            os.path.relpath(ground.root / name, ground.tops[0]),
            *(_written(repository, f"{commit}:{name}", place / commit / name) for commit in sides.commits),
        )
        for name in names[:_MOST]
    )


def _written(repository: Repository, blob: str, path: Path) -> Path | None:
    data = repository.blob(blob)
    if data is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
