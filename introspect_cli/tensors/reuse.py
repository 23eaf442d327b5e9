"""Summaries that need not be computed twice, and are never stale; and a glance at memory.

One module's output is the next one's input, frozen parameters and untouched buffers come by every step, and the full
summary costs three times its checksum. Version counters do not tell whether memory changed: `.data`, numpy and shared
storage write past them. So what was summarised is remembered by its address; when the address comes again with the same
type, size and a few equal bytes, the checksum alone is computed, and the old row taken only if it agrees. Every answer
is of the contents as they are now; address and sample only decide whether trying is worth it. Rows used in one step are
kept for the next, and no tensor is referred to.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from introspect_cli.tensors import kernels
from introspect_cli.tensors.views import address_of

LIMIT: Final = 8192
"""Rows kept from one step to the next, at most: 2 MB."""


def new_memory() -> Any:
    """Rows of this step and the last by the address of their elements, for the compiled intake.

    Call `turn()` at the end of a step, before its rows are used again: it copies those that the step used. `clear()`
    forgets everything.
    """
    return kernels.KERNELS.memory(LIMIT)


def fingerprint(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Version counter, address and `sampled_hash` of a tensor; where any differs later, it was written to or moved.

    Returns:
        None where torch refuses to tell one of them, as for inference tensors and subclasses without storage.
    """
    try:
        version, address = tensor._version, address_of(tensor)  # noqa: SLF001 - documented by use; there is no public counter
        return version, address, sampled_hash(tensor, address)
    except (RuntimeError, NotImplementedError):
        return None


def sampled_hash(tensor: torch.Tensor, address: int) -> int:
    """64-bit hash of bytes at some places of a contiguous CPU tensor, of all its bytes if they are few; 0 for others.

    Others are those that are not contiguous or not on the CPU, and those whose storage was freed.

    Args:
        tensor: any tensor.
        address: where its elements are, as of `views.address_of`.

    Raises:
        RuntimeError: the tensor has no storage of its own.
    """
    if not address or not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return 0
    width = tensor.element_size()
    size, start = tensor.numel() * width, tensor.storage_offset() * width
    if address == start or tensor.untyped_storage().nbytes() < start + size:
        return 0
    seen: int = kernels.KERNELS.glance(address, size)
    return seen
