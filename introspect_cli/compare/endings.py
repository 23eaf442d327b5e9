"""A run that ended by an exception where the other went on: told first, with its line and what agreed until then.

Without it the answer would be that a module does not run in a step of b, or that the runs have no step in common, which
is true and hides what a person sees at once in the terminal. An exception in a step after the first divergence is a
consequence, or another fault, and is told as a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.reasons.words import what
from introspect_cli.compare.table import EQUAL, OTHER, WITHIN

if TYPE_CHECKING:
    from introspect_cli.compare.compared import Compared
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.store.reader import Run

_LONGEST = 160
_DIRECTORIES = re.compile(r"(?:/[^/\s'\"]+)+/")


@dataclass(frozen=True)
class Raised:
    """An exception that ended a run.

    Attributes:
        side: a or b.
        exception: class and message.
        file: of the innermost frame that is the user's own; "" for none.
        line: its line.
        function: its function; "" for none.
    """

    side: str
    exception: str
    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def same_as(self) -> tuple[str, str]:
        """What it shares with the same exception of another run, whose directory may be another one."""
        return _DIRECTORIES.sub("/", self.exception), self.function

    @property
    def words(self) -> str:
        """`ValueError: bad shape at model.py:41 in forward`."""
        text = " ".join(self.exception.split())
        text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
        inside = f" in {self.function}" if self.function not in {"", "<module>"} else ""
        return f"{text}, at {self.file}:{self.line}{inside}" if self.file else text


def raised(run: Run, side: str) -> Raised | None:
    """The exception that ended a run; None where none did."""
    manifest = run.manifest
    text = manifest.get("exception")
    if manifest.get("how") != "exception" or not isinstance(text, str) or not text:
        return None
    at = manifest.get("raised_at")
    if not isinstance(at, Mapping) or not isinstance(at.get("file"), str) or not isinstance(at.get("line"), int):
        return Raised(side, text)
    return Raised(side, text, at["file"], at["line"], str(at.get("function") or ""))


def one_raised(a: Run, b: Run) -> Raised | None:
    """The exception that ended one run and not the other, or not in the same way; b's where both have one."""
    one, two = raised(a, "a"), raised(b, "b")
    if one is not None and two is not None and one.same_as == two.same_as:
        return None
    return two or one


def after_the_end(a: Run, b: Run) -> str:
    """What follows the sentence where all agrees and a run ended by an exception; "" where none did."""
    ending = one_raised(a, b)
    if ending is None:
        return ""
    other = raised(a, "a") if ending.side == "b" else None
    rest = f", and run a by another one: {other.words}" if other is not None else ""
    return f" After that, run {ending.side} ended by an exception: {ending.words}{rest}."


def before_the_end(compared: Compared) -> str:
    """The sentence where a run ended by an exception and nothing that both recorded differs; "" else."""
    ending = one_raised(compared.a, compared.b)
    if ending is None:
        return ""
    side, run = ending.side, dict(compared.runs)[ending.side]
    if not compared.until:
        if any(len(run.rank(rank)) for rank in run.ranks):
            return f"Run {side} ended by an exception: {ending.words}. The runs have no step in common."
        return f"Run {side} ended by an exception before its first step was complete: {ending.words}."
    paired = [outcome.paired for outcome in compared.outcomes if len(outcome.paired)]
    if not any(steps.tail_a if side == "b" else steps.tail_b for steps in paired):
        return ""
    everything = "everything selected" if compared.options.narrowed else "everything that both recorded"
    within = " within tolerance" if compared.tally["within"] else ""
    return (
        f"Run {side} ended by an exception where run {OTHER[side]} goes on: {ending.words}. Until then, "
        f"{compared.until}, {everything} agrees{within}."
    )


def cut_short(scene: Scene) -> Raised | None:
    """The exception that cut off the step of the first divergence; None where none did."""
    ending = one_raised(*scene.runs)
    if ending is None:
        return None
    first, in_b = scene.first, ending.side == "b"
    cut = scene.lacks == ending.side or scene.runs[in_b].manifest.get("remainder") is True
    reader, step = (scene.step.comparison.b, first.step_b) if in_b else (scene.step.comparison.a, first.step)
    return ending if cut and reader.last_step == step else None


def at_the_end(scene: Scene, place: str, why: str) -> tuple[str, str, str]:
    """Place and why where a run ended by an exception, and a note of that; "" where there is no note.

    The exception comes first where the first divergence is in the step that it cut off. Where that is only what the
    run did not come to any more, the exception is the whole answer.
    """
    end = one_raised(*scene.runs)
    if end is None:
        return place, why, ""
    if cut_short(scene) is None:
        return place, why, f"Run {end.side} ended by an exception, after the first divergence: {end.words}."
    agreed = _last_agreed(scene)
    until = f"The last record that agrees is {agreed}."
    if not agreed:
        until = f"In this step nothing agrees before; {scene.all_before}."
    where = f"Run {end.side} ended by an exception in {scene.first.step_words} where run {OTHER[end.side]} goes on"
    how = f"{end.words}. {until}"
    return (where, how, "") if scene.lacks == end.side else (f"{where}: {how} {place}", why, "")


def _last_agreed(scene: Scene) -> str:
    """What the last record of the step is that agrees before the first divergence; "" where none does."""
    step = scene.step
    agree = np.isin(step.state, (EQUAL, WITHIN)) & (step.table.order_of < scene.first.sequence)
    numbers = np.flatnonzero(agree)
    if not len(numbers):
        return ""
    last = int(numbers[np.argmax(step.table.order_of[numbers])])
    return what(step.alignment.site(last))
