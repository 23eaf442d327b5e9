"""What comes out of a collective, held against what its ranks put in.

A sum can be checked where sketches add up, a gather or a broadcast by checksums, extrema bit by bit. Where values are
only moved about (`all_to_all`) or cut after they were added (`reduce_scatter`), their totals must stay. What was not
recorded on every rank of the group proves nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.records import Status
from introspect_cli.store.launched import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

_NEAR, _COARSE_NEAR = 1e-3, 5e-2
_COARSE = ("bfloat16", "float16", "float8")


class Call(NamedTuple):
    """One collective of one rank.

    Attributes:
        told: what it is, with shapes.
        source: `file:line`.
        rows: rows of what goes in and comes out, by path.
    """

    told: str
    source: str
    rows: Mapping[str, int]

    @property
    def where(self) -> str:
        """It and its line."""
        return f"{self.told} at {self.source}" if self.source else self.told


class _Value(NamedTuple):
    """A tensor of one rank.

    Attributes:
        at: the rank's position.
        checksum: of all bits.
        numel: its elements.
        low: the smallest.
        high: the largest.
        mean: of all.
        size: mean of absolute values.
        sketch: None where there is none.
    """

    at: int
    checksum: int
    numel: int
    low: float
    high: float
    mean: float
    size: float
    sketch: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None


def wrong_result(
    readers: Sequence[RankReader], batches: Sequence[StepBatch], calls: Mapping[int, Call], *, all_there: bool
) -> tuple[int, str] | None:
    """A rank's position and what is wrong with its result; None where nothing is, or nothing can be told.

    Args:
        readers: of all ranks.
        batches: of all ranks, of one step.
        calls: one collective, by position of the rank.
        all_there: whether these are all ranks of its group.
    """
    first = calls[min(calls)].told
    word, how = [*first.split(), "", ""][:2]
    given, gives = (_values(readers, batches, calls, way) for way in (".in", ".out"))
    if not gives:
        return None
    names = [reader.rank for reader in readers]
    if word in ("all_reduce", "broadcast"):
        apart = _apart(gives, names)
        if apart is not None:
            return apart
    if not all_there or not given:
        return None
    near = _COARSE_NEAR if any(name in first for name in _COARSE) else _NEAR
    told = None
    if word == "all_reduce":
        told = _reduced(given, gives, how, near)
    elif word == "broadcast":
        told = "" if {own.checksum for own in gives} == {own.checksum for own in given} else "what the root sent"
    elif word in ("all_gather", "gather", "scatter", "all_to_all"):
        told = _moved(given, gives, word, near)
    elif word == "reduce_scatter" and how in ("sum", "avg"):
        size = len(calls) if how == "avg" else 1
        told = "" if _totals(given, gives, near, 1 / size) else f"the {_mean(how)} of what went in, cut into parts"
    return (gives[0].at, f"its result is not {told}") if told else None


def _values(
    readers: Sequence[RankReader], batches: Sequence[StepBatch], calls: Mapping[int, Call], way: str
) -> list[_Value] | None:
    """What all ranks put in, or got; None where any of it was not recorded whole."""
    found = []
    for at in sorted(calls):
        batch, floats = batches[at], batches[at].floats
        rows = {path: row for path, row in calls[at].rows.items() if path.startswith(way)}
        for path in sorted(rows, key=lambda own: (len(own), own)):
            row = rows[path]
            if batch.status[row] != Status.OBSERVED.value:
                return None
            low, high, mean, size = (
                float(floats[name][row]) if name in floats else np.nan for name in ("min", "max", "mean", "amean")
            )
            sketch = None if batch.sketch is None else np.asarray(batch.sketch[row], np.float64)
            numel = readers[at].layouts[int(batch.layout[row])].numel
            found.append(_Value(at, int(batch.checksum[row]), numel, low, high, mean, size, sketch))
    return found


def _apart(gives: Sequence[_Value], names: Sequence[int]) -> tuple[int, str] | None:
    """Ranks with another result than the first; results of several tensors are held by their order."""
    by_rank: dict[int, list[int]] = {}
    for own in gives:
        by_rank.setdefault(own.at, []).append(own.checksum)
    base = min(by_rank)
    others = [at for at in sorted(by_rank) if by_rank[at] != by_rank[base]]
    if not others or len({len(own) for own in by_rank.values()}) > 1:
        return None
    ranks = rank_list([names[at] for at in others])
    return others[0], f"its result on {ranks} is not that on rank {names[base]}"


def _reduced(given: Sequence[_Value], gives: Sequence[_Value], how: str, near: float) -> str:
    """What the result of a reduction is not; "" where it is, or that cannot be told."""
    ranks = len({own.at for own in given})
    each, rest = divmod(len(given), ranks)
    if rest or len(gives) != len(given):
        return ""
    for number in range(each):
        rows, out = given[number::each], gives[number]
        if how in ("max", "min"):
            pick, name = (max, "high") if how == "max" else (min, "low")
            wanted = pick(getattr(own, name) for own in rows)
            if np.isfinite(wanted) and getattr(out, name) != wanted:
                return f"the {how}imum of what went in"
        elif how == "product" and out.numel == 1:
            wanted = float(np.prod([own.mean for own in rows]))
            if np.isfinite(wanted) and abs(out.mean - wanted) > near * abs(wanted):
                return "the product of what went in"
        elif how in ("sum", "avg") and out.sketch is not None:
            rows_ = [own.sketch for own in rows if own.sketch is not None]
            total = np.sum(rows_, axis=0) / (len(rows) if how == "avg" else 1)
            size = max(float(np.linalg.norm(row)) for row in (*rows_, out.sketch))
            far = float(np.linalg.norm(out.sketch - total)) / size if size else 0.0
            if np.isfinite(far) and far > near:
                return f"the {_mean(how)} of what went in (relative L2 {far:.1e})"
    return ""


def _moved(given: Sequence[_Value], gives: Sequence[_Value], word: str, near: float) -> str:
    """What values that are only moved are not; "" where they are, or that cannot be told."""
    what = "what went in, put together" if "gather" in word else "what went in, shared out"
    sent = Counter(own.checksum for own in given)
    each: dict[int, list[_Value]] = {}
    for own in gives:
        each.setdefault(own.at, []).append(own)
    if word == "all_gather":
        for own_results in each.values():
            if len(own_results) == len(given):
                same = Counter(own.checksum for own in own_results) == sent
            else:
                same = _totals(given, own_results, near, 1.0, exact=True)
            if not same:
                return what
        return ""
    if len(gives) == len(given) and word in ("gather", "scatter"):
        return "" if Counter(own.checksum for own in gives) == sent else what
    return "" if _totals(given, gives, near, 1.0, exact=True) else what


def _totals(
    given: Sequence[_Value], gives: Sequence[_Value], near: float, factor: float, *, exact: bool = False
) -> bool:
    """Whether all elements that come out add up to those that went in; `exact`: with their number and extrema."""
    one, two = ([own for own in side if own.numel] for side in (given, gives))
    if not one or not two:
        return True
    if exact and sum(own.numel for own in one) != sum(own.numel for own in two):
        return True  # padded, or coalesced otherwise than was recorded
    totals = [sum(own.mean * own.numel for own in side) for side in (one, two)]
    size = max(sum(own.size * own.numel for own in one) * factor, sum(own.size * own.numel for own in two))
    if not np.isfinite([*totals, size]).all():
        return True
    extrema = [(min(own.low for own in side), max(own.high for own in side)) for side in (one, two)]
    return abs(totals[0] * factor - totals[1]) <= near * size and (not exact or extrema[0] == extrema[1])


def _mean(how: str) -> str:
    return "sum" if how == "sum" else "mean"
