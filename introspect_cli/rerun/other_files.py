"""Files that are no sources and differ between two runs: in their projects, or in the commits that these were at.

Of configuration files that both scripts opened, what they held is kept in the runs, or still lies where it did.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.rerun.minimise import OtherFile
from introspect_cli.rerun.worktree import Repository
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Collection

    from introspect_cli.rerun.ground import Ground
    from introspect_cli.store.reader import Run

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


def at_commits(
    root: Path, commits: tuple[str, str], sources: Collection[Path], ground: Ground, place: Path
) -> tuple[OtherFile, ...]:
    """Files that are none of the sources and differ between the commits of the runs, written out below a directory.

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
    return tuple(
        OtherFile(
            os.path.relpath(ground.root / name, ground.tops[0]),
            *(_written(repository, f"{commit}:{name}", place / commit / name) for commit in commits),
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


_LARGEST_TEXT = 1 << 20


@dataclass(frozen=True)
class OpenedText:
    """A configuration file that both scripts opened and that held something else for b.

    Attributes:
        name: as the runs name it.
        places: where it lies for a, and for b.
        a: what it held for a.
        b: what it held for b.
    """

    name: str
    places: tuple[Path, Path]
    a: str
    b: str


def opened_files(run: Run) -> dict[str, str]:
    """Digest by name of the files that a script opened, where one was taken."""
    opened = run.settings.get("files")
    files = opened.items() if isinstance(opened, Mapping) else ()
    digests = {str(name): about.get("digest") for name, about in files if isinstance(about, Mapping)}
    return {name: digest for name, digest in digests.items() if isinstance(digest, str)}


def opened_texts(
    runs: tuple[Run, Run], directories: tuple[Path, Path], roots: tuple[Path, Path]
) -> tuple[tuple[OpenedText, ...], tuple[str, ...]]:
    """The configuration files that both scripts opened and that differ, and clauses on those that cannot be tried.

    What is a source of both is none.
    """
    one, two = map(opened_files, runs)
    sources = [run.settings.get("sources") or {} for run in runs]
    texts, unknown = [], []
    for name in sorted(one.keys() & two.keys()):
        if one[name] == two[name] or all(name in recorded for recorded in sources):
            continue
        if Path(name).is_absolute() or name.startswith("~"):
            unknown.append(f"{name}: it differs and lies outside of the project")
            continue
        at = [
            next((place for place in (root / name, directory / name) if place.is_file()), directory / name)
            for root, directory in zip(roots, directories, strict=True)
        ]
        held = [_held(run, digest, place) for run, digest, place in zip(runs, (one[name], two[name]), at, strict=True)]
        if held[0] is not None and held[1] is not None:
            texts.append(OpenedText(name, (at[0], at[1]), held[0], held[1]))
        elif at[0] == at[1]:
            unknown.append(f"{name}: it differs, and what it held is not kept")
    return tuple(texts), tuple(unknown)


def _held(run: Run, digest: str, place: Path) -> str | None:
    """The text of a file that a run opened; None where it is not all there, or no text."""
    data = run.source(digest) if digest in run.kept_sources else None
    if data is None or source_digest(data) != digest:
        try:
            data = place.read_bytes() if place.stat().st_size < _LARGEST_TEXT else b""
        except OSError:
            return None
    try:
        return data.decode() if source_digest(data) == digest else None
    except UnicodeDecodeError:
        return None
