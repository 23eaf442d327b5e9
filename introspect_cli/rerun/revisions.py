"""Revisions of somebody's project, and the place in which one runs as the project does in the user's work tree.

git checks the revision out into a work tree of its own. The work tree as it is, `.`, is its commit and the files that
are others than the commit's. What git does not keep and a script may read, ignored data above all, is copied, and not
linked: what the script writes there must not reach the user's files. What is too large for that is named, so that the
user may have it linked. All revisions have the same place, one after the other, so that no path differs between runs.
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
from introspect_cli.rerun.places.place import (
    LEFT_OUT,
    MOST_COPIED,
    PLACE,
    Place,
    entries_below,
    is_foreign,
    link_neighbours,
    rebuilt_below,
)
from introspect_cli.rerun.places.worktree import Repository, link, work_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

AS_IT_IS = "."
_MOST_FILES = 20_000
_CODE = (".py", ".pyx", ".pyi")
_SUBMODULE = "160000"


@dataclass(frozen=True)
class Revision:
    """A revision, or the work tree as it is.

    Attributes:
        name: as it was asked for.
        user: the user's repository.
        commit: what is checked out.
        changed: files of the work tree that are others than the commit's, by their path; all False where one is gone.
        submodules: what each of them is to hold, by its path.
        empty: submodules that are not there.
    """

    name: str
    user: Repository
    commit: str
    changed: Mapping[str, bool] = field(default_factory=dict)
    submodules: Mapping[str, Revision] = field(default_factory=dict)
    empty: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """`main (4e52087ddf)`."""
        changes = f" with {len(self.changed)} changed" if self.changed else ""
        shown = "the work tree" if self.name == AS_IT_IS else self.name
        return f"{shown} ({self.commit[:10]}{changes})"

    def state(self) -> list[object]:
        """What tells it from all others, as plain data."""
        held = [[name, _digest(self.user.root / name) if there else None] for name, there in self.changed.items()]
        return [self.commit, held, [[name, inside.state()] for name, inside in self.submodules.items()]]


def revision_of(user: Repository, revision: str) -> Revision:
    """What a revision is, or `.`, in a repository that was opened at its root.

    Raises:
        UsageError: there is no such revision, or the commit of a submodule is not here.
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
    submodules, empty = {}, []
    for entry in user.names("ls-tree", "-r", "--full-tree", commit):
        about, _, name = entry.partition("\t")
        if not about.startswith(_SUBMODULE):
            continue
        if not (user.root / name / ".git").exists():
            empty.append(name)
            continue
        inside, wanted = Repository(user.root / name), about.split()[2]
        if not as_it_is and not inside.has(wanted):
            raise UsageError(f"{revision} needs commit {wanted[:10]} of the submodule {name}: fetch it there")
        submodules[name] = revision_of(inside, AS_IT_IS if as_it_is else wanted)
    return Revision(revision, user, commit, dict(sorted(changed.items())), submodules, tuple(empty))


def _digest(path: Path) -> str:
    """What a file holds, a link leads to, and whether it can be executed."""
    if path.is_symlink():
        return f"-> {path.readlink()}"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        made = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            made.update(block)
    return f"{made.hexdigest()} {path.stat().st_mode & stat.S_IXUSR}"


@dataclass(frozen=True)
class Unversioned:
    """Files of the work tree that no commit has and every revision is given.

    Attributes:
        copied: their paths.
        large: what is not copied, by the directory or file at the top, with its bytes.
        state: what tells them from those of another time.
    """

    copied: tuple[str, ...]
    large: Mapping[str, int]
    state: tuple[object, ...]


def unversioned_of(user: Repository, links: Sequence[Path], scripts: Iterable[str]) -> Unversioned:
    """Look at what git does not keep.

    Args:
        user: the user's repository, opened at its root.
        links: paths that are linked and need no copy.
        scripts: untracked code that is taken all the same: what is to be run. Other code belongs to the work tree.
    """
    untracked = user.names("ls-files", "--others", "--exclude-standard")
    code = {name for name in untracked if name.endswith(_CODE)} - {*scripts}
    kept: list[tuple[int, str, object]] = []
    large: dict[str, int] = {}
    for name in user.names("ls-files", "--others", "--directory"):
        if not LEFT_OUT.isdisjoint(Path(name).parts):
            continue
        for path, size, changed in _files(user.root / name):
            inside = os.path.relpath(path, user.root)
            if inside not in code and not any(path.is_relative_to(other) for other in links):
                kept.append((size, inside, changed))
    total = 0
    copied = []
    for number, (size, name, _) in enumerate(sorted(kept, key=lambda item: item[:2])):
        if size < 0 or total + size > MOST_COPIED or number >= _MOST_FILES:
            top = name if size < 0 else Path(name).parts[0]
            large[top] = large.get(top, 0) + max(size, 0)
            continue
        total += size
        copied.append(name)
    return Unversioned(tuple(copied), large, tuple(sorted((name, size, changed) for size, name, changed in kept)))


