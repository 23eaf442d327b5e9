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
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.closeup import Closeup, closeup, why_not_comparable, worth_a_look
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, DiffResult, Divergence, Verdict
from introspect_cli.compare.say import some, what
from introspect_cli.records import Kind
from introspect_cli.rerun.place import NEWER, Place, build_place, keep_out_of_git, survey
from introspect_cli.rerun.recipe import Recipe, recipe_of
from introspect_cli.rerun.recorded import recorded_files
from introspect_cli.rerun.variant import capture, first_sentence, started_at
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.files import RUNS
from introspect_cli.store.run import Run, open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

FURTHEST_BACK = 64
"""Steps before the divergence that are recorded again at most, where the stores have none in between."""

_MAX_WHOLE_STEPS = 3
"""Steps of which whole tensors are kept at once."""


@dataclass(frozen=True)
class Side:
    """One run, run again.

    Attributes:
        run: directory of the new capture; None where there is none.
        note: how it was run again, or why not, as a sentence.
        repeats: whether it recorded the numbers that it had recorded before.
    """

    run: Path | None
    note: str
    repeats: bool


@dataclass(frozen=True)
class Zoomed:
    """Result of zooming into the first divergence.

    Attributes:
        before: the comparison of the stores as they were.
        sides: both runs, run again; empty where nothing diverges.
        after: the comparison of the new captures; None where a run does not repeat.
        closeups: the divergences that were looked at, the first one first; as recorded where `after` has none.
    """

    before: DiffResult
    sides: tuple[Side, ...] = ()
    after: DiffResult | None = None
    closeups: tuple[Closeup, ...] = ()


def zoom(
    a: Path,
    b: Path,
    options: DiffOptions,
    output: Path | None,
    links: Sequence[str],
    tell: Callable[[str], None],
    noise: Sequence[Path] = (),
) -> Zoomed:
    """Run both again up to their first divergence, record more there, and compare.

    Nothing is run where they do not diverge, or either cannot be run again. Where nothing new can be looked at, the
    close-up is that of the first divergence as recorded.

    Args:
        a: one run.
        b: the other.
        options: of the first comparison; the second compares all steps, kinds and modules.
        output: directory of the new runs; None for `zoom-<a>-<b>` among the project's.
        links: paths that are linked, and not copied, where a project is rebuilt; relative to where the script ran.
        tell: is given progress, a line each.
        noise: runs of the code of a, whose differences count as noise.

    Raises:
        UsageError: an option cannot be meant.
        StoreError: a run cannot be read.
    """
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(open_run(path)) for path in (a, b))
        before = compare_runs(one, two, options, [stack.enter_context(open_run(path)) for path in noise])
        if before.first is None:
            return Zoomed(before)
        directory = keep_out_of_git(output or Path(RUNS) / f"zoom-{a.name}-{b.name}")
        everything = replace(options, steps=None, kinds=frozenset(), modules=(), limit=None, want_map=False)
        recipes = {"a": recipe_of(one), "b": recipe_of(two)}
        why = [f"Run {name} cannot be run again: {each.problem}." for name, each in recipes.items() if each.problem]
        zoomed = Zoomed(before, tuple(Side(None, sentence, repeats=False) for sentence in why))
        if not why:
            zoomed = _Rerun((one, two), recipes, before, everything, directory, links, tell).look_at(before.first)
        return replace(zoomed, closeups=zoomed.closeups or (closeup(one, two, before.first),))


