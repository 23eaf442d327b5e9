"""Run two recorded commands again and look at their first divergence element by element.

A store names the place and knows how far apart two tensors are, but the tensors are gone. To see which elements differ,
and which operator made them differ, both commands run once more: only up to the first divergence, at operator level,
with whole tensors kept around it. What comes out is worth something only where each run repeats itself, so each new
capture is compared with its old store before anything is said of the two.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.closeup import Closeup, closeup, comparable, is_outermost, worth_a_look
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.reasons.words import what
from introspect_cli.compare.result import Divergence, Verdict
from introspect_cli.records import Kind
from introspect_cli.rerun.recipe import Place, Recipe, UnrepeatableError, placed, recipe_of
from introspect_cli.rerun.variant import Variant, capture
from introspect_cli.schedule import Schedule
from introspect_cli.store.files import RUNS
from introspect_cli.store.reader import Run, open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.compare.result import DiffResult

FURTHEST_BACK = 64
"""Steps before the divergence that are recorded again at most, where the stores have none in between."""

_FEW = 3  # steps of which whole tensors are kept at once


@dataclass(frozen=True)
class Side:
    """One run, run again.

    Attributes:
        name: `a` or `b`.
        run: directory of the new capture; None where there is none.
        told: how it was run again, or why not, as a sentence.
        repeats: whether it recorded the numbers that it had recorded before.
    """

    name: str
    run: Path | None
    told: str
    repeats: bool


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code that ran the operator.

    Attributes:
        name: the run, `a` or `b`; `a and b` where both have the same.
        place: `file:line`.
        text: what stands there; "" where it could not be read.
    """

    name: str
    place: str
    text: str


@dataclass(frozen=True)
class Zoomed:
    """What was seen.

    Attributes:
        before: the comparison of the stores as they were.
        sides: both runs, run again; empty where nothing diverges.
        after: the comparison of the new captures; None where the stores were looked at.
        closeups: the divergences that were looked at, the first one first.
        source: the line of code that ran the first of them, where it is an operator.
        directory: where the new captures are; None where there are none.
    """

    before: DiffResult
    sides: tuple[Side, ...] = ()
    after: DiffResult | None = None
    closeups: tuple[Closeup, ...] = ()
    source: tuple[SourceLine, ...] = ()
    directory: Path | None = None

    @property
    def verdict(self) -> Verdict:
        """That of the comparison as recorded."""
        return self.before.verdict


@dataclass(frozen=True)
class Frame:
    """What is recorded again of one run.

    Attributes:
        steps: the steps, rising; the last is the diverging one.
        tensors: globs of the sites that are stored whole.
    """

    steps: tuple[int, ...]
    tensors: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """As options of `capture`."""
        words = ["--level", "op", "--steps", ",".join(map(str, self.steps)), "--until-step", str(self.steps[-1])]
        return (*words, *(word for glob in self.tensors for word in ("--save-tensors", glob)))


def zoom(
    a: Path,
    b: Path,
    options: DiffOptions,
    output: Path | None,
    links: Sequence[str],
    tell: Callable[[str], None],
    noise: Sequence[Path] = (),
) -> Zoomed:
    """Run what two runs recorded again, up to their first divergence, and look at that.

    Args:
        a: the reference run.
        b: the run that diverges from it.
        options: what counts in the comparison.
        output: where the new captures are kept; None for a directory under `introspect-runs/`.
        links: paths outside of git that a work tree of a commit needs.
        tell: shown a line for each run that is started.
        noise: runs that should equal a, whose spread is let pass.

    Raises:
        UsageError: an option cannot be meant.
        StoreError: a run cannot be read.
    """
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(open_run(path)) for path in (a, b))
        before = compare_runs(one, two, options, [stack.enter_context(open_run(path)) for path in noise])
        if before.first is None:
            return Zoomed(before)
        directory = (output or Path(RUNS) / f"zoom-{a.name}-{b.name}").resolve()
        return _Again((one, two), before, options, directory, links, tell).looked(before.first)


