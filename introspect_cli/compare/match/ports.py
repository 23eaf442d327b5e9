"""Two implementations of one model: where the flow of values through them stops agreeing, in the names of both.

A port has other names, another nesting, fused and transposed parameters, inputs under other names; comparing it site by
site tells only that everything is different. So parameters and activations are put together by value (`flow.py`).
Modules that own the same parameters do the same work; walked in the order in which a ran them, the first of them whose
output does not agree is where to look, and whether its input still agrees says which side of it. What is said of it is
in `port_answer.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.compare.match.flow import (
    Match,
    Parameters,
    Value,
    agreement,
    forward_of,
    matched,
    measured,
    parameters,
    parameters_of,
    values_of,
)
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import Divergence
    from introspect_cli.store.rank_reader import RankReader

_FEW = 1 / 3


def are_ports(a: RankReader, b: RankReader, first: Divergence | None, *, listed: bool = False) -> bool:
    """Whether two runs hardly share a name, of modules and parameters, and comparing them by name led nowhere."""
    if not listed and first is not None and first.a is not None and first.b is not None and first.reason != "structure":
        # A parameter that is transposed, or has become part of another, has another shape from the start.
        transposed = first.reason == "initial" and first.a.layout.shape != first.b.layout.shape
        if not transposed:
            return False
    kinds = {Kind.PARAM.value, Kind.INPUT.value, Kind.OUTPUT.value}
    one, two = (
        {fqn for fqn, kind in zip(run.sites.fqn, run.sites.kind, strict=True) if kind in kinds} for run in (a, b)
    )
    return bool(one) and bool(two) and len(one & two) < _FEW * min(len(one), len(two))


@dataclass(frozen=True, eq=False)
class ModulePair:
    """A call of a module of a, and of the module of b that owns the same parameters.

    Attributes:
        a: its output in a.
        b: its output in b.
        inputs: whether every telling input of both agrees; None where a run has recorded none.
        rel_l2: how far apart the outputs are; None where that cannot be told, or they hold the same in another order.
        agree: whether the outputs agree.
    """

    a: Value
    b: Value
    inputs: bool | None
    rel_l2: float | None
    agree: bool


@dataclass(frozen=True, eq=False)
class Flow:
    """How the values of a step flow through both.

    Attributes:
        step: the step, of a and of b.
        close: relative L2 distance up to which values agree.
        readers: of a and of b.
        ordered: whether the order of a's records, and of b's, is that in which they were computed.
        parameters: which parameters are which.
        values: what flows forward in a, and in b.
        forward: matched values, in a's order.
        modules: modules with the same parameters, in the order in which a ran them.
        end: what of a model's outputs agrees; None where nothing does.
        gradients: parameters whose gradients were compared, with whether they agree, in the order of recording.
    """

    step: int
    close: float
    readers: tuple[RankReader, RankReader]
    ordered: tuple[bool, bool]
    parameters: Parameters
    values: tuple[Sequence[Value], Sequence[Value]]
    forward: tuple[Match, ...]
    modules: tuple[ModulePair, ...]
    end: Match | None
    gradients: tuple[tuple[Value, Value, bool], ...]

    @property
    def related(self) -> bool:
        """Whether the runs have a parameter or a module's output in common: batches alone make no port."""
        shared = self.parameters.pairs or self.parameters.merges
        return bool(shared) or any(match.a.site.kind is Kind.OUTPUT for match in self.forward)


def flow_of(
    readers: tuple[RankReader, RankReader], step: int, close: float, ordered: tuple[bool, bool] = (True, True)
) -> Flow:
    """Put the values of one step of both together."""
    one, two = (values_of(reader, step) for reader in readers)
    shared = parameters(parameters_of(one), parameters_of(two))
    forward = forward_of(one), forward_of(two)
    matches = matched(*forward, close)
    modules = _module_pairs(shared, *forward, close)
    if ordered == (False, True):
        modules.sort(key=lambda pair: pair.b.order)
    return Flow(
        step=step,
        close=close,
        readers=readers,
        ordered=ordered,
        parameters=shared,
        values=forward,
        forward=tuple(matches[value.row] for value in forward[0] if value.row in matches),
        modules=tuple(modules),
        end=next(iter(matched(ends(forward[0]), ends(forward[1]), close).values()), None),
        gradients=tuple(_gradients(shared, one, two, close)),
    )


def ends(values: Sequence[Value]) -> list[Value]:
    """The telling outputs of the model that ran last; of the last module where no model has any."""
    outputs = [value for value in values if value.site.kind is Kind.OUTPUT]
    roots = [value for value in outputs if "." not in value.site.fqn] or outputs
    return [root for root in roots if (root.site.fqn, root.site.call) == (roots[-1].site.fqn, roots[-1].site.call)]


def _module_pairs(shared: Parameters, one: Sequence[Value], two: Sequence[Value], close: float) -> list[ModulePair]:
    """Modules that own the same parameters, with their inputs and outputs compared."""
    partners: dict[str, str] = {}
    for first, second in shared.pairs:
        # A module whose parameters lie in several of the other run does what none of these does.
        if partners.setdefault(first.owner, second.owner) != second.owner:
            partners[first.owner] = ""
    merged = {name.rpartition(".")[0] for merge in shared.merges for name in (*merge.parts, merge.whole)}
    calls_a, calls_b, pairs = _by_call(one), _by_call(two), []
    for value in one:
        name, call = value.site.fqn, value.site.call
        other = partners.get(name)
        if value.site.kind is not Kind.OUTPUT or not other or {name, other} & merged:
            continue
        outputs = calls_b.get((Kind.OUTPUT, other, call), ())
        partner = next((output for output in outputs if output.moments.numel == value.moments.numel), None)
        if partner is None:
            continue
        given, given_b = calls_a.get((Kind.INPUT, name, call), ()), calls_b.get((Kind.INPUT, other, call), ())
        inputs = all(any(agreement(x, y, close) for y in given_b) for x in given) if given and given_b else None
        match = agreement(value, partner, close)
        rel = match.rel_l2 if match is not None else measured(value, partner)
        pairs.append(ModulePair(value, partner, inputs, rel, match is not None))
    return pairs


def _by_call(values: Sequence[Value]) -> dict[tuple[Kind, str, int], list[Value]]:
    by_call: dict[tuple[Kind, str, int], list[Value]] = defaultdict(list)
    for value in values:
        by_call[value.site.kind, value.site.fqn, value.site.call].append(value)
    return by_call


def _gradients(
    shared: Parameters, one: Sequence[Value], two: Sequence[Value], close: float
) -> list[tuple[Value, Value, bool]]:
    """Gradients of parameters that are the same, with whether they agree."""
    sides = [{value.site.fqn: value for value in side if value.site.kind is Kind.GRAD} for side in (one, two)]
    pairs = [(sides[0].get(first.site.fqn), sides[1].get(second.site.fqn)) for first, second in shared.pairs]
    both = [(mine, other) for mine, other in pairs if mine is not None and other is not None]
    # Gradients gather the rounding of the whole backward pass.
    agree = [(mine, other, agreement(mine, other, 10 * close) is not None) for mine, other in both]
    return sorted(agree, key=lambda pair: pair[0].order)
