"""Capture a script again, in a fresh process, and compare what comes out with a reference.

Bisection over commits and over settings both ask one question many times: does this variant diverge from the reference?
Each asking is a process of its own, so that nothing is left over from the last; its run and its output are kept, and
a question that was answered before is answered from disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, DiffResult, Verdict
from introspect_cli.compare.say import what
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.place import keep_out_of_git
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.pack import from_anywhere
from introspect_cli.store.run import RunState, open_run
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from introspect_cli.rerun.place import Place
    from introspect_cli.store.run import Run

_LAST_LINES = 5


@dataclass(frozen=True)
class Rerun:
    """Result of a capture.

    Attributes:
        run: its directory.
        exit_code: the script's; 0 where a kept run was complete.
        steps: steps that can be read, 0 where there is no readable run.
        is_complete: whether it was written to its end.
    """

    run: Path
    exit_code: int
    steps: int
    is_complete: bool = False

    @property
    def last_lines(self) -> str:
        """The last `_LAST_LINES` lines of its output, joined by " / "; `see <log>` where there are none."""
        log = log_of(self.run)
        lines = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:] if log.exists() else []
        return " / ".join(lines) if lines else f"see {log}"


def log_of(run: Path) -> Path:
    """Path of the script's output: `NAME.log` beside the run."""
    return run.with_name(f"{run.name}.log")


def capture(
    run: Path, place: Place, words: Iterable[str], environment: Mapping[str, str | None] | None = None, python: str = ""
) -> Rerun:
    """Capture a script at a place, in a process of its own, and wait for its end, without limit.

    The exit code of a complete run is the script's, not that of a comparison (`--stop`). In a place that is rebuilt,
    `GIT_*` variables are removed.

    Args:
        run: directory for its run, replaced if it is there; its output is kept beside it, as `NAME.log`.
        place: where it runs.
        words: capture options, then the script and its arguments.
        environment: variables to set; None removes one.
        python: the interpreter; "" for the one that runs this.

    Returns:
        the result, also of a script that fails; without steps where no readable run came out.

    Raises:
        OSError: the log cannot be written, or the interpreter not started.
        UsageError: it read a file of the user's that was laid in the place.
    """
    changed: dict[str, str | None] = {**os.environ, **(environment or {}), "PYTHONDONTWRITEBYTECODE": "1"}
    if place.tops:  # another repository than the one that git was told of
        changed |= {name: None for name in changed if name.startswith("GIT_")}
    changed["PYTHONPATH"] = place.paths or changed.get("PYTHONPATH")
    variables = {name: value for name, value in changed.items() if value is not None}
    command = [python or sys.executable, "-m", "introspect_cli", "capture", "-q", "--force", "-o", str(run), *words]
    try:
        code = run_logged(command, log_of(run), place.directory, variables)
    except BaseException:  # interrupted: nobody waits for it
        shutil.rmtree(run, ignore_errors=True)
        log_of(run).unlink(missing_ok=True)
        raise
    made = result_of(run, code)
    check_read(made, place)
    return made


def started_at(run: Run) -> float | None:
    """When a run started, in seconds since 1970; None where the manifest does not say."""
    started = run.time("started")
    return None if started is None else started.timestamp()


