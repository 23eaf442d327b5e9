"""A place in which a command runs as it would where its project lies, and which reaches none of the user's files.

Files of the project may be others by now, or belong to another commit, and what a script writes must not reach the
user's files. So the project is rebuilt elsewhere by one rule: first the tree of a commit, where one is asked for; then
the files that are given (recorded sources, changes); then all else that the script may read by a relative path (data,
configuration), copied from where it lies, the smallest files first, and linked where that would be much. What lies
beside the project is linked, so that `../data` leads where it did. Where python finds modules of the project by an
absolute path, it is led to the place.

Left out are runs, caches, and files that are younger than the run, since the run may have written them. A directory of
very many files is linked as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.rerun.git import CODE_ENDINGS, tracked_files
from introspect_cli.store.files import MANIFEST, RUNS
from introspect_cli.store.run_writer import add_gitignore
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from introspect_cli.rerun.git import Repository, Revision

COMMITS = "commits"
"""The directory among the project's runs that keeps runs of revisions."""
TREE = "tree"
"""The directory in it in which revisions run, one after the other."""
MAX_COPIED_BYTES = 512 << 20
"""Bytes of files that a script may write to and is therefore given copies of."""
NEWER = "a file that is newer than the run has to be named: --link PATH"
"""What helps where a script finds no file in a place."""
_LEVELS_ABOVE = 2
"""Directories above a project whose other entries are linked beside where it is rebuilt."""
_LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", RUNS})
_MAX_ENTRIES = 2000
"""Entries of a directory above which it is linked as a whole."""
_MAX_ENTRIES_BELOW = 20_000
"""Entries of a project above which its further directories are."""
_MAX_NEIGHBOURS = 500


@dataclass(frozen=True)
class Place:
    """Directories in which a command is run, and how the user's paths map to them.

    Attributes:
        root: the project there.
        directory: the directory to run it in.
        at: what directories of the user's are rebuilt below, by their full paths.
        tops: these directories; none where it runs in the user's.
        paths: PYTHONPATH there; "" for what it is.
        large: files and directories that are linked, being too much to copy.
        given: files that are there as another text or revision has them, by the user's paths: the digest of a text.
    """

    root: Path
    directory: Path
    at: Path = Path()
    tops: tuple[Path, ...] = ()
    paths: str = ""
    large: tuple[Path, ...] = ()
    given: Mapping[Path, str] = field(default_factory=dict)

    def rebuilt(self, path: Path) -> Path:
        """The rebuilt path of a user's absolute path; `path` itself if it is below no top, or in the place already."""
        is_rebuilt = any(map(path.is_relative_to, self.tops)) and not path.is_relative_to(self.at)
        return self.at / path.relative_to(path.anchor) if is_rebuilt else path

    def rebuilt_word(self, word: str) -> str:
        """A command-line word with an absolute path in it, alone or after an option's `=`, replaced by the rebuilt one.

        Links are resolved to find it. Any other word, and a path that is not rebuilt, comes back as it is.
        """
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        there = self.rebuilt(real := Path(os.path.realpath(value)))
        return f"{option}{equals}{there}" if Path(value).is_absolute() and there != real else word


# --- what lies around


@dataclass(frozen=True)
class Surroundings:
    """The directories around a run, and what of them is copied or linked.

    Attributes:
        root: the project.
        directory: where the script ran.
        tops: directories that are rebuilt, none inside another: the project, and where the script ran. The first holds
            the project.
        files: paths below the tops that are copied or linked, files and whole directories.
        empty: directories below the tops, which are made.
    """

    root: Path
    directory: Path
    tops: tuple[Path, ...]
    files: tuple[Path, ...]
    empty: tuple[Path, ...]

    def states(self) -> list[tuple[str, int, int]]:
        """(path, size, mtime in ns) of each of `files` now, links not followed: equal while they are unchanged."""
        return [(str(path), status.st_size, status.st_mtime_ns) for path in self.files for status in [path.lstat()]]


