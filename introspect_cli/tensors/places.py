"""Which part of a distributed tensor this rank holds.

A DTensor tells a mesh and a placement for each of its dimensions, and torch's own helper knows neither tensors that
two mesh dimensions cut one inside the other (FSDP around tensor parallelism) nor sums still owed. So the ranges of
indices of each tensor dimension are cut as the placements say, by torch.chunk's rule, from public attributes alone.
Ranges, not lists of indices, so that a vocabulary costs no more than a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from introspect_cli.records import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placed:
    """A local tensor and its part in a whole, where the tensor itself does not know.

    Attributes:
        local: what this rank holds.
        shape: of the whole.
        part: which part.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    part: Part


def part_of(tensor: Any) -> Part | None:
    """The part of a DTensor that this rank holds; None where the rank is outside the mesh."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    dims: list[Ranges] = [((0, int(size)),) for size in tensor.shape]
    owed, owing = "", 1
    for number, placement in enumerate(tensor.placements):
        size = mesh.shape[number]
        if placement.is_partial():
            owed, owing = str(placement.reduce_op), owing * size
        elif not placement.is_replicate():
            factor = getattr(placement, "split_factor", 1)
            pieces = [_chunk(dims[placement.dim], factor, piece) for piece in range(factor)]
            own = [_chunk(piece, size, coordinate[number]) for piece in pieces]
            dims[placement.dim] = _joined(span for piece in own for span in piece)
    return Part(tuple(dims), owed, owing)


def _chunk(ranges: Ranges, chunks: int, number: int) -> Ranges:
    """One of so many chunks of ranges: all of one size, but for the last ones, which are short or empty."""
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


def _joined(spans: Iterator[tuple[int, int]]) -> Ranges:
    out: list[tuple[int, int]] = []
    for first, length in spans:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return tuple(out)


def is_whole(part: Part, shape: Sequence[int]) -> bool:
    """Whether a part is all of the tensor, with nothing owed."""
    return not part.owed and part.source != "flat" and part.ranges == tuple(((0, size),) for size in shape)
