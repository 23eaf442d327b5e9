"""Two runs in different layouts: their ranks put together on either side, and what may then be asked of a pair.

Where every rank of a has its partner in b, ranks are compared one by one. Where one run has other ranks, or cut its
tensors otherwise, whole is compared with whole. Two layouts add up in another order, so nothing that follows from a sum
can be bit-equal, and a tolerance is put to it that is told with the answer. Of values that were gathered from several
ranks (samples, activations) only extrema and means are known: those are compared, and no more is claimed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.amounts import Amounts
from introspect_cli.compare.join.distance import Layouts, other_shapes
from introspect_cli.compare.join.shared_out import OTHER, SAME, SharedOut
from introspect_cli.compare.join.sites import Ids, Mask, kind_code, phase_code
from introspect_cli.compare.join.split import splits_of
from introspect_cli.records import Joined, Kind, Phase, count
from introspect_cli.store.whole import Reader, WholeReader, as_one

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.join.sites import Alignment
    from introspect_cli.compare.join.split import Splits
    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.result import Divergence
    from introspect_cli.compare.table import Table
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import Run

    Column = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

RTOL, RTOL_COARSE, ATOL = 1e-4, 3e-2, 1e-8
"""What another order of summation may change, in float32 and where both runs compute in bfloat16 or float16.

