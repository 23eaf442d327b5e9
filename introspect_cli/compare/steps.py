"""Common steps of two runs, those that have to be opened, and values that ranks share out.

A store's index has, for each step, a digest of its records: only steps with unequal digests are opened. All is arrays,
for tens of thousands of steps.

*Values gathered* from several ranks or microbatches are compared as one whole. If the samples of both runs are equal in
any order, the records are equal; of other gathered values, extrema and means are compared.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.measure import Ids, Layouts, Mask
from introspect_cli.compare.names import grouped
from introspect_cli.compare.table import FLOWING_BACK, MODULE_VALUES, OTHER, columns, unwrapped
from introspect_cli.compare.watched import is_list
from introspect_cli.errors import UsageError
from introspect_cli.records import Joined, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.match import Correspondence
    from introspect_cli.compare.measure import Floats
    from introspect_cli.compare.names import Rename
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.compare.table import Columns, Learned, Table
    from introspect_cli.compare.wholes import Splits
    from introspect_cli.store.log import StepEntry
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run


@dataclass(frozen=True, eq=False, kw_only=True)
class Sides:
    """One rank of both runs, or all ranks as one, with options and selection.

    Attributes:
        options: what counts.
        offset: step k of b is compared with step k + offset of a.
        runs: a and b, whole.
        noise: readers of the noise runs' ranks, each with its run's manifest.
        match: which name of a is which of b.
        splits: how both are split up, where ranks or calls are put together.
        ends: the last step of a, and of b, that counts; None for all.
    """

    rank: int
    a: Reader
    b: Reader
    options: DiffOptions
    offset: int = 0
    manifests: tuple[dict[str, Any], dict[str, Any]]
    runs: tuple[Run, Run]
    noise: tuple[tuple[Reader, dict[str, Any]], ...] = ()
    match: Correspondence
    splits: Splits | None = None
    ends: tuple[int | None, int | None] = (None, None)
    _layouts: dict[tuple[int, int], tuple[Layouts, Layouts]] = field(default_factory=dict, init=False)

    @property
    def rename(self) -> Rename | None:
        """Function from a's FQNs to b's; None where all are the same."""
        return self.match.rename

    @cached_property
    def sites(self) -> tuple[Columns, Columns]:
        """Sites of a, with FQNs renamed, and of b, as columns; computed once."""
        one, two = columns(self.a.sites, self.rename), columns(self.b.sites)
        return (unwrapped(one), unwrapped(two)) if self.match.is_port else (one, two)

    @property
    def layouts(self) -> tuple[Layouts, Layouts]:
        """Lookup tables of layouts of a and of b.

        Built again where reading a step of combined ranks has added layouts.
        """
        known = len(self.a.layouts), len(self.b.layouts)
        if known not in self._layouts:
            self._layouts[known] = Layouts(self.a.layouts), Layouts(self.b.layouts)
        return self._layouts[known]


@dataclass(frozen=True)
class Paired:
    """Common steps of two runs, and the steps of each alone.

    All in pairs, of a and of b.

    Attributes:
        readers: of the rank.
        rows: positions among a run's entries of the steps both have, in order.
        only: steps that it alone has, in order and in a's numbering; those after the last common one included.
        tails: how many steps it has after the last common one.
    """

    readers: tuple[Reader, ...]
    rows: tuple[Ids, ...]
    only: tuple[tuple[int, ...], ...]
    tails: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, place: int) -> tuple[StepEntry, StepEntry]:
        """(index entry of a, index entry of b) of the common step at index `place`.

        A negative one counts from the end.
        """
        one, two = (reader.entry(int(rows[place])) for reader, rows in zip(self.readers, self.rows, strict=True))
        return one, two

    def __iter__(self) -> Iterator[tuple[StepEntry, StepEntry]]:
        return (self[place] for place in range(len(self)))

    @property
    def steps(self) -> Ids:
        """Number of each common step in a, in order."""
        return np.asarray(self.readers[0].entries["step"][self.rows[0]], dtype=np.int64)

    @property
    def records(self) -> int:
        """Number of records that a has in the common steps; 0 of combined ranks, whose steps tell it when read."""
        return int(self.readers[0].entries["rows"][self.rows[0]].sum(dtype=np.int64))


def steps_of(comparison: Sides) -> Paired:
    """The common steps that the options select, matched by number, and the steps of each run alone.

    `tails` count only steps that the other capture was not told to leave out; 0 where the other run is a
    list, whose end is unknown.
    """
    options, readers, shifts = comparison.options, (comparison.a, comparison.b), (0, comparison.offset)
    rows, numbers = list[Ids](), list[Ids]()
    for reader, end, shift in zip(readers, comparison.ends, shifts, strict=True):
        steps = reader.entries["step"].astype(np.int64)
        kept = steps <= (np.inf if end is None else end)
        if options.steps:
            kept &= np.array([options.wants_step(step) for step in (steps + shift).tolist()], np.bool_)
        rows.append(np.flatnonzero(kept))
        numbers.append(steps[rows[-1]] + shift)
    common, at_a, at_b = np.intersect1d(numbers[0], numbers[1], assume_unique=True, return_indices=True)
    only = [tuple(each[~np.isin(each, common)].tolist()) for each in numbers]
    last, tails = max(common.tolist(), default=-1), list[int]()
    for steps_alone, other, shift in zip(only, comparison.manifests[::-1], shifts[::-1], strict=True):
        after = [step for step in steps_alone if step > last]
        tails.append(0 if is_list(other) else _count_wanted(after, other.get("options", {}).get("steps"), shift))
    return Paired(readers, (rows[0][at_a], rows[1][at_b]), tuple(only), tuple(tails))


def _count_wanted(steps: Sequence[int], asked: object, offset: int) -> int:
    """How many of `steps`, after subtracting `offset`, a capture's schedule selects; all without a valid schedule.

    Args:
        steps: numbers of steps.
        asked: the option `steps` of the capture; any value.
        offset: the capture's numbers are as much smaller.
    """
    from introspect_cli.schedule.rules import Schedule

    with suppress(UsageError):
        wanted = Schedule.parse(str(asked or ":")).wants
        return sum(wanted(step - offset) for step in steps)
    return len(steps)  # a store from elsewhere


def differing(paired: Paired) -> list[int]:
    """Indices of the common steps whose digests are unequal, in order; only the index is read."""
    one, two = (reader.entries["digest"][rows] for reader, rows in zip(paired.readers, paired.rows, strict=True))
    return [int(place) for place in np.flatnonzero(one != two)]


_MOMENTS = ("min", "max", "absmin", "mean", "amean", "var")
_WHOLE_NUMBER = 1e-3
"""How near to a whole number a factor has to be."""


def gathered_agree(table: Table, rtol: Floats, learned: Learned) -> tuple[Mask, Learned]:
    """(mask of the rows that agree, `learned` with the factors that the step shows).

    A row agrees by its sum over ranks, by extrema, means and variances, or as an output that the script scales.

    Args:
        table: those rows of a step that differ, as in all functions below.
        rtol: relative tolerance of each row.
        learned: its factor of gradients is used, and is never changed once known. Returned unchanged where either
            run has no means, else as a copy with that factor, and with `units` of this step too.
    """
    if "mean" not in table.a.floats or "mean" not in table.b.floats:
        return _sums_agree(table, rtol, learned.backward_ratio or 1.0), learned
    by_moments, scalar = _compared_by_moments(table), np.maximum(*table.of_layouts("dims")) == 0
    # a loss's gradient is what the script makes it
    ratio = learned.backward_ratio or _whole_ratio(table.of(table.are(*FLOWING_BACK) & by_moments & ~scalar))
    scaled, units = _scaled_outputs(table, rtol, scalar)
    agree = _sums_agree(table, rtol, ratio or 1.0)
    agree[scaled] = True
    agree[by_moments] |= moments_agree(table.of(by_moments), rtol[by_moments], ratio or 1.0)
    return agree, learned._replace(backward_ratio=ratio, units={**learned.units, **units})


def are_of_one_dtype(table: Table) -> Mask:
    """Mask of rows; False for module values (inputs, outputs, their gradients) of two dtypes."""
    return np.asarray(np.equal(*table.of_layouts("dtype")) | ~table.are(*MODULE_VALUES))


def _compared_by_moments(table: Table) -> Mask:
    """Mask of rows to compare by extrema and means.

    Any of: gathered in either run; equal on all ranks, with a size that divides the other run's or is divided by it;
    single numbers equal on all ranks.
    """
    one, two = table.of_layouts("numel")
    whole = np.fmax(one, two) % np.fmax(np.fmin(one, two), 1.0) == 0
    alike = (whole & (one != two)) | _single_numbers(table)
    return np.asarray(_are_joined(table, Joined.GATHERED) | (_are_joined(table, Joined.ALIKE) & alike))


def moments_agree(table: Table, rtol: Floats, ratio: float) -> Mask:
    """Mask of rows that agree: extrema, means and variances; of single numbers, the mean or the sum over calls.

    Args:
        table: the rows.
        rtol: relative tolerance of each.
        ratio: how many times larger than a's the gradients of b are.
    """
    factor = np.where(table.are(*FLOWING_BACK), 1 / ratio, 1.0)
    one, two = np.stack([table.statistic(name) for name in _MOMENTS], axis=1)
    one[-1], two[-1] = np.sqrt(one[-1]), np.sqrt(two[-1])  # of the variance, in the unit of the others
    size = np.nanmax(np.abs([*one[:2], *two[:2], np.zeros(len(table))]), axis=0)
    bound = rtol * size * np.maximum(factor, 1.0)
    with np.errstate(invalid="ignore"):
        near = (np.abs(one - two * factor) <= bound) | (np.isnan(one) & np.isnan(two))
    # single numbers may be summed up over calls in both, in b alone, or scaled
    a, b = one[_MOMENTS.index("mean")], two[_MOMENTS.index("mean")]
    calls = _call_counts(table)
    more = np.maximum(*calls) / np.minimum(*calls)  # losses that are added up are that factor, too
    scale = np.where(more == max(ratio, 1 / ratio), 1.0, ratio)
    sums = np.stack([b * calls[1], b * calls[1] / scale, b, b * calls[0]])
    added = (np.abs(a * calls[0] - sums) <= rtol * np.abs(a * calls[0])).any(axis=0)
    return np.asarray(np.where(_single_numbers(table), near[_MOMENTS.index("mean")] | added, near.all(axis=0)))


def _sums_agree(table: Table, rtol: Floats, ratio: float) -> Mask:
    """Mask of rows that are backward gradients whose sums over ranks agree by their sketches.

    Args:
        table: the rows.
        rtol: relative tolerance of each.
        ratio: how many times larger than a's the gradients of b are.
    """
    if table.a.sketch is None or table.b.sketch is None:
        return np.zeros(len(table), np.bool_)
    whole = ~_are_joined(table, Joined.GATHERED) & np.equal(*table.of_layouts("shape"))
    one, two = (of_run.column("sketch").astype(np.float64) for of_run in table.both())
    distance, size = (np.linalg.norm(values, axis=1) for values in (one - two / ratio, one))
    with np.errstate(invalid="ignore"):
        near = distance <= rtol * size
    return np.asarray(near & table.are(*FLOWING_BACK) & (_are_joined(table, Joined.OWED) | whole))


def factor_notes(learned: Learned) -> list[str]:
    """Sentences on outputs that a script scales, and on the factor of gradients if it is not 1."""
    lines = [
        f"The output {name} of run {'a' if times > 1 else 'b'} is {max(times, 1 / times):.0f} x that of the other, "
        "and its gradient as much smaller: the script scales one of them."
        for name, times in learned.units.items()
    ]
    ratio = learned.backward_ratio or 1.0
    if ratio != 1:
        large = "a" if ratio < 1 else "b"
        times = f"{round(max(ratio, 1 / ratio))} x those of run {OTHER[large]}"
        why = "there the loss is scaled, or is a mean over fewer samples"
        lines.append(f"Gradients inside the backward pass of run {large} are {times}: {why}.")
    return lines


def _times(one: float, two: float) -> int:
    """How many times as large the larger of two numbers is, if that is whole (to 0.1 %); 0 where it is not."""
    larger = max(one / two, two / one) if one > 0 and two > 0 else np.inf
    return round(larger) if larger < np.inf and abs(larger / round(larger) - 1) < _WHOLE_NUMBER else 0


def _whole_ratio(table: Table) -> float | None:
    """The ratio of b's mean absolute value to a's that most rows show, n or 1/n with n whole.

    Of two that as many rows show, the first. None if none shows one.
    """
    means = np.transpose(table.statistic("amean")).tolist()
    seen = Counter(1 / times if one >= two else float(times) for one, two in means if (times := _times(one, two)))
    return seen.most_common(1)[0][0] if seen else None


def _scaled_outputs(table: Table, rtol: Floats, scalar: Mask) -> tuple[list[int], dict[str, float]]:
    """Single outputs that are n times as large in one run, n whole above 1, and whose gradients are n times as small.

    Returns their rows, and of chosen ones the ratio of a to b by name.

    Args:
        table: the rows.
        rtol: relative tolerance of each.
        scalar: whether each has no dimensions.
    """
    kinds, scaled, units = (Kind.OUTPUT, Kind.GRAD_OUTPUT), list[int](), dict[str, float]()
    sites = ((row, table.named(row)) for row in np.flatnonzero(table.are(*kinds) & scalar).tolist())
    for (fqn, path, _), rows in grouped(((site.fqn, site.path, site.call), row) for row, site in sites).items():
        one, two = table.statistic("mean", np.array(rows))
        same = len(rows) == len(kinds) and abs(one.prod() - two.prod()) <= rtol[rows[0]] * abs(one.prod())
        if same and _times(*np.abs([one[0], two[0]]).tolist()) > 1:
            scaled += rows
            if table.chosen[rows].any():
                units[f"{fqn}{path}"] = abs(float(one[0] / two[0]))
    return scaled, units


def _are_joined(table: Table, how: Joined) -> Mask:
    """Mask of rows that ranks' records were joined into in the way `how`, in either run or both."""
    return np.asarray(np.logical_or(*(of_run.column("how", Joined.AS_RECORDED) == how for of_run in table.both())))


def _call_counts(table: Table) -> list[Ids]:
    """How many calls were put together in each record, in a and in b; 1 where none were."""
    return [of_run.column("calls", 1) for of_run in table.both()]


def _single_numbers(table: Table) -> Mask:
    """Mask of rows that are losses, or scalars put together from several calls in either run."""
    several = np.maximum(*_call_counts(table)) > 1
    return np.asarray(table.are(Kind.LOSS) | (several & (np.maximum(*table.of_layouts("dims")) == 0)))
