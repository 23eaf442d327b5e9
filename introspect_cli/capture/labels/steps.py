"""The labels of the current step, gathered while it runs.

When a step ends, a framework may have counted it already, or not yet. While the model runs, its numbers are those that
the script itself would print there. So they are read at each forward pass of training, and a step of several batches
has the first and the last of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.capture.labels.frameworks import Found, ask

if TYPE_CHECKING:
    from introspect_cli.capture.probes.base import Guard


class StepLabels:
    """Labels of the step that runs."""

    def __init__(self, guard: Guard) -> None:
        """Start without any."""
        self._guarded = guard.around("labels", "the framework's own step numbers are")
        self._guarded.on = True
        self._first: Found = {}
        self._last: Found = {}

    def see(self) -> None:
        """Read the labels; a forward or a backward pass of training is about to run."""
        if not self._guarded.on:
            return
        with self._guarded:
            found = ask()
            if found:
                self._first = self._first or found
                self._last = found

    def epoch(self) -> int | None:
        """The epoch at this moment; None where no framework counts any."""
        with self._guarded:
            epoch = ask().get("epoch")
            return math.floor(epoch) if isinstance(epoch, (int, float)) else None
        return None

    def take(self) -> Found:
        """The labels of the step, which has ended."""
        first, last = self._first, self._last
        self._first = self._last = {}
        labels = dict(first)
        one, two = first.get("batch"), last.get("batch")
        if one != two and first.get("epoch") == last.get("epoch") and isinstance(one, int) and isinstance(two, int):
            labels["batch"] = (one, two)
        return labels
