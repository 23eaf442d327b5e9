"""Run a script at revisions of a repository, so that what it computes can be compared.

All revisions run in the same place, one after the other, with the same seed, environment and data. A capture is kept
under the name of all that went into it (revision, command, options, variables, packages, the files beside git's), so
what was asked before is answered from disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.answer.compared import exception_of
from introspect_cli.compare.say import some
from introspect_cli.compare.settings.settings import ENV_NOISE
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.git import Repository, Revision
from introspect_cli.rerun.place import (
    COMMITS,
    TREE,
    Place,
    Surroundings,
    build_place,
    exit_on_signals,
    hold_lock,
    survey_of_git,
)
from introspect_cli.rerun.variant import Rerun, capture, log_of, result_of, run_logged, started_at
from introspect_cli.store.files import MANIFEST, RUNS
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import refuse_or_remove
from introspect_cli.texts import count
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

MAX_KEPT = 20
"""Captures of revisions that are kept; the least recently used go first."""
_REFUSED = ("-o", "--output", "--against", "--stop", "--verify-neutral", "--force")
_MAX_NAMED = 4


@dataclass(frozen=True)
class Command:
    """A command that is captured at several revisions.

    Attributes:
        options: capture options.
        words: the script and its arguments (or `-m`, a module and its arguments).
        links: paths that git does not keep and that are linked, relative to the directory where we are.
        setup: shell command to run in the place before each capture, such as a reinstall; "" for none.
    """

    options: tuple[str, ...]
    words: tuple[str, ...]
    links: tuple[str, ...] = ()
    setup: str = ""

    @property
    def seeded(self) -> tuple[str, ...]:
        """The options, with `--seed 0` where they have no seed."""
        has_seed = "--seed" in {word.partition("=")[0] for word in self.options}
        return self.options if has_seed else (*self.options, "--seed", "0")


@dataclass(frozen=True)
class Captures:
    """Captures at revisions of a command that would run in the current directory.

    Attributes:
        user: the user's repository.
        base: directory of the runs, and of the place in which they are made.
        command: what is captured.
        tell: shown a line for each capture.
    """

    user: Repository
    base: Path
    command: Command
    tell: Callable[[str], None]

    @cached_property
    def around(self) -> Surroundings:
        """What each revision is given that git does not keep: what lies around the current directory now.

        Raises:
            UsageError: the command has no script.
        """
        if not self.command.words:
            raise UsageError("nothing to run: name a script, or -m and a module, after the options")
        script = Path(os.path.realpath(self.command.words[0]))  # of a module no path: `-m`
        return survey_of_git(self.user, Path(os.path.realpath(Path.cwd())), script, self.base)

    def place(self, revision: Revision) -> AbstractContextManager[Place]:
        """A context manager that builds the place in which a revision runs, and removes it after the block."""
        paths, texts = os.environ.get("PYTHONPATH", ""), revision.texts()
        at, links = self.base / TREE, self.command.links
        return build_place(self.around, at, texts, revision=revision, links=links, paths=paths)

    def capture(self, revision: Revision, run: Path, more: Iterable[str] = ()) -> Rerun:
        """Capture the command at a revision into `run`, replacing a run there, and tell what is linked, not copied.

        The setup command, if any, runs before. Where PYTHONHASHSEED is not set, it is 0.

        Args:
            revision: what is captured.
            run: directory of the run; removed where it is interrupted.
            more: further capture options.

        Returns:
            the run; one without steps where the setup command or the script fails before a step.

        Raises:
            UsageError: a file was imported from the user's work tree.
        """
        with self.place(revision) as place:
            if place.large:
                names = some([os.path.relpath(path, self.user.root) for path in place.large], _MAX_NAMED)
                self.tell(f"linked, being too large to copy: {names}; what the script writes there is written to yours")
            if self.command.setup and run_logged(self.command.setup, log_of(run), place.directory):
                return Rerun(run, 1, 0)
            words = map(place.rebuilt_word, self.command.words)
            environment = {} if "PYTHONHASHSEED" in os.environ else {"PYTHONHASHSEED": "0"}
            return capture(run, place, (*self.command.seeded, *more, *words), environment)

    def run_of(self, revision: Revision, side: str, more: tuple[str, ...] = (), *, fresh: bool = False) -> Rerun:
        """The kept run of a revision, if it is complete and nothing that went into it has changed; else capture it now.

        A kept run that is taken is touched: it counts as used now, see `remove_old`. A new one may have no step.

        Args:
            revision: what is captured.
            side: `a` or `b`, whose runs are separate, and told of in a line each; "" to tell nothing.
            more: further capture options.
            fresh: True to capture in any case.

        Raises:
            UsageError: a file was imported from the user's work tree.
        """
        run = self.base / self.name(revision, side, more)
        tell = self.tell if side else lambda _: None
        kept, why = result_of(run), ""
        if kept.is_complete and not fresh:
            if not (changed := self.changed_since(run)):
                tell(f"{side} is {revision.words}: captured before, {os.path.relpath(run)}")
                os.utime(run)
                return kept
            why = f"{changed} has changed since it was captured; "
        running = f"running {shlex.join(self.command.words)} ({os.path.relpath(run)})"
        tell(f"{side} is {revision.words}: {why}{running}")
        began = time.monotonic()
        done = self.capture(revision, run, more)
        tell(f"{side}: {count(done.steps, 'step')} in {time.monotonic() - began:.0f} s")
        return done

    def name(self, revision: Revision, side: str, more: tuple[str, ...]) -> str:
        """Name of a run: `<commit>[-changed]-<hash>`; `-changed` where the work tree has changes.

        Hashed are the side, the code, the files around it (by size and time), the command and its options, environment
        variables except noise, this tool's version, the interpreter and its package directories (by time).
        """
        environment = {name: value for name, value in os.environ.items() if not ENV_NOISE.match(name)}
        directories = [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
        hashed: list[Any] = [
            [side, *revision.state()],
            self.around.states(),
            [*self.command.seeded, *more, "--", *self.command.words],
            [*self.command.links, self.command.setup, os.path.relpath(self.around.directory, self.user.root)],
            sorted(environment.items()),
            [__version__, sys.executable, [(path, Path(path).stat().st_mtime_ns) for path in directories]],
        ]
        key = hashlib.blake2b(json.dumps(hashed).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
        return f"{revision.commit[:10]}{'-changed' if revision.changed else ''}-{key}"

    def changed_since(self, kept: Path) -> str:
        """Name of the first file that a kept run read and that has changed since; "" where none has.

        It has changed if it is gone, has another size, or was modified after the run started. Files of the project that
        were copied or belong to the revision do not count, nor do directories of many files that were recorded as one.
        """
        place, links = self.base / TREE, [self.around.directory / path for path in self.command.links]
        with open_run(kept) as run:
            files, began = run.settings.document("files"), started_at(run) or 0.0
        for name, about in files.items():
            path = self.user.root / Path(name).expanduser()
            is_outside = path.is_relative_to(place) or not path.is_relative_to(self.user.root)
            if about.get("many") or not (is_outside or any(map(path.is_relative_to, links))):
                continue  # many files as one, or the revision's, or one that was copied
            path = Path(path.anchor, path.relative_to(place)) if path.is_relative_to(place) else path
            if not path.is_file() or path.stat().st_size != about.get("size") or path.stat().st_mtime > began:
                return str(name)
        return ""

    def remove_old(self, used: Sequence[Path]) -> None:
        """Remove captures, with their logs, that are neither the `MAX_KEPT` most recently used nor in `used`.

        One that cannot be removed is kept silently.
        """
        runs = sorted((path.parent for path in self.base.glob(f"*/{MANIFEST}")), key=lambda run: -run.stat().st_mtime)
        for run in runs[MAX_KEPT:]:
            if run not in used:
                with contextlib.suppress(StoreError, OSError):
                    refuse_or_remove(run, force=True)
                    log_of(run).unlink(missing_ok=True)


# --- two revisions


def capture_pair(
    words: tuple[str, str],
    runs: tuple[str | None, str | None],
    command: Command,
    tell: Callable[[str], None],
    ends_b: Callable[[str], tuple[str, ...]],
    *,
    fresh: bool = False,
) -> tuple[str, str]:
    """Capture whichever of a and b is a revision, and return the paths of both runs.

    A kept run is taken where it will do. Where a word is a run and a revision, the run is taken. Waits for another
    process that captures in this project; old captures are removed.

    Args:
        words: a and b: a revision, `.` for the work tree as it is, or the name of a run.
        runs: the runs that they stand for; None for a revision.
        command: what is captured.
        tell: shown a line for each capture.
        ends_b: gives the capture options that end b, if it is a revision, by the path of the run of a.
        fresh: run again what was run before.

    Raises:
        UsageError: there is no repository or no such revision, the script records no step there, or an option is one
            that is decided here (`_REFUSED`).
        StoreError: a run cannot be written.
    """
    refused = next((word for word in command.options if word.partition("=")[0] in _REFUSED), None)
    if refused is not None:
        raise UsageError(f"leave {refused} out after `--`: where runs are written and compared is decided here")
    sides = [*zip("ab", words, runs, strict=True)]
    if (user := Repository.around(Path.cwd())) is None:
        first = next(word for _, word, run in sides if run is None)
        raise UsageError(f"{first} is no run, and {Path.cwd()} is in no git repository that has it as a revision")
    base = Path.cwd() / RUNS / COMMITS
    exit_on_signals()
    with hold_lock(base):
        captures = Captures(user, base, command, tell)
        revisions = {side: Revision.named(user, word) for side, word, run in sides if run is None}
        paths: list[str] = []
        for side, _, run in sides:
            ends = ends_b(paths[0]) if paths else ()
            paths.append(run or str(_capture_side(captures, side, revisions[side], ends, fresh=fresh)))
        captures.remove_old([*map(Path, paths)])
    return paths[0], paths[1]


def _capture_side(captures: Captures, side: str, revision: Revision, ends: tuple[str, ...], *, fresh: bool) -> Path:
    """The run of a revision, which is captured with the options `ends` unless a kept run will do.

    Raises:
        UsageError: it recorded no step; but a b that ended by an exception is compared all the same.
    """
    done = captures.run_of(revision, side, ends, fresh=fresh)
    error = None
    if not done.steps and done.is_complete:
        with open_run(done.run) as opened:
            error = exception_of(opened, "")
    if not done.steps and (error is None or side == "a"):
        last = done.last_lines.rpartition(" / ")[2]
        why = f"exit code {done.exit_code} ({last})" if error is None else error.words
        ended = f"{shlex.join(captures.command.words)} at {revision.words} ends by {why}"
        raise UsageError(f"nothing to compare: {ended}, before its first step is complete")
    return done.run
