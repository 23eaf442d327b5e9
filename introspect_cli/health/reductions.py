"""What the collectives of a step tell of a gradient that differs between ranks: over whom it was reduced, if it was.

A script divides before a reduction, after it, or never, so what an optimizer takes is a multiple of what came out of
the collective. Sketches tell multiples. A wrapper reduces many gradients in one bucket, whose sketch is none of theirs.
But elements and squares add up, so what is in a bucket beside the other gradients can be told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.records import Phase, Status, count
from introspect_cli.store.batch import l2_norm
from introspect_cli.store.launched import group_size, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.health.results import Call
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.whole import WholeReader

    Calls = Callable[[int, StepBatch], Mapping[tuple[str, int], Call]]

_WORDS = ("all_reduce", "reduce_scatter", "reduce", "broadcast")
_PARALLEL = 1e-5
_ADDS_UP = 1e-5
_MATTERS = 1e-3
_NEEDED = frozenset({"min", "max", "mean", "amean", "var"})


class _Value(NamedTuple):
    """A tensor that went into a collective, or came out of one, or is a gradient.

    Attributes:
        group: the ranks of the collective; "" of a gradient.
        call: which collective of that group; -1 of a gradient.
        where: what it is, with its line; "" of a gradient.
        backward: whether it ran in the backward pass.
        numel: its elements.
        low: the smallest.
        high: the largest.
        total: their sum.
        size: the sum of their absolute values.
        squares: the sum of their squares.
        sketch: float64 (16,).
    """

    group: str
    call: int
    where: str
    backward: bool
    numel: int
    low: float
    high: float
    total: float
    size: float
    squares: float
    sketch: NDArray[np.float64]


class Reductions:
    """The reductions of one step, rank by rank."""

    def __init__(self, whole: WholeReader, batches: Sequence[StepBatch], calls: Calls) -> None:
        """Read what went into each and what came out.

        Args:
            whole: the ranks' readers.
            batches: a step of each.
            calls: finds the collectives of a rank in its step.
        """
        self._whole, self._batches = whole, batches
        self._given: list[list[_Value]] = []
        self._gives: list[list[_Value]] = []
        for at, batch in enumerate(batches):
            sides: tuple[list[_Value], list[_Value]] = [], []
            for (group, number), call in calls(at, batch).items():
                if call.told.split(" ", 1)[0] not in _WORDS:
                    continue
                for path, row in call.rows.items():
                    value = self._value(at, row, group, number, call.where)
                    if value is not None:
                        sides[path.startswith(".out")].append(value)
            self._given.append(sides[0])
            self._gives.append(sides[1])

    def why(self, gradient: Mapping[int, int], others: Iterable[Mapping[int, int]]) -> str:
        """Why a gradient differs between ranks, as far as the collectives tell; "" where they do not.

        Args:
            gradient: its row on each rank that has it.
            others: rows of the gradients that do not differ.
        """
        own = {at: self._value(at, row) for at, row in gradient.items()}
        if not all(self._gives[at] or self._given[at] for at in own):
            return ""
        came: dict[int, _Value] = {}
        went: dict[int, _Value] = {}
        for at, value in own.items():
            if value is None or not value.squares > 0:
                return ""
            for found, among in ((came, self._gives), (went, self._given)):
                same = next((one for one in among[at] if _is_multiple(value, one)), None)
                if same is not None:
                    found[at] = same
        groups = {at: value.group for at, value in came.items()}
        if len(came) == len(own):
            if len(set(groups.values())) == 1 and len({value.call for value in came.values()}) > 1:
                return _order(came, [reader.rank for reader in self._whole.readers])
            if len(set(groups.values())) < 2 or any(group_size(name) == len(own) for name in groups.values()):
                return ""
            over = " and over ".join(f"{name} alone" for name in dict.fromkeys(groups.values()))
            return f"its gradient was reduced over {over} ({came[min(came)].where})"
        kept = [at for at in went if at not in came]
        if kept:
            ranks = self._ranks(kept)
            return (
                f"its gradient was not reduced on {ranks}: its optimizer takes what went into "
                f"{went[kept[0]].where} there, not what came out"
            )
        left = [at for at in own if at not in came]
        told = [self._left_out(at, own[at], others) for at in left]
        if not all(told):
            return ""
        return f"its gradient was not reduced on {self._ranks(left)}: {told[0]}"

    def _ranks(self, places: Sequence[int]) -> str:
        return rank_list([self._whole.readers[at].rank for at in sorted(places)])

    def _left_out(self, at: int, own: _Value | None, others: Iterable[Mapping[int, int]]) -> str:
        """That nothing which was reduced on a rank can be this gradient; "" where something may be."""
        values = [self._value(at, rows[at]) for rows in others if at in rows]
        known = [value for value in values if value is not None]
        if own is None or not known or len(known) < len(values):
            return ""
        came = [[one for one in self._gives[at] if _is_multiple(value, one)] for value in known]
        spoken = {id(one) for found in came for one in found}
        free = [one for one in self._gives[at] if id(one) not in spoken and one.numel >= own.numel]
        if all(came) and not free:
            return f"no collective of the step gave it, and {count(len(known), 'other gradient')} came from one"
        rest = count(len(known), "other gradient")
        buckets = [one for one in self._gives[at] if one.backward]
        many = f"the {count(len(buckets), 'reduction')} of the backward pass"
        if buckets and _add_up(buckets, known, own):
            return f"what came out of {many} is the {rest} alone"
        sent = [[one for one in given if one.backward] for given in self._given]
        if not buckets and _fill(sent, known, own):
            many = f"the {count(len(sent[at]), 'reduction')} of the backward pass"
            return f"what went into {many} has the size and the sum of the {rest} alone"
        return ""

    def _value(self, at: int, row: int, group: str = "", call: int = -1, where: str = "") -> _Value | None:
        batch, reader = self._batches[at], self._whole.readers[at]
        layout, floats = reader.layouts[int(batch.layout[row])], batch.floats
        if batch.sketch is None or not floats.keys() >= _NEEDED or batch.status[row] == Status.NOT_OBSERVED:
            return None
        numel = layout.numel if layout.part is None else layout.part.numel
        low, high, mean, size, var = (float(floats[name][row]) for name in ("min", "max", "mean", "amean", "var"))
        squares = float(l2_norm(np.float64(mean), np.float64(var), np.float64(numel))) ** 2
        sketch = np.asarray(batch.sketch[row], np.float64)
        if not np.isfinite([low, high, mean, size, squares]).all() or not np.isfinite(sketch).all():
            return None
        backward = reader.sites.phase[int(batch.site[row])] == Phase.BACKWARD
        return _Value(group, call, where, backward, numel, low, high, mean * numel, size * numel, squares, sketch)


def _order(came: Mapping[int, _Value], ranks: Sequence[int]) -> str:
    """That a gradient came out of another collective on each rank: what met there was not one parameter's."""
    base = min(came)
    other = next(at for at in sorted(came) if came[at].call != came[base].call)
    one, two = came[base], came[other]
    return (
        f"its gradient came out of collective {one.call} of {one.group} on rank {ranks[base]} and out of collective "
        f"{two.call} on rank {ranks[other]} ({one.where}), so the ranks reduced gradients in another order"
    )


