"""One diverging step: what differs where and by how much, when modules run, and what rests on what.

The divergences are walked once; every later question is a lookup.

An output rests on its call's inputs, parameters, buffers, submodules and draws; a gradient on the forward pass, the
loss and earlier gradients. A divergence is an origin where all it rests on was recorded and does not differ.

A parameter is recorded as training finds it, after an optimizer step, and where it is written to. The last of these
before a call is what the module computes with; unknown where the forward pass itself changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.evidence import Evidence, Known, Thing, joint_known, worst_of
from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.measure import (
    Ids,
    distance_of,
    has_nonfinite,
    plain_distance,
    proportion,
    relative,
    size_of,
)
from introspect_cli.compare.names import FORWARD, ancestors, grouped, owner_of, tree_at
from introspect_cli.compare.result import Divergence, Size
from introspect_cli.compare.say import some
from introspect_cli.compare.table import ABSENT, DIFFERENT, FLOWING_BACK, NOT_SEEN, Learned, Table, plain_of
from introspect_cli.compare.watched import passes_over, ran_unseen
from introspect_cli.records import SETTING_KINDS, Joined, Kind, ModuleInfo, Phase, Site, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.resumed import Beginning
    from introspect_cli.compare.table import Table
    from introspect_cli.store.batch import StepBatch


class Call(NamedTuple):
    """One call of a module in a step's forward pass.

    Attributes:
        number: of the call, among those of the module.
        begun: order of its first input.
        ended: order of its last output.
    """

    fqn: str
    number: int
    begun: float
    ended: float


# --- the step


_MAX_STEPS_BACK = 2000
"""Steps that are looked through for what stands since an earlier one."""
_BEFORE_USE = frozenset({Phase.START, Phase.OPTIMIZER})


class Step:
    """Lookups over one step's divergences.

    Attributes:
        of: the sites of a kind, in some phases (`Alignment.of`).
        divergences: those of the table that diverge, in order; a position is a place among them.
        sites: those of the divergences.
        orders: where each divergence stands in a's sequence (`Table.order`).
        alone: whether only one run has it, for each divergence.
        state: int8 (number of sites,), the state code of every site, as `Table.state_of`.
        state_before: the same of the previous step; all ABSENT where either run did not record that.
        begins: what is known of what the step begins with.
        learned: what the steps so far have shown.
        is_gathered: whether the step is put together from several ranks, whose modules run at the same time.
    """

    def __init__(self, comparison: Comparison, table: Table, begins: Beginning, learned: Learned) -> None:
        """Go through the divergences once and build the lookups; no step is read here."""
        self.comparison, self.alignment, self.of = comparison, table.alignment, table.alignment.of
        self.table, self.number, self.divergences, self.state = table, table.step, table.divergences, table.state_of
        self.begins, self.learned = begins, learned
        self.sites = [table.alignment.site(site) for site in self.divergences.site.tolist()]
        self.orders, self.alone = self.divergences.order.tolist(), self.divergences.one_sided.tolist()
        self.is_gathered = comparison.is_whole
        self.state_before = np.zeros_like(self.state) if begins.before is None else begins.before.state_of

    # --- what it belongs to

    @cached_property
    def modules(self) -> tuple[dict[str, ModuleInfo], dict[str, ModuleInfo]]:
        """Modules of a and of b as they are at this step, by FQN (a's renamed to b's); computed once."""
        change = self.comparison.rename or str
        return (
            {change(module.fqn): module for module in tree_at(self.comparison.a.module_rows, self.table.step)},
            {module.fqn: module for module in tree_at(self.comparison.b.module_rows, self.table.step_b)},
        )

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
        early = numbers[self.table.order_of[numbers] < before] if np.isfinite(before) else numbers
        return joint_known(self.state[early], every=every)

    # --- what differs

    @cached_property
    def _first(self) -> dict[tuple[Phase, Kind], float]:
        """Where the first divergence of each phase and kind stands in a's sequence."""
        every = [*zip(self.sites, self.orders, strict=True)]
        return {(site.phase, site.kind): order for site, order in every[::-1]}

    @cached_property
    def _begun(self) -> list[tuple[str, float]]:
        """Parameters and buffers that differ as the step begins, an optimizer leaves them, or a module is called.

        With their orders.
        """
        every = [each for each in zip(self.sites, self.orders, strict=True) if each[0].kind in TENSORS]
        begun = [(site.fqn, at) for site, at in every if site.phase in _BEFORE_USE or site.kind is Kind.BUFFER]
        return [*((name, -np.inf) for name in self.begins.names), *begun]

    def differs_before(self, order: float, phases: Container[Phase] = frozenset(Phase)) -> bool:
        """Whether any divergence whose phase is in `phases` comes before `order`; saved files do not count."""
        firsts = (at for (phase, kind), at in self._first.items() if phase in phases and kind is not Kind.PRODUCT)
        return any(at < order for at in firsts)

    def rng_differs(self) -> bool:
        """Whether any random state at the start of the step differs or is one-sided."""
        return (Phase.START, Kind.RNG) in self._first

    @cached_property
    def held(self) -> dict[tuple[Kind, str], list[str]]:
        """FQNs of the parameters and buffers of either run, in any step, by kind and module."""
        names = ((kind, {self.alignment.fqn[union] for union in self.of(kind).tolist()}) for kind in TENSORS)
        return grouped(((kind, owner_of(name)), name) for kind, every in names for name in every)

    def differing(self, kind: Kind, fqn: str) -> list[int]:
        """Positions of the divergences with this kind and FQN, in order; [] for none."""
        sites = self.of(kind, fqn=fqn)
        return [*np.flatnonzero(np.isin(self.divergences.site, sites)).tolist()]

    def differs_inside(self, fqn: str, low: float, high: float) -> bool:
        """Whether anything inside a module's call differs that has an order from `low` to `high`, or a tensor below it.

        Both are orders in the table, inclusive: of forward records (`runs_inside`). Of its parameters and buffers those
        count that differ before `high`, or as the step begins, not parameters within the forward pass.
        """
        order = self.divergences.order
        begun, ended = np.searchsorted(order, low), np.searchsorted(order, high, side="right")
        ran = any(site.phase in FORWARD and self.runs_inside(site, fqn) for site in self.sites[begun:ended])
        return ran or any(at < high and name.startswith(f"{fqn}.") for name, at in self._begun)

    def runs_inside(self, site: Site, fqn: str) -> bool:
        """Whether a record between the beginning and the end of a module's call was made inside it.

        That is any but the module's own inputs, outputs and the like; its operators' results are. With ranks put
        together only those of modules below its name, and its operators.
        """
        if site.fqn == fqn:
            return site.kind is Kind.OP_OUTPUT  # an operator runs inside its module
        return not self.is_gathered or site.fqn.startswith(f"{fqn}.")

    @cached_property
    def one_sided(self) -> dict[str, tuple[set[str], dict[str, int]]]:
        """Of divergences that run `a`, or `b`, alone has: (their FQNs, by FQN and each ancestor the first position)."""
        found: dict[str, tuple[set[str], dict[str, int]]] = {"a": (set(), {}), "b": (set(), {})}
        for position in np.flatnonzero(self.divergences.one_sided).tolist():
            names, inside = found["a" if self.divergences.row_b[position] < 0 else "b"]
            names.add(name := self.sites[position].fqn)
            for head in (name, *ancestors(name)):
                inside.setdefault(head, position)
        return found

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
        alignment, second, site = self.alignment, side == "b", self.alignment.site(union)
        reader = self.comparison.b if second else self.comparison.a
        half, step = self.table.halves[second], self.table.step_b if second else self.table.step
        alike = [each for each in self.of(site.kind, fqn=site.fqn).tolist() if alignment.path[each] == site.path]
        now = self.table.number("sequence", union, side) or 0
        for number in range(step, max(step - 1 - (1 if reader.thinned else _MAX_STEPS_BACK), -1), -1):
            if number in reader:
                records, before = (half.batch, now) if number == step else (reader.read(number), np.inf)
                earlier = np.isin(alignment.ids[second][records.site], alike) & (records.sequence < before)
                if earlier.any():
                    return records, int(np.argmax(np.where(earlier, records.sequence, -1.0)))
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
        now, found = self.table.number("checksum", union, side), self.last(union, side)
        return None if now is None or found is None else int(found[0].checksum[found[1]]) == now

    # --- tensors, and calls

    def differed_before(self, sites: Ids | Sequence[int]) -> bool:
        """Whether any of these sites differs in the step before; False without that step."""
        return bool((self.state_before[sites] == DIFFERENT).any())

    def is_recorded_before(self, fqn: str) -> bool:
        """Whether both runs have a record of any kind under this FQN in an earlier step; False without the one before.

        Sites are numbered in the order of their first records. With ranks put together, the step before alone counts.
        """
        if (before := self.begins.before) is None:
            return False
        numbers = zip(self.alignment.ids, before.halves, strict=True)
        known = (half.sites if self.is_gathered else ids[: half.batch.site.max(initial=0) + 1] for ids, half in numbers)
        return all(np.isin(self.alignment.by_fqn[fqn], sites).any() for sites in known)

    @cached_property
    def calls(self) -> list[Call]:
        """Calls of modules that have an input and an output; none of ranks put together, whose modules run at once."""
        spans: dict[tuple[str, int, int], list[float]] = {}
        for end, kind, outer in ((0, Kind.INPUT, min), (1, Kind.OUTPUT, max)):
            for union in [] if self.is_gathered else self.of(kind, *FORWARD).tolist():
                call = self.alignment.fqn[union], int(self.alignment.call[union]), int(self.alignment.phase[union])
                order = float(self.table.order_of[union])
                if np.isfinite(order):
                    span = spans.setdefault(call, [np.inf, -np.inf])
                    span[end] = outer(span[end], order)
        return [Call(*call[:2], *span) for call, span in spans.items() if np.isfinite(span).all()]

    def around(self, fqn: str, order: float) -> Call | None:
        """The innermost call that runs at `order`, of any module but `fqn`; None for none.

        A call that begins or ends at exactly `order` does not run then.
        """
        running = (call for call in self.calls if call.begun < order < call.ended and call.fqn != fqn)
        return max(running, key=lambda call: call.begun, default=None)


