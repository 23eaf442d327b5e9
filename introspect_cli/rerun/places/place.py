"""A place in which a command runs as it would where its project lies: in a copy of it, or a work tree of a commit.

Files of the project may be others by now, and what a script writes must not reach the user's files. So the project is
rebuilt elsewhere, as it was or with changes, with room beside it for links to what its scripts find by `../data`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.store.files.folders import RUNS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

COMMITS = "commits"
"""The directory below introspect's that keeps runs of revisions (see `commits`)."""
PLACE = "tree"
"""That of it in which they run, one after the other."""
LEVELS_ABOVE = 2
"""Directories above a project whose other entries are linked beside where it is rebuilt."""
LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", RUNS})
MOST_COPIED = 512 << 20
"""Bytes of files that a script may write to and is therefore given copies of."""
_MANY = 2000
_MOST_ENTRIES = 20_000
_MOST_NEIGHBOURS = 500


@dataclass(frozen=True)
class Place:
    """Where a command is run.

    Attributes:
        root: the project there.
        directory: the directory to run it in.
        tops: where each directory of the user's is rebuilt; empty where it runs in these.
        paths: PYTHONPATH there; "" for what it is.
        note: where that is and what of the files is not as it was, as a clause; "" where nobody asks.
    """

    root: Path
    directory: Path
    tops: Mapping[Path, Path] = field(default_factory=dict)
    paths: str = ""
    note: str = ""

    def moved(self, path: Path) -> Path:
        """Where a path of the user's is rebuilt; the path itself where it is not."""
        for top, rebuilt in self.tops.items():
            if path.is_relative_to(top):
                return rebuilt / path.relative_to(top)
        return path

    def moved_word(self, word: str, *, existing: bool = False) -> str:
        """A word of a command line, or the value after its `=`, moved where it is the path of something rebuilt.

        With `existing`, only what is there.
        """
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        real = Path(os.path.realpath(value))
        inside = Path(value).is_absolute() and any(real.is_relative_to(top) for top in self.tops)
        moved = self.moved(real)
        return f"{option}{equals}{moved}" if inside and (moved.exists() or not existing) else word


def rebuilt_below(place: Path, top: Path) -> Path:
    """Where a directory is rebuilt below another, with room for what lies beside it and above."""
    above = top.parents[: min(LEVELS_ABOVE, len(top.parents) - 1)]
    return place.joinpath(*(path.name for path in reversed(above)), top.name)


def path_of_the_users(place: Path, path: Path, top: Path) -> Path:
    """Where a path lies for the user that was found below the place where a directory was rebuilt."""
    above = min(LEVELS_ABOVE, len(top.parents) - 1)
    return Path(os.path.realpath(top.parents[above] / path.relative_to(place)))


def entries_below(top: Path, needed: Collection[Path], skipped: Path) -> Iterator[tuple[Path, bool]]:
    """What lies below a directory, and whether it is linked rather than made."""
    waiting, count = [top], 0
    while waiting:
        directory = waiting.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:
            entries = []
        count += len(entries)
        whole = len(entries) > _MANY or count > _MOST_ENTRIES or is_foreign(entries)
        if whole and directory not in needed:
            yield directory, True
            continue
        yield directory, False
        if {"manifest.yaml", "settings"} <= {entry.name for entry in entries}:
            continue  # a run of introspect
        for entry in entries:
            path = directory / entry.name
            if entry.name in LEFT_OUT or path == skipped:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            else:
                yield path, True


def is_foreign(entries: Iterable[os.DirEntry[str]]) -> bool:
    """Whether it is an environment of packages."""
    return any(entry.name in {"pyvenv.cfg", "site-packages", "conda-meta"} for entry in entries)


def link_neighbours(top: Path, rebuilt: Path, place: Path) -> None:
    """Link what lies beside a directory and above it, so that `../data` leads where it did."""
    for _ in range(LEVELS_ABOVE):
        top, rebuilt, before = top.parent, rebuilt.parent, top
        if top == top.parent or rebuilt.parent == place:
            return
        entries = list(os.scandir(top))
        if len(entries) > _MOST_NEIGHBOURS:
            return
        for entry in entries:
            link = rebuilt / entry.name
            if entry.name not in LEFT_OUT and entry.name != before.name and not link.exists():
                link.symlink_to(top / entry.name)
