"""What differs between two tensors: which elements, by how much, and how one follows from the other.

"0.3 % of the elements differ" is a fact and no lead. That they are columns 96 to 127, one sample of the batch, every
fourth element, or padding alone is one. So the places that differ are held against the shapes that faults have: an
index or a range of one dimension, a stride, a triangle, the end of the tensor. A shape is told only where it holds of
every place that differs; "every element there" only where nothing in it is equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.element.elements import Elements, differing, elements, index_of, relation, ulp_bins
from introspect_cli.compare.element.grid import Picture, picture_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

LARGEST = 6
"""How many of the largest differences are listed."""

_MOST_LISTED = 6
_TILES = (256, 128, 64, 32, 16, 8, 4)


@dataclass(frozen=True)
class About:
    """What is known of a tensor beside its numbers.

    Attributes:
        samples: whether the first dimension is that of the batch.
        heads: number of attention heads of the module; 0 where that is not known.
        padding: for each sample and position of the batch whether it is padding; None where that is not known.
    """

    samples: bool = False
    heads: int = 0
    padding: Mask | None = None


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors of one shape differ.

    Attributes:
        elements: how many differ, and where first and most.
        largest: the largest differences, the largest first: index, value in a, value in b.
        where: clauses on which elements differ; empty where they have no shape that is known here.
        relation: clauses on how b follows from a.
        ulps: how many elements differ by how many units in the last place: the bins' lower ends and counts.
        unit: the dtype whose units these are; "" where there are none.
        picture: where, as a grid.
    """

    shape: tuple[int, ...]
    elements: Elements
    largest: tuple[tuple[tuple[int, ...], complex, complex], ...]
    where: tuple[str, ...]
    relation: tuple[str, ...]
    ulps: tuple[tuple[int, int], ...]
    unit: str
    picture: Picture


def difference(
    a: NDArray[Any], b: NDArray[Any], dtypes: tuple[str, str], about: About | None = None
) -> TensorDifference | None:
    """How two arrays differ; None where their shapes do, or they hold no numbers."""
    largest = elements(a, b)
    if largest is None:
        return None
    about = about or About()
    mask = differing(a, b).reshape(a.shape)
    distances = _distances(a, b)
    bins, unit = ulp_bins(a, b, dtypes)
    return TensorDifference(
        shape=a.shape,
        elements=largest,
        largest=_largest(a, b, distances, mask),
        where=where(mask, about) if largest.differing else (),
        relation=relation(a, b, mask, unit) if largest.differing else (),
        ulps=bins,
        unit=unit,
        picture=picture_of(distances, mask),
    )