def unseen_inside(step: Step, fqn: str) -> list[str]:
    """Modules inside `fqn` without recorded outputs in this step, nor any module between them and `fqn` with some.

    Of either run's module tree, a's order first. Recorded means: an output is in both runs, and none is NOT_SEEN.
    """
    inside = dict.fromkeys(name for tree in step.modules for name in tree if name.startswith(f"{fqn}."))
    outputs = {name: step.state[step.of(Kind.OUTPUT, *FORWARD, fqn=name)] for name in inside}
    recorded = {name for name, states in outputs.items() if states.any() and not (states == NOT_SEEN).any()}
    return [name for name in inside if recorded.isdisjoint((name, *ancestors(name)))]


def tensors_held(step: Step, owners: Collection[str], kind: Kind) -> set[str]:
    """FQNs of the parameters (or buffers) that these modules themselves hold, by either run's module tree or records.

    A tied tensor is under the name that it is recorded by.

    Args:
        step: the step, whose module trees count.
        owners: FQNs of modules.
        kind: PARAM or BUFFER.
    """
    names = {name for owner in owners for name in step.held.get((kind, owner), ())}
    for owner, tree in product(owners, step.modules):
        if (module := tree.get(owner)) is not None:
            tied = {name: of for name, of in module.tied.items() if of in step.held.get((kind, owner_of(of)), ())}
            held = module.parameters if kind is Kind.PARAM else module.buffers
            names |= {tied.get(name, f"{owner}.{name}") for name in (*held, *tied)}
    return names


