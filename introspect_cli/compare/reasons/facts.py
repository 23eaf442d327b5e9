"""What is known of one diverging step, in a shape that questions can be put to.

Whether a divergence is an origin depends on what went into it: which records differ, which came before, which
modules contain which. The step's divergences are walked once, and every later question is a lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import Items, StepPair
    from introspect_cli.compare.join.sites import Alignment

FORWARD = frozenset({Phase.FORWARD, Phase.EVAL, Phase.RECOMPUTE})
_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})
_BEFORE_USE = frozenset({Phase.START, Phase.OPTIMIZER})


def owner_of(fqn: str) -> str:
    """The module a parameter or buffer belongs to, or the parent of a module; "" for a root."""
    return fqn.rpartition(".")[0]


def ancestors(fqn: str) -> list[str]:
    """All modules that contain this name, innermost first."""
    found = []
    head = owner_of(fqn)
    while head:
        found.append(head)
        head = owner_of(head)
    return found


@dataclass
class Carried:
    """Tensors that the step began with and that are known to differ, by FQN (and path for optimizer state)."""

    params: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    states: set[tuple[str, str]] = field(default_factory=set)
    rng: set[str] = field(default_factory=set)
    loaders: set[str] = field(default_factory=set)
    diverged: bool = False


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
        alignment: the runs' sites.
        pair: the step's records.
        items: its divergences in order.
        sites: their sites.
        carried: what differed before the step began.
        gap: whether what the step began with is not known: the step before was not recorded.
    """

    def __init__(
        self,
        alignment: Alignment,
        pair: StepPair,
        items: Items,
        carried: Carried,
        *,
        gap: bool = False,
    ) -> None:
        self.alignment = alignment
        self.pair = pair
        self.items = items
        self.carried = carried
        self.gap = gap
        self.sites = [alignment.site(int(union)) for union in items.union]
        self._first: dict[tuple[Phase, Kind], float] = {}
        self._differing: dict[tuple[Phase, Kind, str, int], float] = {}
        self._inside: dict[tuple[str, str], list[float]] = {}
        self._lonely: dict[str, Lonely] = {}
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

    def before(
        self, order: float, phases: frozenset[Phase] | None = None, kinds: frozenset[Kind] | None = None
    ) -> bool:
        """Whether anything of these phases and kinds differs earlier in the step."""
        return any(
            at < order
            for (phase, kind), at in self._first.items()
            if (phases is None or phase in phases) and (kinds is None or kind in kinds)
        )

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
        return [
            union
            for union in self.alignment.by_fqn.get(fqn, [])
            if (site := self.alignment.site(union)).phase is phase and site.kind is kind and site.call == call
        ]

    def sequence_of(self, unions: list[int], *, side: str = "a") -> float | None:
        """Earliest sequence, in run a (or b), of any of these sites at this step; None where none was recorded."""
        batch = self.pair.a if side == "a" else self.pair.b
        wanted = np.asarray(unions, dtype=np.int64)
        numbers = np.asarray(batch.site).astype(np.int64)
        if side == "b":
            numbers = self.alignment.b_ids[numbers]
        rows = np.flatnonzero(np.isin(numbers, wanted))
        return float(np.asarray(batch.sequence)[rows].min()) if len(rows) else None

    def row(self, union: int, side: str) -> int | None:
        """Row of a site in run a (or b) at this step."""
        batch = self.pair.a if side == "a" else self.pair.b
        numbers = np.asarray(batch.site).astype(np.int64)
        if side == "b":
            numbers = self.alignment.b_ids[numbers]
        rows = np.flatnonzero(numbers == union)
        return int(rows[0]) if len(rows) else None

    def tensors_differ(self, fqn: str, order: float) -> bool:
        """Whether a parameter or buffer of a module, or inside it, differs already at a place of the sequence.

        Those that the step began with, and those that an optimizer changed before, within the step.
        """
        prefix = fqn + "."
        if any(name.startswith(prefix) for name in self.carried.params | self.carried.buffers):
            return True
        return any(
            at < order and site.kind in _TENSORS and site.phase in _BEFORE_USE and site.fqn.startswith(prefix)
            for at, site in zip(self.items.order, self.sites, strict=True)
        )

    def holds_tensors(self, fqn: str) -> bool:
        """Whether a module, or a module inside it, has parameters or buffers."""
        prefix = fqn + "."
        kinds = (Kind.PARAM, Kind.BUFFER)
        return any(
            name.startswith(prefix) and any(self.alignment.site(union).kind in kinds for union in unions)
            for name, unions in self.alignment.by_fqn.items()
        )

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
        return any(site.kind is Kind.RNG for site in self.sites)


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
    states: set[tuple[str, str]] = set()
    loaders = set(known.loaders)
    for site in facts.sites:
        if site.phase is Phase.OPTIMIZER and site.call:
            continue  # how a tensor was within the step
        if site.kind is Kind.PARAM and (site.phase is not Phase.START or site.fqn not in recorded_params):
            params.add(site.fqn)
        elif site.kind is Kind.BUFFER and (site.phase is not Phase.START or site.fqn not in recorded_params):
            buffers.add(site.fqn)
        elif site.kind is Kind.OPTIMIZER_STATE:
            states.add((site.fqn, site.path))
        elif site.kind is Kind.BATCH:
            loaders.add(site.fqn)
    rng = {site.fqn for site in facts.sites if site.kind is Kind.RNG} | known.rng
    return Carried(params, buffers, states, rng, loaders, diverged=True)