def survey(root: Path, directory: Path, sources: Collection[Path], before: float | None, skipped: Path) -> Surroundings:
    """List the files and directories around a run that a rebuilt place needs.

    A directory is linked as a whole where it has more than `_MAX_ENTRIES` entries, more than `_MAX_ENTRIES_BELOW` were
    seen up to its end, or it holds installed packages; but never one that holds the project, where the script ran, or a
    source. Of a run of introspect only the directory is given; git's directory, caches and runs (`_LEFT_OUT`) are
    skipped; a link to a directory is one path.

    Args:
        root: the project.
        directory: where the script ran.
        sources: files whose text is given otherwise; left out.
        before: files changed after this time (seconds since 1970) are left out, except those that git tracks; None to
            leave out none.
        skipped: a directory that is left out: where variants and their runs are kept.
    """
    root, directory, skipped = (Path(os.path.realpath(path)) for path in (root, directory, skipped))
    both = dict.fromkeys((root, directory))
    tops = tuple(top for top in both if not any(top.is_relative_to(other) for other in both if other != top))
    needed = {parent for path in (*sources, root, directory) for parent in (path, *path.parents)}
    tracked = frozenset() if before is None else tracked_files(root)
    files, empty, count = list[Path](), list[Path](), 0
    for name, folders, others in itertools.chain.from_iterable(map(os.walk, tops)):
        here, entries = Path(name), {*folders, *others}
        count += len(entries)
        has_packages = bool(entries & {"pyvenv.cfg", "site-packages", "conda-meta"})
        is_whole = has_packages or len(entries) > _MAX_ENTRIES or count > _MAX_ENTRIES_BELOW
        is_whole = is_whole and here not in needed
        (files if is_whole else empty).append(here)
        inside = set() if is_whole or {MANIFEST, "rank0"} <= entries else entries - _LEFT_OUT  # a run of introspect
        paths = [here / entry for entry in sorted(inside) if here / entry != skipped]
        folders[:] = [path.name for path in paths if path.is_dir() and not path.is_symlink()]
        for path in paths:
            is_old = before is None or path in tracked or path.is_dir() or path.lstat().st_mtime <= before
            if path not in sources and path.name not in folders and is_old and (path.is_symlink() or path.is_file()):
                files.append(path)
    return Surroundings(root, directory, tops, tuple(files), tuple(empty))


def survey_of_git(user: Repository, directory: Path, script: Path, skipped: Path) -> Surroundings:
    """As `survey` of the repository's root, without files that git tracks and untracked code other than `script`.

    Ignored files are listed, code included; files of any age.
    """
    others = {user.root / name for name in user.names("ls-files", "--others", "--exclude-standard")}
    code = {path for path in others if path.suffix in CODE_ENDINGS} - {script}
    return survey(user.root, directory, tracked_files(user.root) | code, None, skipped)


# --- the place


@contextlib.contextmanager
def build_place(
    around: Surroundings,
    at: Path,
    texts: Mapping[Path, bytes] | Mapping[Path, bytes | None],
    *,
    revision: Revision | None = None,
    links: Sequence[str] = (),
    paths: str = "",
) -> Iterator[Place]:
    """Build the place below `at` from a survey, for the length of a block, and remove it afterwards.

    In a file, `texts` win over the revision's tree, and that over what lies around.

    Args:
        around: the survey.
        at: a directory that holds all of it; what was there is removed before.
        texts: what files hold, by the user's path; None for what is not there.
        revision: whose tree the project is; None where the project is as it lies.
        links: paths relative to the directory that are linked, and not copied, whatever they are.
        paths: PYTHONPATH of the user's.

    Raises:
        UsageError: git fails, or there is no such path to link.
        OSError: it cannot be written.
    """
    place = Place(at, at, at, around.tops)
    place = replace(place, root=place.rebuilt(around.root), directory=place.rebuilt(around.directory))
    given = dict.fromkeys(revision.files() if revision is not None else (), "")
    given |= {path: "" if data is None else hex_digest(data) for path, data in texts.items()}
    with contextlib.ExitStack() as stack:
        shutil.rmtree(at, ignore_errors=True)
        stack.callback(shutil.rmtree, at, ignore_errors=True)
        at.parent.mkdir(parents=True, exist_ok=True)
        if revision is not None:
            stack.enter_context(revision.checked_out(place.root))
        for name in links:
            link(around.directory / name, place.directory / name)
        for path in (around.directory, *around.empty, *(path.parent for path in texts)):
            with contextlib.suppress(FileExistsError):  # a file at this revision
                place.rebuilt(path).mkdir(parents=True, exist_ok=True)
        large = _copy({place.rebuilt(path): path for path in around.files if path not in texts})
        for path, data in texts.items():
            there = place.rebuilt(path)
            if there.parent.resolve() == there.parent:  # else in what is linked, which is the user's
                if data is None or there.is_symlink():
                    there.unlink(missing_ok=True)
                if data is not None:
                    there.write_bytes(data)
        if revision is None:  # by it, a capture finds the root of the project
            (place.root / ".git").mkdir(exist_ok=True)
        for top in place.tops:
            _link_neighbours(top, place)
        search_path = _search_path(place, at / "modules", paths)
        yield replace(place, paths=search_path, large=tuple(large), given=given)


