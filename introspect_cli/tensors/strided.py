"""How a strided tensor in CPU memory is cut into pieces, and how the compiled kernels copy each.

Reading a transposed matrix in logical order touches a cache line for each element. So it is copied, in the order of the
source's memory, in pieces of at most a chunk, which threads share and summarise where they are: in the cache. What is
found out of a shape and its strides is kept, since a step has the same ones again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from introspect_cli.tensors import kernels as k
from introspect_cli.tensors.views import cut, unobserved

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH: Final = 8
"""Bytes of an element that the kernels copy, at most."""
_LINES: Final = 16
"""Rows that a piece has at least, so that a cache line of a transposed source serves them all."""
_MOST: Final = 1 << 12
"""Pieces that are worth keeping a plan of."""


class Pieces(NamedTuple):
    """What the kernels are told of tensors of one shape and one set of strides.

    Attributes:
        pieces: int64 (n, 5): place in memory in elements, elements, index of the first, dimensions and plan of each.
        plans: int64 (m, 3, MAX_DIMS): see `copy_plan`.
    """

    pieces: NDArray[np.int64]
    plans: NDArray[np.int64]


def are_short(shape: tuple[int, ...]) -> bool:
    """Whether a chunk has rows enough to be copied by itself."""
    return shape[-1] * _LINES <= k.CHUNK


def can_copy(shape: tuple[int, ...], size: int) -> bool:
    """Whether the kernels copy tensors of a shape and of elements of `size` bytes."""
    return 0 < len(shape) < k.MAX_DIMS - 1 and size <= WIDTH


@lru_cache(maxsize=256)
def cut_up(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> Pieces | None:
    """The pieces of a tensor that is not empty, in logical order; None where it has to be copied another way.

    Args:
        shape: of the tensor.
        strides: in elements.
        size: bytes of an element.
    """
    if not (can_copy(shape, size) and are_short(shape)):
        return None
    found: list[tuple[int, int, int, int, int]] = []
    plans: list[NDArray[np.int64]] = []
    numbers: dict[tuple[int, ...], int] = {}
    with unobserved():
        for first, view in cut(torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta"), k.CHUNK):
            if len(found) == _MOST:
                return None
            box = tuple(view.shape)
            if box not in numbers:
                numbers[box] = len(plans)
                plans.append(copy_plan(box, view.stride()))
            number = numbers[box]
            found.append((int(view.storage_offset()), view.numel(), first, int(plans[number][0, -1]), number))
    return Pieces(np.array(found, np.int64), np.array(plans, np.int64))


def copy_plan(shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.int64]:
    """What `kernels` takes for `copy`, for a copy to contiguous memory; the number of dimensions is in the last word.

    The dimension that is contiguous in the target goes last; or, if another has a smaller stride in the source, last
    but one, and that one last. The others go by falling strides in the source.
    """
    dims, step = [], 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1:
            dims.append((size, stride, step))
            step *= size
    row, *others = dims or [(1, 1, 1)]
    others = [(1, 0, 0), *sorted(others, key=lambda dim: -dim[1])]
    close = min((dim for dim in others if dim[1]), key=lambda dim: dim[1], default=row)
    if close[1] < row[1]:
        others.remove(close)
        order = [*others, row, close]
    else:
        order = [*others, row]
    plan = np.zeros((3, k.MAX_DIMS), dtype=np.int64)
    for place, dim in enumerate(order):
        plan[:, place] = dim
    plan[0, -1] = len(order)
    return plan