def run_logged(
    command: Sequence[str] | str, log: Path, directory: Path, environment: Mapping[str, str] | None = None
) -> int:
    """Run a command (a str: in a shell) in `directory`, without stdin, wait for it, and return its exit code.

    Its output, stderr included, replaces the file `log`, whose directory is made. `environment` holds all of its
    variables; None for those of this process. Where there is `setpriv`, it is killed when this process dies.
    """
    keep_out_of_git(log.parent)
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    setpriv = shutil.which("setpriv")  # of util-linux
    with log.open("wb") as file:
        return subprocess.run(  # noqa: S603 - the user's own script, as the user asked
            [*((setpriv, "--pdeathsig", "KILL") if setpriv else ()), *words],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def result_of(run: Path, exit_code: int = 1) -> Rerun:
    """The result of the capture at `run`; without a step where there is no run that can be read.

    The exit code is the manifest's, 0 of a script that was stopped on request; `exit_code` where it has none.
    """
    try:
        with open_run(run) as opened:
            code = 0 if opened.manifest.get("stopped") else opened.manifest.get("exit_code")
            is_complete = opened.state is RunState.COMPLETE
            return Rerun(run, code if isinstance(code, int) else exit_code, opened.steps, is_complete)
    except StoreError:
        return Rerun(run, exit_code, 0)


def stop_options(reference: Path | str, rtol: float = 0.0, noise: Sequence[Path | str] = ()) -> tuple[str, ...]:
    """Capture options (`--against`, `--stop`, ...) that end a run at its first divergence from `reference`.

    `noise` are repeats of the reference, whose differences from it do not count.
    """
    options = ["--against", from_anywhere(reference), "--stop", *([f"--rtol={rtol}"] if rtol else [])]
    return (*options, *(f"--noise={from_anywhere(path)}" for path in noise))


@dataclass(frozen=True)
class Reference:
    """The run that reruns are compared with, and the last step that counts.

    Attributes:
        run: its directory.
        until: last step to look at; None for all.
    """

    run: Path
    until: int | None = None

    @property
    def stop_options(self) -> tuple[str, ...]:
        """Capture options that end a rerun after the step `until`; where that is None, at its first divergence."""
        return stop_options(self.run) if self.until is None else ("--until-step", str(self.until))

    @property
    def exit_code(self) -> int:
        """The exit code of its script."""
        return result_of(self.run).exit_code

    def judge(self, other: Rerun) -> tuple[Verdict, DiffResult | None]:
        """Compare a rerun with the reference, up to the step `until`.

        Returns:
            (verdict, comparison): (UNDECIDED, None) for a rerun without a step; UNDECIDED, too, for one that agrees and
            whose exit code is neither 0 nor the reference's: agreeing up to a crash is not agreeing. One that diverges
            before it crashes is DIVERGED.

        Raises:
            StoreError: a store cannot be read.
        """
        if not other.steps:
            return Verdict.UNDECIDED, None
        steps = None if self.until is None else Schedule.parse(f":{self.until + 1}")
        with open_run(self.run) as a, open_run(other.run) as b:
            result = compare_runs(a, b, DiffOptions(steps=steps))
        if result.verdict is Verdict.SAME and other.exit_code not in {0, self.exit_code}:
            return Verdict.UNDECIDED, result
        return result.verdict, result


def first_sentence(result: DiffResult) -> str:
    """`First divergence at step 3: output of GPT.h.0.`; the comparison's own sentence where nothing diverges."""
    first = result.first
    return result.sentence if first is None else f"First divergence at step {first.step}: {what(first.site)}."


def check_read(done: Rerun, place: Place) -> None:
    """Check that a run in a place read the files that were laid there; one that read the user's is removed.

    Raises:
        UsageError: one of its source files, or of the files that it opened, is as the user's is now and not as it is in
            the place.
    """
    if not done.steps:
        return
    with open_run(done.run) as run:
        opened, sources = opened_files(run), run.settings.document("sources")
    for name, digest in {**opened, **sources}.items():
        forms = (f"/{name}", f"/{name.removesuffix('.py')}/__init__.py")
        laid = {path: laid for path, laid in place.given.items() if str(path).endswith(forms)}
        # a script may write what it opened, so of that the digest is needed of what it was before
        here = {laid[path] or (digest_of(place.rebuilt(path)) if name in sources else digest) for path in laid}
        users = {digest_of(path) for path in laid}
        if digest in users - here:
            shutil.rmtree(done.run, ignore_errors=True)
            wrong = f"{name} was read as it lies in your project, and not as it was put into {place.root}"
            raise UsageError(f"{wrong}: python found it by an absolute path, or where it is installed")


def digest_of(path: Path) -> str:
    """The source digest of a file; "" where it cannot be read."""
    with suppress(OSError):
        return hex_digest(path.read_bytes())
    return ""


def opened_files(run: Run) -> dict[str, str]:
    """Digest by name of the files that a script opened; those without a digest of all of it are left out."""
    files = [(str(name), about) for name, about in run.settings.document("files").items() if isinstance(about, dict)]
    digests = {name: about.get("digest") for name, about in files if not about.get("sampled")}
    return {name: digest for name, digest in digests.items() if isinstance(digest, str)}