def is_written_later(step: Step, fqn: str, order: float) -> bool:
    """Whether either run recorded, after `order`, that a forward pass changed the parameter.

    Args:
        step: the step.
        fqn: of the parameter.
        order: position in run a's sequence; records at it do not count.
    """
    table, unions = step.table, step.of(Kind.PARAM, Phase.FORWARD, fqn=fqn)
    later = [union for union in unions.tolist() if step.state[union] and table.order_of[union] > order]
    return any(step.repeats_last(union, side) is False for union in later for side in "ab")


def tensor_known(step: Step, fqn: str, kind: Kind, order: float) -> Known:
    """What is known of a tensor at `order`: by its last earlier record in this step, else by its state before the step.

    Before the step: DIFFERS if `begins` has it; else its last record of the previous step; else UNSEEN if no site of
    it is in both runs, or the previous step was not recorded and optimizers change the tensor; else WITHIN if `begins`
    says so, or EQUAL.

    Args:
        step: the step.
        fqn: of the tensor.
        kind: PARAM or BUFFER.
        order: position in run a's sequence.
    """
    begins, unions = step.begins, step.of(kind, fqn=fqn)
    now = [union for union in unions if step.state[union] and step.table.order_of[union] < order]
    if now:
        return step.known([max(now, key=lambda union: step.table.order_of[union])], every=True)
    if fqn in begins.names:
        return Known.DIFFERS
    past = step.state_before[unions]
    if past.any():
        return joint_known(past[past != ABSENT][-1:], every=True)
    is_lost = begins.gap and fqn in step.comparison.recorded_after_steps
    if is_lost or not step.alignment.in_both[unions].any():
        return Known.UNSEEN
    return Known.WITHIN if fqn in begins.within else Known.EQUAL