def keep_out_of_git(directory: Path) -> Path:
    """Make `directory`, return it resolved, and put a `.gitignore` into the nearest parent that is a directory of runs.

    Where there is no such parent, it goes into `directory` itself if that is new, else nowhere.
    """
    directory = directory.resolve()
    new = None if directory.exists() else directory
    directory.mkdir(parents=True, exist_ok=True)
    if runs := next((path for path in directory.parents if path.name == RUNS), new):
        add_gitignore(runs)
    return directory


def link(path: Path, to: Path) -> None:
    """Make `to` a link to `path`, links resolved, if `to` does not exist; parents of `to` are made.

    Where both are directories and `to` is no link, the entries that `to` does not have are linked, at any depth.

    Raises:
        UsageError: there is no such path.
    """
    if not path.exists():
        raise UsageError(f"no such path to link: {path.name}")
    if to.is_dir() and not to.is_symlink() and path.is_dir():
        for inside in path.iterdir():
            link(inside, to / inside.name)
    elif not os.path.lexists(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        to.symlink_to(path.resolve())


def _copy(files: Mapping[Path, Path]) -> list[Path]:
    """Copy files (target: source), the smallest first, while their sum is below `MAX_COPIED_BYTES`.

    Link the others and all directories, and return the sources of those links. Sources that are gone and targets that
    exist are skipped.
    """
    total, large = 0, []
    real = {to: Path(os.path.realpath(path)) for to, path in files.items() if path.exists() and not os.path.lexists(to)}
    sizes = {path: path.stat().st_size if path.is_file() else MAX_COPIED_BYTES for path in real.values()}
    for to, path in sorted(real.items(), key=lambda item: sizes[item[1]]):
        total += sizes[path]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, FileExistsError):
            to.parent.mkdir(parents=True, exist_ok=True)
            if total < MAX_COPIED_BYTES:
                shutil.copy2(path, to)
            else:
                to.symlink_to(path)
                large.append(path)
    return large


def _link_neighbours(top: Path, place: Place) -> None:
    """Link the siblings of a directory and of its parent beside the rebuilt ones, so that `../data` exists.

    Stops at a directory with more than `_MAX_NEIGHBOURS` entries. Names in `_LEFT_OUT` and those that exist beside the
    rebuilt ones are skipped.
    """
    for directory in top.parents[:_LEVELS_ABOVE]:
        entries = list(os.scandir(directory))
        if len(entries) > _MAX_NEIGHBOURS or directory == directory.parent:
            return
        for entry in entries:
            to = place.at / Path(entry).relative_to(top.anchor)
            if entry.name not in _LEFT_OUT and not os.path.lexists(to):
                to.symlink_to(entry)


def _search_path(place: Place, modules: Path, given: str) -> str:
    """PYTHONPATH for a place: `modules` if it is made, then `given` (the user's), then rebuilt entries of `sys.path`.

    Entries of `given` that are rebuilt are replaced. `modules` gets links to the rebuilt modules that editable installs
    map to; it is made where there are any.
    """

    def rebuilt(path: Path) -> Path | None:
        """The rebuilt path of an import directory; None where it is not rebuilt, or is inside an environment."""
        real = Path(os.path.realpath(path))
        there = place.rebuilt(real)
        installed = {"site-packages", "dist-packages"} & {*real.parts} or real.is_relative_to(Path(sys.prefix, "lib"))
        return None if there == real or installed else there

    words = [Path(path) for path in given.split(os.pathsep) if path]
    paths = [str((path.is_absolute() and rebuilt(path)) or path) for path in words]
    # setuptools leaves entries there that are no files, such as `__editable__.name.finder.__path_hook__`
    paths += [str(there) for path in map(Path, sys.path[1:]) if path.exists() and (there := rebuilt(path)) is not None]
    for module in [module for name, module in sys.modules.items() if "__editable__" in name]:
        for name, path in getattr(module, "MAPPING", {}).items():
            there = rebuilt(Path(path))
            if there is not None and "." not in name:
                modules.mkdir(parents=True, exist_ok=True)
                there = there if there.exists() else there.with_name(f"{there.name}.py")
                (modules / (f"{name}.py" if there.suffix == ".py" else name)).symlink_to(there)
    return os.pathsep.join(dict.fromkeys([*([str(modules)] if modules.exists() else []), *paths]))


# --- one at a time


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP exits with 128 + their number from here on, so that cleanup runs."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def hold_lock(base: Path) -> Iterator[None]:
    """Make the directory `base` and hold a lock on it for the length of a block; it is removed afterwards if empty.

    Waits without limit while another process that captures revisions has the lock.
    """
    keep_out_of_git(base)
    descriptor = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            base.rmdir()  # where nothing is kept
