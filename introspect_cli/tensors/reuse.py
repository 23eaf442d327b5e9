"""Summaries that need not be computed twice, and are never stale; and a glance at memory.

One module's output is the next one's input, frozen parameters and untouched buffers come by every step, and the full
summary costs three times its checksum. Version counters do not tell whether memory changed: `.data`, numpy and shared
storage write past them. So what was summarised is remembered by its address; when the address comes again with the same
type, size and a few equal bytes, the checksum alone is computed, and the old row taken only if it agrees. Every answer
is of the contents as they are now; address and sample only decide whether trying is worth it. Rows used in one step are
kept for the next, and no tensor is referred to.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Final

import numpy as np
import torch

from introspect_cli.tensors import kernels
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.views import address_of

_LIMIT: Final = 8192
"""Rows kept from one step to the next, at most: 2 MB."""

_NONE: Final = np.empty((0, r.WORDS), np.uint64)

Known = tuple[int, int, int]
"""What was at an address: a number for the element type, elements, and the address of the row until the next take."""


class Memory:
    """Rows of this step and the last, by the address of the elements they are of.

    Attributes:
        now: what this step has; the compiled intake reads and writes it.
        before: what the last step had.
    """

    def __init__(self) -> None:
        self.now: dict[int, Known] = {}
        self.before: dict[int, Known] = {}
        self._kept = _NONE

    def find(self, address: int, kind: int, count: int) -> int:
        """Address of the row of what may still be at an address, 0 if there is none; the kernel compares."""
        known = self.now.get(address) or self.before.get(address)
        if known is None or known[1] != count or known[0] != kind:
            return 0
        self.now[address] = known
        return known[2]

    def note(self, address: int, known: Known) -> None:
        """Remember a row."""
        self.now[address] = known

    def turn(self) -> None:
        """Keep what this step used for the next one; its rows are about to be given away."""
        if not self.now:
            self.before, self._kept = {}, _NONE
            return
        used = list(self.now.items())[:_LIMIT]
        kept = np.empty((len(used), r.WORDS), np.uint64)
        base = kept.ctypes.data
        kernels.KERNELS.rows([row for _, (_, _, row) in used], base)  # type: ignore[union-attr]  # who else notes rows?
        self.before = {
            address: (kind, count, base + index * r.ROW_BYTES) for index, (address, (kind, count, _)) in enumerate(used)
        }
        self.now, self._kept = {}, kept

    def clear(self) -> None:
        """Forget everything."""
        self.now, self.before, self._kept = {}, {}, _NONE


def stand(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Count of in-place writes, address, and a glance; None for what has no memory (inference tensors, subclasses)."""
    try:
        version, address = tensor._version, address_of(tensor)  # noqa: SLF001 - documented by use; there is no public counter
        return version, address, glance(tensor, address)
    except (RuntimeError, NotImplementedError):
        return None


_PART, _PARTS = 64, 8


def glance(tensor: torch.Tensor, address: int) -> int:
    """64 bits that depend on bytes at places spread over a tensor in host memory, on all of a small one; else 0.

    Args:
        tensor: any; one that is not contiguous, not on the CPU, or whose storage was freed gives 0.
        address: where its elements are.

    Raises:
        RuntimeError: the tensor has no storage of its own.
    """
    if not address or not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return 0
    width = tensor.element_size()
    size, start = tensor.numel() * width, tensor.storage_offset() * width
    if address == start or tensor.untyped_storage().nbytes() < start + size:
        return 0
    if kernels.KERNELS is not None:
        return kernels.KERNELS.glance(address, size)  # type: ignore[no-any-return]  # a module that may be missing
    last = size - _PART
    places = [(0, size)] if size <= _PART * _PARTS else [(last * at // (_PARTS - 1), _PART) for at in range(_PARTS)]
    found = b"".join([ctypes.string_at(address + place, count) for place, count in places])
    return int.from_bytes(hashlib.blake2b(found, digest_size=8).digest(), "little")
