"""Find the commit that made a training script diverge.

`git bisect` knows which commit to try next; a captured run knows whether a commit diverges from the good one, and
where. Everything happens in a work tree of its own, so the user's checkout, index and stash stay as they are, and every
run is kept under the commit's name, so a bisection that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.terms.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.search import MOST_RUNS, Proof, prove
from introspect_cli.rerun.places.worktree import Repository, link, work_tree
from introspect_cli.rerun.variant import Reference, Rerun, Variant, capture, log_of, logged
from introspect_cli.store.files.folders import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Plan:
    """What to bisect.

    Attributes:
        good: revision that is right.
        bad: revision that is not.
        options: capture options, as on the command line.
        words: the script and its arguments (or `-m`, a module and its arguments).
        until_step: last step to look at; None to find it from the bad revision's own divergence.
        setup: shell command to run in the work tree before each capture, such as a reinstall.
        links: paths outside of git (data, checkpoints) that each revision needs, relative to the repository.
        keep: leave the work tree in place at the end.
        output: where runs and the work tree are kept; None for a directory under `introspect-runs/`.
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
    here = Path.cwd()
    user = Repository(here)
    good, bad = user.commit(plan.good), user.commit(plan.bad)
    if user.run("merge-base", "--is-ancestor", good, bad).returncode:
        raise UsageError(f"{plan.good} is not an ancestor of {plan.bad}: name a good revision that bad comes from")
    directory = (plan.output or here / RUNS / f"bisect-{good[:10]}-{bad[:10]}").resolve()
    with work_tree(user, directory / "worktree", good, keep=plan.keep) as tree:
        place = tree.root / os.path.relpath(here.resolve(), user.root.resolve())
        search = _Search(plan, tree, place, directory, tell)
        culprit = search.run(good, bad)
        return replace(culprit, proof=search.proof(culprit))


@dataclass
class _Search:
    """One bisection under way.

    Attributes:
        plan: what to bisect.
        tree: the work tree that commits are checked out into.
        place: where in it the script runs.
        directory: where runs are kept.
        tell: shown a line for each commit tried.
        reference: the run of the good commit, and the last step to look at; None while there is none.
        results: what each commit diverges by from the good one.
        tried: commits captured, with the verdict on each, in order.
    """

    plan: Plan
    tree: Repository
    place: Path
    directory: Path
    tell: Callable[[str], None]
    reference: Reference | None = None
    results: dict[str, DiffResult | None] = field(default_factory=dict)
    tried: list[tuple[str, Verdict]] = field(default_factory=list)

    def run(self, good: str, bad: str) -> Culprit:
        """Capture both ends, then let git choose until one commit is left."""
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
        self.tree.ask("bisect", "start", bad, good)
        try:
            while True:
                commit = self.tree.ask("rev-parse", "HEAD")
                log = self.tree.ask("bisect", "log")
                if "first bad commit" in log or "only skipped commits left" in log:
                    return self._culprit(log)
                verdict, result = reference.judge(self._capture(commit))
                self._note(commit, verdict, result)
                word = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "skip"}[verdict]
                # git exits with 2 when only skipped commits are left, which is an answer.
                self.tree.run("bisect", word)
        finally:
            self.tree.run("bisect", "reset")

    @property
    def _until(self) -> int | None:
        return self.plan.until_step if self.reference is None else self.reference.until

    def _capture(self, commit: str) -> Rerun:
        """Run a commit, up to its first divergence from the reference where there is one."""
        ends: tuple[str, ...] = () if self._until is None else ("--until-step", str(self._until))
        options = (*self.plan.options, *(ends if self.reference is None else self.reference.ends))
        run = self.directory / (commit[:16] if self._until is None else f"{commit[:16]}-to-{self._until}")
        self._check_out(commit)
        sets_up = self.plan.setup if not (run / "manifest.yaml").exists() else None
        if sets_up and logged(sets_up, log_of(run), self.place):
            return Rerun(run, 1, 0)
        words = (*options, *self.plan.words)
        return capture(Variant(run, words, self.place, {"PYTHONDONTWRITEBYTECODE": "1"}))

    def proof(self, culprit: Culprit) -> Proof | None:
        """Which change of the first bad commit it is, where its run and that of the commit before it are at hand."""
        if culprit.commit is None or not self.plan.max_runs:
            return None
        before = self.tree.ask("rev-parse", f"{culprit.commit}^")
        runs = []
        for commit in (before, culprit.commit):
            name = commit[:16]  # of a run that goes no further than is needed, or of the whole
            kept = (self.directory / f"{name}-to-{self._until}", self.directory / name)
            runs.append(next((run for run in kept if (run / "manifest.yaml").exists()), None))
        if runs[0] is None or runs[1] is None:
            return None
        self.tell(f"{culprit.commit[:10]} is the first bad commit: which of its changes is it?")
        self._check_out(before)
        try:
            return prove(
                runs[0],
                runs[1],
                self.plan.options,
                self.directory / "changes",
                self._until,
                self.tell,
                most_runs=self.plan.max_runs,
            )
        except UsageError as error:
            self.tell(f"that cannot be told: {error}")
            return None

    def _check_out(self, commit: str) -> None:
        self.tree.ask("checkout", "--quiet", "--force", "--detach", commit)
        link(Path.cwd(), self.place, self.plan.links)

    def _note(self, commit: str, verdict: Verdict, result: DiffResult | None) -> None:
        self.results[commit] = result
        self.tried.append((commit, verdict))
        said = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "skipped"}[verdict]
        why = result.sentence if result is not None and verdict is not Verdict.SAME else ""
        if result is None:
            why = "it could not be captured"
        self.tell(f"{commit[:10]} is {said}" + (f": {why}" if why else ""))

    def _culprit(self, log: str) -> Culprit:
        first, candidates = "", []
        for line in log.splitlines():
            if line.startswith("# first bad commit: ["):
                first = line.partition("[")[2].partition("]")[0]
            elif line.startswith("# possible first bad commit: ["):
                candidates.append(line.partition("[")[2].partition("]")[0])
        subject = ""
        files: tuple[str, ...] = ()
        if first:
            subject = self.tree.ask("log", "-1", "--format=%s", first)
            changed = self.tree.ask("diff-tree", "--no-commit-id", "--name-only", "-r", "--root", first)
            files = tuple(changed.splitlines())
        return Culprit(
            commit=first or None,
            subject=subject,
            files=files,
            result=self.results.get(first) if first else None,
            tried=tuple(self.tried),
            candidates=tuple(candidates),
            directory=self.directory,
        )
