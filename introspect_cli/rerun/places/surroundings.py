"""What lies around a run, and the place that is made of it with changed source files.

Source files are written anew; all else that the script may read by a relative path (data, configuration) is copied
from where it lies, the smallest files first, and linked where that would be much. What a script writes must not reach
the user's files: directories are made, copies are written instead of the originals, and files that are younger than
the run are left out, since the run may have written them. A directory of very many files is linked as a whole.

Files that are no sources may differ, too: between two projects, or between the commits that the runs were at.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.places.place import MOST_COPIED, Place, entries_below, link_neighbours, rebuilt_below
from introspect_cli.rerun.places.worktree import Repository

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_LARGEST = 256 * 2**20
_MOST_FILES = 200


@dataclass(frozen=True)
class Surroundings:
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


def survey(
    root: Path,
    directory: Path,
    sources: Collection[Path],
    before: float | None,
    skipped: Path,
    kept: Collection[Path] = (),
) -> Surroundings:
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
    return Surroundings(root, directory, tops, tuple(files), tuple(made))


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


def rebuilt(
    around: Surroundings,
    at: Path,
    sources: Mapping[Path, bytes],
    files: Mapping[Path, Path | None],
    reachable: Collection[Path],
    paths: str = "",
) -> Place:
    """Make a place of what lies around a run.

    Args:
        around: what that is.
        at: a directory that holds all of it, which is emptied.
        sources: what each source file holds, by where it lies.
        files: other files that are linked from elsewhere, by where they would lie; None for one that is left out.
        reachable: directories of the user's in which python looks for modules by itself.
        paths: PYTHONPATH of the user's.

    Raises:
        StoreError: it cannot be written.
    """
    place = Place(at, at, {top: rebuilt_below(at / str(number), top) for number, top in enumerate(around.tops)})
    try:
        shutil.rmtree(at, ignore_errors=True)
        for path in (*around.tops, *around.made):
            place.moved(path).mkdir(parents=True, exist_ok=True)
        linked: dict[Path, Path | None] = {path: path for path in around.files}
        linked |= {path: target for path, target in files.items() if path not in sources}
        _give({place.moved(path): Path(os.path.realpath(target)) for path, target in linked.items() if target})
        for source, data in sources.items():
            path = place.moved(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
        # by it, a capture finds the root of the project
        (place.moved(around.root) / ".git").mkdir(exist_ok=True)
        for top, there in place.tops.items():
            link_neighbours(top, there, at)
        first = _modules(place, at / "modules", sources, reachable)
    except OSError as error:
        raise StoreError(f"cannot write {at}: {error.strerror or error}") from None
    moved = [place.moved_word(path) for path in paths.split(os.pathsep)]
    return replace(
        place,
        root=place.moved(around.root),
        directory=place.moved(around.directory),
        paths=os.pathsep.join(filter(None, (*first, *moved))),
    )


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


def _modules(place: Place, directory: Path, sources: Iterable[Path], reachable: Collection[Path]) -> tuple[str, ...]:
    """A directory of links to packages of the project that python would look for where they are installed from."""
    for path in sources:
        if path.suffix != ".py" or any(path.is_relative_to(other) for other in reachable):
            continue
        package = path
        while (place.moved(package.parent) / "__init__.py").exists():
            package = package.parent
        link = directory / package.name
        directory.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(place.moved(package))
    return (str(directory),) if directory.exists() else ()


OtherFile: TypeAlias = "tuple[str, Path | None, Path | None]"
"""A file that is no source and holds something else in b's directory: its path in the project, where a's lies, where
b's does; None where one directory alone has it."""


def in_directories(around_a: Surroundings, around_b: Surroundings) -> tuple[OtherFile, ...]:
    """Files that are others in the project of b, where that is another directory."""
    one, two = (_by_name(around) for around in (around_a, around_b))
    return tuple(
        (name, one.get(name), two.get(name))
        for name in sorted({*one, *two})
        if not _equal(one.get(name, _younger(around_a, name)), two.get(name, _younger(around_b, name)))
    )


def _younger(around: Surroundings, name: str) -> Path | None:
    """A file that is left out as younger than the run: it may be the same in both directories."""
    path = around.tops[0] / name
    return path if path.is_file() else None


def _by_name(around: Surroundings) -> dict[str, Path]:
    files = [path for path in around.files if path.is_relative_to(around.tops[0]) and path.is_file()]
    return {os.path.relpath(path, around.tops[0]): path for path in files}


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
    root: Path, commits: tuple[str, str], sources: Collection[Path], around: Surroundings, place: Path
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
    files = []
    for name in names[:_MOST_FILES]:
        a, b = (_written(repository, f"{commit}:{name}", place / commit / name) for commit in commits)
        files.append((os.path.relpath(around.root / name, around.tops[0]), a, b))
    return tuple(files)


def _written(repository: Repository, blob: str, path: Path) -> Path | None:
    data = repository.blob(blob)
    if data is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
