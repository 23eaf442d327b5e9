"""Summaries that need not be computed twice, and are never stale.

The problem: one module's output is the next one's input, frozen parameters and untouched buffers come by every step,
and the full summary costs three times its checksum. Version counters do not tell whether memory changed: `.data`,
numpy and shared storage write past them. The way: remember, by address, what was summarised there; when the address
comes again with the same type, size and a few equal bytes, compute the checksum alone, and take the old row only if
the checksum agrees. So every answer is of the contents as they are now; address and sample only decide
whether trying is worth it. Rows used in one step are kept for the next, and no tensor is referred to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    import torch

_LIMIT: Final = 8192
"""Rows kept from one step to the next, at most: 2 MB."""

Known = tuple["torch.dtype", int, int, int]
"""What was at an address: element type, elements, address of the row until the next take, and the row's slot, or
-1 - its index among the kept rows."""


class Memory:
    """Rows of this step and the last, by the address of the elements they are of."""

    def __init__(self) -> None:
        self._now: dict[int, Known] = {}
        self._before: dict[int, Known] = {}
        self._kept = r.empty(0)

    def find(self, address: int, dtype: torch.dtype, count: int) -> int:
        """Address of the row of what may still be at an address, 0 if there is none; the kernel compares."""
        known = self._now.get(address) or self._before.get(address)
        if known is None or known[1] != count or known[0] is not dtype:
            return 0
        self._now[address] = known
        return known[2]

    def note(self, address: int, known: Known) -> None:
        """Remember a row."""
        self._now[address] = known

    def turn(self, rows: r.Rows) -> None:
        """Keep what this step used for the next one.

        Args:
            rows: the step's rows, shape (n, 32), about to be given away.
        """
        used = list(self._now.items())[:_LIMIT]
        before = len(self._kept)
        places = [place + before if place >= 0 else -1 - place for _, (_, _, _, place) in used]
        self._kept = np.concatenate([self._kept, rows])[places] if places else r.empty(0)
        base = self._kept.ctypes.data
        self._before = {
            address: (dtype, count, base + index * r.ROW_BYTES, -1 - index)
            for index, (address, (dtype, count, _, _)) in enumerate(used)
        }
        self._now = {}

    def clear(self) -> None:
        """Forget everything."""
        self._now, self._before, self._kept = {}, {}, r.empty(0)
