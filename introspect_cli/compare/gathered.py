"""Comparison of values gathered from several ranks or microbatches as one whole.

If the samples of both runs are equal in any order, the records are equal; of other gathered values, extrema and means
are compared.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.distance import Floats, Layouts, other_shapes
from introspect_cli.compare.terms.sites import FLOWING_BACK, Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.wholes import most_calls
from introspect_cli.records import Joined, Kind, Layout, Phase
from introspect_cli.store.ranks.whole_reader import WholeReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.steps import Sides
    from introspect_cli.compare.terms.table import Learned, Table
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.step_reader import Reader

    Both = tuple[Sequence[Layout], Sequence[Layout]]

_RAN_INSIDE = (Kind.INPUT, Kind.OUTPUT, *FLOWING_BACK)
_MOMENTS = ("min", "max", "absmin", "mean", "amean", "var")
_SURE = 1e-3


class Gathered:
    """Compares gathered values of two runs: by extrema and means, by sums, and by the factor of their gradients."""

    def __init__(self, sides: Sides) -> None:
        """Take both runs, their rank ratio, and the largest number of losses of each in a step."""
        a, b, splits = sides.a, sides.b, sides.splits
        self._ranks = shares(b) / shares(a)
        self.by_samples = splits is not None and splits.differ
        self._layouts = a.layouts, b.layouts
        self._often = most_calls(a, {Kind.LOSS.value}), most_calls(b, {Kind.LOSS.value})

    def _is_scaled(self, learned: Learned) -> bool:
        """Whether the gradient factor is a power of two other than the ratio of microbatches: a gradient scaler's."""
        times = abs(learned.factor or 1)
        return times > 1 and not times & (times - 1) and times * min(self._often) != max(self._often)

    def learn(self, table: Table, learned: Learned) -> Learned:
        """`learned` with the gradient factor (kept once found), the outputs' factors, and whether gradients use it."""
        if not _has_means(table):
            return learned
        back = of_kinds(table.kinds, FLOWING_BACK) & self._by_moments(table)
        rows = np.flatnonzero(back & ~_scalar(table, self._layouts))  # a loss's gradient is what the script makes it
        factor = learned.factor if learned.factor is not None else _factor(table, rows)
        flows = learned.flows_back or bool((back & table.chosen[table.differing]).any())
        units = self._other_units(table, np.full(len(table.rows_a), _SURE))[1]
        return learned._replace(factor=factor, flows_back=flows, units={**learned.units, **units})

    def of_one_dtype(self, table: Table) -> Mask:
        """Mask of differing rows, False for module values (inputs, outputs, their gradients) with two dtypes."""
        pairs = zip(self._layouts, table.pairs, strict=True)
        one, two = (Layouts(layouts).dtype[batch.layout[rows]] for layouts, (batch, rows) in pairs)
        return np.asarray((one == two) | ~of_kinds(table.kinds, _RAN_INSIDE))

    def _by_moments(self, table: Table) -> Mask:
        """Mask of differing rows to compare by extrema and means: gathered in either run, or single numbers."""
        gathered = _how(table, Joined.GATHERED) | _equal_parts(table, self._layouts)
        gathered |= _single(table, self._layouts) & _how(table, Joined.ALIKE)
        if not _has_sketches(table):
            gathered |= _added_up(table, self._layouts)
        return gathered

    def agree(self, table: Table, rtol: Floats, learned: Learned) -> Mask:
        """Mask of differing rows that agree within `rtol`: by sums, or by extrema, means and variances."""
        out, rows = self._sums(table, rtol, learned), np.flatnonzero(self._by_moments(table))
        if not len(rows) or not _has_means(table):
            return out
        out[self._other_units(table, rtol)[0]] = True
        single = _single(table, self._layouts)[rows]
        factor = np.where(of_kinds(table.kinds, FLOWING_BACK), learned.smaller, 1.0)[rows]
        often = tuple(_often(batch, of_run[rows]) for batch, of_run in table.pairs)
        size = np.maximum(*(_size(batch, of_run[rows]) for batch, of_run in table.pairs))
        limit = rtol[rows]
        close = np.ones(len(rows), np.bool_)
        for name in _MOMENTS:
            one, two = (values[rows] for values in _values(table, name))
            if name == "var":  # in the unit of the others
                one, two = np.sqrt(one), np.sqrt(two)
            with np.errstate(invalid="ignore"):
                distance = np.abs(one - two * factor)
                near = (distance <= limit * size * np.maximum(factor, 1.0)) | (np.isnan(one) & np.isnan(two))
            if name == "mean":
                scale = learned.smaller if self._is_scaled(learned) else 1.0
                near |= single & self._add_up(one, two, (often[0], often[1]), limit, scale)
            close &= near | (single & (name != "mean"))
        out[rows] |= close
        return out

    def _other_units(self, table: Table, rtol: Floats) -> tuple[list[int], dict[str, float]]:
        """Rows of scalar outputs that are n times as large in one run, with gradients n times as small."""
        kinds, rows, units = (Kind.OUTPUT, Kind.GRAD_OUTPUT), list[int](), dict[str, float]()
        numbers: dict[tuple[str, str, int], list[int]] = {}
        for at in np.flatnonzero(of_kinds(table.kinds, kinds) & _scalar(table, self._layouts)).tolist():
            site = table.named(int(table.differing[at]))
            numbers.setdefault((site.fqn, site.path, site.call), []).append(at)
        for (fqn, path, _), places in numbers.items():
            one, two = (values[places] for values in _values(table, "mean"))
            with np.errstate(all="ignore"):
                times = abs(float(one[0] / two[0]))
                same = len(places) == len(kinds) and abs(one.prod() - two.prod()) <= rtol[places[0]] * abs(one.prod())
            more = max(times, 1 / times) if same and np.isfinite(times) and times > 0 else 0
            if round(more) > 1 and abs(more / round(more) - 1) < _SURE:
                rows += places
                if table.chosen[table.differing][places].any():
                    units[f"{fqn}{path}"] = times
        return rows, units

    def _sums(self, table: Table, rtol: Floats, learned: Learned) -> Mask:
        """Mask of gradients whose sum over ranks, times the common factor, is within `rtol` by their sketches."""
        out = np.zeros(len(table.rows_a), np.bool_)
        if not _has_sketches(table):
            return out
        pairs = zip(self._layouts, table.pairs, strict=True)
        shapes = (Layouts(layouts).shape[batch.layout[rows]] for layouts, (batch, rows) in pairs)
        whole = ~_how(table, Joined.GATHERED) & np.equal(*shapes)
        rows = np.flatnonzero(of_kinds(table.kinds, FLOWING_BACK) & (_how(table, Joined.OWED) | whole))
        one, two = (np.asarray(batch.sketch, np.float64)[of_run[rows]] for batch, of_run in table.pairs)
        distance, size = (np.linalg.norm(values, axis=1) for values in (one - two * learned.smaller, one))
        with np.errstate(invalid="ignore"):
            out[rows] = distance <= rtol[rows] * size
        return out

    def _add_up(self, one: Floats, two: Floats, often: tuple[Ids, Ids], rtol: Floats, scale: float) -> Mask:
        """Mask of scalars whose sum over calls agrees: both summed, b summed already, or b's times `scale`."""
        total, other = one * often[0], two * often[1]
        sums = [np.abs(total - each) <= rtol * np.abs(total) for each in (other, other * scale, two)]
        return np.asarray(np.logical_or.reduce(sums) | (np.abs(one - other) <= rtol * np.abs(one)))

    def notes(self, learned: Learned) -> list[str]:
        """Sentences on the gradient factor, and on outputs that a script scales."""
        lines = [
            f"The output {name} of run {'a' if times > 1 else 'b'} is {max(times, 1 / times):.0f} x that of the other, "
            "and its gradient as much smaller: the script scales one of them. That is taken into account."
            for name, times in learned.units.items()
        ]
        factor, times = learned.factor, learned.times
        if factor is None or times is None or abs(factor) == 1 or not learned.flows_back:
            return lines
        small, large = ("b", "a") if factor > 0 else ("a", "b")
        text = f"Gradients inside the backward pass of run {large} are {abs(factor)} x those of run {small}: "
        if self.by_samples and self._is_scaled(learned):
            text += "its loss is scaled (GradScaler, or by hand). That is taken into account."
        elif self.by_samples and abs(times - self._ranks) > _SURE:  # no ranks make that factor
            text += (
                "the losses of its microbatches are added up, not averaged. Where its parameters' gradients agree "
                "nevertheless, they were divided (a pipeline's schedule does that) or clipped after it."
            )
        else:
            text += "there the loss is a mean over fewer samples. That is taken into account."
        return [*lines, text]


