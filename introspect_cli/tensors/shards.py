"""Where a shard's elements lie in the whole tensor.

Terms of all three kernels are keyed by the element's index in the whole tensor, and a rank holds a box of it. A box is
a list of runs, each contiguous both in the shard and in the whole; a run and the index of its first element are all a
kernel needs.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


def run_offsets(local: Sequence[int], whole: Sequence[int], start: Sequence[int]) -> tuple[int, list[int]]:
    """The runs of a box.

    Args:
        local: the box's sizes.
        whole: the whole tensor's sizes.
        start: the box's first index in every dimension.

    Returns:
        Elements in a run, and the row-major index in the whole of each run's first element, in the box's
        row-major order.
    """
    if 0 in local:
        return 0, []
    cut = max((dim for dim in range(len(local)) if local[dim] != whole[dim]), default=0)
    steps = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    length = math.prod(local[cut:])
    base = sum(first * step for first, step in zip(start, steps, strict=True))
    leading = itertools.product(*(range(size) for size in local[:cut]))
    offsets = [base + sum(i * step for i, step in zip(index, steps[:cut], strict=True)) for index in leading]
    return length, offsets


def runs(shard: torch.Tensor, whole: Sequence[int], start: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """A shard's runs, each with its global index: what `reference.row` and the compiled kernels take.

    Args:
        shard: the box's elements; made contiguous as a whole.
        whole: the whole tensor's sizes.
        start: the box's first index in every dimension.
    """
    length, offsets = run_offsets(shard.shape, whole, start)
    flat = shard.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    for number, offset in enumerate(offsets):
        yield offset, flat[number * length : (number + 1) * length]