class _Again:
    """Two runs under way once more."""

    def __init__(
        self,
        runs: tuple[Run, Run],
        before: DiffResult,
        options: DiffOptions,
        directory: Path,
        links: Sequence[str],
        tell: Callable[[str], None],
    ) -> None:
        self._runs, self._before, self._directory, self._links, self._tell = runs, before, directory, links, tell
        self._options = replace(options, steps=None, kinds=frozenset(), modules=(), limit=None, want_map=False)

    def looked(self, first: Divergence) -> Zoomed:
        """The runs captured again and looked at; their stores looked at where one does not repeat itself."""
        asked = [_recipe(name, run) for name, run in zip("ab", self._runs, strict=True)]
        recipes = [own for own in asked if isinstance(own, Recipe)]
        sides = [own for own in asked if isinstance(own, Side)]
        steps = steps_between(self._runs[0], first)
        globs = around(self._runs[0], first) if len(steps[0]) <= _FEW else ()
        found = None if sides else self._captured(recipes, steps, globs, first)
        bare = (own.divergence for own in found.closeups if own.difference is None) if found is not None else ()
        nearer = next(filter(comparable, bare), None)
        if nearer is not None:
            self._tell(f"first at step {nearer.step}, {what(nearer.site)}: once more, for whole tensors there")
            steps = steps_at(nearer)
            found = self._captured(recipes, steps, (*around(self._runs[0], nearer), *globs), first)
        if found is not None and found.closeups:
            return found
        sides = list(found.sides) if found is not None else sides
        stored = (closeup(*self._runs, first),)
        return Zoomed(self._before, tuple(sides), closeups=stored, directory=self._kept(sides))

    def _kept(self, sides: Sequence[Side]) -> Path | None:
        return self._directory if any(side.run is not None for side in sides) else None

    def _captured(
        self,
        recipes: Sequence[Recipe],
        steps: tuple[tuple[int, ...], tuple[int, ...]],
        globs: Sequence[str],
        first: Divergence,
    ) -> Zoomed:
        sides: list[Side] = []
        with contextlib.ExitStack() as stack:
            places = []
            for name, recipe, own in zip("ab", recipes, steps, strict=True):
                place = stack.enter_context(placed(recipe, self._directory / f"{name}-tree", self._links))
                places.append(place)
                sides.append(self._side(name, recipe, place, Frame(own, tuple(globs))))
            found = Zoomed(self._before, tuple(sides), directory=self._kept(sides))
            if not all(side.repeats for side in sides):
                return found
            one, two = (stack.enter_context(open_run(side.run or "")) for side in sides)
            after = compare_runs(one, two, self._options)
            if after.first is None:
                return replace(found, after=after)
            closeups = tuple(closeup(one, two, own) for own in worth_a_look(after, first))
            lines = source_lines((one, two), after.first, places)
        return replace(found, after=replace(after, divergences=()), closeups=closeups, source=lines)

    def _side(self, name: str, recipe: Recipe, place: Place, frame: Frame) -> Side:
        """Run one of them again and compare it with its store."""
        run, path = self._runs["ab".index(name)], self._directory / name
        self._tell(f"running {name} again {place.told}: {shlex.join(place.words)}, in {place.directory}")
        words = (*frame.options, *place.words)
        environment = {**recipe.environment, "PYTHONDONTWRITEBYTECODE": "1"}
        new = capture(Variant(path, words, place.directory, environment, recipe.python), again=True)
        told = "; ".join([f"Run {name} was run again {place.told}", *recipe.notes])
        if not new.usable:
            why = f"it ended with exit code {new.exit_code} and recorded no step: {new.last_lines}"
            return Side(name, None, f"{told}, but {why}", repeats=False)
        apart = _apart(run, path, frame)
        if apart:
            ended = f" (it ended with exit code {new.exit_code})" if new.exit_code else ""
            return Side(name, path, f"{told}, but does not repeat what was recorded{ended}. {apart}", repeats=False)
        return Side(name, path, f"{told}, and repeats what was recorded.", repeats=True)


def _recipe(name: str, run: Run) -> Recipe | Side:
    """How a run can be run again, or that it cannot."""
    try:
        return recipe_of(run)
    except UnrepeatableError as error:
        return Side(name, None, f"Run {name} cannot be run again: {error}.", repeats=False)


def _apart(run: Run, new: Path, frame: Frame) -> str:
    """Why a new capture is not what its run recorded; "" where it is."""
    reader = run.rank(run.ranks[0])
    known = [step for step in frame.steps if step in reader]
    if not known:
        return "None of the steps that were recorded again was recorded before."
    with open_run(new) as again:
        if known[-1] not in again.rank(again.ranks[0]):
            return f"It recorded nothing of step {known[-1]}."
        steps = Schedule.parse(",".join(map(str, known)))
        result = compare_runs(run, again, DiffOptions(steps=steps, limit=1))
    return "" if result.verdict is Verdict.SAME else result.sentence


def steps_between(a: Run, first: Divergence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Steps of a and of b to record: the first, and all from the last that a recorded before it diverges."""
    earlier = [int(step) for step in a.rank(first.rank).entries["step"] if step < first.step]
    since = max(*earlier[-1:], first.step - FURTHEST_BACK, 0) if earlier else first.step
    shift = first.step - first.step_b
    steps = {0, *range(since, first.step + 1)}
    return tuple(sorted(steps)), tuple(sorted({0, *(step - shift for step in steps if step >= shift)}))


def steps_at(first: Divergence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The diverging step, the one before it, and the first, of a and of b."""
    own = ({0, max(step - 1, 0), step} for step in (first.step, first.step_b))
    one, two = (tuple(sorted(steps)) for steps in own)
    return one, two


def around(run: Run, first: Divergence) -> tuple[str, ...]:
    """What is stored whole: the site and all inside it, what holds it alone, and batches, which tell of padding.

    Without a loader, what the models are given is stored in their place.
    """
    name = first.site.fqn
    inside = name if "." in name else f"={name}"
    globs = [inside, *([f"={name.rpartition('.')[0]}"] if "." in name else [])]
    reader = run.rank(first.rank)
    every = list(zip(reader.sites.kind, reader.sites.fqn, strict=True))
    batches = {name for kind, name in every if kind == Kind.BATCH.value}
    batches = batches or {name for kind, name in every if is_outermost(kind, name)}
    return tuple(dict.fromkeys([*globs, *(f"={name}" for name in sorted(batches))]))


def source_lines(runs: tuple[Run, Run], first: Divergence, places: Sequence[Place]) -> tuple[SourceLine, ...]:
    """The lines that ran an operator in a and in b, as they stand in the files; one where both have the same."""
    found = []
    for name, run, place, step in zip("ab", runs, places, (first.step, first.step_b), strict=True):
        records = (own for own in run.rank(first.rank).records(step) if own.site == first.site)
        told = next((own.info.source for own in records), "")
        if told:
            found.append(SourceLine(name, told, _line(place.root, told)))
    if len(found) == 2 and found[0].place == found[1].place and found[0].text == found[1].text:
        return (replace(found[0], name="a and b"),)
    return tuple(found)


def _line(root: Path, told: str) -> str:
    """What stands at a `file:line` of the project; "" where it cannot be read."""
    name, _, number = told.rpartition(":")
    path = (root / name).resolve()
    if not number.isdecimal() or not path.is_relative_to(root.resolve()):
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return next((line.strip() for at, line in enumerate(file, 1) if at == int(number)), "")
    except OSError:
        return ""
