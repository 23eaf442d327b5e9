"""A directory in which a variant of somebody's code runs as the code itself ran in the user's.

The variant's sources are files of their own; all else that the script may read by a relative path (data, configuration)
is copied from where it lies, the smallest files first, and linked where that would be much. What a script writes must
not reach the user's files: directories are made, copies are written instead of the originals, and files that are
younger than the run are left out, since the run may have written them. A directory of very many files is linked as a
whole.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.rerun.worktree import LEVELS_ABOVE, rebuilt_below
from introspect_cli.store.files import RUNS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", RUNS})
_MANY = 2000
_MOST_ENTRIES = 20_000
_BESIDE = 500
MOST_COPIED = 512 << 20
"""Bytes of files that a script may write to and is therefore given copies of."""


@dataclass(frozen=True)
class Ground:
    """The directories around a run, and what of them a variant needs.

    Attributes:
        root: the project.
        directory: where the script ran.
        tops: directories that are rebuilt, none inside another: the project, where the script ran, and where source
            files from elsewhere lie. The first holds the project.
        files: paths below the tops that are copied or linked, files and whole directories.
        made: directories below the tops, which are made.
    """

    root: Path
    directory: Path
    tops: tuple[Path, ...]
    files: tuple[Path, ...]
    made: tuple[Path, ...]


@dataclass(frozen=True)
class Planted:
    """A ground that was made.

    Attributes:
        place: the directory that holds all of it, to be removed.
        tops: where each directory of the user's is rebuilt.
        directory: where to run.
        modules: a directory of packages that come before others; None where none is needed.
    """

    place: Path
    tops: Mapping[Path, Path]
    directory: Path
    modules: Path | None = None

    def moved(self, path: Path) -> Path:
        """Where a path of the user's is rebuilt; the path itself where it is not."""
        for top, rebuilt in self.tops.items():
            if path.is_relative_to(top):
                return rebuilt / path.relative_to(top)
        return path

    def moved_word(self, word: str) -> str:
        """A word of a command line, or the value after its `=`, moved where it is the path of something rebuilt."""
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        path = Path(value)
        real = Path(os.path.realpath(path))
        inside = path.is_absolute() and any(real.is_relative_to(top) for top in self.tops)
        return f"{option}{equals}{self.moved(real)}" if inside else word


def survey(
    root: Path,
    directory: Path,
    sources: Collection[Path],
    before: float | None,
    skipped: Path,
    kept: Collection[Path] = (),
) -> Ground:
    """Look at what lies around a run.

    Args:
        root: the project.
        directory: where the script ran.
        sources: the source files, which are not linked.
        before: files changed after this time (seconds since 1970) are left out; None for none.
        skipped: a directory that is left out: where variants and their runs are kept.
        kept: files that no run wrote, which are linked whenever they were changed.
    """
    root, directory = Path(os.path.realpath(root)), Path(os.path.realpath(directory))
    tops = _outermost([directory, root] if root.is_relative_to(directory) else [root, directory])
    tops = _outermost([*tops, *(_package_root(path) for path in sources)])
    needed = {parent for path in (*sources, root, directory) for parent in (path, *path.parents)}
    files, made = [], []
    for top in tops:
        for path, linked in entries_below(top, needed, Path(os.path.realpath(skipped))):
            if not linked:
                made.append(path)
            elif path not in sources and (before is None or path in kept or path.is_dir() or _changed(path) <= before):
                files.append(path)
    return Ground(root, directory, tops, tuple(files), tuple(made))


def _outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Directories without those that lie in another one."""
    outermost: list[Path] = []
    for path in paths:
        if not any(path.is_relative_to(other) for other in outermost):
            outermost.append(path)
    return tuple(outermost)


def _package_root(path: Path) -> Path:
    """The directory from which a source file is imported."""
    directory = path.parent
    while (directory / "__init__.py").is_file() and directory != directory.parent:
        directory = directory.parent
    return directory


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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


def plant(
    ground: Ground,
    place: Path,
    sources: Mapping[Path, bytes],
    files: Mapping[Path, Path | None],
    reachable: Collection[Path],
) -> Planted:
    """Make a ground.

    Args:
        ground: what lies around the run.
        place: a directory, which is emptied.
        sources: what each source file holds, by where it lies.
        files: other files that are linked from elsewhere, by where they would lie; None for one that is left out.
        reachable: directories of the user's in which python looks for modules by itself.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        shutil.rmtree(place, ignore_errors=True)
        tops = {}
        for number, top in enumerate(ground.tops):
            tops[top] = rebuilt_below(place / str(number), top)
        planted = Planted(place, tops, place)
        for path in ground.made:
            planted.moved(path).mkdir(parents=True, exist_ok=True)
        linked: dict[Path, Path | None] = {path: path for path in ground.files}
        linked |= {path: target for path, target in files.items() if path not in sources}
        _give({planted.moved(path): Path(os.path.realpath(target)) for path, target in linked.items() if target})
        for source, data in sources.items():
            path = planted.moved(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
        # by it, a capture finds the root of the project
        (planted.moved(ground.root) / ".git").mkdir(exist_ok=True)
        for top, rebuilt in tops.items():
            beside(top, rebuilt, place)
        modules = _modules(planted, sources, reachable)
    except OSError as error:
        raise StoreError(f"cannot write {place}: {error.strerror or error}") from None
    return replace(planted, directory=planted.moved(ground.directory), modules=modules)


def _give(files: Mapping[Path, Path]) -> None:
    """Put files where a script looks for them: copies, and links where the copies would be large."""
    total = 0
    sizes = {target: target.stat().st_size if target.is_file() else MOST_COPIED for target in files.values()}
    for path, target in sorted(files.items(), key=lambda item: sizes[item[1]]):
        path.parent.mkdir(parents=True, exist_ok=True)
        total += sizes[target]
        if total < MOST_COPIED:
            shutil.copy2(target, path)
        else:
            path.symlink_to(target)


def beside(top: Path, rebuilt: Path, place: Path) -> None:
    """Link what lies beside a directory and above it, so that `../data` leads where it did."""
    for _ in range(LEVELS_ABOVE):
        top, rebuilt, before = top.parent, rebuilt.parent, top
        if top == top.parent or rebuilt.parent == place:
            return
        entries = list(os.scandir(top))
        if len(entries) > _BESIDE:
            return
        for entry in entries:
            link = rebuilt / entry.name
            if entry.name not in LEFT_OUT and entry.name != before.name and not link.exists():
                link.symlink_to(top / entry.name)


def _modules(planted: Planted, sources: Iterable[Path], reachable: Collection[Path]) -> Path | None:
    """Links to packages of the project that python would look for elsewhere: those that are installed as editable."""
    directory = planted.place / "modules"
    for path in sources:
        if path.suffix != ".py" or any(path.is_relative_to(directory) for directory in reachable):
            continue
        package = path
        while (planted.moved(package.parent) / "__init__.py").exists():
            package = package.parent
        link = directory / package.name
        directory.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(planted.moved(package))
    return directory if directory.exists() else None