def _factor(table: Table, rows: Ids) -> int | None:
    """The whole number n that most gradients show as |a| / |b|, or -n as |b| / |a|; None where none does."""
    one, two = (values[rows] for values in _values(table, "amean"))
    seen: Counter[int] = Counter()
    positive = (one > 0) & (two > 0)
    for ratio in (one[positive] / two[positive]).tolist():
        larger = round(max(ratio, 1 / ratio))
        if abs(max(ratio, 1 / ratio) / larger - 1) < _SURE:
            seen[larger if ratio >= 1 else -larger] += 1
    return seen.most_common(1)[0][0] if seen else None


# --- which differing rows


def _added_up(table: Table, both: Both) -> Mask:
    """Mask of rows that another order of a sum may explain: floats of equal shape.

    Not start values, batches or unequal copies.
    """
    out = table.alignment.phase[table.site[table.differing]] != phase_code(Phase.START)
    shapes = []
    for layouts, (batch, rows) in zip(map(Layouts, both), table.pairs, strict=True):
        numbers = batch.layout[rows]
        out &= layouts.floating[numbers] & ~_joined(batch, rows, Joined.COPIES)
        shapes.append(layouts.shape[numbers])
    return np.asarray(out & (shapes[0] == shapes[1]) & (table.kinds != kind_code(Kind.BATCH)))


