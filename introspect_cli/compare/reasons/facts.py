"""What is known of one diverging step, in a shape that questions can be put to.

Whether a divergence is an origin depends on what went into it: which records differ, which came before, which
modules contain which. The step's divergences are walked once, and every later question is a lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.coverage import (
    chooses_modules,
    draws_apart,
    draws_known,
    draws_recorded,
    observed_kinds,
)
from introspect_cli.compare.join.live_in import Carried
from introspect_cli.compare.join.moved import tree_at
from introspect_cli.compare.join.offset import start_values
from introspect_cli.compare.join.sites import KINDS, kind_code, phase_code
from introspect_cli.records import DRAWN_BEFORE, Kind, ModuleInfo, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from introspect_cli.compare.join.rows import Items, StepPair
    from introspect_cli.compare.join.sites import Alignment, Ids
    from introspect_cli.compare.join.steps import Sides

FORWARD = frozenset({Phase.FORWARD, Phase.EVAL, Phase.RECOMPUTE})
_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})
_BEFORE_USE = frozenset({Phase.START, Phase.OPTIMIZER})


ABSENT, EQUAL, WITHIN, DIFFERS, BLIND = range(5)
"""What is known of a site in a step: no record, equal, within tolerance, different (or one-sided), not seen."""


def owner_of(fqn: str) -> str:
    """The module a parameter or buffer belongs to, or the parent of a module; "" for a root."""
    return fqn.rpartition(".")[0]


def generator_of(site: Site) -> str:
    """The random generator that an `rng` record is of: named by its path within a step, by its name at the start."""
    return site.path.removesuffix(DRAWN_BEFORE) or site.fqn


def ancestors(fqn: str) -> list[str]:
    """All modules that contain this name, innermost first."""
    found = []
    head = owner_of(fqn)
    while head:
        found.append(head)
        head = owner_of(head)
    return found


def with_ancestors(names: Iterable[str]) -> set[str]:
    """These names and those of all modules that contain them."""
    found: set[str] = set()
    for name in names:
        head = name
        while head and head not in found:
            found.add(head)
            head = owner_of(head)
    return found


@dataclass(frozen=True)
class Lonely:
    """What only one side has in a step.

    Attributes:
        own: FQNs of its records.
        inside: for these FQNs and all that contain them, the first item inside.
    """

    own: frozenset[str]
    inside: dict[str, int]


class Facts:
    """Lookups over one step's divergences.

    Attributes:
        sides: both runs' ranks.
        alignment: the runs' sites.
        pair: the step's records.
        items: its divergences in order.
        sites: their sites.
        carried: what differed before the step began.
        before: the step before, where both runs recorded it.
        gap: whether what the step began with is not known: the step before was not recorded.
        resumed: whether nothing diverged before, and one run began later, with other values than the other had then.
    """

    def __init__(
        self,
        sides: Sides,
        alignment: Alignment,
        pair: StepPair,
        items: Items,
        carried: Carried,
        *,
        before: StepPair | None = None,
        gap: bool = False,
        resumed: bool = False,
    ) -> None:
        self.sides = sides
        self.alignment = alignment
        self.pair = pair
        self.items = items
        self.carried = carried
        self.before_pair = before
        self.gap = gap
        self.resumed = resumed
        self.sites = [alignment.site(int(union)) for union in items.union]
        self._first: dict[tuple[Phase, Kind], float] = {}
        self._differing: dict[tuple[Phase, Kind, str, int], float] = {}
        self._inside: dict[tuple[str, str], list[float]] = {}
        self._lonely: dict[str, Lonely] = {}
        self._begun: dict[str, tuple[list[float], list[int], dict[int, float]]] = {}
        self._by_kind: dict[tuple[Kind, str], list[int]] = {}
        for index, site in enumerate(self.sites):
            order = float(items.order[index])
            self._first.setdefault((site.phase, site.kind), order)
            self._differing.setdefault((site.phase, site.kind, site.fqn, site.call), order)
            self._by_kind.setdefault((site.kind, site.fqn), []).append(index)
            family = "backward" if site.phase is Phase.BACKWARD else "forward" if site.phase in FORWARD else ""
            if family:
                own = (site.fqn,) if site.kind is Kind.OP_OUTPUT else ()  # an operator runs inside its module
                for head in (*own, *ancestors(site.fqn)):
                    self._inside.setdefault((family, head), []).append(order)

    @property
    def step(self) -> int:
        """The step of run a."""
        return self.pair.step

    @cached_property
    def state(self) -> npt.NDArray[np.int8]:
        """What is known of every site in this step, by union number."""
        return states(self.alignment, self.pair)

    @cached_property
    def state_before(self) -> npt.NDArray[np.int8] | None:
        """The same for the step before; None where it was not recorded."""
        return None if self.before_pair is None else states(self.alignment, self.before_pair)

    @cached_property
    def order(self) -> npt.NDArray[np.float64]:
        """When each site was recorded in run a, by union number; infinity where it was not."""
        order = np.full(self.alignment.size, np.inf)
        order[np.asarray(self.pair.a.site).astype(np.int64)] = np.asarray(self.pair.a.sequence)
        return order

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Kinds that both runs watched for, as far as is known."""
        found = []
        for manifest, columns in (
            (self.sides.manifest_a, self.alignment.a),
            (self.sides.manifest_b, self.alignment.b),
        ):
            told = observed_kinds(manifest)
            own = {KINDS[code] for code in np.flatnonzero(np.bincount(columns.kind))}
            found.append({kind for kind in Kind if kind.value in told} | own)
        return frozenset(found[0] & found[1])

    @cached_property
    def without_modules(self) -> bool:
        """Whether both captures watched modules and operators were not asked for, and no module ran in either run."""
        if Kind.OUTPUT not in self.kinds or Kind.OP_OUTPUT in self.kinds or any(self.modules):
            return False
        calls = [kind_code(kind) for kind in (Kind.INPUT, Kind.OUTPUT)]
        return not np.isin(self.alignment.kind, calls).any()

    @cached_property
    def modules_chosen(self) -> bool:
        """Whether one of the captures was told to leave modules out."""
        return any(chooses_modules(manifest) for manifest in (self.sides.manifest_a, self.sides.manifest_b))

    @cached_property
    def draws_recorded(self) -> bool:
        """Whether both captures looked for draws within a step, and at the same moments."""
        manifests = self.sides.manifest_a, self.sides.manifest_b
        return all(map(draws_recorded, manifests)) and not draws_apart(self.alignment, *manifests).any()

    @cached_property
    def draws_known(self) -> bool:
        """Whether both captures noticed every draw from a default random generator."""
        return all(draws_known(manifest) for manifest in (self.sides.manifest_a, self.sides.manifest_b))

    @cached_property
    def modules(self) -> tuple[dict[str, ModuleInfo], dict[str, ModuleInfo]]:
        """Both module trees by FQN, as they are compared and as they are at this step."""
        change = self.sides.rename or str
        return (
            {change(module.fqn): module for module in tree_at(self.sides.a.module_rows, self.pair.step)},
            {module.fqn: module for module in tree_at(self.sides.b.module_rows, self.pair.step_b)},
        )

    def unions(self, kind: Kind, phases: frozenset[Phase], fqn: str | None = None) -> Ids:
        """Union numbers of the sites of a kind, in these phases."""
        if fqn is not None:
            numbers = np.array(self.alignment.by_fqn.get(fqn, []), dtype=np.int64)
        else:
            numbers = np.arange(self.alignment.size, dtype=np.int64)
        chosen = self.alignment.kind[numbers] == kind_code(kind)
        chosen &= np.isin(self.alignment.phase[numbers], [phase_code(phase) for phase in phases])
        return np.asarray(numbers[chosen])

    @cached_property
    def ended(self) -> frozenset[str]:
        """FQNs of the tensors that optimizer steps leave on record."""
        tensors = np.isin(self.alignment.kind, [kind_code(kind) for kind in _TENSORS])
        after = tensors & (self.alignment.phase == phase_code(Phase.OPTIMIZER))
        return frozenset(self.alignment.fqn[union] for union in np.flatnonzero(after))

    @cached_property
    def _began(self) -> frozenset[str]:
        """FQNs of the tensors that both captures began with."""
        sides = (self.sides.a, self.alignment.a), (self.sides.b, self.alignment.b)
        one, two = ({fqn for _, fqn, _ in start_values(*side)} for side in sides)
        return frozenset(one & two)

    @cached_property
    def _tensors_of_owner(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for union in np.flatnonzero(np.isin(self.alignment.kind, [kind_code(kind) for kind in _TENSORS])):
            name = self.alignment.fqn[union]
            found.setdefault(owner_of(name), set()).add(name)
        return found

    def tensors_in(self, fqn: str) -> set[str]:
        """FQNs of the parameters and buffers recorded of a module, without those of modules inside it."""
        return self._tensors_of_owner.get(fqn, set())

    def was_there(self, fqn: str) -> bool:
        """Whether a tensor found at the start of a step is not a new one: the step before has it, or the first step."""
        alignment, before = self.alignment, self.before_pair
        if before is not None:
            own = alignment.by_fqn[fqn]
            rows = np.asarray(before.a.site), alignment.b_ids[np.asarray(before.b.site)]
            if all(np.isin(own, sites).any() for sites in rows):
                return True
        return self.step > self.sides.a.entry(0).step and fqn in self._began

    def before(
        self, order: float, phases: frozenset[Phase] | None = None, kinds: frozenset[Kind] | None = None
    ) -> bool:
        """Whether anything of these phases and kinds differs earlier in the step."""
        return any(
            at < order
            for (phase, kind), at in self._first.items()
            if (phases is None or phase in phases) and (kinds is None or kind in kinds)
        )

    def anything_before(self, order: float) -> bool:
        """Whether anything differs before this place, in the step or in what it began with."""
        return bool(self.carried.params or self.carried.buffers) or self.before(order)

    def differs(self, phase: Phase, kind: Kind, fqn: str, call: int) -> bool:
        """Whether a site differs, on any path."""
        return (phase, kind, fqn, call) in self._differing

    def differing(self, kind: Kind, fqn: str) -> list[int]:
        """Items of a kind and FQN, in order."""
        return self._by_kind.get((kind, fqn), [])

    def inside(self, family: str, fqn: str, low: float, high: float) -> bool:
        """Whether a record inside a module differs, within a span of the sequence."""
        orders = self._inside.get((family, fqn), [])
        return bisect_left(orders, low) < bisect_right(orders, high)

    def recorded(self, phase: Phase, kind: Kind, fqn: str, call: int) -> list[int]:
        """Union numbers of the sites there are for a module call, on all paths."""
        return self.alignment.of_call(phase, kind, fqn, call)

    def sequence_of(self, unions: list[int]) -> float | None:
        """Earliest sequence, in run a, of any of these sites at this step; None where none was recorded."""
        found = self.order[unions].min(initial=np.inf)
        return float(found) if np.isfinite(found) else None

    def running(self, fqn: str, order: float) -> tuple[float, int] | None:
        """When the call of a module that is running at a place of the sequence began, and which call it is.

        The last whose inputs stand before; None where there is none.
        """
        if fqn not in self._begun:
            inputs = self.unions(Kind.INPUT, FORWARD, fqn)
            inputs = inputs[np.argsort(self.order[inputs], kind="stable")]
            orders, calls = self.order[inputs].tolist(), self.alignment.call[inputs].tolist()
            self._begun[fqn] = orders, calls, dict(zip(reversed(calls), reversed(orders), strict=True))
        orders, calls, starts = self._begun[fqn]
        place = bisect_right(orders, order) - 1
        return None if place < 0 else (starts[calls[place]], calls[place])

    def tensors_differ(self, fqn: str, order: float) -> bool:
        """Whether a parameter or buffer of a module, or inside it, differs already at a place of the sequence.

        Those that the step began with, and those that an optimizer changed before, within the step.
        """
        return self._tensors_from.get(fqn, np.inf) < order

    @cached_property
    def _tensors_from(self) -> dict[str, float]:
        """From where in the sequence on a parameter or buffer inside a module differs, by FQN of the module."""
        found = dict.fromkeys(
            (head for name in self.carried.params | self.carried.buffers for head in ancestors(name)), -np.inf
        )
        for order, site in zip(self.items.order.tolist(), self.sites, strict=True):
            if site.kind in _TENSORS and site.phase in _BEFORE_USE:
                for head in ancestors(site.fqn):
                    found[head] = min(order, found.get(head, np.inf))
        return found

    def lonely(self, side: str) -> Lonely:
        """What only one side has in this step."""
        if side not in self._lonely:
            missing = self.items.row_b if side == "a" else self.items.row_a
            own: set[str] = set()
            inside: dict[str, int] = {}
            for index in np.flatnonzero(missing < 0):
                name = self.sites[index].fqn
                own.add(name)
                for head in (name, *ancestors(name)):
                    inside.setdefault(head, int(index))
            self._lonely[side] = Lonely(frozenset(own), inside)
        return self._lonely[side]

    def rng_differs(self) -> bool:
        """Whether a random state differs at the start of the step."""
        return (Phase.START, Kind.RNG) in self._first


def states(alignment: Alignment, pair: StepPair) -> npt.NDArray[np.int8]:
    """What is known of every site in a step, by union number."""
    found = np.full(alignment.size, ABSENT, dtype=np.int8)
    site_a, site_b = pair.sites(alignment)
    place_b = np.full(alignment.size, -1, dtype=np.int64)
    place_b[site_b] = np.arange(len(site_b))
    partner = place_b[site_a]
    both = np.flatnonzero(partner >= 0)
    same = np.asarray(pair.a.checksum)[both] == np.asarray(pair.b.checksum)[partner[both]]
    found[site_a[both]] = np.where(same, EQUAL, BLIND)
    found[site_a[pair.within_a]] = WITHIN
    found[site_a[pair.unseen_a]] = BLIND
    found[pair.alone] = BLIND
    found[site_a[pair.rows_a]] = DIFFERS
    found[site_a[pair.only_a]] = DIFFERS
    found[site_b[pair.only_b]] = DIFFERS
    return found


def carry_over(facts: Facts, known: Carried, recorded_params: frozenset[str]) -> Carried:
    """What the next step begins with, given how this one ended.

    Args:
        facts: the step.
        known: what it began with.
        recorded_params: FQNs whose values are recorded at the end of each step; what a step recorded anew replaces
            what was known before.
    """
    params = {name for name in known.params if name not in recorded_params}
    buffers = {name for name in known.buffers if name not in recorded_params}
    held: set[tuple[str, str]] = set()
    loaders = set(known.loaders)
    for site in facts.sites:
        if site.phase is Phase.OPTIMIZER and site.call:
            continue  # how a tensor was within the step
        if site.kind is Kind.PARAM and (site.phase is not Phase.START or site.fqn not in recorded_params):
            params.add(site.fqn)
        elif site.kind is Kind.BUFFER and (site.phase is not Phase.START or site.fqn not in recorded_params):
            buffers.add(site.fqn)
        elif site.kind is Kind.OPTIMIZER_STATE:
            held.add((site.fqn, site.path))
        elif site.kind is Kind.BATCH:
            loaders.add((site.phase, site.fqn))
    rng = {generator_of(site) for site in facts.sites if site.kind is Kind.RNG} | known.rng
    within = {name for name in known.within if name not in recorded_params} | within_tolerance_of(
        facts.alignment, facts.pair
    )
    return Carried(params, buffers, held, rng, loaders, within, diverged=True)


def within_tolerance_of(alignment: Alignment, pair: StepPair) -> set[str]:
    """FQNs of the tensors that a step leaves within tolerance, not equal."""
    unions = np.asarray(pair.a.site).astype(np.int64)[pair.within_a]
    tensors = unions[np.isin(alignment.kind[unions], [kind_code(kind) for kind in _TENSORS])]
    return {alignment.fqn[union] for union in tensors}