Between layouts of one training, parameters after AdamW were seen to differ by 2e-5 and by 1e-2."""

_STATE = (Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE)
_FLOWING_BACK = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_RAN_INSIDE = (Kind.INPUT, Kind.OUTPUT, *_FLOWING_BACK)
_MOMENTS = ("min", "max", "absmin", "mean", "amean", "var")
_SURE = 1e-3
_OTHER_SAMPLES = (
    "Its samples are not those of a, whichever rank has which: their checksums add up to another sum (captures with "
    "--per-sample tell how many are the same)."
)
_COARSE = frozenset({"bfloat16", "float16"})
_FLOATING = ("float", "bfloat", "complex")


def wholes(a: Run, b: Run, splits: Splits | None = None) -> tuple[Reader, Reader]:
    """All ranks of each run as one, calls put together where one run calls its modules more often than the other."""
    splits = splits or splits_of(a, b, alike=False)
    return as_one(a, splits.folds[0]), as_one(b, splits.folds[1])


def same_layout(a: Run, b: Run) -> bool:
    """Whether each rank of one run has its partner in the other, with the same share of every tensor.

    What one of the runs has on no rank, such as a layer of its own, tells nothing of how the others are shared out.
    """
    if a.world_size != b.world_size or bool(a.whole_of) != bool(b.whole_of):
        return False
    if a.whole_of:
        return bool(a.manifest["whole"].get("layout") == b.manifest["whole"].get("layout"))
    common = [rank for rank in a.ranks if rank in b.ranks]
    if len(a.ranks) == len(b.ranks) == 1:
        return True
    if any(_parts(a.rank(rank)) != _parts(b.rank(rank)) for rank in common):
        return False
    held = [{rank: _state(run.rank(rank)) for rank in common} for run in (a, b)]
    both = set.intersection(*(set[tuple[str, str]]().union(*own.values()) for own in held))
    if not both:  # it shows only where each rank has all
        return all(len(set(map(frozenset, own.values()))) < 2 for own in held)
    return all(held[0][rank] & both == held[1][rank] & both for rank in common)


def _state(reader: Reader) -> set[tuple[str, str]]:
    sites = reader.sites
    states = {kind.value for kind in (Kind.PARAM, Kind.OPTIMIZER_STATE)}
    return {(f, k) for f, k in zip(sites.fqn, sites.kind, strict=True) if k in states}


def _parts(reader: Reader) -> set[object]:
    return {(layout.shape, layout.part) for layout in reader.layouts if layout.part is not None}


def tolerances(options: DiffOptions, readers: Iterable[Reader]) -> DiffOptions:
    """The options with the tolerance that different layouts need, where none was asked for."""
    if options.tolerant:
        return options
    coarse = all(any(layout.dtype in _COARSE for layout in reader.layouts) for reader in readers)
    return replace(options, rtol=RTOL_COARSE if coarse else RTOL, atol=ATOL)


def told(a: Run, b: Run, options: DiffOptions, splits: Splits) -> str:
    """A note on what is compared."""
    folded = ", calls of a module together" if splits.folded else ""
    sizes = [count(run.world_size, "rank") if run.world_size > 1 else "one process" for run in (a, b)]
    sizes = [f"{size}{' put together' * bool(run.whole_of)}" for size, run in zip(sizes, (a, b), strict=True)]
    recorded = any(Kind.OP_OUTPUT.value in run.rank(rank).sites.kind for run in (a, b) for rank in run.recorded[:1])
    operators = " and results of operators" if splits.folded and recorded else ""
    differ, each = "The layouts differ", "rank to rank"
    if bool(a.whole_of) != bool(b.whole_of):
        differ = "The ranks of one run are put together"
    if splits.apart:
        cut = splits.a.words, splits.b.words
        if a.world_size == b.world_size == 1:
            sizes, differ, each = list(cut), "The batch of a step is cut differently", "call to call"
        else:
            sizes = [f"{size}, {own}{' each' * (size != 'one process')}" for size, own in zip(sizes, cut, strict=True)]
            each = "rank to rank or call to call"
    sampled = all(run.rank(run.recorded[0]).has_samples for run in (a, b) if run.recorded)
    by = (
        "by its samples where these are on record and equal, else by extrema and means"
        if sampled
        else "by its extrema and means alone"
    )
    return (
        f"{differ} (a: {sizes[0]}, b: {sizes[1]}), so wholes are compared: parts added up, copies counted "
        f"once{folded}, what differs from {each} {by}, random states{operators} not at all. "
        f"Sums in another order may differ by {options.rtol:g} of the values."
    )


def stages_apart(readers: Iterable[Reader]) -> list[str]:
    """Notes on pipelines whose stages give one name to several things."""
    found = []
    for name, reader in zip("ab", readers, strict=True):
        roots = sorted(reader.distinct_roots) if isinstance(reader, WholeReader) else []
        found += [
            f"The stages of run {name} have different parameters under equal names: {root} of stage 1 is called "
            f"{root}[stage 1] here, and so on."
            for root in roots
        ]
    return found


def copies_told(first: Divergence, runs: tuple[Run, Run]) -> list[str]:
    """Notes on copies that are not equal within one run, where the first divergence is of that."""
    found = [
        f"In run {name} the {first.site.kind.value} {first.site.fqn} is not one value: its {summary.text}."
        for summary, name in ((first.a, "a"), (first.b, "b"))
        if summary is not None and summary.joined is Joined.COPIES
    ]
    return [*found, *_samples_told(first, runs)]


def _samples_told(first: Divergence, runs: tuple[Run, Run]) -> list[str]:
    """That a run's batch is as small as one rank's share, where it is: all its ranks were given the same."""
    if first.site.kind is not Kind.BATCH or first.a is None or first.b is None:
        return []
    shapes = first.a.layout.shape, first.b.layout.shape
    if not all(shapes) or shapes[0][1:] != shapes[1][1:]:
        return []
    for run, name, own, other in ((runs[1], "b", *shapes[::-1]), (runs[0], "a", *shapes)):
        if run.world_size > 1 and other[0] == own[0] * run.world_size:
            size = count(run.world_size, "rank")
            return [f"In run {name} the {size} have one batch between them: each was given the same samples."]
    return []


class Gathered:
    """Compares what was gathered from several ranks, and remembers by which factor gradients flow back.

    Its notes tell of what was chosen to be compared.
    """

    def __init__(self, sides: Sides) -> None:
        """Start without a factor; the readers know how often either run computes its loss in a step."""
        a, b = sides.a, sides.b
        self.factor: int | None = None
        self._shared = SharedOut(sides)
        self._amounts = Amounts((a.layouts, b.layouts)) if sides.splits is not None and sides.splits.apart else None
        self._ranks = getattr(b, "many", 1) / getattr(a, "many", 1)
        self.by_samples = self._amounts is not None
        self._exact: set[tuple[int, int]] = set()
        self._often = _losses(a), _losses(b)
        self._layouts = a.layouts, b.layouts
        self._divided = False
        self._flows_back = False
        self._scaled: dict[str, float] = {}

    @property
    def times(self) -> float | None:
        """How many times those of a the gradients inside the backward pass of b are; None where that was not seen."""
        return None if self.factor is None else 1 / self.factor if self.factor > 0 else float(-self.factor)

    @property
    def summed(self) -> bool:
        """Whether these gradients tell that a run adds up losses of microbatches: no ranks make that factor."""
        return self._amounts is not None and self.times is not None and abs(self.times - self._ranks) > _SURE

    def of_equal_amounts(self, table: Table) -> Table:
        """The table without what two splits of a batch have other amounts of, which means nothing."""
        return table if self._amounts is None else self._amounts.without(table)

    def same_samples(self, table: Table) -> Mask:
        """Differing rows whose samples are all equal, whichever rank has which."""
        same = np.asarray(self._shared.known(table) == SAME)
        chosen = same & table.chosen[table.differing]
        self._exact |= {(table.step, int(table.a.site[row])) for row in table.rows_a[chosen]}
        return same

    def samples_told(self, table: Table, rows: tuple[int, int], kind: Kind) -> list[str]:
        """How many samples of a are in b too, of a divergence of which both kept them.

        Args:
            table: the step.
            rows: the record of a, and of b; -1 where one run has none.
            kind: of the records.
        """
        if min(rows) < 0:
            return []
        bags = self._shared.bags(table, *rows)
        if bags is None:
            other = kind is Kind.BATCH and self._shared.known_of(table, *rows) == OTHER
            return [_OTHER_SAMPLES] if other else []
        both = (bags[0] & bags[1]).total()
        if not both and kind is not Kind.BATCH:
            return []  # sums in another order leave no sample equal
        return [f"Of {count(bags[0].total(), 'sample')} of a, {both} {'is' if both == 1 else 'are'} in b too."]

    def of_one_dtype(self, alignment: Alignment, table: Table) -> Mask:
        """Differing rows but those of what ran inside in another dtype, on any rank: no other order makes that."""
        kinds = alignment.kind[np.asarray(table.a.site)[table.rows_a]]
        one, two = (
            Layouts(own).dtype[np.asarray(batch.layout)[rows]]
            for own, batch, rows in zip(self._layouts, (table.a, table.b), (table.rows_a, table.rows_b), strict=True)
        )
        return np.asarray((one == two) | ~np.isin(kinds, [kind_code(kind) for kind in _RAN_INSIDE]))

    def agree(self, alignment: Alignment, table: Table, rtol: float) -> Mask:
        """Differing rows of which one side at least was gathered, and whose extrema and means agree.

        A batch that was kept sample by sample is the same samples or another batch: no rounding is in it.
        """
        out = self._other_units(alignment, table, rtol)
        gathered = (
            _how(table.a, table.rows_a, Joined.GATHERED)
            | _how(table.b, table.rows_b, Joined.GATHERED)
            | self._equal_parts(table)
        )
        single = self._single(alignment, table)
        gathered |= single & (_how(table.a, table.rows_a, Joined.ALIKE) | _how(table.b, table.rows_b, Joined.ALIKE))
        batches = alignment.kind[np.asarray(table.a.site)[table.rows_a]] == kind_code(Kind.BATCH)
        if table.a.sketch is None or table.b.sketch is None:
            gathered |= self._added_up(alignment, table)
        if (gathered & batches).any():
            gathered &= ~(batches & (self._shared.known(table) == OTHER))
        rows = np.flatnonzero(gathered)
        if not len(rows) or "mean" not in table.a.floats or "mean" not in table.b.floats:
            return out
        rows_a, rows_b = table.rows_a[rows], table.rows_b[rows]
        kinds = alignment.kind[np.asarray(table.a.site)[rows_a]]
        factor = np.where(
            np.isin(kinds, [kind_code(kind) for kind in _FLOWING_BACK]), self._factor(table, rows_a, rows_b, kinds), 1.0
        )
        chosen = table.chosen[table.differing][rows]
        self._flows_back |= bool((np.isin(kinds, [kind_code(kind) for kind in _FLOWING_BACK]) & chosen).any())
        single = single[rows]
        often = _often(table.a, rows_a), _often(table.b, rows_b)
        size = np.maximum(*(_size(batch, own) for batch, own in ((table.a, rows_a), (table.b, rows_b))))
        close = np.ones(len(rows), np.bool_)
        for name in _MOMENTS:
            one, two = (
                np.asarray(batch.floats[name], np.float64)[own] for batch, own in ((table.a, rows_a), (table.b, rows_b))
            )
            power = 2 if name == "var" else 1
            with np.errstate(invalid="ignore"):
                apart = np.abs(one - two * factor**power)
                near = (apart <= rtol * (size * np.maximum(factor, 1.0)) ** power) | (np.isnan(one) & np.isnan(two))
            if name == "mean":
                loss = kinds == kind_code(Kind.LOSS)
                near |= single & self._add_up(one, two, often, rtol, loss & chosen & ~near)
            close &= near | (single & (name != "mean"))
        out[rows] |= close
        return out | self._sums(alignment, table, rtol)

    def _added_up(self, alignment: Alignment, table: Table) -> Mask:
        """Differing rows that sums in another order may explain, where no sketch tells how far they are apart.

        What a step begins with is no sum.
        """
        sites = np.asarray(table.a.site)[table.rows_a]
        out = alignment.phase[sites] != phase_code(Phase.START)
        shapes = []
        for own, batch, rows in zip(self._layouts, (table.a, table.b), (table.rows_a, table.rows_b), strict=True):
            numbers = np.asarray(batch.layout)[rows]
            floating = np.array([layout.dtype.startswith(_FLOATING) for layout in own], np.bool_)
            out &= floating[numbers] & ~_how(batch, rows, Joined.COPIES)
            shapes.append([own[number].shape for number in numbers.tolist()])
        alike = np.array([one == two for one, two in zip(*shapes, strict=True)], np.bool_)
        return np.asarray(out & alike & (alignment.kind[sites] != kind_code(Kind.BATCH)))

    def _equal_parts(self, table: Table) -> Mask:
        """Differing rows that may be parts on several ranks which happen to be equal: all zeros, as a layer begins."""
        out = np.zeros(len(table.rows_a), np.bool_)
        if table.a.how is None and table.b.how is None:
            return out
        numbers = [np.asarray(own.layout)[rows] for own, rows in ((table.a, table.rows_a), (table.b, table.rows_b))]
        for one, two in {*zip(*(own.tolist() for own in numbers), strict=True)}:
            layouts = self._layouts[0][one], self._layouts[1][two]
            if layouts[0].shape != layouts[1].shape:
                for at in np.flatnonzero((numbers[0] == one) & (numbers[1] == two)).tolist():
                    held = _held(table.a, table.rows_a[at]), _held(table.b, table.rows_b[at])
                    alike = Joined.ALIKE in {joined for joined, _ in held}
                    out[at] = alike and not other_shapes(layouts, held)
        return out

    def _sums(self, alignment: Alignment, table: Table, rtol: float) -> Mask:
        """Gradients that the ranks' own add up to, by the factor that all gradients have."""
        out = np.zeros(len(table.rows_a), np.bool_)
        if table.a.sketch is None or table.b.sketch is None:
            return out
        kinds = alignment.kind[np.asarray(table.a.site)[table.rows_a]]
        flows = np.isin(kinds, [kind_code(kind) for kind in _FLOWING_BACK])
        rows = np.flatnonzero(
            flows & (_how(table.a, table.rows_a, Joined.OWED) | _how(table.b, table.rows_b, Joined.OWED))
        )
        factor = 1.0 if self.factor is None else self.factor if self.factor > 0 else -1.0 / self.factor
        one, two = (
            np.asarray(batch.sketch, np.float64)[own[rows]] * by
            for batch, own, by in ((table.a, table.rows_a, 1.0), (table.b, table.rows_b, factor))
        )
        apart, size = (np.linalg.norm(values, axis=1) for values in (one - two, one))
        with np.errstate(invalid="ignore"):
            out[rows] = apart <= rtol * size
        return out

    def _other_units(self, alignment: Alignment, table: Table, rtol: float) -> Mask:
        """Numbers that come out of a module n times as large and whose gradient is n times smaller.

        A loss that a module divides by the samples of all ranks, and the script multiplies by the number of ranks
        again, is the same loss.
        """
        out = np.zeros(len(table.rows_a), np.bool_)
        if "mean" not in table.a.floats or "mean" not in table.b.floats:
            return out
        sites = np.asarray(table.a.site)[table.rows_a]
        kinds = alignment.kind[sites]
        numbers: dict[tuple[str, str, int], dict[int, int]] = {}
        codes = kind_code(Kind.OUTPUT), kind_code(Kind.GRAD_OUTPUT)
        for at in np.flatnonzero(np.isin(kinds, codes)).tolist():
            layouts = (
                own[int(batch.layout[row])]
                for own, batch, row in zip(
                    self._layouts, (table.a, table.b), (table.rows_a[at], table.rows_b[at]), strict=True
                )
            )
            if all(layout.shape == () for layout in layouts):
                site = alignment.site(int(sites[at]))
                numbers.setdefault((site.fqn, site.path, site.call), {})[int(kinds[at])] = at
        for (fqn, path, _), found in numbers.items():
            if len(found) == len(codes):
                place = np.array([found[code] for code in codes])
                one, two = (
                    np.asarray(batch.floats["mean"], np.float64)[rows[place]]
                    for batch, rows in ((table.a, table.rows_a), (table.b, table.rows_b))
                )
                with np.errstate(all="ignore"):
                    times = float(one[0] / two[0])
                    whole = round(max(times, 1 / times)) if np.isfinite(times) and times > 0 else 0
                    same = abs(one.prod() - two.prod()) <= rtol * abs(one.prod())
                if same and whole > 1 and abs(max(times, 1 / times) / whole - 1) < _SURE:
                    out[place] = True
                    if table.chosen[table.differing][place].any():
                        self._scaled[f"{fqn}{path}"] = whole if times > 1 else -whole
        return out

    def _single(self, alignment: Alignment, table: Table) -> Mask:
        """Differing rows of single numbers, one of each call: losses, and those that a model computes itself."""
        kinds = alignment.kind[np.asarray(table.a.site)[table.rows_a]]
        out = kinds == kind_code(Kind.LOSS)
        several = (_often(table.a, table.rows_a) > 1) | (_often(table.b, table.rows_b) > 1)
        if several.any():
            single = [
                np.array([not own[number].shape for number in np.asarray(batch.layout)[rows].tolist()], np.bool_)
                for own, batch, rows in zip(
                    self._layouts, (table.a, table.b), (table.rows_a, table.rows_b), strict=True
                )
            ]
            out = out | (several & single[0] & single[1])
        return np.asarray(out)

    def _add_up(self, one: Column, two: Column, often: tuple[Ids, Ids], rtol: float, losses: Mask) -> Mask:
        """Single numbers of microbatches of which a script takes the sum, as it divides each by how many there are.

        Args:
            one: their means in run a.
            two: those in run b.
            often: how many there are, on a rank of a and on one of b.
            rtol: what sums in another order may differ by.
            losses: of which this is told.
        """
        total, other = one * often[0], two * often[1]
        divided = np.abs(total - other) <= rtol * np.abs(total)
        self._divided |= bool((divided & losses & (often[0] != often[1])).any())
        return np.asarray(
            divided | (np.abs(total - two) <= rtol * np.abs(total)) | (np.abs(one - other) <= rtol * np.abs(one))
        )

    def _factor(self, table: Table, rows_a: Ids, rows_b: Ids, kinds: object) -> float:
        """By what gradients of b are smaller: the whole number that most sites show."""
        if self.factor is not None:
            return self.factor if self.factor > 0 else -1.0 / self.factor
        one, two = (np.asarray(b.floats["amean"], np.float64)[own] for b, own in ((table.a, rows_a), (table.b, rows_b)))
        back = np.isin(kinds, [kind_code(kind) for kind in _FLOWING_BACK]) & (one > 0) & (two > 0)  # type: ignore[arg-type]
        seen: Counter[int] = Counter()
        for ratio in (one[back] / two[back]).tolist():
            larger = round(max(ratio, 1 / ratio))
            if abs(max(ratio, 1 / ratio) / larger - 1) < _SURE:
                seen[larger if ratio >= 1 else -larger] += 1
        if not seen:
            return 1.0
        self.factor = seen.most_common(1)[0][0]
        return self._factor(table, rows_a, rows_b, kinds)

    def notes(self) -> list[str]:
        """What to say of the factors, and of what was compared sample by sample."""
        found = [] if self._amounts is None else self._amounts.notes()
        if self._exact:
            many = count(len(self._exact), "value")
            found.append(f"{many} that ranks share out by samples: every sample is equal, whichever rank has it.")
        if self._divided:
            few, many = ("a", "b") if self._often[0] < self._often[1] else ("b", "a")
            times = max(self._often) / min(self._often)
            found.append(
                f"The loss of run {few} is {times:g} x that of run {many}, which computes it {times:g} times as often "
                "in a step: each of its losses is divided by that. That is taken into account."
            )
        for name, times in self._scaled.items():
            large, small = ("a", "b") if times > 0 else ("b", "a")
            found.append(
                f"The output {name} of run {large} is {abs(times):g} x that of run {small}, and its gradient "
                f"1/{abs(times):g} of that there: one of them is scaled on its way to the loss. That is taken into "
                "account."
            )
        if self.factor is None or abs(self.factor) == 1 or not self._flows_back:
            return found
        small, large = ("b", "a") if self.factor > 0 else ("a", "b")
        if self.summed:
            found.append(
                f"Gradients inside the backward pass of run {large} are {abs(self.factor)} x those of run {small}: the "
                "losses of its microbatches are added up, not averaged. Where its parameters' gradients agree all the "
                "same, clipping hides that."
            )
            return found
        found.append(
            f"Gradients inside the backward pass of run {large} are {abs(self.factor)} x those of run {small}: there "
            "the loss is a mean over fewer samples. That is taken into account."
        )
        return found


