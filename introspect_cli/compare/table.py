"""Sites of both runs under one numbering, and one step of both as a table.

Each run numbers its sites in order of appearance. Both are mapped once onto the *union*: a's numbers, then the sites of
b alone. Steps are then matched with integer arrays; names are looked up only for what is shown or reasoned about.

*A step* is one table, with a row for each record of a, of b, or of both. It has thousands of records, so they stand in
columns of numpy: the site, the row of either run's records, and what comparing made of them so far. A pass of a
comparison (`passes.py`) takes such a table and returns one with other states: what is known of a pair of records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.measure import Floats, Ids, Layouts, Mask, Records, distances, relative
from introspect_cli.compare.names import grouped, strip_wrappers, with_ancestors
from introspect_cli.records import EVALUATED, KIND_CODES, Kind, Phase, Site, Status
from introspect_cli.selection import selects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.names import SiteTable


FLOWING_BACK = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
MODULE_VALUES = (Kind.INPUT, Kind.OUTPUT, *FLOWING_BACK)
MODULE_KINDS = (*MODULE_VALUES, Kind.OP_OUTPUT)
ACTIVATIONS = (Kind.BATCH, *MODULE_KINDS)
"""What flows back through modules, what they are given and give, with operators, with batches."""

KINDS = tuple(Kind)
PHASES = tuple(Phase)
PHASE_CODES = {phase.value: code for code, phase in enumerate(PHASES)}
"""The small integer that stands for each phase in arrays."""


@dataclass(frozen=True)
class Columns:
    """Sites as columns, a site in each row, under the names that are compared.

    Attributes:
        keys: hash of each site's phase, kind, FQN, call and path; equal keys are taken for equal sites.
        phase: phase codes.
        kind: kind codes.
    """

    keys: npt.NDArray[np.uint64]
    phase: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]
    fqn: list[str]
    call: npt.NDArray[np.int64]
    path: list[str]
    module_class: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    def are(self, *what: Kind | Phase, sites: npt.NDArray[Any] | slice = slice(None)) -> Mask:
        """Mask of sites that are of any of these kinds, and in any of these phases; where none is named, in all.

        Args:
            what: kinds and phases, in any order.
            sites: the sites that are looked at, by number; all by default.
        """
        mask = np.full(len(self.kind[sites]), fill_value=True)
        kinds = [KIND_CODES[each] for each in what if isinstance(each, Kind)]
        phases = [PHASE_CODES[each] for each in what if isinstance(each, Phase)]
        for column, codes in ((self.kind, kinds), (self.phase, phases)):
            if codes:
                wanted = np.zeros(1 << 8, bool)  # of columns this short, quicker than to search
                wanted[codes] = True
                mask &= wanted[column[sites]]
        return mask

    def site(self, number: int) -> Site:
        """The site with a number."""
        phase, kind = PHASES[self.phase[number]], KINDS[self.kind[number]]
        return Site(phase, kind, self.fqn[number], int(self.call[number]), self.path[number])

    def names_of(self, sites: Ids, *what: Kind | Phase) -> set[str]:
        """FQNs of those of `sites` that are of any of these kinds, and in any of these phases."""
        return {self.fqn[site] for site in sites[self.are(*what, sites=sites)].tolist()}

    @cached_property
    def evaluating(self) -> Mask:
        """Mask of sites that are in the phase `eval`, or whose root is an evaluation copy of a model (`EVALUATED`)."""
        copies = {name for name in set(self.fqn) if EVALUATED in name.partition(".")[0]}
        return np.asarray(self.are(Phase.EVAL) | (among(self.fqn, copies) if copies else False))

    def selected(self, kinds: Iterable[Kind] = (), modules: tuple[str, ...] = ()) -> Mask:
        """Mask of sites of any of `kinds` whose name matches any glob in `modules`; an empty one selects all."""
        wanted = {name for name in set(self.fqn) if not modules or selects(name, modules)}
        return self.are(*kinds) & among(self.fqn, wanted)


def columns(table: SiteTable, rename: Callable[[str], str] | None = None) -> Columns:
    """Columns of a store's site table under the names that are compared.

    Args:
        table: the sites of a rank.
        rename: changes FQNs; None to strip wrappers alone. Keys of changed names are computed again.
    """
    phase = np.frombuffer(bytes(map(PHASE_CODES.__getitem__, table.phase)), np.uint8)
    kind = np.frombuffer(bytes(map(KIND_CODES.__getitem__, table.kind)), np.uint8)
    keys, calls, change = np.array(table.key, np.uint64), np.asarray(table.call, np.int64), rename or strip_wrappers
    new = {name: change(name) for name in {*table.fqn} if rename or "._" in name}
    fqns = [new.get(name, name) for name in table.fqn] if new else table.fqn
    sites = Columns(keys, phase, kind, fqns, calls, table.path, table.module_class)
    for at in [at for at, name in enumerate(table.fqn if new else ()) if fqns[at] != name]:
        keys[at] = sites.site(at).key()
    return sites


def unwrapped(sites: Columns) -> Columns:
    """A copy in which the first output of each call has no path, whatever it is wrapped in (a tuple, a dataclass)."""
    keys, paths, seen = sites.keys.copy(), [*sites.path], set[Site]()
    for at in np.flatnonzero(sites.are(Kind.OUTPUT, Kind.GRAD_OUTPUT)).tolist():
        call = replace(sites.site(at), path="")
        if call not in seen:
            seen.add(call)
            paths[at], keys[at] = "", call.key()
    return replace(sites, keys=keys, path=paths)


@dataclass(frozen=True)
class Alignment(Columns):
    """Both runs' sites under one numbering: those of a, then those that only b has.

    Attributes:
        a: sites of run a; their union numbers are their own.
        b: sites of run b.
        b_ids: b's site number to union number.
    """

    a: Columns
    b: Columns
    b_ids: Ids

    @cached_property
    def ids(self) -> tuple[Ids, Ids]:
        """Arrays that map site numbers to union numbers: that of a (each its own), that of b."""
        return np.arange(len(self.a), dtype=np.int64), self.b_ids

    @cached_property
    def in_both(self) -> Mask:
        """Mask of sites that both runs have, each in any step."""
        return np.isin(np.arange(len(self)), self.b_ids[self.b_ids < len(self.a)])

    @cached_property
    def by_fqn(self) -> dict[str, list[int]]:
        """Union numbers of the sites of each FQN; computed once."""
        return grouped((name, index) for index, name in enumerate(self.fqn))

    def of(self, *what: Kind | Phase, fqn: str | None = None, call: int | None = None) -> Ids:
        """Union numbers of the sites of any of these kinds, in any of these phases (`Columns.are`).

        Only those of that FQN and call, where given.
        """
        sites = np.arange(len(self)) if fqn is None else np.array(self.by_fqn.get(fqn, []), np.int64)
        mask = self.are(*what, sites=sites)
        return np.asarray(sites[mask if call is None else mask & (self.call[sites] == call)])

    @cached_property
    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """(all FQNs that run a has, all that b has), at any step."""
        return frozenset(self.a.fqn), frozenset(self.b.fqn)

    @cached_property
    def around(self) -> tuple[set[str], set[str]]:
        """(FQNs of a with all their ancestors, the same of b), at any step."""
        return with_ancestors(self.names[0]), with_ancestors(self.names[1])


def among(names: Sequence[object], wanted: Collection[object]) -> Mask:
    """Mask of `names` that are in `wanted`."""
    return np.fromiter(map(wanted.__contains__, names), np.bool_, len(names))


def align(a: Columns, b: Columns) -> Alignment:
    """Put the sites of a and b under one numbering: a's numbers, then b's other sites; equal keys are one site.

    Of a site of both, the columns have what a has.
    """
    columns: dict[str, Any] = {field.name: getattr(a, field.name) for field in fields(Columns)}
    if np.array_equal(a.keys, b.keys):  # as those of most ranks are
        return Alignment(**columns, a=a, b=b, b_ids=np.arange(len(b)))
    known = {key: number for number, key in reversed([*enumerate(a.keys.tolist())])}
    ids = np.array([known.get(key, -1) for key in b.keys.tolist()], np.int64)
    extra = np.flatnonzero(ids < 0)
    ids[extra] = len(a) + np.arange(len(extra))
    for name, one in columns.items():
        two, is_list = getattr(b, name), isinstance(one, list)
        columns[name] = one + [two[i] for i in extra.tolist()] if is_list else np.concatenate([one, two[extra]])
    return Alignment(**columns, a=a, b=b, b_ids=ids)


Codes = npt.NDArray[np.int8]

OTHER = {"a": "b", "b": "a"}

ABSENT, EQUAL, WITHIN, DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B, UNUSED, CUT, EVALUATING = range(10)
"""What is known of a row: nothing that counts (one run alone has it, and the other could not have it), equal, within
tolerance, different, not seen by a run, only in a, or b, different though nothing that rests on it is; of one run alone
since the other was stopped within the step, or since it evaluates in other steps."""


class Learned(NamedTuple):
    """Knowledge passed from step to step.

    Attributes:
        coarse: the first step in which anything was rounded to bfloat16 or float16; infinity while none was.
        unsettled: parameters whose gradient was seen to be nothing but rounding, each with the step since when, and
            whether that was so of some elements only.
        let_pass: those parameters for which a difference beyond the tolerance was marked WITHIN.
        backward_ratio: ratio of the gradients inside the backward pass of b to those of a, n or 1/n with n whole, where
            ranks or microbatches are put together; None while that was not seen.
        units: how many times larger than those of b outputs of a are, by name, whose gradients are as much smaller.
    """

    coarse: float = np.inf
    unsettled: Mapping[str, tuple[int, bool]] = {}
    let_pass: frozenset[str] = frozenset()
    backward_ratio: float | None = None
    units: Mapping[str, float] = {}


class Half(NamedTuple):
    """One run's records of a step.

    Attributes:
        batch: its records, as the store's columns.
        sites: the union number of each.
        row: the row in `batch` of each row of the table; -1 where the other run alone has it.
        alone: the state of rows that it alone has.
        only: rows in `batch` that the other run should have and has not.
    """

    side: str
    batch: StepBatch
    sites: Ids
    row: Ids
    alone: int
    only: Ids


@dataclass(frozen=True, eq=False)
class Table:
    """One step of both runs; n rows.

    Rows of b's records come first, then those of a alone.

    Attributes:
        site: int64 (n,), the number of each row's site in the alignment.
        row_a: int64 (n,), the row among a's records; -1 where only b has it.
        row_b: int64 (n,), the row among b's records; -1 where only a has it.
        state: int8 (n,), `EQUAL` and so on.
        chosen: bool (n,), whether it was selected to be compared.
        cause: bool (n,), whether it diverges but does not count as a divergence (random states, one-sided names).
        layouts: of a and of b.
    """

    alignment: Alignment
    step: int
    step_b: int
    a: StepBatch
    b: StepBatch
    site: Ids
    row_a: Ids
    row_b: Ids
    state: Codes
    chosen: Mask
    cause: Mask
    layouts: tuple[Layouts, Layouts]

    def __len__(self) -> int:
        return len(self.site)

    # --- other tables

    def marked(self, rows: Ids | Mask, state: int, *, alone: int | None = None) -> Table:
        """A copy where these rows have this `state`; where `alone` is given, it is that of one-sided ones."""
        states = self.state.copy()
        states[rows] = state if alone is None else np.where(self.one_sided[rows], alone, state)
        return replace(self, state=states)

    def of(self, rows: Ids | Mask) -> Table:
        """A copy with only these rows, in this order; batches and steps stay whole."""
        columns = ("site", "row_a", "row_b", "state", "chosen", "cause")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    def keeping(self, rows: Mask) -> Table:
        """A copy in which diverging rows outside of `rows` diverge no more: NOT_SEEN, or ABSENT if one-sided."""
        others = self.diverging & ~rows
        return self.marked(others, NOT_SEEN, alone=ABSENT) if others.any() else self

    # --- which rows

    @cached_property
    def fqns(self) -> list[str]:
        """FQN of each row."""
        return [self.alignment.fqn[site] for site in self.site.tolist()]

    def are(self, *what: Kind | Phase) -> Mask:
        """Mask of rows that are of any of these kinds, and in any of these phases (`Columns.are`)."""
        return self.alignment.are(*what, sites=self.site)

    @cached_property
    def agreeing(self) -> Mask:
        """Mask of rows of both runs that are EQUAL or WITHIN."""
        return np.asarray(((self.state == EQUAL) | (self.state == WITHIN)) & ~self.one_sided)

    @cached_property
    def diverging(self) -> Mask:
        """Mask of rows whose state is DIFFERENT, ONLY_A or ONLY_B."""
        return np.asarray((self.state == DIFFERENT) | (self.state == ONLY_A) | (self.state == ONLY_B))

    @cached_property
    def one_sided(self) -> Mask:
        """Mask of rows that only one run has, whatever their state."""
        return np.asarray((self.row_a < 0) | (self.row_b < 0))

    @cached_property
    def differing(self) -> Ids:
        """Indices of the rows whose state is DIFFERENT."""
        return np.flatnonzero(self.state == DIFFERENT)

    def both(self, rows: Ids | None = None) -> tuple[Records, Records]:
        """Records of a, and of b, of rows that both runs have; of all rows where `rows` is None."""
        at, layouts = slice(None) if rows is None else rows, self.layouts
        return Records(self.a, self.row_a[at], layouts[0]), Records(self.b, self.row_b[at], layouts[1])

    def relative(self, rows: Ids | None = None) -> Floats:
        """Estimated relative L2 distance of `both`, float64; NaN where it is unknown."""
        return relative(*distances(*self.both(rows)))

    def of_layouts(self, name: str, rows: Ids | None = None) -> tuple[Any, Any]:
        """Attribute `name` of `Layouts` (`numel`, `shape`) of `both`: (in a, in b)."""
        one, two = self.both(rows)
        return one.layout(name), two.layout(name)

    def statistic(self, name: str, rows: Ids | None = None) -> Floats:
        """Statistic `name` (`mean`, `min`) of rows that both runs have, float64 (2, rows): in a and in b."""
        return np.array([of_run.statistic(name) for of_run in self.both(rows)])

    @cached_property
    def halves(self) -> tuple[Half, Half]:
        """Records of a and of b."""
        each = zip("ab", (self.a, self.b), self.alignment.ids, (self.row_a, self.row_b), (ONLY_A, ONLY_B), strict=True)
        a, b = (Half(side, of, ids[of.site], row, only, row[self.state == only]) for side, of, ids, row, only in each)
        return a, b

    # --- order

    @cached_property
    def order(self) -> npt.NDArray[np.float64]:
        """Place of each row in a's sequence, float64 (n,).

        A row of b alone comes just before the next record that a has and that is not ONLY_A, so behind what is.
        """
        sequence, (half_a, half_b) = self.a.sequence.astype(np.float64), self.halves
        arrival = np.argsort(self.b.sequence, kind="stable")
        places = self.order_of[half_b.sites]
        reached = np.empty(len(arrival))
        reached[arrival] = np.maximum.accumulate(np.where(np.isinf(places), -1.0, places)[arrival])
        # before the next record that both have, and after what a alone has there
        shared = np.sort(np.delete(sequence, half_a.only))
        ends = np.append(shared, sequence.max(initial=0.0) + 2.0)
        of_b = ends[np.searchsorted(shared, reached, side="right")] - 0.5
        return np.where(self.row_a < 0, np.append(of_b, np.inf)[self.row_b], np.append(sequence, np.inf)[self.row_a])

    @cached_property
    def in_order(self) -> Ids:
        """Indices of the diverging rows, sorted by `order`, then by b's sequence."""
        rows = np.flatnonzero(self.diverging)
        return np.asarray(rows[np.lexsort((np.append(self.b.sequence, 0)[self.row_b[rows]], self.order[rows]))])

    @cached_property
    def divergences(self) -> Table:
        """The diverging rows as a table, in the order of `in_order`; computed once."""
        return self.of(self.in_order)

    # --- by site

    @cached_property
    def state_of(self) -> Codes:
        """State of every site of the alignment.

        DIFFERENT for ONLY_A and ONLY_B too, ABSENT for CUT and EVALUATING too, and where no row has the site.
        """
        states, uncounted = np.full(len(self.alignment), ABSENT, np.int8), np.isin(self.state, (CUT, EVALUATING))
        states[self.site] = np.select([self.diverging, uncounted], [DIFFERENT, ABSENT], self.state)
        return states

    @cached_property
    def order_of(self) -> npt.NDArray[np.float64]:
        """Place of every site of the alignment in a's sequence; infinity where a has no record of it in the step."""
        order = np.full(len(self.alignment), np.inf)
        order[self.halves[0].sites] = self.a.sequence
        return order

    @cached_property
    def rows_of(self) -> dict[str, dict[int, int]]:
        """By run (`a`, `b`), the row in its batch of each site that it recorded, by union number."""
        return {half.side: {site: row for row, site in enumerate(half.sites.tolist())} for half in self.halves}

    def _record(self, site: int, side: str) -> tuple[int | None, StepBatch]:
        """(row of a site in the batch of run `side`, or None, that batch)."""
        return self.rows_of[side].get(site), self.a if side == "a" else self.b

    def number(self, name: str, site: int, side: str) -> int | None:
        """`status`, `checksum` or `sequence` (place in the order of recording) of a site's record in run `side`.

        `site` is a union number. None without a record.
        """
        row, batch = self._record(site, side)
        return None if row is None else int(getattr(batch, name)[row])

    def sketches(self, site: int) -> tuple[Any, Any] | None:
        """(sketch in a, sketch in b) of a site, float64 (16,); None where either has none, or is not finite."""
        found = [self._record(site, side) for side in "ab"]
        both = [of.sketch[row].astype(np.float64) for row, of in found if row is not None and of.sketch is not None]
        return (both[0], both[1]) if len(both) == 2 and np.isfinite(both).all() else None

    def plain(self, site: int, side: str) -> str | None:
        """`plain_of` a site's record in run `side`; None without a record."""
        row, batch = self._record(site, side)
        return None if row is None else plain_of(batch, row)

    def first_of(self, rows: Mask) -> Site | None:
        """The site of the earliest of these rows by `order`; None for none."""
        chosen = np.flatnonzero(rows)
        return self.named(int(chosen[np.argmin(self.order[chosen])])) if len(chosen) else None

    def named(self, row: int) -> Site:
        """The site of row `row` of this table."""
        return self.alignment.site(int(self.site[row]))


def unseen(batch: StepBatch) -> Mask:
    """Mask over all rows of a batch, true for those without a value: NOT_OBSERVED, or PARTIAL with checksum 0."""
    partly = (batch.status == Status.PARTIAL) & (batch.checksum == 0)
    return np.asarray(partly | (batch.status == Status.NOT_OBSERVED))


def plain_of(batch: StepBatch, row: int) -> str | None:
    """A value's text, else the mean of a tensor as text (`0.1`); None where both are missing.

    A number with a decimal point is rounded to six significant digits.
    """
    text = batch.text[row]
    if not text and "mean" in batch.floats:
        return f"{float(batch.floats['mean'][row]):g}"
    return f"{float(text):g}" if re.fullmatch(r"-?(\d+\.\d*|\.\d+)(e[-+]?\d+)?", text) else text or None
