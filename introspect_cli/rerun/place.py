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
import hashlib
import os
import shutil
import signal
import stat
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.git import Repository, work_tree
from introspect_cli.store.files.folders import RUNS
from introspect_cli.store.write.run_writer import ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

AS_IT_IS = "."
"""What names the work tree as it is among revisions."""
COMMITS = "commits"
"""The directory below introspect's that keeps runs of revisions (see `commits`)."""
PLACE = "tree"
"""That of it in which they run, one after the other."""
MOST_COPIED = 512 << 20
"""Bytes of files that a script may write to and is therefore given copies of."""
_LEVELS_ABOVE = 2
"""Directories above a project whose other entries are linked beside where it is rebuilt."""
_LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", RUNS})
_CODE = (".py", ".pyx", ".pyi")
_SUBMODULE = "160000"
_MANY = 2000
_MOST_ENTRIES = 20_000
_MOST_NEIGHBOURS = 500


@dataclass(frozen=True)
class Place:
    """Directories in which a command is run, and how the user's paths map to them.

    Attributes:
        root: the project there.
        directory: the directory to run it in.
        tops: where each directory of the user's is rebuilt; empty where it runs in these.
        paths: PYTHONPATH there; "" for what it is.
        large: files and directories that are linked, being too much to copy.
    """

    root: Path
    directory: Path
    tops: Mapping[Path, Path] = field(default_factory=dict)
    paths: str = ""
    large: tuple[Path, ...] = ()

    def moved(self, path: Path) -> Path:
        """The rebuilt path of a user's path; the path itself where it is not rebuilt, or lies in the place already."""
        if any(map(path.is_relative_to, self.tops.values())):  # the place may lie in the project
            return path
        for top, rebuilt in self.tops.items():
            if path.is_relative_to(top):
                return rebuilt / path.relative_to(top)
        return path

    def moved_word(self, word: str) -> str:
        """A command-line word with its path, or that after `=`, replaced by the rebuilt one, where it is absolute."""
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        moved = self.moved(real := Path(os.path.realpath(value)))
        return f"{option}{equals}{moved}" if Path(value).is_absolute() and moved != real else word


# --- what lies around


@dataclass(frozen=True)
class Around:
    """The directories around a run, and what of them is copied or linked.

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

    def states(self) -> list[tuple[str, int, int]]:
        """(path, size, mtime in ns) of each file: equal while the files are unchanged."""
        return [(str(path), status.st_size, status.st_mtime_ns) for path in self.files for status in [path.lstat()]]


def survey(
    root: Path,
    directory: Path,
    sources: Collection[Path],
    before: float | None,
    skipped: Path,
    kept: Collection[Path] = (),
) -> Around:
    """List the files and directories around a run that a rebuilt place needs.

    Args:
        root: the project.
        directory: where the script ran.
        sources: files that are given, and therefore left out.
        before: files changed after this time (seconds since 1970) are left out; None for none.
        skipped: a directory that is left out: where variants and their runs are kept.
        kept: files that no run wrote, which are taken whenever they were changed.
    """
    root, directory = Path(os.path.realpath(root)), Path(os.path.realpath(directory))
    tops = _outermost([directory, root] if root.is_relative_to(directory) else [root, directory])
    elsewhere = [path for path in sources if not any(path.is_relative_to(top) for top in tops)]
    tops = _outermost([*tops, *map(_package_root, elsewhere)])
    needed = {parent for path in (*sources, root, directory) for parent in (path, *path.parents)}
    files, made = [], []
    for top in tops:
        for path, linked in _entries_below(top, needed, Path(os.path.realpath(skipped))):
            if not linked:
                made.append(path)
            elif path not in sources and (before is None or path in kept or path.is_dir() or _changed(path) <= before):
                files.append(path)
    return Around(root, directory, tops, tuple(files), tuple(made))


def survey_of_git(user: Repository, directory: Path, scripts: Iterable[Path], skipped: Path) -> Around:
    """List files that git does not track; untracked code is left out, except `scripts`."""
    tracked = {user.root / name for name in user.names("ls-files")}
    others = {user.root / name for name in user.names("ls-files", "--others", "--exclude-standard")}
    code = {path for path in others if path.suffix in _CODE} - {*scripts}
    around = survey(user.root, directory, tracked | code, None, skipped)
    theirs = {parent for path in tracked for parent in path.parents}
    return replace(around, made=tuple(path for path in around.made if path not in theirs))


def scripts_of(words: Sequence[str]) -> list[Path]:
    """The script of a command line as a list of one path; empty for `-m MODULE`."""
    return [Path(os.path.realpath(words[0]))] if words[0] != "-m" else []


def tracked_files(root: Path) -> frozenset[Path]:
    """Paths of a project's files that git tracks; empty outside a repository."""
    try:
        return frozenset(root / name for name in Repository(root).names("ls-files"))
    except UsageError:
        return frozenset()


