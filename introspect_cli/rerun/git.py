"""A git repository asked through git itself, and the trees of its revisions beside the user's own.

Running code of another commit must leave the user's checkout, index and stash as they are: each commit gets a work tree
of its own, which is removed afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK_TREE = "."
"""What names the work tree as it is among revisions."""
CODE_ENDINGS = (".py", ".pyx", ".pyi")
_SUBMODULE = "160000"


class Repository:
    """A git repository, asked through git itself."""

    def __init__(self, directory: Path) -> None:
        """Ask git now for the root of the repository that holds the directory; commands run there.

        Raises:
            UsageError: there is none, or no git.
        """
        self.root = directory
        self.root = Path(self.ask("rev-parse", "--show-toplevel"))

    @classmethod
    def around(cls, directory: Path) -> Repository | None:
        """The repository that holds the directory; None without a repository or git."""
        with contextlib.suppress(UsageError):
            return cls(directory)
        return None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run git and return its output as text, whatever the exit code.

        Without hooks, prompts, stdin and the user's `GIT_*` variables; messages are in English.

        Raises:
            UsageError: git cannot be started.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        try:
            return subprocess.run(  # noqa: S603 - no shell
                # hooks of the user's may do anything
                ["git", "-c", f"core.hooksPath={os.devnull}", *words],  # noqa: S607 - the user's own git
                cwd=self.root,
                env={**environment, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"},
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise UsageError(f"cannot run git: {error.strerror or error}") from None

    def ask(self, *words: str) -> str:
        """The output of a git command, without blanks at its end.

        Raises:
            UsageError: git fails; the last line it printed says why.
        """
        answer = self.run(*words)
        if answer.returncode:
            lines = (answer.stderr or answer.stdout).strip().splitlines() or ["it failed"]
            raise UsageError(f"git {words[0]}: {lines[-1].removeprefix('fatal: ')}")
        return answer.stdout.rstrip()

    def names(self, *words: str) -> list[str]:
        """Names that a git command lists with `-z` (which is added), in its order.

        Raises:
            UsageError: git fails.
        """
        return [name for name in self.ask(*words, "-z").split("\0") if name]

    def find(self, revision: str) -> str:
        """The full hash of a revision's commit; "" where there is none of that name."""
        return self.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").stdout.strip()

    def commit(self, revision: str) -> str:
        """The full hash of a revision's commit.

        Raises:
            UsageError: there is no such revision.
        """
        if not (found := self.find(revision)):
            raise UsageError(f"no revision {revision!r} in {self.root}: name a commit, tag or branch")
        return found


def tracked_files(root: Path) -> frozenset[Path]:
    """Paths of the files of the repository around `root` that git tracks; empty outside of one or without git."""
    user = Repository.around(root)
    return frozenset() if user is None else frozenset(user.root / name for name in user.names("ls-files"))


@dataclass(frozen=True)
class Revision:
    """A revision, or the work tree as it is.

    Attributes:
        name: as it was asked for.
        user: the user's repository.
        commit: what is checked out.
        changed: names of files that differ from the commit's in the work tree.
    """

    name: str
    user: Repository
    commit: str
    changed: tuple[str, ...] = ()

    @classmethod
    def named(cls, user: Repository, name: str) -> Revision:
        """Resolve a revision, or `.` for the work tree with its changes.

        Changes of the work tree are all of tracked files, and untracked files that are code and not ignored.

        Raises:
            UsageError: there is no such revision, or it has another commit of a submodule than is checked out:
                submodules run as they lie there. Not checked for `.` and for submodules that are not checked out.
        """
        commit = user.commit("HEAD" if name == WORK_TREE else name)
        if name == WORK_TREE:
            # `git diff` would write the index
            asked = ("status", "--porcelain", "--no-renames", "--untracked-files=all", "--ignore-submodules=all")
            listed = user.names(*asked)
            names = [line[3:] for line in listed if line[:2] != "??" or line.endswith(CODE_ENDINGS)]
            return cls(name, user, commit, tuple(sorted(names)))
        for entry in user.names("ls-tree", "-r", "--full-tree", commit):
            about, _, path = entry.partition("\t")
            is_here = about.startswith(_SUBMODULE) and (user.root / path / ".git").exists()
            if is_here and Repository(user.root / path).commit("HEAD") not in about:
                raise UsageError(f"{name} has another commit of the submodule {path}: check it out there first")
        return cls(name, user, commit)

    @property
    def words(self) -> str:
        """Name and commit for a sentence: `main (4e52087ddf)`, `the work tree (4e52087ddf with 2 changed)`."""
        changes = f" with {len(self.changed)} changed" if self.changed else ""
        shown = "the work tree" if self.name == WORK_TREE else self.name
        return f"{shown} ({self.commit[:10]}{changes})"

    def files(self) -> list[Path]:
        """The user's paths of its files, changed ones included."""
        names = self.user.names("ls-tree", "-r", "--name-only", "--full-tree", self.commit)
        return [self.user.root / name for name in {*names, *self.changed}]

    def texts(self) -> dict[Path, bytes | None]:
        """What changed files hold in the work tree now, by the user's path; None for one that was removed."""
        paths = [self.user.root / name for name in self.changed]
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    def state(self) -> list[object]:
        """[commit, [[path, digest], ...] of changed files]; a digest is None where the file was removed.

        Files are read now. States are equal for equal trees.
        """
        texts = self.texts().items()
        return [self.commit, [[str(path), None if data is None else hex_digest(data)] for path, data in texts]]

    @contextlib.contextmanager
    def checked_out(self, root: Path) -> Iterator[None]:
        """Check out the tree of its commit at `root` as a detached git worktree, for the length of a block.

        What was at `root` is removed before, the tree afterwards.

        Raises:
            UsageError: git fails.
        """
        self._remove(root)
        root.parent.mkdir(parents=True, exist_ok=True)
        self.user.ask("worktree", "add", "--detach", "--force", str(root), self.commit)
        try:
            yield
        finally:
            self._remove(root)

    def _remove(self, root: Path) -> None:
        """Remove the work tree at `root` with git, then whatever is left of its directory."""
        self.user.run("worktree", "remove", "--force", "--force", str(root))
        shutil.rmtree(root, ignore_errors=True)
