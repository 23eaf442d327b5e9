"""A failure of ours must never become the script's.

Every entry point of a probe runs under the guard. What it raises is caught, the probe is switched off, one warning
says what is no longer seen, and the manifest keeps the sentence so that a diff can say so too.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Guard:
    """Remembers which probes have failed and what is no longer observed because of it."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Take the function that shows a warning to the user."""
        self._warn = warn
        self.sentences: list[str] = []
        self.failed: set[str] = set()
        self.details: list[str] = []

    def failure(self, probe: str, lost: str, error: Exception) -> None:
        """Note that `probe` failed; `lost` says what is no longer seen."""
        if probe in self.failed:
            return
        self.failed.add(probe)
        where = traceback.extract_tb(error.__traceback__)
        line = f" at {where[-1].filename.rpartition('/')[2]}:{where[-1].lineno}" if where else ""
        self.details.append("".join(traceback.format_exception(error))[-4000:])
        self.note(f"{lost} not observed from here on: {type(error).__name__}: {error}{line}")

    def note(self, sentence: str) -> None:
        """Keep and show a sentence about something that is not seen."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            self._warn(sentence)
