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
from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.compare.settings.settings import arguments
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.edits import apply_edits
from introspect_cli.rerun.changes.elements import Element, command_line, on_axis
from introspect_cli.rerun.changes.texts import encode_text, opened_files
from introspect_cli.rerun.place import build_place
from introspect_cli.rerun.variant import Reference, Rerun, capture
from introspect_cli.store.run import Sources, open_run
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from introspect_cli.rerun.changes.sides import Sides
    from introspect_cli.rerun.commits import Command
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
        elements: what differs between them, the likeliest cause first.
        reference: run a, and the last step to run.
        command: further capture options, and what is linked and not copied.
        output: where runs are kept.
        most: how many runs may be made.
        tell: shown a line for each.
        answers: the result of each, by the positions of the elements that were as in b.
        runs: how many runs were made.
    """

    sides: Sides
    elements: Sequence[Element]
    reference: Reference
    command: Command
    output: Path
    most: int
    tell: Callable[[str], None]
    answers: dict[frozenset[int], Attempt] = field(default_factory=dict)
    runs: int = 0

    def judge(self, chosen: frozenset[int], name: str) -> Verdict:
        """Run a with the changes `chosen`, and tell in a line how that ends; asked again, the first answer is returned.

        Args:
            chosen: positions in `elements`; empty to run a unchanged.
            name: what is run, in words, for the line.

        Returns:
            SAME as a, DIVERGED from it, or UNDECIDED: it fails, records no step, or its files cannot be parsed (that is
            no run, and nothing is told).

        Raises:
            OutOfRunsError: no more runs are allowed.
            UsageError: a changed file was imported from elsewhere than the place.
        """
        if chosen not in self.answers:
            self.answers[chosen] = attempt = self._make_attempt(chosen)
            first = attempt.result.first if attempt.result is not None else None
            said = {
                Verdict.SAME: "the same as a",
                Verdict.DIVERGED: "diverges from a" + (f" at step {first.step}" if first is not None else ""),
                Verdict.UNDECIDED: f"cannot be told ({self.why_undecided(chosen)})",
            }
            if attempt.done is not None:
                self.tell(f"{name}: {said[attempt.verdict]}")
        return self.answers[chosen].verdict

    @property
    def undecided(self) -> int:
        """Number of runs whose verdict was UNDECIDED."""
        return sum(one.verdict is Verdict.UNDECIDED and one.done is not None for one in self.answers.values())

    def why_undecided(self, chosen: frozenset[int]) -> str:
        """The reason, in words, why an attempt is UNDECIDED; KeyError where `chosen` was not judged."""
        _, result, done = self.answers[chosen]
        if done is None:
            return "a file cannot be read by python"
        if done.exit_code:
            return f"it ends with {done.exit_code}: {done.last_lines.rpartition(' / ')[2]}"
        return result.sentence if result is not None else done.last_lines

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
            sources = sources_with(elements, self.sides)
        except ValueError:
            return Attempt(Verdict.UNDECIDED)
        if self.runs >= self.most:
            raise OutOfRunsError
        self.runs += 1
        done = self._run(elements, sources)
        if done.exit_code not in {0, self.reference.exit_code}:  # it may diverge by failing
            return Attempt(Verdict.UNDECIDED, done=done)
        return Attempt(*self.reference.judge(done), done)

    def _run(self, elements: Sequence[Element], sources: Mapping[str, bytes]) -> Rerun:
        """Capture a with these changes and source files, or take a complete run that is kept under the same name.

        The name is a hash of the files, the command and the variables.

        Raises:
            UsageError: a changed file was imported from elsewhere than the place.
        """
        recipe, variables = self._command_with(elements)
        described = [
            sorted((name, source_digest(data)) for name, data in sources.items()),
            [*self.command.options, *self.command.links, *recipe.words, self.reference.until],
            sorted(variables.items()),
        ]
        name = hashlib.blake2b(json.dumps(described).encode(), digest_size=6).hexdigest()
        around, places = self.sides.around, self.sides.places
        texts = {places[name]: data for name, data in sources.items()}
        paths = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH")) or ""
        at = self.output / "variants" / name
        with build_place(around, at, texts, links=self.command.links, paths=paths) as place:
            words = (*recipe.options, *self.command.options, *self.reference.stop_options, *recipe.words_at(place))
            done = capture(self.output / name, place, words, variables, recipe.python, again=False)
        self._check_imported(done, sources)
        return done

    def _command_with(self, elements: Sequence[Element]) -> tuple[Recipe, dict[str, str | None]]:
        """(a's recipe with b's arguments and options among `elements`, variables to set: None removes one)."""
        recipe = self.sides.recipe
        named, variables, options = arguments(recipe.arguments), dict(recipe.environment), list(recipe.options)
        variables |= {item.name: item.b for item in on_axis(elements, "environment")}
        for item in on_axis(elements, "capture"):
            options = [word for word in options if word.partition("=")[0] != f"--{item.name}"]
            if item.b is not None and item.b is not False:
                options.append(f"--{item.name}" if item.b is True else f"--{item.name}={item.b}")
        changed = {item.name: item.b for item in on_axis(elements, "argument")}
        words = tuple(command_line(named | changed)) if changed else recipe.arguments
        return replace(recipe, options=tuple(options), arguments=words), variables

    def _check_imported(self, done: Rerun, sources: Mapping[str, bytes]) -> None:
        """Check that the files that any change concerns were read as `sources` has them.

        A run without a step passes, and so does a file that it did not read.

        Raises:
            UsageError: another version of one was read.
        """
        if not done.usable:
            return
        changes = [item for item in self.elements if isinstance(item, Change)]
        changed = {each.file for item in changes for each in item.pieces or (item,)}
        with open_run(done.run) as run:
            ran = {**opened_files(run), **Sources(run).digests}
        for name in sorted(changed & sources.keys() & ran.keys()):
            if ran[name] != source_digest(sources[name]):
                raise UsageError(
                    f"{name} was not read from the directory of the variant, but from where it is installed or an "
                    "absolute path leads: its changes cannot be tried"
                )


def sources_with(elements: Sequence[Element], sides: Sides) -> dict[str, bytes]:
    """A's source and opened files with the changes among `elements`, as bytes by name.

    Settings among `elements` are passed over. Files that only b has are always included.

    Raises:
        ValueError: a changed file cannot be parsed.
    """
    texts = {**sides.b, **sides.a}
    changes = [item for item in elements if isinstance(item, Change)]
    pieces = [piece for change in changes for piece in change.pieces or (change,)]
    for name in {piece.file for piece in pieces}:
        text = apply_edits([piece for piece in pieces if piece.file == name], sides.a.get(name), sides.b[name])
        if text is not None:
            texts[name] = text
    return {name: encode_text(text) for name, text in texts.items()}