def _distances(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """|a - b|; infinite where only one is finite, or neither and they are not equal."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distances = np.abs(a.astype(wide) - b.astype(wide))
    return np.where(np.isfinite(distances), distances, np.inf)


def _largest(
    a: NDArray[Any], b: NDArray[Any], distances: NDArray[np.float64], mask: Mask
) -> tuple[tuple[tuple[int, ...], complex, complex], ...]:
    places = np.flatnonzero(mask)
    order = places[np.argsort(-distances.reshape(-1)[places], kind="stable")[:LARGEST]]
    largest = []
    for flat in order.tolist():
        index = index_of(flat, a.shape)
        largest.append((index, a[index].item(), b[index].item()))
    return tuple(largest)


# --- which elements


def where(mask: Mask, about: About) -> tuple[str, ...]:
    """Which elements differ, as clauses, each true of all of them."""
    places = np.flatnonzero(mask)
    if mask.size == 1:
        return ()
    if len(places) == mask.size:
        return ("all of them",)
    if len(places) == 1:
        return (f"one element alone, {list(index_of(int(places[0]), mask.shape))}",)
    boxed = [np.flatnonzero(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim))) for dim in range(mask.ndim)]
    full = math.prod(len(hit) for hit in boxed) == len(places)
    diagonal = not full and _is_diagonal(mask)
    clauses = []
    for dim, hit in enumerate(boxed[:-2] if diagonal else boxed):  # a whole diagonal tells its rows and columns
        if len(hit) < mask.shape[dim] and (clause := _in_dimension(dim, hit, mask.shape, about)):
            clauses.append(clause)
    if clauses and full:
        clauses[-1] += ", every element there"
    if not full:
        others = (_triangle(mask), "" if diagonal else _counted_through(places, mask.shape))
        clauses += [clause for clause in others if clause]
    padded = _padding(mask, about.padding)
    return (*clauses, padded) if padded else tuple(clauses)


def _called(dim: int, shape: tuple[int, ...], about: About) -> tuple[str, str, str]:
    """What a dimension's indices are called: one, several, and of which dimension."""
    if dim == 0 and about.samples:
        return "sample", "samples", ""
    if len(shape) == 1:
        return "element", "elements", ""
    if dim == len(shape) - 1:
        return "column", "columns", ""
    if dim == 0 and len(shape) == 2:
        return "row", "rows", ""
    return "index", "indices", f" of dimension {dim}"


def _in_dimension(dim: int, hit: NDArray[np.intp], shape: tuple[int, ...], about: About) -> str:
    """Which indices of a dimension are hit, as a clause; "" where they form no shape."""
    size = shape[dim]
    one, several, of = _called(dim, shape, about)
    if about.heads > 1 and len(shape) > 1 and dim > 0:
        clause = _heads(hit, size, about.heads, last=dim == len(shape) - 1)
        if clause:
            return clause
    if len(hit) == 1:
        return f"{one} {hit[0]}{of} alone (of {size:,})"
    if len(hit) == size - 1:
        missing = next(iter(set(range(size)) - set(hit.tolist())))
        return f"all but {one} {missing}{of} (of {size:,})"
    clause = _progression(hit, size, several, of)
    if not clause and len(hit) <= _MOST_LISTED:
        clause = f"{several} {', '.join(map(str, hit.tolist()))}{of} (of {size:,})"
    return clause


def _progression(hit: NDArray[np.intp], size: int, several: str, of: str) -> str:
    """A range of indices, every n-th of them, or equal blocks at equal distances; "" where they are none."""
    low, high = int(hit[0]), int(hit[-1])
    steps = np.diff(hit)
    if (steps == 1).all():
        if high == size - 1:
            return f"the last {len(hit):,} of {size:,} {several}{of}{_leftover(low, size)}"
        return f"{several} {low} to {high}{of} (of {size:,})"
    stride = int(steps[0])
    if len(hit) > 2 and (steps == stride).all():
        ends = "" if low < stride and high + stride >= size else f" to {high}"
        return f"every {_th(stride)} of {size:,} {several}{of}, from {low}{ends}"
    starts = hit[np.flatnonzero(np.concatenate([[True], steps > 1]))]
    stops = hit[np.flatnonzero(np.concatenate([steps > 1, [True]]))]
    widths, gaps = stops - starts + 1, np.diff(starts)
    regular = len(starts) > 1 and (widths == widths[0]).all() and (gaps == gaps[0]).all()
    if regular and (len(starts) > 2 or low < int(gaps[0]) <= size - int(starts[-1])):
        return f"{widths[0]} {several}{of} of every {gaps[0]}, from {low} (of {size:,})"
    return ""


def _leftover(low: int, size: int) -> str:
    """Whether what begins at an index is what tiles of some width leave over."""
    for tile in _TILES:
        if size % tile and low == size - size % tile and low:
            return f", what tiles of {tile} leave over"
    for tile in _TILES:
        if low == size - tile and size % tile == 0 and size > tile:
            return f", the last tile of {tile}"
    return ""


def _th(number: int) -> str:
    words = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    return words[number - 2] if number <= 8 else f"{number}th"


def _heads(hit: NDArray[np.intp], size: int, heads: int, *, last: bool) -> str:
    if size != heads and not (last and size % heads == 0 and size > heads):
        return ""
    wide = size // heads
    which = np.unique(hit // wide)
    if len(which) == heads or (len(which) > 1 and len(which) > _MOST_LISTED):
        return ""
    names = ", ".join(map(str, which.tolist()))
    columns = "" if wide == 1 else f", {wide} columns each" if len(which) > 1 else f", columns {which[0] * wide} to "
    columns += str((which[0] + 1) * wide - 1) if wide > 1 and len(which) == 1 else ""
    return f"head{'s' * (len(which) > 1)} {names}{' alone' * (len(which) == 1)} (of {heads}{columns})"


def _is_diagonal(mask: Mask) -> bool:
    """Whether what differs is all of one diagonal of the last two dimensions, and nothing else."""
    if mask.ndim < 2 or min(mask.shape[-2:]) < 3:
        return False
    hit = mask.any(axis=tuple(range(mask.ndim - 2)))
    rows, columns = np.nonzero(hit)
    off = columns - rows
    return bool((off == off[0]).all()) and bool(np.diagonal(hit, int(off[0])).all())


def _triangle(mask: Mask) -> str:
    """Whether all lies on one side of the diagonal of the last two dimensions, or on it."""
    if mask.ndim < 2 or min(mask.shape[-2:]) < 3:
        return ""
    rows, columns = np.nonzero(mask.any(axis=tuple(range(mask.ndim - 2))))
    if len(np.unique(rows)) < 3 or len(np.unique(columns)) < 3:
        return ""
    off = columns - rows
    if (off == off[0]).all():
        return (
            "on the diagonal of the last two dimensions"
            if off[0] == 0
            else f"on a diagonal, {int(off[0]):+d} from the main one"
        )
    if (off > 0).all():
        return "above the diagonal of the last two dimensions"
    return "below the diagonal of the last two dimensions" if (off < 0).all() else ""


def _counted_through(places: NDArray[np.intp], shape: tuple[int, ...]) -> str:
    """A stride or an end in the elements counted through, where no dimension alone tells it."""
    size = math.prod(shape)
    if len(shape) < 2 or len(places) < 3:
        return ""
    steps = np.diff(places)
    stride = int(np.gcd.reduce(steps))
    if stride > 1 and (steps == stride).all() and shape[-1] % stride:
        return f"every {_th(stride)} element from {int(places[0])} on, counted through"
    if (steps == 1).all() and int(places[-1]) == size - 1:
        return f"the last {len(places):,} of {size:,} elements, counted through{_leftover(int(places[0]), size)}"
    return ""


def _padding(mask: Mask, padding: Mask | None) -> str:
    """Whether what differs is padding alone, or all but that."""
    if padding is None or not padding.any() or padding.all() or mask.ndim < 2:
        return ""
    samples, length = padding.shape
    hit: Mask | None = None
    if mask.shape[0] == samples:
        dim = next((d for d in range(1, mask.ndim) if mask.shape[d] == length), None)
        if dim is not None:
            hit = np.asarray(mask.any(axis=tuple(d for d in range(1, mask.ndim) if d != dim)))
    elif mask.shape[0] == samples * length:
        hit = np.asarray(mask.any(axis=tuple(range(1, mask.ndim)))).reshape(padding.shape)
    if hit is None:
        return ""
    if not (hit & ~padding).any():
        return f"only at positions that are padding ({int(hit.sum()):,} of {int(padding.sum()):,})"
    return "at every position that is no padding, and at no other" if (hit == ~padding).all() else ""