def _outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Directories without those inside an earlier one, in order."""
    outermost: list[Path] = []
    for path in paths:
        if not any(path.is_relative_to(other) for other in outermost):
            outermost.append(path)
    return tuple(outermost)


def _package_root(path: Path) -> Path:
    """The directory from which a source file is imported: the first parent without `__init__.py`."""
    directory = path.parent
    while (directory / "__init__.py").is_file() and directory != directory.parent:
        directory = directory.parent
    return directory


def _changed(path: Path) -> float:
    """Modification time of a file; 0 where it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _entries_below(top: Path, needed: Collection[Path], skipped: Path) -> Iterator[tuple[Path, bool]]:
    """(path, True) for what is copied or linked, (path, False) for directories that are made.

    Directories with too many entries or with installed packages are linked whole unless in `needed`.
    """
    waiting, count = [top], 0
    while waiting:
        directory = waiting.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:
            entries = []
        count += len(entries)
        of_packages = any(entry.name in {"pyvenv.cfg", "site-packages", "conda-meta"} for entry in entries)
        if (len(entries) > _MANY or count > _MOST_ENTRIES or of_packages) and directory not in needed:
            yield directory, True
            continue
        yield directory, False
        if {"manifest.yaml", "settings"} <= {entry.name for entry in entries}:
            continue  # a run of introspect
        for entry in entries:
            path = directory / entry.name
            if entry.name in _LEFT_OUT or path == skipped:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            elif entry.is_symlink() or entry.is_file():
                yield path, True


# --- revisions


@dataclass(frozen=True)
class Revision:
    """A revision, or the work tree as it is.

    Attributes:
        name: as it was asked for.
        user: the user's repository.
        commit: what is checked out.
        changed: files of the work tree that are others than the commit's, by their path; all False where one is gone.
    """

    name: str
    user: Repository
    commit: str
    changed: Mapping[str, bool] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """`main (4e52087ddf)`."""
        changes = f" with {len(self.changed)} changed" if self.changed else ""
        shown = "the work tree" if self.name == AS_IT_IS else self.name
        return f"{shown} ({self.commit[:10]}{changes})"

    def state(self) -> list[object]:
        """Commit, and digests of changed files: equal for equal trees, as plain data."""
        held = [[name, _digest(self.user.root / name) if there else None] for name, there in self.changed.items()]
        return [self.commit, held]

    def check_out(self, root: Path, stack: contextlib.ExitStack, *, keep: bool = False) -> None:
        """Check its tree out at `root`, changed files included, until `stack` is closed.

        Raises:
            UsageError: git refuses.
        """
        stack.enter_context(work_tree(self.user, root, self.commit, keep=keep))
        for name, there in self.changed.items():
            with contextlib.suppress(OSError):
                (root / name).unlink()
            if there:
                _copy(self.user.root / name, root / name)


