"""Prove which of the changes between two runs makes them diverge.

Two questions are asked of a set of changes, and each is answered by running a script: is b without them the same as a,
and does a with them alone diverge? A set for which both answers are yes is the cause: without it nothing differs, and
nothing else is needed. The likeliest changes are asked about first, so two runs often suffice; else delta debugging
finds the smallest set (`ddmin`: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002). What
does not run answers neither question.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, DiffResult, Verdict
from introspect_cli.compare.say import listed, some
from introspect_cli.compare.settings.settings import arguments
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.edits import apply_edits
from introspect_cli.rerun.changes.sides import Difference, Element, command_line, count_by_kind, likely_first, sides_of
from introspect_cli.rerun.place import NEWER, build_place, keep_out_of_git
from introspect_cli.rerun.recorded import decoded, encoded
from introspect_cli.rerun.variant import Reference, Rerun, capture, result_of
from introspect_cli.store.files import RUNS
from introspect_cli.store.run import open_run
from introspect_cli.sums import hex_digest
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from introspect_cli.rerun.changes.sides import Sides
    from introspect_cli.rerun.commits import Command
    from introspect_cli.rerun.recipe import Recipe

_MAX_NAMED = 4
_MAX_TRIED_ALONE = 3
"""Likely changes that are each tried alone before the search."""


@dataclass(frozen=True)
class Proof:
    """The smallest set of changes that makes two runs diverge, and how it was found.

    Attributes:
        elements: the smallest set of changes; empty where there is none.
        proven: whether the runs are the same without them and diverge with them alone.
        changes: how many changes there are.
        runs: how many runs were made.
        undecided: how many runs answered nothing, since they failed before the last step.
        result: how a with them alone diverges from a; None where nothing is proven.
        sentence: the answer in words.
        unknown: what differs and could not be tried, as clauses.
        directory: where the runs are.
    """

    elements: tuple[Element, ...]
    proven: bool
    changes: int
    runs: int
    undecided: int
    result: DiffResult | None
    sentence: str
    unknown: tuple[str, ...]
    directory: Path


class Limits(NamedTuple):
    """How far a search goes.

    Attributes:
        output: where its runs are kept, and complete ones are used again; None for a place among the project's runs.
        until_step: last step that is compared; None for that of the first divergence.
        max_runs: how many variants may be run; with 0, which change of a commit it is, is not looked for.
    """

    output: Path | None
    until_step: int | None
    max_runs: int


def prove(a: Path, b: Path, command: Command, tell: Callable[[str], None], limits: Limits) -> Proof:
    """Find the smallest set of changes that makes two runs diverge; unproven where there is no answer.

    Variants run one after the other.

    Args:
        a: a run.
        b: another.
        command: further capture options of variants, and what is linked and not copied; its words are not run.
        tell: shown a line for each variant that is run.
        limits: how far it goes; without a place for its runs, they are in `changes-<a>-<b>`.

    Raises:
        UsageError: the runs do not diverge, nothing differs that could be changed, a cannot be run again, or a variant
            read a changed file from elsewhere.
        StoreError: a run cannot be read.
    """
    directory = keep_out_of_git(limits.output or Path(RUNS) / f"changes-{a.name}-{b.name}")
    with open_run(a) as one, open_run(b) as two:
        recorded = compare_runs(one, two, DiffOptions())
        if recorded.verdict is not Verdict.DIVERGED or recorded.first is None:
            raise UsageError(f"nothing to bisect: {recorded.sentence}")
        sides = sides_of(one, two, directory)
    elements, likely = likely_first(sides.elements, recorded)
    if not elements:
        none = "no statement, file, argument, environment variable or seed that could be changed"
        untried = f" (not tried: {'; '.join(sides.unknown)})" if sides.unknown else ""
        raise UsageError(f"the two runs differ in {none}{untried}")
    tell(f"{count_by_kind(elements)} between the runs; they diverge at step {recorded.first.step}")
    reference = Reference(a, recorded.first.step if limits.until_step is None else limits.until_step)
    return Search(sides, elements, likely, reference, command, directory, limits.max_runs, tell).run()


class OutOfRunsError(Exception):
    """As many runs were made as were allowed."""


class Attempt(NamedTuple):
    """What an attempt has shown, also in words, and its comparison with a; None where there is none to show."""

    verdict: Verdict
    words: str
    result: DiffResult | None = None


@dataclass
class Search:
    """Search for the smallest set of changes that makes the runs diverge; a set is one of positions in `elements`.

    Attributes:
        sides: both runs.
        elements: what differs between them, the likeliest cause first.
        likely: how many of the elements, the first ones, are called likely by the comparison.
        reference: run a, and the last step to run.
        command: further capture options, and what is linked and not copied.
        output: where runs are kept.
        most: how many runs may be made.
        tell: shown a line for each.
        answers: the result of each attempt, by the positions of the elements that were as in b.
        runs: how many runs were made.
    """

    sides: Sides
    elements: Sequence[Element]
    likely: int
    reference: Reference
    command: Command
    output: Path
    most: int
    tell: Callable[[str], None]
    answers: dict[frozenset[int], Attempt] = field(default_factory=dict)
    runs: int = 0

    def run(self) -> Proof:
        """Find a set without which b is the same as a, then what else it needs to make a diverge, and prove both.

        The likely changes, no more than `_MAX_TRIED_ALONE` and half of all, are tried alone; else both ends (no change,
        all changes) are checked, and the set is minimised. Unproven where no more runs are allowed or an end is not as
        it should be; the sentence says which.
        """
        every = frozenset(range(len(self.elements)))
        few = min(self.likely, _MAX_TRIED_ALONE, len(self.elements) // 2) if len(self.elements) > 1 else 1
        try:
            core = next(filter(self._is_needed, (frozenset({place}) for place in range(few))), None)
            if core is None and not self._is_needed(every):
                why = "or something that it reads is not as it was"
                why = f"the script is not deterministic by itself, {why}, or it cannot be run again ({NEWER})"
                return self._proof(frozenset(), f"running a again, unchanged, {self.answers[frozenset()].words}: {why}")
            if (core is None or not self._suffices(core)) and not self._suffices(every):
                why = "something else differs between the runs"
                return self._proof(frozenset(), f"a with all of b's changes {self.answers[every].words}: {why}")
            both = core = core or ddmin(every, self._is_needed)
            if not self._suffices(core):
                both = core | ddmin(every - core, lambda part: self._suffices(core | part))
                self._suffices(both)
        except OutOfRunsError:
            same = [every - chosen for chosen, one in self.answers.items() if one.verdict is Verdict.SAME]
            least = min(same, key=len, default=every)
            among = f": what makes the runs diverge is among {count(len(least), 'change')}" if least < every else ""
            sentence = f"not finished after {count(self.runs, 'run')} (--max-runs){among}"
            return self._proof(least if among else frozenset(), sentence)
        make, them = ("one makes", "it") if len(both) == 1 else (f"{len(both)} make", "them")
        without = them if core == both else self._names(core)
        until, runs = self.reference.until, count(self.runs, "run")
        proven = f"without {without} the runs are the same up to step {until}, with {them} alone they diverge"
        sentence = f"of {count_by_kind(self.elements)}, {make} them diverge: {self._names(both)}"
        sentence += f"; proven by {runs}: {proven}"
        return self._proof(both, sentence, self.answers[both].result, proven=True)

    def _is_needed(self, part: frozenset[int]) -> bool:
        """Whether b without the changes `part` is the same as a, by a run; False where that cannot be judged."""
        rest = frozenset(range(len(self.elements))) - part
        return self.judge(rest, f"b without {self._names(part)}" if rest else "a again, unchanged,") is Verdict.SAME

    def _suffices(self, part: frozenset[int]) -> bool:
        """Whether a with only the changes `part` diverges from a, by a run; False where that cannot be judged."""
        every = len(part) == len(self.elements)
        name = "a with all of b's changes" if every else f"a with {self._names(part)} alone"
        return self.judge(part, name) is Verdict.DIVERGED

    def _names(self, part: frozenset[int]) -> str:
        """Places of changes, as a list for a sentence: the first `_MAX_NAMED`, then how many more."""
        names = list(dict.fromkeys(self.elements[place].place for place in sorted(part)))
        return some(names, _MAX_NAMED) if len(names) > _MAX_NAMED else listed(names)

    def _proof(
        self, chosen: frozenset[int], sentence: str, result: DiffResult | None = None, *, proven: bool = False
    ) -> Proof:
        """A `Proof` of the changes `chosen`, positions in `elements`, with the number of runs made so far."""
        elements = tuple(self.elements[place] for place in sorted(chosen))
        undecided = sum(one.verdict is Verdict.UNDECIDED for one in self.answers.values())
        counts = len(self.elements), self.runs, undecided
        return Proof(elements, proven, *counts, result, sentence, self.sides.unknown, self.output)

    def judge(self, chosen: frozenset[int], name: str) -> Verdict:
        """Run a with the changes `chosen`, and tell in a line how that ends; asked again, the first answer is returned.

        Args:
            chosen: positions in `elements`; empty to run a unchanged.
            name: what is run, in words, for the line.

        Returns:
            SAME as a, DIVERGED from it, or UNDECIDED: it fails, records no step, or its files cannot be parsed.

        Raises:
            OutOfRunsError: no more runs are allowed.
            UsageError: a changed file was imported from elsewhere than the place.
        """
        if chosen not in self.answers:
            self.answers[chosen] = self._make_attempt(chosen)
            self.tell(f"{name} {self.answers[chosen].words}")
        return self.answers[chosen].verdict

    def _make_attempt(self, chosen: frozenset[int]) -> Attempt:
        """Run an attempt, count it in `runs`, and judge it.

        UNDECIDED without a run, and not counted, where a changed file cannot be parsed; UNDECIDED, even if it diverges,
        where the exit code is neither 0 nor the reference's. A run that was kept counts, too.

        Raises:
            OutOfRunsError: no more runs are allowed.
            UsageError: a changed file was imported from elsewhere than the place.
        """
        elements = [self.elements[place] for place in sorted(chosen)]
        try:
            files = files_with(elements, self.sides)
        except ValueError:
            return Attempt(Verdict.UNDECIDED, "cannot be read by python")
        if self.runs >= self.most:
            raise OutOfRunsError
        self.runs += 1
        done = self._run(elements, files)
        if done.exit_code not in {0, self.reference.exit_code}:  # it may diverge by failing
            last = done.last_lines.rpartition(" / ")[2]
            return Attempt(Verdict.UNDECIDED, f"cannot be told: it ends with {done.exit_code}: {last}")
        verdict, result = self.reference.judge(done)
        if result is None or verdict is Verdict.UNDECIDED:
            return Attempt(verdict, f"cannot be told: {done.last_lines if result is None else result.sentence}", result)
        at = f" at step {result.first.step}" if result.first is not None else ""
        return Attempt(verdict, "is the same as a" if verdict is Verdict.SAME else f"diverges from a{at}", result)

    def _run(self, elements: Sequence[Element], files: Mapping[str, bytes]) -> Rerun:
        """Capture a with these changes and files, or take a complete run that is kept under the same name.

        The name is a hash of the files, the command and the variables.

        Raises:
            UsageError: a changed file was imported from elsewhere than the place.
        """
        recipe = self._recipe_with(elements)
        described = [
            sorted((name, hex_digest(data)) for name, data in files.items()),
            [self.command.options, self.command.links, recipe.options, recipe.started, recipe.arguments],
            [self.reference.until, sorted(recipe.environment.items())],
        ]
        run = self.output / hashlib.blake2b(json.dumps(described).encode(), digest_size=6).hexdigest()
        kept = result_of(run)
        if kept.is_complete:
            return kept
        texts = {self.sides.places[name]: data for name, data in files.items()}
        at, links = self.output / f"{run.name}-tree", self.command.links
        with build_place(self.sides.around, at, texts, links=links, paths=recipe.search_path) as place:
            words = recipe.words_at(place, *self.command.options, *self.reference.stop_options)
            return capture(run, place, words, recipe.environment, recipe.python)

    def _recipe_with(self, elements: Sequence[Element]) -> Recipe:
        """A's recipe with b's arguments, variables and options among `elements`."""
        recipe, chosen = self.sides.recipe, defaultdict[str, dict[str, Any]](dict)
        for item in elements:
            if isinstance(item, Difference):
                chosen[item.axis][item.name] = item.b
        options = {**recipe.options, **chosen["capture"]}
        if chosen["argument"]:
            words = command_line(arguments(recipe.arguments) | chosen["argument"])
            recipe = replace(recipe, arguments=tuple(words))
        return replace(recipe, options=options, environment={**recipe.environment, **chosen["environment"]})


def ddmin(items: Collection[int], fails: Callable[[frozenset[int]], bool]) -> frozenset[int]:
    """A subset on which `fails` is true and of which no single item can be left out (delta debugging).

    Args:
        items: a set on which `fails` is true; the least first, which are the likeliest, are asked about first.
        fails: the question; asked of subsets, and never of the empty one.
    """
    parts = 2
    while True:
        ordered, size = sorted(items), max(len(items) // parts, 1)
        chunks = [frozenset(ordered[start : start + size]) for start in range(0, len(ordered), size)]
        rests = [frozenset(ordered) - chunk for chunk in chunks if len(chunks) > 2]
        smaller = next((part for part in (*chunks, *rests) if len(part) < len(ordered) and fails(part)), None)
        if smaller is not None:
            items, parts = smaller, 2 if smaller in chunks else max(parts - 1, 2)
        elif size == 1:
            return frozenset(items)
        else:
            parts = min(parts * 2, len(items))


def files_with(elements: Sequence[Element], sides: Sides) -> dict[str, bytes]:
    """What a's files hold with the changes among `elements`, by name.

    Settings among `elements` are passed over. Files that only b has are always included.

    Raises:
        ValueError: a changed file cannot be parsed.
    """
    files = {**sides.b, **sides.a}
    changes = [item for item in elements if isinstance(item, Change)]
    pieces = [piece for change in changes for piece in change.pieces or (change,)]
    for name in {piece.file for piece in pieces}:
        edits = [edit for one in pieces if one.file == name for edit in sides.edits[name, one.a, one.b]]
        files[name] = encoded(apply_edits(name, edits, decoded(sides.a[name]) or "", decoded(sides.b[name]) or ""))
    return files
