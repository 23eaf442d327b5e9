"""Lookups over a diverging step: what differs where, what contains what, and when modules run.

The divergences are walked once; every later question is a lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.evidence import Known, joint_known
from introspect_cli.compare.terms.names import FORWARD, ancestors, tree_at
from introspect_cli.compare.terms.sites import Ids, kind_code
from introspect_cli.compare.terms.table import Codes, Learned, Table, plain_of
from introspect_cli.records import Kind, ModuleInfo, Phase

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from introspect_cli.compare.resumed import Carried
    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.compare.terms.table import Table
    from introspect_cli.store.format.batch import StepBatch


class Calls:
    """When modules run in a step, by the order of their inputs and outputs in run a.

    With ranks put together, whose modules run at the same time, nothing is said of what runs inside what.
    """

    def __init__(self, table: Table, comparison: Comparison) -> None:
        """Keep the table; calls are looked up at the first question."""
        self._table, self._of = table, comparison.of
        self._is_gathered = comparison.gathered is not None

    def around(self, fqn: str, order: float) -> tuple[str, float, int] | None:
        """(FQN, order of the start, call number) of the innermost call that runs at `order`, of any module but `fqn`.

        A call that begins or ends at exactly `order` does not run then. None for none, and always with ranks put
        together.
        """
        if self._is_gathered:
            return None
        calls, begun, ended = self._spans
        running = np.flatnonzero((begun < order) & (ended > order))
        others = [at for at in running.tolist() if calls[at][0] != fqn]
        at = max(others, key=begun.__getitem__, default=None)
        return None if at is None else (calls[at][0], float(begun[at]), calls[at][1])

    def spans_of(self, fqn: str) -> list[tuple[float, float]]:
        """(order of the first input, order of the last output) of each call of a module; calls without either left out.

        With ranks put together one infinite span.
        """
        if self._is_gathered:
            return [(-np.inf, np.inf)]
        calls, begun, ended = self._spans
        return [(begun[at], ended[at]) for at, (name, _) in enumerate(calls) if name == fqn]

    @cached_property
    def _spans(self) -> tuple[list[tuple[str, int]], Any, Any]:
        """((FQN, call number) of each call, order of its first input, order of its last output); computed once.

        A list and two arrays of one length. Calls without an input, or without an output, are left out.
        """
        begun: dict[tuple[str, int, int], float] = {}
        ended: dict[tuple[str, int, int], float] = {}
        orders, alignment = self._table.order_of, self._table.alignment
        for of, kind, outer in ((begun, Kind.INPUT, min), (ended, Kind.OUTPUT, max)):
            for union in self._of(kind, FORWARD).tolist():
                if np.isfinite(order := float(orders[union])):
                    call = alignment.fqn[union], int(alignment.call[union]), int(alignment.phase[union])
                    of[call] = outer(order, of.get(call, order))
        calls = [call for call in begun if call in ended]
        spans = np.array([(begun[call], ended[call]) for call in calls]).reshape(-1, 2)
        return [call[:2] for call in calls], spans[:, 0], spans[:, 1]


# --- the step


_TENSORS = (Kind.PARAM, Kind.BUFFER)
_DATA = frozenset({Phase.DATA})
_MAX_STEPS_BACK = 2000
"""Steps that are looked through for what stands since an earlier one."""
_BEFORE_USE = frozenset({Phase.START, Phase.OPTIMIZER})


class Step:
    """Lookups over one step's divergences.

    Attributes:
        of: the sites of a kind, in some phases.
        of_call: the sites of a kind there are for a module call, on all paths.
        divergences: those of the table that diverge, in order; a position is a place among them.
        carried: differences that the step begins with.
        before: the step before, where both runs recorded it.
        gap: whether start values are unknown, since the previous step was not recorded.
        resumed: whether nothing diverged before, and one run began later, with other values than the other had then.
        learned: what the steps so far have shown.
        is_gathered: whether the step is put together from several ranks, whose modules run at the same time.
    """

    def __init__(
        self,
        comparison: Comparison,
        table: Table,
        carried: Carried,
        *,
        before: Table | None = None,
        gap: bool = False,
        resumed: bool = False,
        learned: Learned | None = None,
    ) -> None:
        """Go through the divergences once and build the lookups; no step is read here.

        Arguments are as the attributes; `learned` is empty where none is given.
        """
        self.comparison, self.of = comparison, comparison.of
        self.table, self.number, self.divergences = table, table.step, table.divergences
        self.alignment, self.of_call = table.alignment, table.alignment.of_call
        self.carried = carried
        self.before = before
        self.gap = gap
        self.resumed = resumed
        self.learned = learned or Learned()
        self.sites = [table.alignment.site(site) for site in self.divergences.site.tolist()]
        self.is_gathered = comparison.gathered is not None
        self._first: dict[tuple[Phase, Kind], float] = {}
        self._differing: set[tuple[Phase, Kind, str, int]] = set()
        self._inside: dict[str, list[float]] = {}
        self._one_sided: dict[str, tuple[set[str], dict[str, int]]] = {}
        self._by_kind: dict[tuple[Kind, str], list[int]] = {}
        for position, (site, order) in enumerate(zip(self.sites, self.divergences.order.tolist(), strict=True)):
            if site.kind is not Kind.PRODUCT:  # what was saved before is made of the same, and nothing is made of it
                self._first.setdefault((site.phase, site.kind), order)
            self._differing.add((site.phase, site.kind, site.fqn, site.call))
            self._by_kind.setdefault((site.kind, site.fqn), []).append(position)
            if site.phase in FORWARD:
                itself = (site.fqn,) if site.kind is Kind.OP_OUTPUT else ()  # an operator runs inside its module
                for head in (*itself, *ancestors(site.fqn)) if self.is_gathered else ("", site.fqn)[: 2 - len(itself)]:
                    self._inside.setdefault(head, []).append(order)

    def with_table(self, table: Table) -> Step:
        """A `Step` like this with another table of the same step; this one is left as it is."""
        return Step(
            self.comparison,
            table,
            self.carried,
            before=self.before,
            gap=self.gap,
            resumed=self.resumed,
            learned=self.learned,
        )

    # --- what it belongs to

    @property
    def state(self) -> Codes:
        """State code of every site in this step, int8 (number of sites,), as `Table.state_of`."""
        return self.table.state_of

    @property
    def state_before(self) -> Codes | None:
        """State code of every site in the previous step, int8 (number of sites,), as `Table.state_of`.

        One-sided rows are DIFFERENT there, sites without a row ABSENT. None where either run did not record that step.
        """
        return None if self.before is None else self.before.state_of

    @cached_property
    def modules(self) -> tuple[dict[str, ModuleInfo], dict[str, ModuleInfo]]:
        """Modules of a and of b as they are at this step, by FQN (a's renamed to b's); computed once."""
        change = self.comparison.rename or str
        return (
            {change(module.fqn): module for module in tree_at(self.comparison.a.module_rows, self.table.step)},
            {module.fqn: module for module in tree_at(self.comparison.b.module_rows, self.table.step_b)},
        )

    @cached_property
    def has_no_modules(self) -> bool:
        """Whether no module is on record, in either tree or among the sites, though both runs record module outputs.

        False where both record operators.
        """
        kinds = self.comparison.kinds
        if Kind.OUTPUT not in kinds or Kind.OP_OUTPUT in kinds or any(self.modules):
            return False
        calls = [kind_code(kind) for kind in (Kind.INPUT, Kind.OUTPUT)]
        return not np.isin(self.alignment.kind, calls).any()

    def known(self, sites: Ids | Sequence[int], before: float = np.inf, *, every: bool = False) -> Known:
        """What is known of these sites in this step together: the first of DIFFERS, FORM, WITHIN, EQUAL that any has.

        UNSEEN where none has any of these; with `every`, UNSEEN comes second.

        Args:
            sites: their union numbers.
            before: position in run a's sequence; only earlier records of a count. Infinity for all, those that b alone
                has included.
            every: whether one record that was not seen makes the answer UNSEEN.
        """
        numbers = np.asarray(sites, dtype=np.int64)
        states = self.state[numbers]
        if np.isfinite(before):
            states = states[self.table.order_of[numbers] < before]
        return joint_known(states, every=every)

    # --- what differs

    def order_at(self, position: int) -> float:
        """Where divergence number `position` of this step stands in a's sequence (`Table.order`)."""
        return float(self.divergences.order[position])

    def is_one_sided(self, position: int) -> bool:
        """Whether only one run has the record at `position`."""
        return bool(self.divergences.one_sided[position])

    def differs_before(self, order: float, phases: Container[Phase] = frozenset(Phase)) -> bool:
        """Whether any divergence whose phase is in `phases` comes before `order`; saved files do not count."""
        return any(at < order and phase in phases for (phase, _), at in self._first.items())

    def anything_before(self, order: float) -> bool:
        """Whether anything differs before `order`: a parameter or buffer as the step begins, or anything in the step.

        Saved files do not count.
        """
        return bool(self.carried.params or self.carried.buffers) or self.differs_before(order)

    def rng_differs(self) -> bool:
        """Whether any random state at the start of the step differs or is one-sided."""
        return (Phase.START, Kind.RNG) in self._first

    def differs(self, phase: Phase, kind: Kind, fqn: str, call: int) -> bool:
        """Whether any divergence of the step has this phase, kind, FQN and call, whatever its path."""
        return (phase, kind, fqn, call) in self._differing

    def differing(self, kind: Kind, fqn: str) -> list[int]:
        """Positions of the divergences with this kind and FQN, in order; [] for none."""
        return self._by_kind.get((kind, fqn), [])

    def differs_inside(self, fqn: str, low: float, high: float) -> bool:
        """Whether a forward record inside a module's call differs, among those whose order is from `low` to `high`.

        Both are orders in the table, as `spans_of` gives, inclusive. All records between count as inside, of whatever
        module, but not the module's own inputs, outputs and the like; its operators' outputs do. With ranks put
        together only those of modules below its name count, and its operators.
        """
        of_all, of_it = (_count_between(self._inside.get(name, []), low, high) for name in ("", fqn))
        return of_it > 0 if self.is_gathered else of_all > of_it

    def one_sided(self, side: str) -> tuple[set[str], dict[str, int]]:
        """Of divergences that run `side` alone has: (their FQNs, by FQN and each ancestor the first position).

        Positions are those in `divergences`. Computed once per side; not to be changed.
        """
        if side not in self._one_sided:
            missing = self.divergences.row_b if side == "a" else self.divergences.row_a
            names, inside = self._one_sided.setdefault(side, (set(), {}))
            for position in np.flatnonzero(missing < 0).tolist():
                name = self.sites[position].fqn
                names.add(name)
                for head in (name, *ancestors(name)):
                    inside.setdefault(head, position)
        return self._one_sided[side]

    # --- the last value of each tensor and setting

    def last(self, union: int, side: str) -> tuple[StepBatch, int] | None:
        """(records of a step, row in them) of the last earlier record of what a site is about; None for none.

        Earlier records of one kind, FQN and path count, whatever their phase and call. Looked for in this step before
        the site's own record, then in the `_MAX_STEPS_BACK` steps before it (only one where steps were thinned), which
        are read.

        Args:
            union: number of the site.
            side: `a` or `b`.
        """
        table, alignment, comparison = self.table, self.alignment, self.comparison
        of = alignment.kind[union], alignment.path[union]
        alike = [u for u in alignment.by_fqn[alignment.fqn[union]] if (alignment.kind[u], alignment.path[u]) == of]
        reader, batch, step = (
            (comparison.a, table.a, table.step) if side == "a" else (comparison.b, table.b, table.step_b)
        )
        rows, now = table.rows_of(side), table.sequence(union, side)
        found = [rows[u] for u in alike if u in rows and now is not None and batch.sequence[rows[u]] < now]
        if found:
            return batch, max(found, key=batch.sequence.__getitem__)
        ids = alignment.ids[side == "b"]
        for number in range(step - 1, max(step - 1 - (1 if reader.thinned else _MAX_STEPS_BACK), -1), -1):
            if number in reader:
                batch = reader.read(number)
                found = np.flatnonzero(np.isin(ids[batch.site], alike)).tolist()
                if found:
                    return batch, max(found, key=batch.sequence.__getitem__)
        return None

    def last_text(self, union: int, side: str) -> str | None:
        """The value that `last` finds, as text; None where it finds none, or that has no text."""
        found = self.last(union, side)
        return None if found is None else plain_of(*found)

    def unchanged_side(self, union: int) -> str:
        """`a` or `b`, if in that run alone the record repeats the last value (`repeats_last`).

        "" for neither or both.
        """
        same = [side for side in "ab" if self.repeats_last(union, side) is True]
        return same[0] if len(same) == 1 else ""

    def repeats_last(self, union: int, side: str) -> bool | None:
        """Whether the checksum of run `side` at site `union` is that of the record before it (`last`).

        That is the last one of the same kind, FQN and path, of any phase and call, in this step or an earlier one. None
        where either of the two is missing.
        """
        now, found = self.table.checksum(union, side), self.last(union, side)
        return None if now is None or found is None else int(found[0].checksum[found[1]]) == now

    # --- tensors, and calls

    def is_recorded_before(self, fqn: str) -> bool:
        """Whether both runs have a record of any kind under this FQN in the previous step; False without that step."""
        recorded = (self.before.sites_a, self.before.sites_b) if self.before is not None else ((), ())
        return all(np.isin(self.alignment.by_fqn[fqn], sites).any() for sites in recorded)

    def sequence_of(self, sites: list[int]) -> float | None:
        """Lowest order in run a of these sites; None where a has none of them in the step."""
        earliest = self.table.order_of[sites].min(initial=np.inf)
        return float(earliest) if np.isfinite(earliest) else None

    @cached_property
    def calls(self) -> Calls:
        """Lookups of module calls of this step; created once."""
        return Calls(self.table, self.comparison)

    def tensors_differ(self, fqn: str, order: float) -> bool:
        """Whether a parameter or buffer at or below the module differs before `order`, or as the step begins.

        Only records of the phases `start` and `optimizer` count, not those within the forward pass.
        """
        return self._tensors_from.get(fqn, np.inf) < order

    @cached_property
    def _tensors_from(self) -> dict[str, float]:
        """By module, the lowest order at which a parameter or buffer of it or of its submodules differs.

        Only in the phases `_BEFORE_USE`; -inf if it does as the step begins (`carried`). Modules where none differs are
        left out.
        """
        tensors = dict.fromkeys(
            (head for name in self.carried.params | self.carried.buffers for head in ancestors(name)), -np.inf
        )
        for order, site in zip(self.divergences.order.tolist(), self.sites, strict=True):
            if site.kind in _TENSORS and site.phase in _BEFORE_USE:
                for head in ancestors(site.fqn):
                    tensors[head] = min(order, tensors.get(head, np.inf))
        return tensors


def _count_between(orders: list[float], low: float, high: float) -> int:
    """How many of `orders` (sorted) are from `low` to `high`, both inclusive."""
    return bisect_right(orders, high) - bisect_left(orders, low)