def revision_of(user: Repository, revision: str) -> Revision:
    """Resolve a revision, or `.` for the work tree with its changes.

    Raises:
        UsageError: there is no such revision, or it has another commit of a submodule than is checked out: submodules
            run as they lie there.
    """
    as_it_is = revision == AS_IT_IS
    commit = user.commit("HEAD" if as_it_is else revision)
    changed = {}
    if as_it_is:
        # `git diff` would write the index
        asked = ("status", "--porcelain", "--no-renames", "--untracked-files=all", "--ignore-submodules=all")
        status = [(entry[:2], entry[3:]) for entry in user.names(*asked)]
        names = [name for letters, name in status if letters != "??" or name.endswith(_CODE)]
        changed = {name: os.path.lexists(user.root / name) for name in names}
    for entry in () if as_it_is else user.names("ls-tree", "-r", "--full-tree", commit):
        about, _, name = entry.partition("\t")
        inside = user.root / name
        if about.startswith(_SUBMODULE) and (inside / ".git").exists():
            wanted = about.split()[2]
            if Repository(inside).commit("HEAD") != wanted:
                raise UsageError(
                    f"{revision} has commit {wanted[:10]} of the submodule {name}: check it out there first"
                )
    return Revision(revision, user, commit, dict(sorted(changed.items())))


def _digest(path: Path) -> str:
    """A digest of a file's content and executable bit; `-> target` for a link, "" for nothing."""
    if path.is_symlink():
        return f"-> {path.readlink()}"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        made = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            made.update(block)
    return f"{made.hexdigest()} {path.stat().st_mode & stat.S_IXUSR}"


# --- the place


@contextlib.contextmanager
def placed(
    around: Around,
    at: Path,
    texts: Mapping[Path, bytes] | None = None,
    *,
    revision: Revision | None = None,
    files: Mapping[Path, Path | None] | None = None,
    links: Sequence[str] = (),
    paths: str | None = None,
    keep: bool = False,
) -> Iterator[Place]:
    """Build the place below `at` from a survey, and remove it afterwards.

    Args:
        around: what that is.
        at: a directory that holds all of it, which is emptied.
        texts: what files hold, by where they lie.
        revision: whose tree the project is; None where the project is as it lies.
        files: other files that are copied from elsewhere, by where they would lie; None for one that is left out.
        links: paths relative to the directory that are linked, and not copied, whatever they are.
        paths: PYTHONPATH of the user's; None for that of this process.
        keep: leave it.

    Raises:
        UsageError: git refuses, or there is no such path to link.
        StoreError: it cannot be written.
    """
    texts = texts or {}
    place = Place(at, at, {top: _rebuilt_below(at / str(number), top) for number, top in enumerate(around.tops)})
    with contextlib.ExitStack() as stack:
        try:
            shutil.rmtree(at, ignore_errors=True)
            if not keep:
                stack.callback(_remove, at)
            at.parent.mkdir(parents=True, exist_ok=True)
            if revision is not None:
                revision.check_out(place.moved(around.root), stack, keep=keep)
            for path in (*around.tops, around.directory, *(path.parent for path in texts)):
                place.moved(path).mkdir(parents=True, exist_ok=True)
            for name in links:
                link(around.directory / name, place.moved(around.directory) / name)
            for path in around.made:
                place.moved(path).mkdir(parents=True, exist_ok=True)
            others = {path: path for path in around.files} | dict(files or {})
            large = _give({place.moved(path): other for path, other in others.items() if other and path not in texts})
            for path, data in texts.items():
                place.moved(path).unlink(missing_ok=True)
                place.moved(path).write_bytes(data)
            if revision is None:  # by it, a capture finds the root of the project
                (place.moved(around.root) / ".git").mkdir(exist_ok=True)
            for top, there in place.tops.items():
                _link_neighbours(top, there, at)
            given = os.environ.get("PYTHONPATH", "") if paths is None else paths
            search_path = _search_path(place, at / "modules", given)
        except OSError as error:
            raise StoreError(f"cannot write {at}: {error.strerror or error}") from None
        root, directory = place.moved(around.root), place.moved(around.directory)
        yield replace(place, root=root, directory=directory, paths=search_path, large=tuple(large))


def _remove(at: Path) -> None:
    """Remove a directory, and its parent where that is empty then."""
    shutil.rmtree(at, ignore_errors=True)
    with contextlib.suppress(OSError):
        at.parent.rmdir()  # where nothing else is kept


def _rebuilt_below(place: Path, top: Path) -> Path:
    """Where `top` is rebuilt below `place`: under the names of up to `_LEVELS_ABOVE` of its parents."""
    above = top.parents[: min(_LEVELS_ABOVE, len(top.parents) - 1)]
    return place.joinpath(*(path.name for path in reversed(above)), top.name)