def _losses(reader: Reader) -> int:
    """How often a run computes its loss in a step, at most."""
    each = [own.sites for own in getattr(reader, "readers", [reader])]
    most = 0
    for sites in each:
        calls = sites.call
        losses = (int(calls[at]) for at in np.flatnonzero(calls).tolist() if sites.kind[at] == Kind.LOSS.value)
        most = max(most, max(losses, default=0))
    return most + 1


def _often(batch: StepBatch, rows: Ids) -> Ids:
    """How many calls of one rank became each row."""
    return np.ones(len(rows), np.int64) if batch.calls is None else np.asarray(batch.calls)[rows]


def _held(batch: StepBatch, row: int) -> tuple[int, int]:
    """How ranks hold a record: how theirs became one, and how many have one value."""
    return (0, 0) if batch.how is None or batch.ranks is None else (int(batch.how[row]), int(batch.ranks[row]))


def _how(batch: StepBatch, rows: Ids, how: int) -> Mask:
    return np.zeros(len(rows), np.bool_) if batch.how is None else np.asarray(batch.how)[rows] == how


def _size(batch: StepBatch, rows: Ids) -> Column:
    """The largest absolute value of each row's tensor."""
    low, high = (np.abs(np.asarray(batch.floats[name], np.float64)[rows]) for name in ("min", "max"))
    return np.fmax(low, high)