def _equal_parts(table: Table, layouts: Both) -> Mask:
    """Mask of rows whose equal copies may be equal parts of one tensor (all zeros), so that shapes are compatible."""
    out = np.zeros(len(table.rows_a), np.bool_)
    if table.a.how is None and table.b.how is None:
        return out
    numbers = [batch.layout[rows] for batch, rows in table.pairs]
    for one, two in {*zip(*(of_run.tolist() for of_run in numbers), strict=True)}:
        pair = layouts[0][one], layouts[1][two]
        if pair[0].shape != pair[1].shape:
            for at in np.flatnonzero((numbers[0] == one) & (numbers[1] == two)).tolist():
                held = _held(table.a, table.rows_a[at]), _held(table.b, table.rows_b[at])
                out[at] = Joined.ALIKE in {joined for joined, _ in held} and not other_shapes(pair, held)
    return out


def _single(table: Table, layouts: Both) -> Mask:
    """Mask of losses, and of scalars that one rank records in several calls."""
    several = np.logical_or(*(_often(batch, rows) > 1 for batch, rows in table.pairs))
    single = several & _scalar(table, layouts) if several.any() else several
    return np.asarray((table.kinds == kind_code(Kind.LOSS)) | single)


def _scalar(table: Table, layouts: Both) -> Mask:
    """Mask of differing rows that are a single number (shape ()) in both runs."""
    pairs = zip(map(Layouts, layouts), table.pairs, strict=True)
    one, two = (of_run.scalar[batch.layout[rows]] for of_run, (batch, rows) in pairs)
    return np.asarray(one & two)


# --- columns


def _values(table: Table, name: str) -> tuple[Floats, Floats]:
    """Statistic `name` (`mean`, `min`) of the differing rows, in a and in b."""
    one, two = (np.asarray(batch.floats[name], np.float64)[rows] for batch, rows in table.pairs)
    return one, two


def _has_means(table: Table) -> bool:
    return "mean" in table.a.floats and "mean" in table.b.floats


def _has_sketches(table: Table) -> bool:
    return table.a.sketch is not None and table.b.sketch is not None


def _how(table: Table, how: int) -> Mask:
    """Mask of differing rows that were joined in way `how` (`Joined`) in either run."""
    return np.asarray(np.logical_or(*(_joined(batch, rows, how) for batch, rows in table.pairs)))


def _joined(batch: StepBatch, rows: Ids, how: int) -> Mask:
    """Mask of rows joined in way `how`; all False in a step of a single rank."""
    return np.zeros(len(rows), np.bool_) if batch.how is None else np.asarray(batch.how)[rows] == how


def _often(batch: StepBatch, rows: Ids) -> Ids:
    """Number of calls put together in each row, 1 without such."""
    return np.ones(len(rows), np.int64) if batch.calls is None else np.asarray(batch.calls)[rows]


def _held(batch: StepBatch, row: int) -> tuple[int, int]:
    """(`Joined` code, number of ranks) of a row; (0, 0) in a step of a single rank."""
    return (0, 0) if batch.how is None or batch.ranks is None else (int(batch.how[row]), int(batch.ranks[row]))


def _size(batch: StepBatch, rows: Ids) -> Floats:
    """Largest absolute value of each row, from minimum and maximum."""
    low, high = (np.abs(np.asarray(batch.floats[name], np.float64)[rows]) for name in ("min", "max"))
    return np.fmax(low, high)


def shares(reader: Reader) -> float:
    """Number of ranks over which a batch is divided; pipeline stages of one model count once."""
    stages = reader.stages.values() if isinstance(reader, WholeReader) else ()
    return reader.rank_count / max((each.of / max(len(each.roots), 1) for each in stages), default=1)