# --- what rests on what


PASSES = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD})


class Place(NamedTuple):
    """The moment in a step at which something is computed.

    Attributes:
        site: what is computed; for a call of a module, an input or output of it.
        order: position in run a's sequence; what was recorded at it or later does not matter.
        of: the module whose call it is, where that is not the diverging one.
        start: order at which the call began, if it has other modules' calls inside; -1 if it has none, or that is
            unknown.
    """

    site: Site
    order: float
    of: str = ""
    start: float = -1.0


Edge = Callable[[Step, Place], list[Evidence]]
"""Looks up one thing that a record rests on: what is known of it at a place of the step, as any number of facts."""


def rests_on(step: Step, place: Place, edges: Iterable[Edge]) -> list[Evidence]:
    """Evidence from each of these edges at `place`, one after the other; an edge may give none."""
    return [fact for edge in edges for fact in edge(step, place)]


LEFT_OUT = Evidence(Thing.LEFT_OUT, Known.UNSEEN, needed=True)
"""The modules that a capture was told to leave out."""


def _all_before(thing: Thing, *what: Kind | Phase, needed: bool = False, of_model: bool = False) -> Edge:
    """Edge: one fact on `thing`, the joint state of all records of these kinds and phases before `place.order`.

    DIFFERS if any differs; records that were not seen are left out, and it is UNSEEN where no others are there.

    Args:
        thing: what the fact is about.
        what: kinds and phases of the records (`Columns.are`).
        needed: as in `Evidence`: whether nothing can be concluded where none was seen.
        of_model: whether the fact is `LEFT_OUT` where they agree, but a capture was told to leave modules out.
    """

    def edge(step: Step, place: Place) -> list[Evidence]:
        state = step.known(step.of(*what), place.order)
        left_out = of_model and state in {Known.EQUAL, Known.WITHIN} and step.comparison.leaves_modules_out
        return [LEFT_OUT if left_out else Evidence(thing, state, needed)]

    return edge


# --- random numbers and data