class _Rerun(NamedTuple):
    """Both runs, to be captured again.

    Attributes:
        runs: both, as they were recorded.
        recipes: how each, `a` and `b`, is run again.
        before: their comparison.
        options: what counts in the comparison of the new captures.
        directory: where these are kept.
        links: paths that are linked and not copied.
        tell: shown a line for each run that is started.
    """

    runs: tuple[Run, Run]
    recipes: Mapping[str, Recipe]
    before: DiffResult
    options: DiffOptions
    directory: Path
    links: Sequence[str]
    tell: Callable[[str], None]

    def look_at(self, first: Divergence) -> Zoomed:
        """Capture both again around `first`, the divergence of the stores, and look at where the new captures diverge.

        That is from the last step before it that a has, but no more than `FURTHEST_BACK` before it; where a has none,
        only its own step.

        Where they diverge at a comparable site of which no whole tensors were kept, both are captured once more with
        these. With more than `_MAX_WHOLE_STEPS` steps of a to record, the first time keeps no whole tensors.
        """
        earlier = [int(step) for step in self.runs[0].rank(first.rank).entries["step"] if step < first.step]
        steps = steps_around(first, max(*earlier[-1:], first.step - FURTHEST_BACK, 0) if earlier else first.step)
        globs = globs_around(self.runs[0], first) if len(steps[0]) <= _MAX_WHOLE_STEPS else ()
        zoomed = self._capture_both(steps, globs, first)
        without_tensors = (closeup.divergence for closeup in zoomed.closeups if closeup.difference is None)
        nearer = next((each for each in without_tensors if not why_not_comparable(each)), None)
        if nearer is None:
            return zoomed
        self.tell(f"first at step {nearer.step}, {what(nearer.site)}: once more, for whole tensors there")
        return self._capture_both(
            steps_around(nearer, max(nearer.step - 1, 0)), (*globs_around(self.runs[0], nearer), *globs), first
        )

    def _capture_both(
        self, steps: tuple[tuple[int, ...], tuple[int, ...]], globs: Sequence[str], first: Divergence
    ) -> Zoomed:
        """Capture both at the given steps with whole tensors at `globs`, and look at their first divergences.

        Args:
            steps: those of a, and those of b.
            globs: of the modules and tensors that are stored whole.
            first: the divergence of the stores.

        Returns:
            what was seen; without closeups, and without `after`, where a run does not repeat; without closeups where
            both agree now.
        """
        pairs = zip(self.recipes, self.runs, steps, strict=True)
        sides = tuple(self._capture_side(name, run, numbers, globs) for name, run, numbers in pairs)
        if not all(side.repeats for side in sides):
            return Zoomed(self.before, sides)
        with open_run(sides[0].run or "") as one, open_run(sides[1].run or "") as two:
            after = compare_runs(one, two, self.options)
            near = worth_a_look(after, first) if after.first is not None else ()
            closeups = tuple(closeup(one, two, divergence) for divergence in near)
        return Zoomed(self.before, sides, replace(after, divergences=()), closeups)

    def _capture_side(self, name: str, run: Run, steps: tuple[int, ...], globs: Sequence[str]) -> Side:
        """Capture a run again, at operator level, into `directory / name`, and compare it with its store.

        One without a step has no `run`; one that does not repeat what was recorded has. The note says why.

        Args:
            name: `a` or `b`.
            run: as it was recorded.
            steps: which are recorded, with operators; it ends after the last.
            globs: of the modules and tensors that are stored whole.
        """
        path, recipe = self.directory / name, self.recipes[name]
        with place_for(run, recipe, self.directory / f"{name}-tree", self.links) as (place, where):
            self.tell(f"running {name} again {where}: {shlex.join(recipe.words_at(place))}, in {place.directory}")
            when = ["--steps", ",".join(map(str, steps)), "--until-step", str(steps[-1])]
            whole = (word for glob in globs for word in ("--save-tensors", glob))
            words = recipe.words_at(place, "--level", "op", "--full-every", "1", *when, *whole)
            new = capture(path, place, words, recipe.environment, recipe.python)
        note = "; ".join([f"Run {name} was run again {where}", *recipe.notes])
        if not new.steps:
            why = f"it ended with exit code {new.exit_code} and recorded no step: {new.last_lines}"
            return Side(None, f"{note}, but {why}{f' ({NEWER})' if place.tops else ''}", repeats=False)
        if difference := _why_not_repeated(run, path, steps):
            ended = f" (it ended with exit code {new.exit_code})" if new.exit_code else ""
            return Side(path, f"{note}, but does not repeat what was recorded{ended}. {difference}", repeats=False)
        return Side(path, f"{note}, and repeats what was recorded.", repeats=True)


