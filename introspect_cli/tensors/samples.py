"""The checksums of a tensor's samples added up: what does not depend on which rank has which sample, or in what order.

Ranks that share out a batch have none of the checksums of one process, and extrema and means are the same for two
orders of its tokens. Each index of the first dimension has a checksum of its own, and the sum of all of them is the
same number however the samples are dealt out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from introspect_cli.sums import MASK, header
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors.cpu import CODES
from introspect_cli.tensors.special import PLAIN, is_wrapped
from introspect_cli.tensors.views import address_of, unobserved

_COPIED: Final = 1 << 26
"""Bytes of a tensor that is not contiguous, up to which it is copied for this."""


def sum_of_samples(tensor: torch.Tensor) -> int | None:
    """The checksums of all samples of a tensor, added up modulo 2**64.

    Returns:
        None of what is no plain tensor with samples in the memory of the CPU, or where there are no compiled kernels.
    """
    if k.KERNELS is None or type(tensor) not in PLAIN or is_wrapped(tensor):
        return None
    with unobserved():
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return None
        code, total = CODES.get(tensor.dtype), tensor.numel()
        if code in (None, k.TABLE) or not tensor.dim() or not total:
            return None
        size, each = tensor.element_size(), total // len(tensor)
        if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + 1) * size:
            return None  # freed
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            if total * size > _COPIED:
                return None
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        elif tensor.untyped_storage().nbytes() < (tensor.storage_offset() + total) * size:
            return None
        name = str(tensor.dtype).removeprefix("torch.")
        sample = _header(name, tuple(tensor.shape[1:]))
        found: int = k.KERNELS.sum_of_samples(address_of(tensor), total, each, code, sample)
        return found & MASK


@lru_cache(maxsize=256)
def _header(dtype: str, shape: tuple[int, ...]) -> int:
    return header(dtype, shape)
