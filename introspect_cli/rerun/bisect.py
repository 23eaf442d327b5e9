"""Find the commit that made a training script diverge.

git knows which commit halves those that are left; a captured run knows whether a commit diverges from the good one, and
where. Each commit runs in a place of its own (see `place`), so the user's checkout, index and stash stay as they are,
and every run is kept under the commit's name, so a bisection that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.terms.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.search import MOST_RUNS, Proof, prove
from introspect_cli.rerun.git import Repository
from introspect_cli.rerun.place import (
    PLACE,
    Around,
    Place,
    ended_in_order,
    keep_out_of_git,
    placed,
    revision_of,
    scripts_of,
    survey_of_git,
)
from introspect_cli.rerun.variant import Reference, Rerun, briefly, capture, kept_run, log_of, logged
from introspect_cli.store.files.folders import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager


@dataclass(frozen=True)
class Plan:
    """The command to bisect, its range of commits, and how it is run.

    Attributes:
        good: revision that is right.
        bad: revision that is not.
        options: capture options, as on the command line.
        words: the script and its arguments (or `-m`, a module and its arguments).
        until_step: last step to look at; None to find it from the bad revision's own divergence.
        setup: shell command to run in the place before each capture, such as a reinstall.
        links: paths that are linked and not copied, relative to the directory where we are.
        keep: leave the last place at the end.
        output: where runs and the place are kept; None for a directory under `introspect-runs/`.
        max_runs: how many runs may be made to find the change in the first bad commit.
    """

    good: str
    bad: str
    options: tuple[str, ...]
    words: tuple[str, ...]
    until_step: int | None = None
    setup: str | None = None
    links: tuple[str, ...] = ()
    keep: bool = False
    output: Path | None = None
    max_runs: int = MOST_RUNS


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


def bisect(plan: Plan, tell: Callable[[str], None]) -> Culprit:
    """Find the first commit between good and bad whose run diverges from the good one's.

    Raises:
        UsageError: no such revision, the good one does not run, or good and bad do not differ.
    """
    here = Path(os.path.realpath(Path.cwd()))
    user = Repository(Repository(here).root)
    good, bad = user.commit(plan.good), user.commit(plan.bad)
    if user.run("merge-base", "--is-ancestor", good, bad).returncode:
        raise UsageError(f"{plan.good} is not an ancestor of {plan.bad}: name a good revision that bad comes from")
    directory = (plan.output or here / RUNS / f"bisect-{good[:10]}-{bad[:10]}").resolve()
    keep_out_of_git(directory)
    with ended_in_order():
        around = survey_of_git(user, here, scripts_of(plan.words), directory)
        search = _Search(plan, user, around, directory, tell)
        culprit = search.run(good, bad)
        return replace(culprit, proof=search.proof(culprit))


@dataclass
class _Search:
    """One bisection under way.

    Attributes:
        plan: what to bisect.
        user: the user's repository.
        around: what each commit is given that git does not keep.
        directory: where runs are kept.
        tell: shown a line for each commit tried.
        reference: the run of the good commit, and the last step to look at; None while there is none.
        results: what each commit diverges by from the good one.
        tried: commits captured, with the verdict on each, in order.
    """

    plan: Plan
    user: Repository
    around: Around
    directory: Path
    tell: Callable[[str], None]
    reference: Reference | None = None
    results: dict[str, DiffResult | None] = field(default_factory=dict)
    tried: list[tuple[str, Verdict]] = field(default_factory=list)

    def run(self, good: str, bad: str) -> Culprit:
        """Capture both ends, then bisect; UsageError where the good commit fails or the two do not diverge."""
        made = self._capture(good)
        if not made.usable or made.exit_code:
            raise UsageError(
                f"the good revision {good[:10]} does not run (exit code {made.exit_code}): {made.last_lines}"
            )
        self.tell(f"{good[:10]} is the reference: {made.steps} steps")
        self.reference = Reference(made.run, self.plan.until_step)
        worst = self._capture(bad)
        verdict, result = self.reference.judge(worst)
        self._note(bad, verdict, result)
        if verdict is not Verdict.DIVERGED or result is None or result.first is None:
            raise UsageError(
                f"nothing to bisect: {bad[:10]} "
                + ("runs the same as the good revision" if verdict is Verdict.SAME else "cannot be judged")
                + (f" ({result.sentence})" if result is not None else f" ({worst.last_lines})")
            )
        if self.reference.until is None:
            self.reference = replace(self.reference, until=result.first.step)
            self.tell(f"{bad[:10]} diverges at step {self.reference.until}: later steps are not run")
        return self._drive(self.reference, good, bad)

    def _drive(self, reference: Reference, good: str, bad: str) -> Culprit:
        """Capture commits that `git rev-list --bisect-all` proposes, until the first bad one is found.

        Ends without one where only commits are left that cannot be captured.
        """
        same, skipped = [good], set()
        while True:
            left = self.user.ask("rev-list", "--bisect-all", bad, "--not", *same).splitlines()
            commits = [line.partition(" ")[0] for line in left]
            commit = next((each for each in commits if each != bad and each not in skipped), None)
            if commit is None:
                return self._culprit(bad if len(commits) == 1 else "", commits)
            verdict, result = reference.judge(self._capture(commit))
            self._note(commit, verdict, result)
            if verdict is Verdict.SAME:
                same.append(commit)
            elif verdict is Verdict.DIVERGED:
                bad = commit
            else:
                skipped.add(commit)

    @property
    def _until(self) -> int | None:
        return self.plan.until_step if self.reference is None else self.reference.until

    def _capture(self, commit: str) -> Rerun:
        """Capture a commit, or take its kept run.

        It stops at the first divergence where there is a reference already.
        """
        ends: tuple[str, ...] = () if self._until is None else ("--until-step", str(self._until))
        options = (*self.plan.options, *(ends if self.reference is None else self.reference.ends))
        run = self.directory / (commit[:16] if self._until is None else f"{commit[:16]}-to-{self._until}")
        kept = kept_run(run)
        if kept is not None:
            return kept
        with self._placed(commit) as place:
            if self.plan.setup and logged(self.plan.setup, log_of(run), place.directory):
                return Rerun(run, 1, 0)
            words = map(place.moved_word, self.plan.words)
            return capture(run, place, (*options, *words))

    def _placed(self, commit: str) -> AbstractContextManager[Place]:
        revision, links = revision_of(self.user, commit), self.plan.links
        return placed(self.around, self.directory / PLACE, revision=revision, links=links, keep=self.plan.keep)

    def proof(self, culprit: Culprit) -> Proof | None:
        """Find which change of the first bad commit makes the runs diverge.

        None where its or its parent's run is gone.
        """
        if culprit.commit is None or not self.plan.max_runs:
            return None
        before = self.user.ask("rev-parse", f"{culprit.commit}^")
        runs = []
        for commit in (before, culprit.commit):
            name = commit[:16]  # of a run that goes no further than is needed, or of the whole
            kept = (self.directory / f"{name}-to-{self._until}", self.directory / name)
            runs.append(next((run for run in kept if (run / "manifest.yaml").exists()), None))
        if runs[0] is None or runs[1] is None:
            return None
        self.tell(f"{culprit.commit[:10]} is the first bad commit: which of its changes is it?")
        changes, most = self.directory / "changes", self.plan.max_runs
        try:
            with self._placed(before):  # where its run ran
                return prove(runs[0], runs[1], self.plan.options, changes, self._until, self.tell, most_runs=most)
        except UsageError as error:
            self.tell(f"that cannot be told: {error}")
            return None

    def _note(self, commit: str, verdict: Verdict, result: DiffResult | None) -> None:
        """Keep the verdict on a commit and tell it in a line."""
        self.results[commit] = result
        self.tried.append((commit, verdict))
        said = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "skipped"}[verdict]
        why = briefly(result) if result is not None and verdict is not Verdict.SAME else ""
        if result is None:
            why = "it could not be captured"
        self.tell(f"{commit[:10]} is {said}" + (f": {why}" if why else ""))

    def _culprit(self, first: str, candidates: Sequence[str]) -> Culprit:
        """The result: the commit `first`, or `candidates` where that is ""."""
        subject, files = "", ""
        if first:
            subject = self.user.ask("log", "-1", "--format=%s", first)
            files = self.user.ask("diff-tree", "--no-commit-id", "--name-only", "-r", "--root", first)
        return Culprit(
            commit=first or None,
            subject=subject,
            files=tuple(files.splitlines()),
            result=self.results.get(first),
            tried=tuple(self.tried),
            candidates=() if first else tuple(candidates),
            directory=self.directory,
        )
