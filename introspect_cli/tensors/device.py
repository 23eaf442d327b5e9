"""Rows on an accelerator: one preallocated buffer a device, read back once a step.

The problem: reading any value from a device makes the host wait for it, and a step has thousands of tensors. The
way: every row is written into a buffer on the device, grown by doubling, and the buffer is copied once, at the
end of the step. Streams that wrote rows are waited for, on the device, before the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    from introspect_cli.tensors.rows import Rows

_FIRST_ROWS: Final = 256


class DeviceRows:
    """The buffer of one device, and which slots its rows belong to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros((_FIRST_ROWS, r.WORDS), dtype=torch.int64, device=device)
        self._streams: set[Any] = set()
        self.slots: list[int] = []

    def put(self, slot: int, row: torch.Tensor) -> None:
        """Queue the copy of a row, int64, shape (32,), on this device."""
        used = len(self.slots)
        if used == len(self._buffer):
            grown = torch.zeros((2 * used, r.WORDS), dtype=torch.int64, device=self._device)
            grown[:used] = self._buffer
            self._buffer = grown
        self._buffer[used] = row
        if self._device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(self._device))
        self.slots.append(slot)

    def take(self) -> Rows:
        """The rows put since the last take, on the host, shape (len(slots),32); empties the buffer's slots."""
        if self._streams:
            here = torch.cuda.current_stream(self._device)
            for stream in self._streams - {here}:
                here.wait_stream(stream)
            self._streams.clear()
        rows: Rows = self._buffer[: len(self.slots)].cpu().numpy().copy().view(np.uint64)
        self.slots = []
        if self._device.type == "mps":
            narrow = rows[:, r.MIN :].astype(np.uint32).view(np.float32)
            rows[:, r.MIN :] = narrow.astype(np.float64).view(np.uint64)
        return rows
