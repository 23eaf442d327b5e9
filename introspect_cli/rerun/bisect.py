"""Find the commit that made a training script diverge.

git knows which commit halves those that are left; a captured run knows whether a commit diverges from the good one, and
where. Commits are captured as for `diff REV REV` (see `commits`), and every run is kept under the commit's name, so a
bisection that was interrupted goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.search import MAX_RUNS, Proof, prove
from introspect_cli.rerun.commits import Captures, Command
from introspect_cli.rerun.git import Repository, Revision
from introspect_cli.rerun.place import exit_on_signals, keep_out_of_git
from introspect_cli.rerun.variant import Reference, Rerun, first_sentence
from introspect_cli.store.files import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable


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


def bisect(
    good: str,
    bad: str,
    command: Command,
    tell: Callable[[str], None],
    output: Path | None = None,
    until_step: int | None = None,
    max_runs: int = MAX_RUNS,
) -> Culprit:
    """Find the first commit between two revisions whose run diverges from the good one's.

    Runs in the current directory's repository. Captures that are kept in `output` are used again.

    Args:
        good: revision that is right.
        bad: later revision that is not.
        command: what is captured.
        tell: shown a line for each commit tried.
        until_step: last step that is compared; None for the step at which the run of `bad` diverges.
        output: where the runs, and meanwhile the work tree, are; None for `bisect-GOOD-BAD` among the project's runs.
        max_runs: how many runs may be made to find the change in the first bad commit; with 0 it is not looked for.

    Raises:
        UsageError: no such revision, `good` is no ancestor of `bad`, it records no step or exits with an error, or
            `bad` does not diverge from it.
    """
    user = Repository(Path.cwd())
    first, last = user.commit(good), user.commit(bad)
    if user.run("merge-base", "--is-ancestor", first, last).returncode:
        raise UsageError(f"{good} is not an ancestor of {bad}: name a good revision that bad comes from")
    directory = keep_out_of_git(output or Path(RUNS) / f"bisect-{first[:10]}-{last[:10]}")
    exit_on_signals()
    captures = Captures(user, directory, command, tell)
    ends = () if until_step is None else ("--until-step", str(until_step))
    made = captures.run_of(Revision.named(user, first), "", ends)
    if not made.steps or made.exit_code:
        raise UsageError(f"the good revision {first[:10]} does not run (exit code {made.exit_code}): {made.last_lines}")
    tell(f"{first[:10]} is the reference: {made.steps} steps")
    search = _Search(captures, Reference(made.run, until_step), {first: made.run})
    culprit = search.run(first, last)
    return replace(culprit, proof=search.prove_culprit(culprit, max_runs))


@dataclass
class _Search:
    """One bisection under way.

    Attributes:
        captures: the captures of commits.
        reference: the run of the good commit, and the last step to look at; None for that to find it.
        runs: the run of each commit captured.
        results: verdict on each commit that was compared with the good one, and what it diverges by, in order.
    """

    captures: Captures
    reference: Reference
    runs: dict[str, Path]
    results: dict[str, tuple[Verdict, DiffResult | None]] = field(default_factory=dict)

    def run(self, good: str, bad: str) -> Culprit:
        """Capture the bad commit, then those that `git rev-list --bisect-all` proposes, the first not tried each time.

        Ends once only the last bad commit remains: that is the first bad one. Where commits with an UNDECIDED verdict
        remain beside it, the first bad one is unknown, and all that remain are its candidates. Where the reference does
        not say how far to look, later commits run only to the step at which the bad one diverges.

        Raises:
            UsageError: the bad commit does not diverge from the good one.
        """
        verdict, result = self._judge(bad)
        if verdict is not Verdict.DIVERGED or result is None or result.first is None:
            how = "runs the same as the good revision" if verdict is Verdict.SAME else "cannot be judged"
            why = result.sentence if result is not None else Rerun(self.runs[bad], 0, 0).last_lines
            raise UsageError(f"nothing to bisect: {bad[:10]} {how} ({why})")
        if self.reference.until is None:
            self.reference = replace(self.reference, until=result.first.step)
            self.captures.tell(f"{bad[:10]} diverges at step {self.reference.until}: later steps are not run")
        while True:
            same = [commit for commit, (verdict, _) in self.results.items() if verdict is Verdict.SAME]
            left = self.captures.user.ask("rev-list", "--bisect-all", bad, "--not", good, *same).splitlines()
            commits = [line.partition(" ")[0] for line in left]
            commit = next((each for each in commits if each not in self.results), None)
            if commit is None:
                break
            bad = commit if self._judge(commit)[0] is Verdict.DIVERGED else bad
        tried, directory = tuple((each, verdict) for each, (verdict, _) in self.results.items()), self.captures.base
        if len(commits) > 1:
            return Culprit(None, "", (), None, tried, tuple(commits), directory)
        subject, _, files = self.captures.user.ask("log", "-1", "--format=%s", "--name-only", bad).partition("\n\n")
        return Culprit(bad, subject, tuple(files.splitlines()), self.results[bad][1], tried, (), directory)

    def _judge(self, commit: str) -> tuple[Verdict, DiffResult | None]:
        """Capture a commit, compare it with the reference, and tell the verdict (good, bad, skipped) in a line.

        Fills `runs` and `results`. Returns the verdict and the comparison, which is None where no step was recorded.
        """
        done = self.captures.run_of(Revision.named(self.captures.user, commit), "", self.reference.stop_options)
        self.runs[commit] = done.run
        verdict, result = self.results[commit] = self.reference.judge(done)
        why = "it could not be captured" if result is None else first_sentence(result)
        said = {Verdict.SAME: "good", Verdict.DIVERGED: f"bad: {why}", Verdict.UNDECIDED: f"skipped: {why}"}
        self.captures.tell(f"{commit[:10]} is {said[verdict]}")
        return verdict, result

    def prove_culprit(self, culprit: Culprit, max_runs: int) -> Proof | None:
        """Run variants of the first bad commit's parent to find which of its changes makes the runs diverge.

        Returns:
            the proof; None where there is no such commit, `max_runs` is 0, no run of its first parent was made by this
            search, or the change cannot be looked for (only that reason is told).
        """
        before = self.captures.user.ask("rev-parse", f"{culprit.commit}^") if culprit.commit and max_runs else ""
        if not culprit.commit or before not in self.runs:
            return None
        tell, revision = self.captures.tell, Revision.named(self.captures.user, before)
        tell(f"{culprit.commit[:10]} is the first bad commit: which of its changes is it?")
        try:
            with self.captures.place(revision):  # where its run ran
                runs, place = (self.runs[before], self.runs[culprit.commit]), self.captures.base / "changes"
                return prove(*runs, self.captures.command, tell, place, self.reference.until, max_runs)
        except UsageError as error:
            tell(f"that cannot be told: {error}")
            return None
