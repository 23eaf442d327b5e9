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
from introspect_cli.rerun.variant import Reference, Rerun, complete_run, first_sentence
from introspect_cli.store.files import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        UsageError: no such revision, `good` is no ancestor of `bad`, it does not run, or `bad` does not diverge from
            it.
    """
    user = Repository(Path.cwd())
    first, last = user.commit(good), user.commit(bad)
    if user.run("merge-base", "--is-ancestor", first, last).returncode:
        raise UsageError(f"{good} is not an ancestor of {bad}: name a good revision that bad comes from")
    directory = keep_out_of_git(output or Path(RUNS) / f"bisect-{first[:10]}-{last[:10]}")
    exit_on_signals()
    search = _Search(Captures(user, directory, command, tell), until_step)
    culprit = search.run(first, last)
    return replace(culprit, proof=search.prove_culprit(culprit, max_runs))


@dataclass
class _Search:
    """One bisection under way.

    Attributes:
        captures: the captures of commits.
        until_step: last step to look at; None to find it.
        reference: the run of the good commit, and the last step to look at; None while there is none.
        runs: the run of each commit captured.
        results: verdict on each commit that was compared with the good one, and what it diverges by, in order.
    """

    captures: Captures
    until_step: int | None
    reference: Reference | None = None
    runs: dict[str, Path] = field(default_factory=dict)
    results: dict[str, tuple[Verdict, DiffResult | None]] = field(default_factory=dict)

    def run(self, good: str, bad: str) -> Culprit:
        """Capture both ends, set `reference`, then bisect.

        Without `until_step`, later commits run only to the step at which the bad one diverges.

        Raises:
            UsageError: the good commit records no step or exits with an error, or the bad one does not diverge from it.
        """
        made = self._capture(good)
        if not made.steps or made.exit_code:
            raise UsageError(
                f"the good revision {good[:10]} does not run (exit code {made.exit_code}): {made.last_lines}"
            )
        self.captures.tell(f"{good[:10]} is the reference: {made.steps} steps")
        self.reference = Reference(made.run, self.until_step)
        verdict, result = self._judge(self.reference, bad)
        if verdict is not Verdict.DIVERGED or result is None or result.first is None:
            same = "runs the same as the good revision" if verdict is Verdict.SAME else "cannot be judged"
            why = result.sentence if result is not None else Rerun(self.runs[bad], 0, 0).last_lines
            raise UsageError(f"nothing to bisect: {bad[:10]} {same} ({why})")
        if self.reference.until is None:
            self.reference = replace(self.reference, until=result.first.step)
            self.captures.tell(f"{bad[:10]} diverges at step {self.reference.until}: later steps are not run")
        return self._search_between(self.reference, good, bad)

    def _search_between(self, reference: Reference, good: str, bad: str) -> Culprit:
        """Capture the commits that `git rev-list --bisect-all` proposes, the first one not tried each time.

        Ends once only the last bad commit remains: that is the first bad one. Where commits with an UNDECIDED verdict
        remain beside it, the first bad one is unknown, and all that remain are its candidates.
        """
        while True:
            same = [commit for commit, (verdict, _) in self.results.items() if verdict is Verdict.SAME]
            left = self.captures.user.ask("rev-list", "--bisect-all", bad, "--not", good, *same).splitlines()
            commits = [line.partition(" ")[0] for line in left]
            commit = next((each for each in commits if each not in self.results), None)
            if commit is None:
                return self._culprit(bad if len(commits) == 1 else "", commits)
            verdict, _ = self._judge(reference, commit)
            bad = commit if verdict is Verdict.DIVERGED else bad

    def _capture(self, commit: str) -> Rerun:
        """Capture a commit, or take its kept run, and set its entry in `runs`.

        Before there is a reference, the run ends after `until_step`, if that is given; then where the `stop_options` of
        the reference say.
        """
        until = () if self.until_step is None else ("--until-step", str(self.until_step))
        ends = until if self.reference is None else self.reference.stop_options
        done = self.captures.run_of(Revision.named(self.captures.user, commit), "", ends)
        self.runs[commit] = done.run
        return done

    def _judge(self, reference: Reference, commit: str) -> tuple[Verdict, DiffResult | None]:
        """Capture a commit, compare it with the reference, and tell the verdict (good, bad, skipped) in a line.

        Fills `results`. Returns the verdict and the comparison, which is None where no step was recorded.
        """
        verdict, result = self.results[commit] = reference.judge(self._capture(commit))
        said = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "skipped"}[verdict]
        why = "it could not be captured" if result is None else first_sentence(result)
        self.captures.tell(f"{commit[:10]} is {said}" if verdict is Verdict.SAME else f"{commit[:10]} is {said}: {why}")
        return verdict, result

    def prove_culprit(self, culprit: Culprit, max_runs: int) -> Proof | None:
        """Run variants of the first bad commit's parent to find which of its changes makes the runs diverge.

        Returns:
            the proof; None where there is no such commit, `max_runs` is 0, no complete run of its first parent was made
            by this search, or the change cannot be looked for (only that reason is told).
        """
        if culprit.commit is None or not max_runs or self.reference is None:
            return None
        before = self.captures.user.ask("rev-parse", f"{culprit.commit}^")
        if before not in self.runs or complete_run(self.runs[before]) is None:
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

    def _culprit(self, first: str, candidates: Sequence[str]) -> Culprit:
        """The result: the first bad commit is `first`; where that is "", it is unknown and one of `candidates`."""
        asked = ("log", "-1", "--format=%s", "--name-only", first)
        subject, _, files = (self.captures.user.ask(*asked) if first else "").partition("\n\n")
        return Culprit(
            commit=first or None,
            subject=subject,
            files=tuple(files.splitlines()),
            result=self.results[first][1] if first else None,
            tried=tuple((commit, verdict) for commit, (verdict, _) in self.results.items()),
            candidates=() if first else tuple(candidates),
            directory=self.captures.base,
        )