def _files(path: Path) -> Iterator[tuple[Path, int, object]]:
    """The files at or below a path, each with its bytes and when it was changed; -1 of a directory of very many."""
    below = [(path, True)]
    if path.is_dir() and not path.is_symlink():
        with os.scandir(path) as scanned:
            if is_foreign(list(scanned)):
                return  # an environment of packages: python has it already
        below = list(entries_below(path, (), Path(os.devnull)))
    for file, linked in below:
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode):
            yield file, 0, str(file.readlink())
        elif stat.S_ISREG(status.st_mode):
            yield file, status.st_size, status.st_mtime_ns
        elif linked and stat.S_ISDIR(status.st_mode) and not is_foreign(list(os.scandir(file))):
            yield file, -1, None


@contextlib.contextmanager
def checked_out(revision: Revision, unversioned: Unversioned, links: Sequence[str], base: Path) -> Iterator[Place]:
    """A place of a revision, which is removed afterwards.

    Args:
        revision: what is checked out.
        unversioned: what is copied beside it.
        links: paths relative to the directory where we are that are linked.
        base: a directory of introspect's.

    Raises:
        UsageError: git refuses, or there is no such path to link.
        StoreError: it cannot be written.
    """
    user, here = revision.user, Path(os.path.realpath(Path.cwd()))
    at = base / PLACE
    root = rebuilt_below(at, user.root)
    place = Place(root, root / here.relative_to(user.root), {user.root: root})
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, at, ignore_errors=True)
        _check_out(revision, root, stack)
        try:
            place.directory.mkdir(parents=True, exist_ok=True)  # of the user's, and git may keep nothing in it
            link_neighbours(user.root, root, base)
            for name in unversioned.copied:
                _copy(user.root / name, root / name)
            link(Path.cwd(), place.directory, links)
            paths = _search_path(user.root, place, at / "modules")
        except OSError as error:
            raise StoreError(f"cannot write {at}: {error.strerror or error}") from None
        yield replace(place, paths=paths)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Have a signal that ends a process end this one by an exception, so that nothing is left behind."""

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
    """Wait until no other process captures revisions here: they have one place."""
    try:
        base.mkdir(parents=True, exist_ok=True)
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


def _check_out(revision: Revision, root: Path, stack: contextlib.ExitStack) -> None:
    stack.enter_context(work_tree(revision.user, root, revision.commit))
    for name, there in revision.changed.items():
        with contextlib.suppress(OSError):
            (root / name).unlink()
        if there:
            _copy(revision.user.root / name, root / name)
    for name, inside in revision.submodules.items():
        _check_out(inside, root / name, stack)


def _copy(path: Path, to: Path) -> None:
    """Copy a file, or a link as one, where nothing is; a file that has gone is passed over."""
    if os.path.lexists(to):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, FileExistsError):
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            to.symlink_to(os.path.normpath(path.parent / path.readlink()) if path.exists() else path.readlink())
        elif path.is_file():
            shutil.copy2(path, to)


def _search_path(root: Path, place: Place, modules: Path) -> str:
    """PYTHONPATH with what lies in the project moved, and packages of it that are installed as editable first."""
    given = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [place.moved(Path(os.path.realpath(path))) if _is_inside(path, root) else path for path in given]
    # setuptools leaves entries there that are no files, such as `__editable__.name.finder.__path_hook__`
    looked_in = [path for path in map(Path, sys.path[1:]) if path.exists() and _is_inside(path, root)]
    paths += [place.moved(Path(os.path.realpath(path))) for path in looked_in]
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = vars(module).get("MAPPING") if module is not None and "__editable__" in module.__name__ else None
        for name, path in (mapping or {}).items():
            if _is_inside(Path(path), root) and "." not in name:
                modules.mkdir(parents=True, exist_ok=True)
                moved = place.moved(Path(os.path.realpath(path)))
                moved = moved if moved.exists() else moved.with_name(f"{moved.name}.py")
                (modules / (f"{name}.py" if moved.suffix == ".py" else name)).symlink_to(moved)
    return os.pathsep.join(dict.fromkeys(map(str, [*([modules] if modules.exists() else []), *paths])))


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a place where python looks for modules is the project's, and not an environment inside it."""
    real = Path(os.path.realpath(path))
    installed = {"site-packages", "dist-packages"} & {*real.parts}
    return real.is_relative_to(root) and not installed and not real.is_relative_to(Path(sys.prefix, "lib"))