def path_of_the_users(place: Path, path: Path, top: Path) -> Path:
    """The user's path of `path`, which lies below the rebuilt first top in `place`; inverse of `_rebuilt_below`."""
    above = min(_LEVELS_ABOVE, len(top.parents) - 1)
    return Path(os.path.realpath(top.parents[above] / path.relative_to(place / "0")))


def keep_out_of_git(directory: Path) -> None:
    """Make `directory`, and put a `.gitignore` into the directory of runs it is in, or into it if new."""
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    runs = next((path for path in directory.parents if path.name == RUNS), directory if made else None)
    if runs is not None:
        ignored(runs)


def link(path: Path, to: Path) -> None:
    """Make `to` a link to `path`; where both are directories, link the entries that `to` lacks.

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


def _copy(path: Path, to: Path) -> None:
    """Copy a file, or recreate a link, unless `to` exists; nothing where the file is gone."""
    if os.path.lexists(to):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, FileExistsError):
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            to.symlink_to(os.path.normpath(path.parent / path.readlink()) if path.exists() else path.readlink())
        elif path.is_file():
            shutil.copy2(path, to)


def _give(files: Mapping[Path, Path]) -> list[Path]:
    """Copy files (target: source), smallest first, up to `MOST_COPIED` bytes in all.

    Link the rest, and return those.
    """
    total, large = 0, []
    real = {to: Path(os.path.realpath(path)) for to, path in files.items() if path.exists()}
    sizes = {path: path.stat().st_size if path.is_file() else MOST_COPIED for path in real.values()}
    for to, path in sorted(real.items(), key=lambda item: sizes[item[1]]):
        total += sizes[path]
        if total < MOST_COPIED:
            _copy(path, to)
        elif not os.path.lexists(to):
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(path)
            large.append(path)
    return large


def _link_neighbours(top: Path, rebuilt: Path, place: Path) -> None:
    """Link the siblings of a directory and of its parents beside the rebuilt one, so that `../data` exists."""
    for _ in range(_LEVELS_ABOVE):
        top, rebuilt, before = top.parent, rebuilt.parent, top
        if top == top.parent or rebuilt.parent == place:
            return
        entries = list(os.scandir(top))
        if len(entries) > _MOST_NEIGHBOURS:
            return
        for entry in entries:
            link = rebuilt / entry.name
            if entry.name not in _LEFT_OUT and entry.name != before.name and not link.exists():
                link.symlink_to(top / entry.name)


def _search_path(place: Place, modules: Path, given: str) -> str:
    """PYTHONPATH for a place: entries inside the project moved, editable installs of the project first."""

    def moved(path: Path) -> Path | None:
        """The rebuilt path of an import directory; None where it is not rebuilt, or is inside an environment."""
        real = Path(os.path.realpath(path))
        there = place.moved(real)
        installed = {"site-packages", "dist-packages"} & {*real.parts} or real.is_relative_to(Path(sys.prefix, "lib"))
        return None if there == real or installed else there

    words = [Path(path) for path in given.split(os.pathsep) if path]
    paths = [str((path.is_absolute() and moved(path)) or path) for path in words]
    # setuptools leaves entries there that are no files, such as `__editable__.name.finder.__path_hook__`
    paths += [str(there) for path in map(Path, sys.path[1:]) if path.exists() and (there := moved(path)) is not None]
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = vars(module).get("MAPPING") if module is not None and "__editable__" in module.__name__ else None
        for name, path in (mapping or {}).items():
            there = moved(Path(path))
            if there is not None and "." not in name:
                modules.mkdir(parents=True, exist_ok=True)
                there = there if there.exists() else there.with_name(f"{there.name}.py")
                (modules / (f"{name}.py" if there.suffix == ".py" else name)).symlink_to(there)
    return os.pathsep.join(dict.fromkeys([*([str(modules)] if modules.exists() else []), *paths]))


# --- one at a time


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit(128 + number), so that cleanup runs."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exclusively(base: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock on `base`, waiting for another process that captures revisions there."""
    try:
        keep_out_of_git(base)
        descriptor = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot write {base}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another introspect captures revisions in {base}: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            base.rmdir()  # where nothing is kept