@contextlib.contextmanager
def place_for(run: Run, recipe: Recipe, at: Path, links: Sequence[str] = ()) -> Iterator[tuple[Place, str]]:
    """A place to run a recipe, for the length of a block, and a clause that says where it is.

    Where all sources are as recorded (or none are), or the exact text of a changed one cannot be had: where it ran.
    Else the project is rebuilt with the recorded texts.

    Args:
        run: the run.
        recipe: how it is run again.
        at: where the project is rebuilt; removed afterwards.
        links: paths that are linked there, relative to the directory; not used where it ran.

    Raises:
        UsageError: no such path to link, where the project is rebuilt.
    """
    files = recorded_files(run, recipe)
    held = files.held(files.sources)
    changed = [name for name in files.sources if files.unchanged(name) is None]
    without = [name for name in sorted(changed) if name not in held or files.is_redacted(name, held[name])]
    if not changed or without:
        clause = "its source files unchanged" if recipe.sources else "no source files were recorded"
        has = "has changed since and its" if len(without) == 1 else "have changed since and their"
        clause = f"although {some(without)} {has} text is not kept" if without else clause
        yield Place(files.tops[0], recipe.directory), f"where it ran, {clause}"
        return
    held = files.held(files.digests)
    texts = {files.places[name]: data for name, data in held.items() if not files.is_redacted(name, data)}
    around = survey(files.tops[0], recipe.directory, texts.keys(), started_at(run), at.parent)
    with build_place(around, at, texts, links=links, paths=recipe.search_path) as place:
        yield place, "from its recorded sources"


def _why_not_repeated(run: Run, new: Path, steps: Sequence[int]) -> str:
    """The sentence on how a new capture differs from what its run recorded at `steps`; "" where it is the same.

    Only steps that the lowest rank of `run` recorded count; having none of them is a difference. So is an UNDECIDED
    verdict.
    """
    reader = run.rank(run.ranks[0])
    recorded = [step for step in steps if step in reader]
    if not recorded:
        return "None of the steps that were recorded again was recorded before."
    with open_run(new) as again:
        compared = Schedule.parse(",".join(map(str, recorded)))
        result = compare_runs(run, again, DiffOptions(steps=compared, limit=1))
    return "" if result.verdict is Verdict.SAME else first_sentence(result)


def steps_around(first: Divergence, since: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Steps of a and of b to record, each rising: 0, and all from a's step `since` to that of the divergence.

    Steps of b are those of a, shifted to b's step of the divergence; negative ones are left out.
    """
    shift = first.step - first.step_b
    steps = {0, *range(since, first.step + 1)}
    return tuple(sorted(steps)), tuple(sorted({0, *(step - shift for step in steps if step >= shift)}))


def globs_around(run: Run, first: Divergence) -> tuple[str, ...]:
    """Globs of the tensors to store whole: the FQN of the site and all inside it, its parent, and batches.

    `=name` stands for that name alone, a plain name for all inside it, too. Of a root module, only the module itself
    and not all inside it. Where no batch was recorded, what outermost modules are given is stored in their place.
    """
    name, sites = first.site.fqn, run.rank(first.rank).sites
    globs = [name, f"={name.rpartition('.')[0]}"] if "." in name else [f"={name}"]
    every = list(zip(sites.kind, sites.fqn, strict=True))
    batches = {name for kind, name in every if kind == Kind.BATCH.value}
    batches = batches or {name for kind, name in every if kind == Kind.INPUT.value and "." not in name}
    return tuple(dict.fromkeys([*globs, *(f"={name}" for name in sorted(batches))]))
