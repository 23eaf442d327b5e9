"""A git repository asked through git itself, and work trees of its commits beside the user's own.

Running code of another commit must leave the user's checkout, index and stash as they are: each commit gets a work tree
of its own, which is removed afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Repository:
    """A git repository, asked through git itself."""

    def __init__(self, directory: Path) -> None:
        """Find the repository that holds the directory.

        Raises:
            UsageError: there is none, or no git.
        """
        self.directory = directory
        self.root = Path(self.ask("rev-parse", "--show-toplevel"))

    @classmethod
    def around(cls, directory: Path) -> Repository | None:
        """The repository that holds the directory; None where there is none."""
        try:
            return cls(directory)
        except UsageError:
            return None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `git` with these words in the repository; output decoded, any exit code."""
        done = self._run(*words)
        answer, complaint = (data.decode("utf-8", "replace") for data in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, answer, complaint)

    def blob(self, name: str) -> bytes | None:
        """Content of a file at a commit, named `commit:path`; None where there is none."""
        done = self._run("cat-file", "blob", name)
        return done.stdout if done.returncode == 0 else None

    def _run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """Run git without hooks, prompts and `GIT_*` variables; UsageError where git cannot be started."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        try:
            return subprocess.run(  # noqa: S603 - no shell
                # hooks of the user's may do anything
                ["git", "-c", f"core.hooksPath={os.devnull}", *words],  # noqa: S607 - the user's own git
                cwd=self.directory,
                env={**environment, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"},
                capture_output=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise UsageError(f"cannot run git: {error.strerror or error}") from None

    def ask(self, *words: str) -> str:
        """The output of a git command, stripped.

        Raises:
            UsageError: git refuses; its last line says why.
        """
        return self._answer(*words).strip()

    def _answer(self, *words: str) -> str:
        """The output of a git command; UsageError with its last line where it fails."""
        answer = self.run(*words)
        if answer.returncode:
            lines = (answer.stderr or answer.stdout).strip().splitlines() or ["it failed"]
            raise UsageError(f"git {words[0]}: {lines[-1].removeprefix('fatal: ')}")
        return answer.stdout

    def names(self, *words: str) -> list[str]:
        """Names that a git command lists with `-z`.

        Raises:
            UsageError: git refuses.
        """
        return [name for name in self._answer(*words, "-z").split("\0") if name]

    def has(self, commit: str) -> bool:
        """Whether the repository holds a commit."""
        return self.run("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0

    def is_revision(self, word: str) -> bool:
        """Whether a word names a commit."""
        return self._resolve(word).returncode == 0

    def _resolve(self, word: str) -> subprocess.CompletedProcess[str]:
        return self.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{word}^{{commit}}")

    def commit(self, revision: str) -> str:
        """The full hash of a revision's commit.

        Raises:
            UsageError: there is no such revision.
        """
        answer = self._resolve(revision)
        if answer.returncode:
            raise UsageError(f"no revision {revision!r} in {self.root}: name a commit, tag or branch")
        return answer.stdout.strip()


@contextlib.contextmanager
def work_tree(user: Repository, path: Path, commit: str, *, keep: bool = False) -> Iterator[Repository]:
    """A work tree of a commit at a path, removed afterwards unless it is to be kept.

    Raises:
        UsageError: git refuses.
    """
    _remove(user, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    user.ask("worktree", "add", "--detach", "--force", str(path), commit)
    try:
        yield Repository(path)
    finally:
        if not keep:
            _remove(user, path)


def _remove(user: Repository, path: Path) -> None:
    """Remove the work tree at `path` with git, then whatever is left of its directory."""
    user.run("worktree", "remove", "--force", "--force", str(path))
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