def random_at_start(step: Step, _place: Place) -> list[Evidence]:
    """Edge: the random states at the start of the step.

    With ranks put together, one state that was not seen makes it UNSEEN: each rank may have another.
    """
    known = step.known(step.of(Kind.RNG, Phase.START), every=step.is_gathered)
    return [Evidence(Thing.RANDOM_AT_START, known)]


def drawn_from(step: Step, place: Place) -> list[Evidence]:
    """Edge: the random states that the module, or one inside it, drew from before `place.order`.

    Where none of these was seen in both runs: nothing if both captures record all draws (but in a recomputation), else
    the states at the start of the step (`random_at_start`).
    """
    site, names, within = place.site, step.alignment.fqn, f"{place.site.fqn}."
    states = step.of(Kind.RNG, site.phase).tolist()
    known = step.known([state for state in states if f"{names[state]}.".startswith(within)], place.order)
    if known is not Known.UNSEEN:
        return [Evidence(Thing.DRAWN_FROM, known)]
    noticed = step.comparison.notices_all_draws and site.phase is not Phase.RECOMPUTE
    return [] if noticed else random_at_start(step, place)


_batches_before = _all_before(Thing.BATCHES, Kind.BATCH, Phase.DATA)


def batches(step: Step, place: Place) -> list[Evidence]:
    """Edge: the batches of the step; SHARED_BATCHES where one run alone has others, nothing where no other was seen."""
    facts, table, what = _batches_before(step, place), step.table, (Kind.BATCH, Phase.DATA)
    in_both = all(table.alignment.are(*what, sites=half.sites).any() for half in table.halves)
    if not in_both or not (table.one_sided & table.are(*what)).any():
        return facts
    return [fact._replace(thing=Thing.SHARED_BATCHES) for fact in facts if fact.known is not Known.UNSEEN]


def loading(step: Step, place: Place) -> list[Evidence]:
    """Edge: EVERYTHING as DIFFERS where an output, or a draw of this loader, before the batch differs.

    Nothing otherwise.
    """
    made = np.append(step.of(Kind.OUTPUT, *FORWARD), step.of(Kind.RNG, Phase.DATA, fqn=place.site.fqn))
    return [Evidence(Thing.EVERYTHING, Known.DIFFERS)] if step.known(made, place.order) is Known.DIFFERS else []


# --- the forward pass


def passed_over(step: Step, _place: Place) -> list[Evidence]:
    """Edge: PASSED_OVER as UNSEEN where either run did not record an evaluation in the step; nothing otherwise."""
    runs = zip(step.comparison.manifests, (step.number, step.table.step_b), strict=True)
    return [Evidence(Thing.PASSED_OVER, Known.UNSEEN)] if any(passes_over(*run) for run in runs) else []


def inputs(step: Step, place: Place) -> list[Evidence]:
    """Edge: the inputs of the call together: DIFFERS if any differs, else UNSEEN if any was not seen.

    Nothing where both captures record all inputs but this call has none; UNSEEN if it has none otherwise.
    """
    site = place.site
    sites = step.of(Kind.INPUT, site.phase, fqn=site.fqn, call=site.call)
    present = sites[step.state[sites] != ABSENT].tolist()
    none = not present and Kind.INPUT in step.comparison.kinds and not step.comparison.leaves_modules_out
    return [] if none else [Evidence(Thing.INPUTS, step.known(present, every=True), needed=True, of=place.of)]


def inside(step: Step, place: Place) -> list[Evidence]:
    """Edge: outputs of other modules recorded from the call's start to before the place.

    Nothing where `place.start` is -1. With ranks put together only those of submodules, by name. UNSEEN where there is
    none, or one was not seen, unless another differs.
    """
    if place.start < 0:
        return []
    given, order = step.of(Kind.OUTPUT, *FORWARD), step.table.order_of
    ran = given[(order[given] >= place.start) & (order[given] < place.order)].tolist()
    inside = [number for number in ran if step.runs_inside(step.alignment.site(number), place.site.fqn)]
    return [Evidence(Thing.INSIDE, step.known(inside, every=True), needed=True)]


