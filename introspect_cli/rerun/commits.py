"""Run a script at two revisions, so that what it computes can be compared.

Both run in the same place, one after the other, with the same seed, environment and data; b is compared with a while it
runs and ends at its first divergence. A capture is kept under the name of all that went into it (revision, command,
options, variables, packages, the files beside git's), so what was asked before is answered from disk.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.answer.endings import raised
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.settings.settings import ENV_NOISE
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.compare.terms.words import some
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.git import Repository
from introspect_cli.rerun.place import (
    AS_IT_IS,
    COMMITS,
    PLACE,
    Around,
    Place,
    Revision,
    ended_in_order,
    exclusively,
    path_of_the_users,
    placed,
    revision_of,
    scripts_of,
    survey_of_git,
)
from introspect_cli.rerun.variant import (
    Rerun,
    capture,
    ends_against,
    kept_run,
    log_of,
    or_nothing,
)
from introspect_cli.store.files.folders import RUNS
from introspect_cli.store.read.run import open_run
from introspect_cli.store.write.launch import remove_run
from introspect_cli.sums import source_digest
from introspect_cli.texts import count
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_KEPT = 20
"""Captures that are kept."""
MOST_BYTES = 4 << 30
"""Bytes of captures that are kept."""
_REFUSED = ("-o", "--output", "--against", "--stop", "--repeat", "--verify-neutral", "--force")
_SHOWN = 4


@dataclass(frozen=True)
class Question:
    """The command that is captured at both revisions, and how.

    Attributes:
        options: capture options.
        words: the script and its arguments.
        links: paths that git does not keep and that are linked, relative to the directory where we are.
        fresh: run again what was run before.
        stop: end b at its first divergence.
        rtol: what b is compared by while it runs.
        noise: runs that should equal a.
    """

    options: tuple[str, ...]
    words: tuple[str, ...]
    links: tuple[str, ...] = ()
    fresh: bool = False
    stop: bool = True
    rtol: float = 0.0
    noise: tuple[str, ...] = ()


def captured(
    a: str, b: str, runs: Sequence[str | None], asked: Question, tell: Callable[[str], None]
) -> tuple[str, str]:
    """Capture whichever of a and b is a revision, and return the paths of both runs.

    Args:
        a: a revision, or `.` for the work tree as it is, or what stands for a run.
        b: as a.
        runs: the runs that a and b stand for; None of a revision.
        asked: what is run.
        tell: shown a line for each capture.

    Raises:
        UsageError: there is no such revision, the script does not run there, or an option cannot be meant.
        StoreError: a run cannot be written.
    """
    here = Path.cwd()
    refused = next((word for word in asked.options if word.partition("=")[0] in _REFUSED), None)
    if refused is not None:
        raise UsageError(f"leave {refused} out after `--`: where runs are written and compared is decided here")
    around = Repository.around(here)
    if around is None:
        first = next(word for word, run in zip((a, b), runs, strict=True) if run is None)
        raise UsageError(f"{first} is no run, and {here} is in no git repository that has it as a revision")
    user = Repository(around.root)
    for word, run in zip((a, b), runs, strict=True):
        if run is not None and word != AS_IT_IS and user.is_revision(word):
            tell(f"{word} is a run ({run}) and a revision: the run is taken (refs/heads/{word} is the branch)")
    base = here / RUNS / COMMITS
    with ended_in_order(), exclusively(base, tell):
        return _Captures(user, base, asked, tell).pair((a, b), runs)


@dataclass(frozen=True)
class _Captures:
    """Captures of revisions of a repository."""

    user: Repository
    base: Path
    asked: Question
    tell: Callable[[str], None]

    def pair(self, words: Sequence[str], runs: Sequence[str | None]) -> tuple[str, str]:
        """Paths of both sides' runs; a side that is a revision is captured, b against a."""
        revisions = [
            revision_of(self.user, word) if run is None else None for word, run in zip(words, runs, strict=True)
        ]
        around = survey_of_git(self.user, Path.cwd(), scripts_of(self.asked.words), self.base)
        names = [self._name(one, around) if one is not None else "" for one in revisions]
        first, second = runs
        if revisions[0] is not None:
            first = str(self._captured("a", revisions[0], around, names[0]))
        assert first is not None
        if revisions[1] is not None:
            name = names[1]
            if names[0] == names[1]:
                self.tell("a and b are the same code: where their runs differ, the script does not repeat itself")
                name += "-again"
            second = str(self._captured("b", revisions[1], around, name, against=first))
        assert second is not None
        self._bound({Path(first).name, Path(second).name})
        return first, second

    def _name(self, revision: Revision, around: Around) -> str:
        """`<commit>-<hash>`, the hash over revision, files around, options, environment and installed packages."""
        environment = {name: value for name, value in os.environ.items() if not ENV_NOISE.match(name)}
        directories = [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
        made: list[Any] = [
            revision.state(),
            around.states(),
            [*self.asked.options, "--", *self.asked.words],
            [*self.asked.links, str(Path.cwd().relative_to(self.user.root))],
            sorted(environment.items()),
            [__version__, sys.executable, [(path, Path(path).stat().st_mtime_ns) for path in directories]],
        ]
        key = hashlib.blake2b(json.dumps(made).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
        return f"{revision.commit[:10]}{'-changed' if revision.changed else ''}-{key}"

    def _captured(
        self, side: str, revision: Revision, around: Around, name: str, *, against: str | None = None
    ) -> Path:
        """The run of a revision, kept or captured; with `against`, ended at its first divergence from that run."""
        whole = self.base / name
        run, options = whole, list(self.asked.options)
        if "--seed" not in {word.partition("=")[0] for word in options}:
            options += ["--seed", "0"]
        if against is not None and self.asked.stop:
            more = ends_against(against, self.asked.rtol, self.asked.noise)
            run = whole.with_name(f"{name}-to-{hashlib.blake2b(json.dumps(more).encode(), digest_size=3).hexdigest()}")
            options += more
        kept = None if self.asked.fresh else kept_run(whole) or kept_run(run)
        changed = "" if kept is None else self._changed_since(kept.run)
        if changed:
            self.tell(f"{changed} has changed since {side} was captured")
        elif kept is not None:
            self.tell(f"{side} is {revision.words}: captured before, {_shown(kept.run)}")
            self._refuse(side, kept, revision)
            os.utime(kept.run)
            return kept.run
        self.tell(
            f"{side} is {revision.words}: running {shlex.join(self.asked.words)} (introspect watch {_shown(run)})"
        )
        began = time.monotonic()
        at, links = self.base / PLACE, self.asked.links
        with or_nothing(run), placed(around, at, revision=revision, links=links) as place:
            if place.large:
                names = some([os.path.relpath(path, self.user.root) for path in place.large], _SHOWN)
                self.tell(f"linked, being too large to copy: {names}; what the script writes there is written to yours")
            done = self._run(run, revision, place, options)
            self._refuse(side, done, revision)
            self._check(done, revision, place)
        with open_run(run) as opened:
            stopped = opened.manifest.get("stopped") is True
        if stopped and against is not None and not self._diverges(against, run):
            return self._captured(side, revision, around, name)
        if run != whole and not stopped:
            if whole.exists():
                remove_run(whole)
            run.rename(whole)
            log_of(run).replace(log_of(whole))
            run = whole
        how = ", up to its first divergence" if stopped else ""
        self.tell(f"{side}: {count(done.steps, 'step')} in {time.monotonic() - began:.0f} s{how}")
        return run

    def _diverges(self, reference: str, run: Path) -> bool:
        """Whether a run that was stopped at its first divergence still diverges from `reference` now."""
        with contextlib.ExitStack() as stack:
            paths = (reference, str(run), *self.asked.noise)
            a, b, *others = (stack.enter_context(open_run(path)) for path in paths)
            return compare_runs(a, b, DiffOptions(rtol=self.asked.rtol), others).verdict is Verdict.DIVERGED

    def _changed_since(self, kept: Path) -> str:
        """Name of a file outside the revision that a kept run read and that has changed since; "" where none has."""
        here, place = Path(os.path.realpath(Path.cwd())), self.base / PLACE
        links = [here / path for path in self.asked.links]
        with open_run(kept) as run:
            files, started = run.settings.document("files"), run.time("started")
        began = 0.0 if started is None else started.timestamp()
        for name, about in files.items():
            path = self.user.root / Path(name).expanduser()
            if path.is_relative_to(place):
                path = path_of_the_users(place, path, self.user.root)
            elif path.is_relative_to(self.user.root) and not any(path.is_relative_to(link) for link in links):
                continue  # the revision's, or one that was copied
            if about.get("many"):
                continue
            if not path.is_file() or path.stat().st_size != about.get("size") or path.stat().st_mtime > began:
                return str(name)
        return ""

    def _run(self, run: Path, revision: Revision, place: Place, options: Sequence[str]) -> Rerun:
        """Capture the command at a revision's place, PYTHONHASHSEED 0 where unset; UsageError without the script."""
        words = list(self.asked.words)
        if words[0].endswith(".py") and not (place.directory / place.moved_word(words[0])).exists():
            raise UsageError(f"there is no {words[0]} at {revision.words}")
        words = [place.moved_word(word) for word in words]
        environment = {} if "PYTHONHASHSEED" in os.environ else {"PYTHONHASHSEED": "0"}
        return capture(run, place, (*options, *words), environment)

    def _refuse(self, side: str, done: Rerun, revision: Revision) -> None:
        """Raise UsageError where a capture recorded no step, unless b ended by an exception, which is compared."""
        if done.usable:
            return
        error = None
        if kept_run(done.run) is not None:
            with open_run(done.run) as run:
                error = raised(run, "")
        if error is not None and side == "b":
            return
        how = f"exit code {done.exit_code} ({done.last_lines.rpartition(' / ')[2]})" if error is None else error.words
        raise UsageError(
            f"nothing to compare: {shlex.join(self.asked.words)} at {revision.words} ends by {how}, before its first "
            "step is complete"
        )

    def _check(self, done: Rerun, revision: Revision, place: Place) -> None:
        """Check that the imported files were the revision's.

        Raises:
            UsageError: one was imported from the user's work tree.
        """
        with open_run(done.run) as run:
            ran = run.settings.document("sources")
        files = Repository(place.root).names("ls-files")
        for name, digest in ran.items():
            forms = (str(name), str(name).removesuffix(".py") + "/__init__.py")
            named = [file for file in files if any(f"/{file}".endswith(f"/{form}") for form in forms)]
            if digest not in _digests(place.root, named) and digest in _digests(self.user.root, named):
                raise UsageError(
                    f"{name} did not run as it is at {revision.words}: python imported the one of your work tree, by "
                    "an absolute path or from where it is installed"
                )

    def _bound(self, used: set[str]) -> None:
        """Remove the least recently used captures beyond `MOST_KEPT` or `MOST_BYTES`, never those in `used`."""
        runs = sorted(
            (path.parent for path in self.base.glob("*/manifest.yaml")), key=lambda path: -path.stat().st_mtime
        )
        total = 0
        for number, run in enumerate(runs):
            total += sum(path.lstat().st_size for path in run.rglob("*"))
            if run.name not in used and (number >= MOST_KEPT or total > MOST_BYTES):
                with contextlib.suppress(StoreError):
                    remove_run(run)
                    log_of(run).unlink(missing_ok=True)


def _digests(root: Path, names: Sequence[str]) -> set[str]:
    return {source_digest((root / name).read_bytes()) for name in names if (root / name).is_file()}


def _shown(path: Path) -> str:
    near = os.path.relpath(path)
    return str(path) if near.startswith(os.pardir) else near
