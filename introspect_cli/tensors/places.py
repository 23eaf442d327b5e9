"""Which part of a distributed tensor this rank holds.

A DTensor tells a mesh and a placement for each of its dimensions, and torch's own helper knows neither tensors that
two mesh dimensions cut one inside the other (FSDP around tensor parallelism) nor pending sums. So the ranges of
indices of each tensor dimension are cut as the placements say, by torch.chunk's rule, from public attributes alone.
Ranges, not lists of indices, so that a vocabulary costs no more than a bias.

Terms of all three kernels are keyed by the element's index in the whole tensor, and a rank holds a box of it. A box is
a list of runs, each contiguous both in the shard and in the whole; a run and the index of its first element are all a
kernel needs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.records import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placed:
    """A local tensor with its part of a whole, where the tensor itself does not tell.

    Attributes:
        local: what this rank holds.
        shape: of the whole.
        part: which part.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    part: Part


def part_of(tensor: Any) -> Part | None:
    """This rank's part of a DTensor, by its mesh and placements; no other rank is asked.

    Pending sums over several mesh dimensions become one, over as many ranks as these have together.

    Returns:
        None where this rank is outside the tensor's mesh.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    dims: list[Ranges] = [((0, int(size)),) for size in tensor.shape]
    reduction, reduced_over = "", 1
    for number, placement in enumerate(tensor.placements):
        size = mesh.shape[number]
        if placement.is_partial():
            reduction, reduced_over = str(placement.reduce_op), reduced_over * size
        elif not placement.is_replicate():
            factor = getattr(placement, "split_factor", 1)
            pieces = [_chunk_of(dims[placement.dim], factor, piece) for piece in range(factor)]
            mine = [_chunk_of(piece, size, coordinate[number]) for piece in pieces]
            dims[placement.dim] = _merged_ranges(span for piece in mine for span in piece)
    return Part(tuple(dims), reduction, reduced_over)


def _chunk_of(ranges: Ranges, chunks: int, number: int) -> Ranges:
    """One chunk of a list of ranges, by torch.chunk's rule: all of equal length, but the last ones short or empty.

    Args:
        ranges: first index and length of each, taken end to end.
        chunks: how many chunks they are cut into.
        number: which of these, from 0.
    """
    total = sum(length for _, length in ranges)
    size = -(-total // chunks)
    start, stop = number * size, min((number + 1) * size, total)
    out, at = [], 0
    for first, length in ranges:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            out.append((first + low, high - low))
        at += length
    return tuple(out)


def _merged_ranges(spans: Iterator[tuple[int, int]]) -> Ranges:
    """Ranges in their order, each one that begins where the one before ended merged with it."""
    out: list[tuple[int, int]] = []
    for first, length in spans:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return tuple(out)


def is_whole(part: Part, shape: Sequence[int]) -> bool:
    """Whether a part is the whole tensor of this shape: all indices, nothing to be reduced, and not `flat`."""
    return not part.reduction and part.source != "flat" and part.ranges == tuple(((0, size),) for size in shape)


FLAT: Final = "flat"
"""Source of a part that is a stretch of the flattened tensor."""


def run_offsets(part: Part, whole: Sequence[int]) -> list[tuple[int, int]]:
    """Where the contiguous runs of a part lie in the whole: the row-major index of the first element, and the length.

    Args:
        part: the part.
        whole: sizes of the whole tensor.

    Returns:
        In the order in which the local tensor has them, row-major; of a part of a flat tensor the ranges themselves, in
        the flat tensor. [] for an empty part that is not of a flat tensor.
    """
    if part.source == FLAT:
        return [span for ranges in part.ranges for span in ranges]
    if not part.numel:
        return []
    full = [ranges == ((0, size),) for ranges, size in zip(part.ranges, whole, strict=True)]
    cut = max((dim for dim, is_full in enumerate(full) if not is_full), default=-1)
    if cut < 0:
        return [(0, math.prod(whole))]
    steps = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    leading = itertools.product(
        *([index for first, length in ranges for index in range(first, first + length)] for ranges in part.ranges[:cut])
    )
    bases = [sum(i * step for i, step in zip(index, steps[:cut], strict=True)) for index in leading]
    return [(base + first * steps[cut], length * steps[cut]) for base in bases for first, length in part.ranges[cut]]


def runs(local: torch.Tensor, whole: Sequence[int], part: Part) -> Iterator[tuple[int, torch.Tensor]]:
    """Row-major index in the whole and elements, shape (n,), of each contiguous run of a part, as of `run_offsets`.

    Elements are views of `local`, or of one copy of it where it is not contiguous, or conjugated or negated lazily.

    Args:
        local: what this rank holds, of any strides.
        whole: sizes of the whole tensor.
        part: which part of it `local` is, with as many elements.
    """
    flat = local.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    at = 0
    for offset, length in run_offsets(part, whole):
        yield offset, flat[at : at + length]
        at += length