def tensors(step: Step, place: Place) -> list[Evidence]:
    """Edge: parameters and buffers of the module and of submodules without recorded outputs.

    One fact per kind of tensor that there is, the worst state of its tensors; in the phase `forward`, REWRITTEN as
    UNSEEN instead where the forward pass changes one after the place. BUFFERS_AT_START are those that the step leaves
    otherwise: modules write to them as they run, so that what they were at the place is not on record. Where no module
    tree and no parameters are on record, PARAMETERS is UNSEEN.
    """
    fqn = place.site.fqn
    owners = [fqn, *unseen_inside(step, fqn)]
    facts = list[Evidence]()
    for kind, thing in ((Kind.PARAM, Thing.PARAMETERS), (Kind.BUFFER, Thing.BUFFERS)):
        names, rewrites = tensors_held(step, owners, kind), place.site.phase is Phase.FORWARD
        if rewrites and kind is Kind.PARAM and any(is_written_later(step, name, place.order) for name in names):
            facts.append(Evidence(Thing.REWRITTEN, Known.UNSEEN, needed=True))
        elif names:
            answers = [tensor_known(step, name, kind, place.order) for name in names]
            left = (step.known(step.of(Kind.BUFFER, Phase.OPTIMIZER, fqn=name)) for name in names)
            moved = kind is Kind.BUFFER and Known.DIFFERS in left
            facts.append(Evidence(Thing.BUFFERS_AT_START if moved else thing, worst_of(answers), needed=True))
    if not facts and not step.modules[0] and Kind.PARAM not in step.comparison.kinds:
        facts.append(Evidence(Thing.PARAMETERS, Known.UNSEEN, needed=True))
    return facts


def rewritten(step: Step, place: Place) -> list[Evidence]:
    """Edge: REWRITTEN as UNSEEN where `tensors` has it: what an operator read was changed before; else nothing."""
    return [fact for fact in tensors(step, place) if fact.thing is Thing.REWRITTEN]


outputs = _all_before(Thing.OUTPUTS, Kind.OUTPUT, *FORWARD, needed=True, of_model=True)
"""All module outputs recorded before the place."""


def unseen(step: Step, place: Place) -> list[Evidence]:
    """Edge: RAN_UNSEEN, with their names, where modules ran unobserved in the place's evaluation or forward pass.

    Else nothing.
    """
    phase = Phase.EVAL if place.site.phase is Phase.EVAL else Phase.FORWARD
    names = ran_unseen(step.comparison.manifests, phase)
    return [Evidence(Thing.RAN_UNSEEN, Known.UNSEEN, of=some(names))] if names else []


forward = _all_before(Thing.FORWARD, Kind.INPUT, Kind.OUTPUT, *FORWARD, needed=True, of_model=True)
"""All module inputs and outputs recorded before the place."""


everything = _all_before(Thing.EVERYTHING)
"""All records before the place, those that a alone has included: what b alone has has no place in a's order."""


# --- the backward pass


def loss(step: Step, place: Place) -> list[Evidence]:
    """Edge: one fact, the joint state of losses before the place.

    Nothing where both runs record losses but no loss of this step was compared.
    """
    sites = step.of(Kind.LOSS, Phase.LOSS)
    none = not step.state[sites].any() and Kind.LOSS in step.comparison.kinds
    return [] if none else [Evidence(Thing.LOSS, step.known(sites, place.order), needed=True)]


backward = _all_before(Thing.BACKWARD, *FLOWING_BACK, Phase.BACKWARD, needed=True)
"""The backward pass, by the gradients that hooks recorded in it."""


# --- the optimizer