def _is_multiple(one: _Value, two: _Value) -> bool:
    """Whether two tensors of as many elements are positive multiples of each other, by their sketches."""
    if one.numel != two.numel or one.numel < 2:
        return False  # a lone element is a multiple of any other
    product, norms = float(one.sketch @ two.sketch), float(np.linalg.norm(one.sketch) * np.linalg.norm(two.sketch))
    if not norms > 0 or product <= 0:
        return False
    rest = one.sketch - two.sketch * (product / float(two.sketch @ two.sketch))
    return float(np.linalg.norm(rest)) <= _PARALLEL * float(np.linalg.norm(one.sketch))


def _add_up(buckets: Sequence[_Value], gradients: Sequence[_Value], beside: _Value) -> bool:
    """Whether buckets hold one multiple of some gradients and nothing of another one, by sums and extrema."""
    squares, wanted = (sum(one.squares for one in own) for own in (buckets, gradients))
    if not squares > 0 or not wanted > 0 or beside.squares <= _MATTERS * wanted:
        return False
    if sum(one.numel for one in buckets) < sum(one.numel for one in gradients):
        return False
    factor, width = float(np.sqrt(squares / wanted)), float(np.sqrt(squares))
    size = sum(one.size for one in buckets)
    return (
        abs(size - factor * sum(one.size for one in gradients)) <= _ADDS_UP * size
        and abs(sum(one.total for one in buckets) - factor * sum(one.total for one in gradients)) <= _ADDS_UP * size
        and abs(min(one.low for one in buckets) - factor * min(one.low for one in gradients)) <= _ADDS_UP * width
        and abs(max(one.high for one in buckets) - factor * max(one.high for one in gradients)) <= _ADDS_UP * width
    )


def _fill(sent: Sequence[Sequence[_Value]], gradients: Sequence[_Value], beside: _Value) -> bool:
    """Whether what all ranks put into buckets is as large as some gradients and adds up to them, without another one.

    A wrapper that waits for its reductions itself shows no more.
    """
    number, ranks = sum(one.numel for one in gradients), len(sent)
    if any(sum(one.numel for one in own) != number for own in sent):
        return False
    if any(group_size(one.group) != ranks for own in sent for one in own):
        return False
    total, size = sum(one.total for own in sent for one in own), sum(one.size for own in sent for one in own)
    taken = sum(one.total for one in gradients)
    near = float(_ADDS_UP * size)
    return abs(beside.total) > 10 * near and any(abs(total * own - taken) <= near for own in (1.0, 1 / ranks))
