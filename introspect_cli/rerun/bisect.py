"""Find the commit that made a training script diverge.

git knows which commit halves those that are left; a captured run knows whether a commit diverges from the good one, and
where. Commits are captured as for `diff REV REV` (see `commits`), and every run is kept under the commit's name, so a
bisection that was interrupted goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.search import Limits, Proof, prove
from introspect_cli.rerun.commits import Captures, Command
from introspect_cli.rerun.git import Repository, Revision
from introspect_cli.rerun.place import exit_on_signals, keep_out_of_git
from introspect_cli.rerun.variant import Reference, Rerun, first_sentence
from introspect_cli.store.files import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Culprit:
    """How a bisection ended.

    Attributes:
        commit: the first bad commit; None where only skipped ones are left.
        subject: its first line.
        files: the files it changed.
        result: what it diverges by from the good revision.
        tried: commits captured, with the verdict on each, in order.
        candidates: commits that could be the first bad one where skipped ones leave it open.
        directory: where the runs are.
        proof: which of its changes it is; None where that could not be asked.
    """

    commit: str | None
    subject: str
    files: tuple[str, ...]
    result: DiffResult | None
    tried: tuple[tuple[str, Verdict], ...]
    candidates: tuple[str, ...]
    directory: Path
    proof: Proof | None = None


def bisect(good: str, bad: str, command: Command, tell: Callable[[str], None], limits: Limits) -> Culprit:
    """Find the first commit between two revisions whose run diverges from the good one's.

    Runs in the current directory's repository.

    The bad commit is captured, then those that `git rev-list --bisect-all` proposes, the first not tried each time.
    Once only the last bad commit remains, that is the first bad one. Where commits with an UNDECIDED verdict remain
    beside it, the first bad one is unknown, and all that remain are its candidates. Where no last step is given, later
    commits run only to the step at which the bad one diverges.

    Args:
        good: revision that is right.
        bad: later revision that is not.
        command: what is captured.
        tell: shown a line for each commit tried.
        limits: how far it goes; without a place for its runs and the work tree, they are in `bisect-GOOD-BAD`.

    Raises:
        UsageError: no such revision, `good` is no ancestor of `bad`, it records no step or exits with an error, or
            `bad` does not diverge from it.
    """
    user = Repository(Path.cwd())
    first, last = user.commit(good), user.commit(bad)
    if user.run("merge-base", "--is-ancestor", first, last).returncode:
        raise UsageError(f"{good} is not an ancestor of {bad}: name a good revision that bad comes from")
    until_step = limits.until_step
    directory = keep_out_of_git(limits.output or Path(RUNS) / f"bisect-{first[:10]}-{last[:10]}")
    exit_on_signals()
    captures = Captures(user, directory, command, tell)
    ends = () if until_step is None else ("--until-step", str(until_step))
    made = captures.run_of(Revision.named(user, first), "", ends)
    if not made.steps or made.exit_code:
        raise UsageError(f"the good revision {first[:10]} does not run (exit code {made.exit_code}): {made.last_lines}")
    tell(f"{first[:10]} is the reference: {made.steps} steps")
    runs, reference, compared = {first: made.run}, Reference(made.run, until_step), dict[str, DiffResult | None]()
    tried: dict[str, Verdict] = {}

    def judge(commit: str) -> Verdict:
        """Capture a commit, compare it with the reference, and tell the verdict (good, bad, skipped) in a line."""
        done = captures.run_of(Revision.named(user, commit), "", reference.stop_options)
        runs[commit] = done.run
        tried[commit], result = reference.judge(done)
        compared[commit] = result  # None where no step was recorded
        why = "it could not be captured" if result is None else first_sentence(result)
        said = {Verdict.SAME: "good", Verdict.DIVERGED: f"bad: {why}", Verdict.UNDECIDED: f"skipped: {why}"}
        tell(f"{commit[:10]} is {said[tried[commit]]}")
        return tried[commit]

    verdict, result = judge(last), compared[last]
    if verdict is not Verdict.DIVERGED or result is None or result.first is None:
        how = "runs the same as the good revision" if verdict is Verdict.SAME else "cannot be judged"
        why = result.sentence if result is not None else Rerun(runs[last], 0, 0).last_lines
        raise UsageError(f"nothing to bisect: {last[:10]} {how} ({why})")
    if until_step is None:
        reference = replace(reference, until=result.first.step)
        tell(f"{last[:10]} diverges at step {reference.until}: later steps are not run")
    while True:
        same = [commit for commit, verdict in tried.items() if verdict is Verdict.SAME]
        left = user.ask("rev-list", "--bisect-all", last, "--not", first, *same).splitlines()
        commits = [line.partition(" ")[0] for line in left]
        commit = next((each for each in commits if each not in tried), None)
        if commit is None:
            break
        last = commit if judge(commit) is Verdict.DIVERGED else last
    verdicts = tuple(tried.items())
    if len(commits) > 1:
        return Culprit(None, "", (), None, verdicts, tuple(commits), captures.base)
    subject, _, files = user.ask("log", "-1", "--format=%s", "--name-only", last).partition("\n\n")
    proof = _prove_culprit(captures, last, runs, limits._replace(until_step=reference.until))
    return Culprit(last, subject, tuple(files.splitlines()), compared[last], verdicts, (), captures.base, proof)


def _prove_culprit(captures: Captures, culprit: str, runs: Mapping[str, Path], limits: Limits) -> Proof | None:
    """Run variants of the first bad commit's parent to find which of its changes makes the runs diverge.

    Returns:
        the proof; None where no run is allowed, `runs` has none of its first parent, or the change cannot be looked for
        (only that reason is told).
    """
    before, tell = captures.user.ask("rev-parse", f"{culprit}^"), captures.tell
    if not limits.max_runs or before not in runs:
        return None
    tell(f"{culprit[:10]} is the first bad commit: which of its changes is it?")
    try:
        with captures.place(Revision.named(captures.user, before)):  # where its run ran
            limits = limits._replace(output=captures.base / "changes")
            return prove(runs[before], runs[culprit], captures.command, tell, limits)
    except UsageError as error:
        tell(f"that cannot be told: {error}")
        return None