def gradient(step: Step, place: Place) -> list[Evidence]:
    """Edge: the parameter's gradient as the optimizer takes it; UNSEEN without a record of it.

    GRADIENT_SUM instead where the ranks of one run alone have not summed it yet.
    """
    sites = step.of(Kind.GRAD, Phase.OPTIMIZER, fqn=place.site.fqn)
    thing = Thing.GRADIENT_SUM if owing_side(step, sites) else Thing.GRADIENT
    return [Evidence(thing, step.known(sites, every=True), needed=True)]


def lacks_gradient(step: Step, fqn: str) -> bool:
    """Whether the optimizer phase of the step has gradients in any state, but none of this parameter."""
    every = step.of(Kind.GRAD, Phase.OPTIMIZER)
    return bool(step.state[every].any()) and not step.state[step.of(Kind.GRAD, Phase.OPTIMIZER, fqn=fqn)].any()


def owing_side(step: Step, sites: Ids) -> str:
    """`a` or `b`, if ranks have yet to sum (`Joined.OWED`) a gradient among `sites` in that run alone.

    "" for neither or both.
    """
    hows = ((half.side, half.sites, half.batch.how) for half in step.table.halves)
    owing = [side for side, of, how in hows if how is not None and (how[np.isin(of, sites)] == Joined.OWED).any()]
    return owing[0] if len(owing) == 1 else ""


gradients_in_step = _all_before(Thing.GRADIENTS_IN_STEP, Kind.GRAD, Phase.OPTIMIZER)
"""The gradients that an optimizer computed before, within its step."""


def value_before(step: Step, place: Place) -> list[Evidence]:
    """Edge: the tensor's last value before the record, as `tensor_known` has it: in this step, else before it."""
    return [Evidence(Thing.VALUE_BEFORE, tensor_known(step, place.site.fqn, place.site.kind, place.order))]


def state_before(step: Step, place: Place) -> list[Evidence]:
    """Edge: the parameter's optimizer state before the step.

    Its records of the previous step, else those at this step's start, else UNSEEN. Nothing instead of UNSEEN where
    there is no state yet: in step 0 of both, or in a resumed run's first step if states are recorded.
    """
    sites = step.of(Kind.OPTIMIZER_STATE, Phase.OPTIMIZER, Phase.START, fqn=place.site.fqn)
    if step.state_before[sites].any():
        return [Evidence(Thing.STATE_BEFORE, joint_known(step.state_before[sites], every=True))]
    phases = step.alignment.phase[sites]
    known = step.known(sites[phases != phases[:1]])
    resumes = step.comparison.is_resume_step(step.number) and Kind.OPTIMIZER_STATE in step.comparison.kinds
    begun = step.number == step.table.step_b == 0 or resumes
    return [] if begun and known is Known.UNSEEN else [Evidence(Thing.STATE_BEFORE, known)]


def trained(step: Step, place: Place) -> list[Evidence]:
    """Edge: all parameters as they are at the place: the worst of their states; UNSEEN where there are none."""
    names = [name for (kind, _), every in step.held.items() if kind is Kind.PARAM for name in every]
    answers = [tensor_known(step, name, Kind.PARAM, place.order) for name in names]
    return [Evidence(Thing.TRAINED, worst_of(answers) if answers else Known.UNSEEN, needed=True)]


def updates_by_hand(step: Step) -> bool:
    """Whether neither run has, in any step, a hyper-parameter or a record of the optimizer phase."""
    return not (step.alignment.are(*SETTING_KINDS) | step.alignment.are(Phase.OPTIMIZER)).any()


RESTS_ON: dict[str, tuple[Edge, ...]] = {
    **dict.fromkeys(("rng", "initial", "split", "value", "collective"), (random_at_start,)),
    "batch": (random_at_start, loading),
    "module": (inputs, tensors, drawn_from),
    "own_code": (inputs, inside, tensors, drawn_from),
    "script": (batches, random_at_start, passed_over),
    "op": (everything, rewritten, random_at_start),
    "product": (trained,),
    "loss": (outputs, batches, random_at_start, passed_over, unseen),
    "backward": (forward, loss, random_at_start),
    "gradient": (forward, loss, backward, random_at_start),
    "optimizer": (gradient,),
    **dict.fromkeys(("buffer", "by_hand"), (value_before,)),
}
"""By the word of a reason, what its records rest on; what one case needs besides is added in `applies`."""


