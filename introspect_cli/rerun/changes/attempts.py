"""Run a's command with some of b's changes, and judge whether it diverges from a.

Each attempt has a directory of its own, with a's files in which the chosen changes are made (see `place`), and
goes as far as the step at which b diverges from a. Its run is kept under a name that says what was run, so no attempt
is made twice, in a later call neither.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.settings.documents import arguments
from introspect_cli.compare.terms.result import DiffResult, Verdict
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.changes.edits import with_edits
from introspect_cli.rerun.changes.minimise import SETTINGS, Element, command_line, on_axes
from introspect_cli.rerun.changes.texts import encoded, opened_files, undefined
from introspect_cli.rerun.place import Around, placed
from introspect_cli.rerun.variant import End, Reference, Rerun, capture, end_of
from introspect_cli.store.read.run import open_run
from introspect_cli.store.read.source_texts import Sources
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from introspect_cli.rerun.changes.elements import Sides
    from introspect_cli.rerun.recipe import Recipe


class OutOfRunsError(Exception):
    """As many runs were made as were allowed."""


class Attempt(NamedTuple):
    """Result of an attempt: verdict, comparison with a, and its run; None for what could not be made."""

    verdict: Verdict
    result: DiffResult | None = None
    done: Rerun | None = None


@dataclass
class Attempts:
    """Runs of a with some of b's changes, and the result of each.

    Attributes:
        sides: both runs.
        elements: what differs between them.
        around: what lies around a.
        reference: run a, and the last step to run.
        options: further capture options.
        output: where runs are kept.
        most: how many runs may be made.
        tell: shown a line for each.
        keep: leave each attempt's directory in place.
        ends: how the scripts of a and b ended.
        by_end: whether how they ended is all that differs, so that an attempt that ends as b diverges.
        answers: what came of each, by the places of the elements that were as in b.
        runs: how many runs were made.
    """

    sides: Sides
    elements: Sequence[Element]
    around: Around
    reference: Reference
    options: tuple[str, ...]
    output: Path
    most: int
    tell: Callable[[str], None]
    keep: bool = False
    ends: tuple[End, End] = (End(), End())
    by_end: bool = False
    answers: dict[frozenset[int], Attempt] = field(default_factory=dict)
    runs: int = 0

    def verdict(self, chosen: frozenset[int], name: str) -> Verdict:
        """Run a with the changes `chosen` (positions in `elements`), once; SAME as a, DIVERGED, or UNDECIDED.

        Raises:
            OutOfRunsError: no more runs are allowed.
            UsageError: what was to run is not what ran.
        """
        if chosen not in self.answers:
            self.answers[chosen] = self._answer(chosen)
            verdict, result, done = self.answers[chosen]
            if done is None:
                return verdict
            said = {Verdict.SAME: "the same as a", Verdict.UNDECIDED: "cannot be told"}.get(verdict, "diverges from a")
            side = 1 if verdict is Verdict.DIVERGED else 0
            if verdict is not Verdict.UNDECIDED and self.ends_as(side, chosen):
                said = f"ends as {'ab'[side]}: {self.ends[side].words}"
            elif verdict is Verdict.DIVERGED and result is not None and result.first is not None:
                said += f" at step {result.first.step}"
            elif verdict is Verdict.UNDECIDED:
                said += f" ({self.why(chosen)})"
            self.tell(f"{name}: {said}")
        return self.answers[chosen].verdict

    @property
    def undecided(self) -> int:
        """Number of runs whose verdict was UNDECIDED."""
        return sum(one.verdict is Verdict.UNDECIDED and one.done is not None for one in self.answers.values())

    def why(self, chosen: frozenset[int]) -> str:
        """The reason, in words, for the verdict UNDECIDED of an attempt."""
        _, result, done = self.answers[chosen]
        if done is None:
            return "a file cannot be read by python, or uses a name that nothing defines"
        if done.exit_code:
            return f"it ends with {done.exit_code}: {done.last_lines.rpartition(' / ')[2]}"
        return result.sentence if result is not None else done.last_lines

    @property
    def narrowed(self) -> bool:
        """Whether a was captured with another selection of records (`narrowing`) than the attempts."""
        asked = []
        made = (one.done.run for one in self.answers.values() if one.done is not None)
        for path in (self.reference.run, next(made, self.reference.run)):
            with open_run(path) as run:
                asked.append({**(run.manifest.get("narrowing") or {}), "until_step": None})
        return asked[0] != asked[1]

    def _answer(self, chosen: frozenset[int]) -> Attempt:
        """Run an attempt and judge it; UNDECIDED without a run where the changed files cannot be made.

        Raises:
            OutOfRunsError: no more runs are allowed.
        """
        elements = [self.elements[place] for place in sorted(chosen)]
        try:
            sources = sources_with(elements, self.sides)
        except ValueError:
            return Attempt(Verdict.UNDECIDED)
        if self.runs >= self.most:
            raise OutOfRunsError
        self.runs += 1
        done = self._run(elements, sources)
        return Attempt(*self._judged(done), done)

    def _judged(self, done: Rerun) -> tuple[Verdict, DiffResult | None]:
        """Verdict on a run: UNDECIDED where it fails otherwise than a and b; where `by_end`, by whose end it shares."""
        end = _end_of(done)
        as_a, as_b = (end.is_as(other) for other in self.ends)
        if end.failed and not (as_a or as_b):
            return Verdict.UNDECIDED, None
        verdict, result = self.reference.judge(done, done.exit_code)
        if not self.by_end:
            return verdict, result
        if as_a and (verdict is Verdict.SAME or not done.usable):
            return Verdict.SAME, result
        return Verdict.DIVERGED if as_b else Verdict.UNDECIDED, result

    def ends_as(self, side: int, chosen: frozenset[int]) -> bool:
        """Whether an attempt ended by the exception of a (side 0) or b (side 1), and the other side did not."""
        end, attempt = self.ends[side], self.answers.get(chosen)
        done = attempt.done if attempt is not None else None
        differs = end.error is not None and not end.is_as(self.ends[1 - side])
        return differs and done is not None and _end_of(done).is_as(end)

    def _run(self, elements: Sequence[Element], sources: Mapping[str, bytes]) -> Rerun:
        """Capture a with these changes and source files, in a directory named by a hash of all that goes in."""
        recipe, set_as_in_b, python = self._started(elements)
        files = {item.name: item.a for item in on_axes(self.elements, "file")}
        files |= {item.name: item.b for item in on_axes(elements, "file")}
        described = json.dumps(
            [
                [[name, source_digest(data)] for name, data in sorted(sources.items())],
                [[name, str(path)] for name, path in sorted(files.items())],
                [*self.options, *recipe.words, python, self.reference.until],
                sorted((name, value) for name, value in set_as_in_b.items()),
            ],
            default=str,
        )
        described += f" {len(self.around.files)}"
        name = hashlib.blake2b(described.encode(), digest_size=6).hexdigest()
        directory = self.output / "variants" / name
        texts = {self.sides.places[name]: data for name, data in sources.items()}
        others = {self.around.tops[0] / name: path for name, path in files.items()}
        paths = set_as_in_b.get("PYTHONPATH", os.environ.get("PYTHONPATH")) or ""
        with placed(self.around, directory, texts, files=others, paths=paths, keep=self.keep) as place:
            words = (*recipe.options, *self.options, *self.reference.ends, *recipe.words_at(place))
            done = capture(self.output / name, place, words, set_as_in_b, python, again=False)
        self._check(done, sources)
        return done

    def _started(self, elements: Sequence[Element]) -> tuple[Recipe, dict[str, str | None], str]:
        """The recipe of a with b's settings among `elements`, the environment variables to set, and the interpreter."""
        recipe = self.sides.recipe
        named, variables, options = arguments(recipe.arguments), dict(recipe.environment), list(recipe.options)
        for item in on_axes(elements, *SETTINGS):
            if item.axis == "argument":
                named[item.name] = item.b
            elif item.axis == "environment":
                variables[item.name] = item.b
            elif (option := f"--{item.name}") == "--seed":
                at = options.index(option) if option in options else len(options)
                options[at : at + 2] = [] if item.b is None else [option, str(item.b)]
            elif option == "--deterministic":
                options = [word for word in options if word != option] + [option] * bool(item.b)
        changed = bool(on_axes(elements, "argument"))
        words = tuple(command_line(named)) if changed else recipe.arguments
        python = next((item.b for item in on_axes(elements, "python")), recipe.python)
        return replace(recipe, options=tuple(options), arguments=words), variables, python

    def _check(self, done: Rerun, sources: Mapping[str, bytes]) -> None:
        """Check that the changed files were the ones imported.

        Raises:
            UsageError: another version of one was imported, from elsewhere.
        """
        if not done.usable:
            return
        changes = [item for item in self.elements if isinstance(item, Change)]
        changed = {each.file for item in changes for each in item.pieces or (item,)}
        with open_run(done.run) as run:
            ran = {**opened_files(run), **Sources(run).digests}
        for name in sorted(changed & sources.keys()):
            if name in ran and ran[name] != source_digest(sources[name]):
                raise UsageError(
                    f"{name} was not read from the directory of the variant, but from where it is installed or an "
                    "absolute path leads: its changes cannot be tried"
                )


def _end_of(done: Rerun) -> End:
    """How an attempt's script ended; only the exit code where it made no run."""
    try:
        with open_run(done.run) as run:
            return replace(end_of(run), exit_code=done.exit_code)
    except StoreError:  # it did not come to make one
        return End(done.exit_code)


def sources_with(elements: Sequence[Element], sides: Sides) -> dict[str, bytes]:
    """A's source files with the changes among `elements`, as bytes by name.

    Raises:
        ValueError: a file cannot be parsed then, or uses a name that neither version leaves undefined.
    """
    texts = {**sides.inert, **sides.a}
    changes = [item for item in elements if isinstance(item, Change)]
    pieces = [piece for change in changes for piece in change.pieces or (change,)]
    for name in {piece.file for piece in pieces}:
        text = with_edits([piece for piece in pieces if piece.file == name], texts.get(name), sides.b[name])
        if text is not None:
            if name.endswith(".py") and undefined(text) - undefined(sides.b[name]) - undefined(texts.get(name)):
                raise ValueError(name)
            texts[name] = text
    return {name: encoded(text) for name, text in texts.items()}
