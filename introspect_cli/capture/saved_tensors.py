"""The tensors of the current step that are stored whole, or held in case that something happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from introspect_cli.capture.step_block import SavedTensor
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.views import in_memory

if TYPE_CHECKING:
    import threading

    from introspect_cli.capture.keeping import Keeping
    from introspect_cli.capture.sites import Sites
    from introspect_cli.tensors.summarizer import Summarizer


class SavedTensors:
    """Copies tensors as they are recorded; the recorder's lock is held.

    Attributes:
        of_step: those of the current step so far.
        are_wanted: whether any may be.
    """

    def __init__(
        self, globs: tuple[str, ...], summarizer: Summarizer, keeping: Keeping, sites: Sites, lock: threading.RLock
    ) -> None:
        self.are_wanted = bool(globs) or keeping.box is not None
        self._summarizer, self._keeping, self._sites, self._lock = summarizer, keeping, sites, lock
        self.of_step: list[SavedTensor] = []

    def save(self, site: int, slot: int, value: torch.Tensor | Placed) -> None:
        """Copy what is stored whole, or held in case that something happens."""
        box, always = self._keeping.box, site in self._sites.whole
        if not always and box is None:
            return
        value = value.local if isinstance(value, Placed) else value
        if always:
            if value.layout is not torch.strided or in_memory(value.shape, value.stride()) is None:
                self.of_step.append(SavedTensor(slot, self._summarizer.copied(value)))
        elif box is not None and box.takes(self._sites.of[site], value):
            try:
                self.of_step.append(SavedTensor(slot, self._summarizer.copied(value), always=False))
            except Exception as error:  # there is no memory for it, or no way to copy it
                box.failed(error)

    def compared(self, agreed: int, diverged: tuple[int | None] | None) -> None:
        """Hear what a comparison says: up to which step the runs agree, or where they diverge."""
        box = self._keeping.box
        if box is None or not box.open:
            return
        with self._lock:
            if diverged is None:
                box.agreed(agreed)
            else:
                box.diverged(*diverged)

    def turn(self) -> None:
        """The step is over: hold nothing; what was handed on stays as it is."""
        self.of_step = []
        if self._keeping.box is not None:
            self._keeping.box.turn()