def terms_of(step: Step, site: Site, a: Summary | None) -> int:
    """Number of terms of the sum that gives run a's gradient at `site`; 0 where unknown, and of all else.

    Elements of its module's output per row of the parameter.

    Args:
        step: the step of the record.
        site: what was recorded.
        a: run a's record of it; None gives 0.
    """
    if site.kind is not Kind.GRAD or a is None or not a.layout.shape:
        return 0
    given = np.isin(step.table.halves[0].sites, step.of(Kind.OUTPUT, fqn=owner_of(site.fqn)))
    numel = step.table.layouts[0].numel[step.table.a.layout[given]].max(initial=0.0)
    return int(numel) // max(a.layout.shape[0], 1)


def divergence_at(step: Step, position: int, cause: Cause) -> Divergence:
    """The divergence at a position of `step.divergences`, with role and reason of `cause`, distance, size and factor.

    Reads the whole tensors from disk, where both runs stored them; then the distance is exact. Else it is that of the
    texts, or by sketches, and where b is c times a, what follows from c. Random states and one-sided records have no
    distance and no floor, random states no size either. `floor` is the largest of all noise runs, None without any.
    """
    comparison, table, site = step.comparison, step.table, step.sites[position]
    number, halves = int(step.divergences.site[position]), step.divergences.halves
    records = [
        reader.record(half.batch, int(half.row[position]), at) if half.row[position] >= 0 else None
        for reader, half, at in zip((comparison.a, comparison.b), halves, (table.step, table.step_b), strict=True)
    ]
    a, b = (None if record is None else record.summary for record in records)
    name, order = step.alignment.module_class[number], step.orders[position]
    there = Divergence(table.step, table.step_b, comparison.rank, order, site, name, cause.role, cause.reason, a, b)
    labels, labels_b = comparison.a.labels.get(table.step, {}), comparison.b.labels.get(table.step_b, {})
    there = there._replace(labels=labels, labels_b=labels_b)
    if site.kind in {Kind.OP_OUTPUT, Kind.COLLECTIVE}:
        there = there._replace(source=next(record.info.source for record in records if record is not None))
    if site.kind is Kind.RNG:
        return there
    if a is None or b is None:
        return there._replace(size=Size.STRUCTURAL)
    rel, times, exact, differing = np.nan, None, True, None
    whole = (run.tensor(of.checksum) for run, of in zip(comparison.runs, (a, b), strict=True) if of.checksum)
    stored = [tensor for tensor in whole if tensor is not None and tensor.shape == a.layout.shape]
    if Status.VALUE in (a.status, b.status):
        rel = float(relative(*map(np.float64, plain_distance(a.text, b.text))))
    else:
        exact, finite = False, bool(a.stats) and not has_nonfinite(a.stats)
        # sketches leave infinities out, and where these are differs
        rel = float(step.divergences.relative(np.array([position]))[0]) or (0.0 if finite else np.nan)
        both = table.sketches(number) if finite and a.layout.shape == b.layout.shape and a.layout.numel > 16 else None
        times = None if both is None else proportion(*both)
        if times is not None:
            rel = abs(times - 1) / max(1.0, abs(times))  # what follows from the factor is no estimate
    if len(stored) == 2:
        from introspect_cli.compare.elements import elements  # few runs store whole tensors

        rel, exact, differing = distance_of(*stored), True, elements(*stored)
    far = float(rel) if np.isfinite(rel) else None
    size, exact = size_of(a, b, far, terms_of(step, site, a), times), exact and far is not None
    floor = max((float(noise.floor[number]) for noise in comparison.floors), default=None)
    return there._replace(rel_l2=far, exact=exact, size=size, scale=times, floor=floor, elements=differing)
