"""Prove which of the changes between two runs makes them diverge.

Two questions are asked of a set of changes, and each is answered by running a script: is b without them the same as a,
and does a with them alone diverge? A set for which both answers are yes is the cause: without it nothing differs, and
nothing else is needed. The likeliest changes are asked about first, so two runs often suffice; else delta debugging
finds the smallest set. What does not run answers neither question.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import DiffResult, Verdict
from introspect_cli.compare.terms.words import listed, some
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.attempts import Attempts, OutOfRunsError
from introspect_cli.rerun.changes.elements import Sides, likely_first, sides_of
from introspect_cli.rerun.changes.minimise import Difference, Element, counted, ddmin, place_of
from introspect_cli.rerun.changes.other_files import at_commits, in_directories
from introspect_cli.rerun.place import Around, keep_out_of_git, survey, tracked_files
from introspect_cli.rerun.variant import End, Reference, end_of
from introspect_cli.store.files.folders import RUNS
from introspect_cli.store.read.run import Run, open_run
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable


MOST_RUNS = 50
_NAMED = 4
_TRIED = 3


@dataclass(frozen=True)
class Proof:
    """What came of it.

    Attributes:
        elements: the smallest set of changes; empty where there is none.
        proven: whether the runs are the same without them and diverge with them alone.
        each: whether each of several makes the runs diverge by itself.
        changes: how many changes there are.
        runs: how many runs were made.
        undecided: runs that answered nothing, since they do not run as far.
        result: what a with them alone diverges in; else what it rests on.
        sentence: the answer in words.
        unknown: what differs and could not be tried, as clauses.
        directory: where the runs are.
    """

    elements: tuple[Element, ...]
    proven: bool
    each: bool
    changes: int
    runs: int
    undecided: int
    result: DiffResult | None
    sentence: str
    unknown: tuple[str, ...]
    directory: Path


def prove(
    a: Path,
    b: Path,
    options: tuple[str, ...],
    output: Path | None,
    until_step: int | None,
    tell: Callable[[str], None],
    *,
    most_runs: int = MOST_RUNS,
    keep: bool = False,
) -> Proof:
    """Find the smallest set of changes that makes two runs diverge.

    Raises:
        UsageError: the runs do not diverge, nothing differs that could be changed, or a cannot be run again.
        StoreError: a run cannot be read.
    """
    directory = (output or Path(RUNS) / f"changes-{a.name}-{b.name}").resolve()
    keep_out_of_git(directory)
    with open_run(a) as one, open_run(b) as two:
        recorded = compare_runs(one, two, DiffOptions())
        ends = end_of(one), end_of(two)
        by_end = recorded.verdict is not Verdict.DIVERGED or recorded.first is None
        if by_end and (ends[0].is_as(ends[1]) or not any(end.error for end in ends)):
            raise UsageError(f"nothing to bisect: {recorded.sentence}")
        until = _step_after((one, two), ends) if recorded.first is None else recorded.first.step
        sides = sides_of(one, two)
        around, files = _around(sides, one, two, directory)
    elements, likely = likely_first((*sides.elements, *files), recorded)
    if not elements:
        raise UsageError(
            "the two runs differ in no statement, file, argument, environment variable or seed that could be changed"
            + (f" (not tried: {'; '.join(sides.unknown)})" if sides.unknown else "")
        )
    differ = "they end in different ways" if by_end else f"they diverge at step {until}"
    tell(f"{counted(elements)} between the runs; {differ}")
    attempts = Attempts(
        sides=sides,
        elements=elements,
        around=around[0],
        reference=Reference(a, until if until_step is None else until_step),
        options=options,
        output=directory,
        most=most_runs,
        tell=tell,
        keep=keep,
        ends=ends,
        by_end=by_end,
    )
    return _Search(attempts, around, recorded, likely).run()


def _step_after(runs: tuple[Run, Run], ends: tuple[End, End]) -> int:
    """The step after the last one recorded by the runs that ended by an exception."""
    last = [run.last_step for run, end in zip(runs, ends, strict=True) if end.error is not None]
    return 1 + max((step for step in last if step is not None), default=-1)


def _around(sides: Sides, a: Run, b: Run, output: Path) -> tuple[tuple[Around, ...], tuple[Element, ...]]:
    """Surveys around a, without and with files newer than its run, and the other files that differ for b."""
    began, began_b = _began(a), _began(b)
    elsewhere = os.path.realpath(sides.root) != os.path.realpath(sides.root_b)
    if not elsewhere:
        began = None if began is None or began_b is None else min(began, began_b)
    directory, sources = sides.recipe.directory, {*sides.places.values()}
    around = survey(sides.root, directory, sources, began, output, tracked_files(sides.root))
    if elsewhere:
        kept = tracked_files(sides.root_b)
        files = in_directories(
            around, survey(sides.root_b, sides.directory_b, {*sides.places_b}, began_b, output, kept)
        )
    else:
        files = at_commits(sides.root, sides.commits, sources, around, output / "files")
    others = tuple(Difference("file", *file) for file in files)
    return (around, survey(sides.root, directory, sources, None, output)), others


def _began(run: Run) -> float | None:
    started = run.time("started")
    return None if started is None else started.timestamp()


@dataclass
class _Search:
    """Search for the smallest set of changes that makes the runs diverge.

    Attributes:
        attempts: runs a with some changes.
        around: what lies around a: the first is used as long as a runs in it.
        recorded: how b diverges from a.
        likely: how many of the elements, the first ones, are called likely by the comparison.
        smallest: the smallest set so far without which b is the same as a.
    """

    attempts: Attempts
    around: tuple[Around, ...]
    recorded: DiffResult
    likely: int = 0
    smallest: frozenset[int] | None = None

    @property
    def everything(self) -> frozenset[int]:
        return frozenset(range(len(self.attempts.elements)))

    def run(self) -> Proof:
        """Try the likeliest changes alone, else check both ends and minimise; stops where no more runs are allowed."""
        try:
            core = self._quick()
            if core is None:
                stopped = self._controls()
                if stopped:
                    return self._proof(frozenset(), stopped)
                core = frozenset(ddmin(sorted(self.everything), lambda part: self._needed(frozenset(part))))
            return self._sufficient(core)
        except OutOfRunsError:
            return self._out_of_runs()

    def _quick(self) -> frozenset[int] | None:
        """The first likely change without which b is the same as a; None where none of the few tried is."""
        half = max(len(self.everything) // 2, 1)
        few = 1 if len(self.everything) == 1 else min(self.likely, _TRIED, half)
        for place in range(few):
            if self._needed(frozenset({place})):
                return frozenset({place})
        return None

    def _needed(self, part: frozenset[int]) -> bool:
        """Whether b without the changes `part` is the same as a; keeps the smallest such set."""
        rest = self.everything - part
        name = f"b without {self._names(part)}" if rest else "a again, unchanged"
        same = self.attempts.verdict(rest, name) is Verdict.SAME
        if same and (self.smallest is None or len(part) < len(self.smallest)):
            self.smallest = part
        return same

    def _enough(self, part: frozenset[int]) -> bool:
        """Whether a with only the changes `part` diverges from a."""
        every = part == self.everything
        name = "a with all of b's changes" if every else f"a with {self._names(part)} alone"
        return self.attempts.verdict(part, name) is Verdict.DIVERGED

    def _controls(self) -> str:
        """Why the search cannot begin: a unchanged does not repeat itself, or a with all changes does not diverge.

        "" where it can.
        """
        attempts = self.attempts
        nothing: frozenset[int] = frozenset()
        if not self._needed(self.everything) and attempts.around != self.around[1]:
            attempts.tell("again, with the files that are newer than a's run")
            attempts.around = self.around[1]
            attempts.answers.clear()
            self._needed(self.everything)
        verdict, result, _ = attempts.answers[nothing]
        if verdict is Verdict.DIVERGED:
            return (
                "running a again, unchanged, already diverges from a: the script is not deterministic by itself, or "
                f"something that it reads is not as it was ({result.sentence if result is not None else ''})"
            )
        if verdict is Verdict.UNDECIDED:
            return f"a cannot be run again from what it recorded: {attempts.why(nothing)}"
        return "" if self._enough(self.everything) else self._all_do_not()

    def _all_do_not(self) -> str:
        """The reason, in words, that a with all changes was not seen to diverge."""
        if self.attempts.answers[self.everything].verdict is Verdict.SAME:
            return "running a with all of b's changes does not diverge from a: something else differs between the runs"
        return f"a with all of b's changes cannot be judged: {self.attempts.why(self.everything)}"

    def _sufficient(self, core: frozenset[int]) -> Proof:
        """Add the partners that `core` needs to make a diverge, by `ddmin`, and make the proof."""
        if self._enough(core):
            each = len(core) > 1 and all(self._enough(frozenset({place})) for place in sorted(core))
            return self._proof(core, self._proven(core, core, each=each), proven=True, each=each)
        if not self._enough(self.everything):
            return self._proof(frozenset(), self._all_do_not())
        rest = sorted(self.everything - core)
        partners = frozenset(ddmin(rest, lambda part: self._enough(core | frozenset(part))))
        both = core | partners
        self._enough(both)
        return self._proof(both, self._proven(core, both, each=False), proven=True)

    def _proven(self, core: frozenset[int], both: frozenset[int], *, each: bool) -> str:
        """The sentence of a proof: how many changes, which, and what the runs without and with them showed."""
        several = len(both) > 1
        make = "one makes" if not several else f"{len(both)} make" if each else f"{len(both)} together make"
        them = "them" if several else "it"
        without = them if core == both else self._names(core)
        return (
            f"of {counted(self.attempts.elements)}, {make} them diverge: {self._names(both)}; proven by "
            f"{count(self.attempts.runs, 'run')}: without {without} {self._same(self.everything - core)}, with {them} "
            f"alone {self._diverges(both)}{self._by_itself(both, each=each)}"
        )

    def _by_itself(self, both: frozenset[int], *, each: bool) -> str:
        """A clause on changes that make the runs diverge alone; "" where none of several was seen to."""
        answers = self.attempts.answers
        asked = {one: answers[frozenset({one})] for one in both if frozenset({one}) in answers}
        alone = [one for one, attempt in asked.items() if attempt.verdict is Verdict.DIVERGED]
        if each:
            return "; each of them does by itself"
        return f"; enough alone: {self._names(frozenset(alone))}" if alone and len(both) > 1 else ""

    def _same(self, rest: frozenset[int]) -> str:
        """A clause: the runs are the same up to a step, or b ends by a's exception."""
        if self.attempts.ends_as(0, rest):
            return "b ends by a's exception"
        narrowed = " in what a recorded" if self.attempts.narrowed else ""
        return f"the runs are the same up to step {self.attempts.reference.until}{narrowed}"

    def _diverges(self, chosen: frozenset[int]) -> str:
        """A clause on how a with only the cause differs: at b's first divergence, elsewhere, or by its exception."""
        result, recorded, by_end = self.attempts.answers[chosen].result, self.recorded.first, self.attempts.by_end
        if self.attempts.ends_as(1, chosen):
            return "a ends by b's exception"
        if by_end:
            return "a does not end by its exception"
        if result is None or result.first is None or recorded is None:
            return "they diverge"
        if (result.first.step, result.first.site) == (recorded.step, recorded.site):
            return "they diverge where b does"
        return f"they diverge, but first elsewhere than b (at step {result.first.step}: {result.first.site.fqn})"

    def _out_of_runs(self) -> Proof:
        """The unproven result once no more runs are allowed, with the smallest set so far."""
        attempts = self.attempts
        sentence = f"not finished after {count(attempts.runs, 'run')} (--max-runs)"
        if self.smallest is not None and self.smallest != self.everything:
            sentence += f": what makes the runs diverge is among {count(len(self.smallest), 'change')}"
            return self._proof(self.smallest, sentence)
        return self._proof(frozenset(), sentence)

    def _names(self, part: frozenset[int]) -> str:
        names = list(dict.fromkeys(place_of(self.attempts.elements[place]) for place in sorted(part)))
        return some(names, _NAMED) if len(names) > _NAMED else listed(names)

    def _proof(self, chosen: frozenset[int], sentence: str, *, proven: bool = False, each: bool = False) -> Proof:
        """The result for the changes `chosen`."""
        attempts = self.attempts
        answer = attempts.answers.get(chosen)
        return Proof(
            elements=tuple(attempts.elements[place] for place in sorted(chosen)),
            proven=proven,
            each=each,
            changes=len(attempts.elements),
            runs=attempts.runs,
            undecided=attempts.undecided,
            result=answer.result if answer is not None and proven else None,
            sentence=sentence,
            unknown=attempts.sides.unknown,
            directory=attempts.output,
        )
