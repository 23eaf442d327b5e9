"""Exceptions that ended a run where the other went on, and whether one cut off the first divergence.

Without them the answer would be that a module does not run in a step of b, which is true and hides what the terminal
shows. An exception in a step after the first divergence is told as a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.store.run import Run

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
        """Key by which exceptions of two runs are the same: class and message without directories, and function."""
        return _DIRECTORIES.sub("/", self.exception), self.function

    @property
    def words(self) -> str:
        """The exception with its place: `ValueError: bad shape, at model.py:41 in forward`.

        Without the place it has at most `_LONGEST` characters.
        """
        text = " ".join(self.exception.split())
        text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
        inside = f" in {self.function}" if self.function not in {"", "<module>"} else ""
        return f"{text}, at {self.file}:{self.line}{inside}" if self.file else text


def exception_of(run: Run, side: str) -> Raised | None:
    """The exception that ended a run, as its manifest notes it; None where none did.

    `side` is what the run is called in words: `a`, `b` or "".
    """
    manifest = run.manifest
    text = manifest.get("exception")
    if manifest.get("how") != "exception" or not isinstance(text, str) or not text:
        return None
    at = manifest.get("raised_at")
    if not isinstance(at, Mapping) or not isinstance(at.get("file"), str) or not isinstance(at.get("line"), int):
        return Raised(side, text)
    return Raised(side, text, at["file"], at["line"], str(at.get("function") or ""))


def exception_of_one(one: Raised | None, two: Raised | None) -> Raised | None:
    """The exception of the run that alone ended by one; b's where they differ.

    None where both are the same or none is.
    """
    if one is not None and two is not None and one.same_as == two.same_as:
        return None
    return two or one


def cut_short(scene: View) -> Raised | None:
    """The exception that ended one run within the step of the first divergence; b's where two different ones did.

    None for none, or the same in both runs.
    """
    one, two = (exception_of(run, side) for run, side in zip(scene.runs, "ab", strict=True))
    endings = () if exception_of_one(one, two) is None else (two, one)
    return next((ending for ending in endings if ending is not None and _is_in_diverging_step(ending, scene)), None)


def _is_in_diverging_step(ending: Raised, scene: View) -> bool:
    """Whether its run ended in the first divergence's step, with that record missing or the step cut off."""
    first, in_b = scene.first, ending.side == "b"
    cut = scene.side_without == ending.side or scene.runs[in_b].manifest.get("remainder") is True
    reader, step = (scene.step.comparison.b, first.step_b) if in_b else (scene.step.comparison.a, first.step)
    return cut and reader.last_step == step
