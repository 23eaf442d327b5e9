"""Where a shard's elements lie in the whole tensor.

Terms of all three kernels are keyed by the element's index in the whole tensor, and a rank holds a box of it. A box is
a list of runs, each contiguous both in the shard and in the whole; a run and the index of its first element are all a
kernel needs.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from introspect_cli.records import Part

FLAT: Final = "flat"
"""Source of a part that is a stretch of the flattened tensor."""


def run_offsets(part: Part, whole: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of a part: the row-major index in the whole of each run's first element, and how many elements.

    Args:
        part: which indices are held.
        whole: the whole tensor's sizes.

    Returns:
        In the order in which the local tensor has them, row-major.
    """
    if part.source == FLAT:
        return [span for own in part.ranges for span in own]
    if not part.numel:
        return []
    full = [own == ((0, size),) for own, size in zip(part.ranges, whole, strict=True)]
    cut = max((dim for dim, is_full in enumerate(full) if not is_full), default=-1)
    if cut < 0:
        return [(0, math.prod(whole))]
    steps = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    leading = itertools.product(
        *([index for first, length in own for index in range(first, first + length)] for own in part.ranges[:cut])
    )
    bases = [sum(i * step for i, step in zip(index, steps[:cut], strict=True)) for index in leading]
    return [(base + first * steps[cut], length * steps[cut]) for base in bases for first, length in part.ranges[cut]]


def runs(local: torch.Tensor, whole: Sequence[int], part: Part) -> Iterator[tuple[int, torch.Tensor]]:
    """A part's runs, each with its global index: what `reference.row` and the compiled kernels take.

    Args:
        local: the part's elements; made contiguous as a whole.
        whole: the whole tensor's sizes.
        part: which elements these are.
    """
    flat = local.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    at = 0
    for offset, length in run_offsets(part, whole):
        yield offset, flat[at : at + length]
        at += length
