"""Two implementations of one model: where the flow of values through them stops agreeing, in the names of both.

A port has other names, another nesting, fused and transposed parameters, inputs under other names; comparing it site by
site tells only that everything is different. So parameters and activations are put together by value
(`join/flow.py`). Modules that own the same parameter do the same work; walked in the order in which a ran them, the
first of them whose output does not agree is where to look, and whether its input still agrees says which side of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join import flow
from introspect_cli.compare.reasons.words import amount, named, what
from introspect_cli.compare.result import Counts, Divergence, Role, StructureChange, Verdict
from introspect_cli.records import Kind, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.join.flow import Match, Parameters, Value
    from introspect_cli.compare.result import DiffResult
    from introspect_cli.records import Summary
    from introspect_cli.store.rank_reader import RankReader

_FEW = 1 / 3
_LISTED = 4


def are_ports(a: RankReader, b: RankReader, first: Divergence | None, *, listed: bool = False) -> bool:
    """Whether two runs hardly share a name, of modules and parameters, and comparing them by name led nowhere.

    Args:
        a: run a's rank.
        b: run b's.
        first: the first divergence of a comparison by name.
        listed: whether a run lists values that were computed elsewhere, which rounds in other places.
    """
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
class Pair:
    """A module of a and the module of b that own the same parameters.

    Attributes:
        a: its name in a.
        b: its name in b.
        call: which call.
        inputs: whether every telling input of both agrees; None where a run has recorded none.
        one: its output in a.
        two: its output in b.
        rel_l2: how far apart the outputs are; None where that cannot be told, or they hold the same in another order.
        agree: whether the outputs agree.
    """

    a: str
    b: str
    call: int
    inputs: bool | None
    one: Value
    two: Value
    rel_l2: float | None
    agree: bool


@dataclass(frozen=True, eq=False)
class Flow:
    """How the values of a step flow through both.

    Attributes:
        step: the step, of a and of b.
        close: relative L2 distance up to which values agree.
        parameters: which parameters are which.
        forward: matched values, in a's order.
        values: how many values of a there are, and of b.
        pairs: modules with the same parameters, in the order in which a ran them.
        ends: a telling output of the model of a, and of b; None where there is none.
        end: what of a model's outputs agrees; None where nothing does.
        ran: of a and of b, the order and name of each module's output.
        records: of a and of b, the summary of each row that a match may name.
        rank: process.
        gradients: parameters whose gradients were compared, with whether they agree, in the order of recording.
        ordered: whether the order of a's records, and of b's, is that in which they were computed.
    """

    step: int
    close: float
    parameters: Parameters
    forward: tuple[Match, ...]
    values: tuple[int, int]
    pairs: tuple[Pair, ...]
    ends: tuple[Value | None, Value | None]
    end: Match | None
    ran: tuple[list[tuple[int, str]], list[tuple[int, str]]]
    records: tuple[dict[int, Summary], dict[int, Summary]]
    rank: int
    gradients: tuple[tuple[Value, Value, bool], ...]
    ordered: tuple[bool, bool] = (True, True)

    @property
    def related(self) -> bool:
        """Whether the runs have a parameter or a module's output in common: batches alone make no port."""
        known = self.parameters.pairs or self.parameters.merges
        return bool(known) or any(own.a.site.kind is Kind.OUTPUT for own in self.forward)


def flow_of(a: RankReader, b: RankReader, step: int, close: float, ordered: tuple[bool, bool] = (True, True)) -> Flow:
    """Put the values of one step of both together.

    Args:
        a: run a's rank.
        b: run b's.
        step: the step.
        close: relative L2 distance up to which values agree.
        ordered: whether the order of a's records, and of b's, is that in which they were computed.
    """
    one, two = flow.values_of(a, step), flow.values_of(b, step)
    known = flow.parameters(flow.parameters_of(one), flow.parameters_of(two))
    forward = flow.forward_of(one), flow.forward_of(two)
    found = flow.matched(*forward, close)
    ends = _ends(forward[0]), _ends(forward[1])
    end = next((match for match in flow.matched(*ends, close).values()), None)
    pairs = _pairs(known, *forward, close)
    if ordered == (False, True):
        pairs.sort(key=lambda pair: pair.two.order)
    return Flow(
        step=step,
        close=close,
        parameters=known,
        forward=tuple(found[own.row] for own in forward[0] if own.row in found),
        values=(len(forward[0]), len(forward[1])),
        pairs=tuple(pairs),
        ends=(ends[0][0] if ends[0] else None, ends[1][0] if ends[1] else None),
        end=end,
        ran=(_ran(forward[0]), _ran(forward[1])),
        records=(_summaries(a, step), _summaries(b, step)),
        rank=a.rank,
        gradients=tuple(_gradients(known, one, two, close)),
        ordered=ordered,
    )


def _ends(values: Sequence[Value]) -> list[Value]:
    """The telling outputs of the model that ran last; of the last module where no model has any."""
    outputs = [own for own in values if own.site.kind is Kind.OUTPUT]
    roots = [own for own in outputs if "." not in own.site.fqn] or outputs
    return [own for own in roots if (own.site.fqn, own.site.call) == (roots[-1].site.fqn, roots[-1].site.call)]


def _ran(values: Sequence[Value]) -> list[tuple[int, str]]:
    return [(own.order, own.site.fqn) for own in values if own.site.kind is Kind.OUTPUT]


def _summaries(reader: RankReader, step: int) -> dict[int, Summary]:
    return {row: record.summary for row, record in enumerate(reader.records(step))}


def _pairs(known: Parameters, one: Sequence[Value], two: Sequence[Value], close: float) -> list[Pair]:
    """Modules that own the same parameters, with their inputs and outputs compared."""
    owners: dict[str, str] = {}
    for first, second in known.pairs:
        here, there = (value.site.fqn.rpartition(".")[0] for value in (first, second))
        # A module whose parameters lie in several of the other run does what none of these does.
        if owners.setdefault(here, there) != there:
            owners[here] = ""
    merged = {name.rpartition(".")[0] for merge in known.merges for name in (*merge.parts, merge.whole)}
    sides = _index(one), _index(two)
    found = []
    for own in one:
        site = own.site
        other = owners.get(site.fqn)
        if site.kind is not Kind.OUTPUT or not other or {site.fqn, other} & merged:
            continue
        outputs = sides[1].get((Kind.OUTPUT, other, site.call), ())
        partner = next((value for value in outputs if value.moments.numel == own.moments.numel), None)
        if partner is None:
            continue
        rel = flow.distance(own, partner, close)
        inputs = sides[0].get((Kind.INPUT, site.fqn, site.call), ()), sides[1].get((Kind.INPUT, other, site.call), ())
        agree = all(any(_same(x, y, close) for y in inputs[1]) for x in inputs[0]) if all(inputs) else None
        known_rel = None if rel is None else rel if np.isfinite(rel) else flow.measured(own, partner)
        found.append(Pair(site.fqn, other, site.call, agree, own, partner, known_rel, rel is None or np.isfinite(rel)))
    return found


def _index(values: Sequence[Value]) -> dict[tuple[Kind, str, int], list[Value]]:
    found: dict[tuple[Kind, str, int], list[Value]] = {}
    for own in values:
        found.setdefault((own.site.kind, own.site.fqn, own.site.call), []).append(own)
    return found


def _same(one: Value, two: Value, close: float) -> bool:
    rel = flow.distance(one, two, close)
    return rel is None or bool(np.isfinite(rel))


def _gradients(
    known: Parameters, one: Sequence[Value], two: Sequence[Value], close: float
) -> list[tuple[Value, Value, bool]]:
    """Gradients of parameters that are the same, with whether they agree."""
    sides = [{own.site.fqn: own for own in side if own.site.kind is Kind.GRAD} for side in (one, two)]
    pairs = [
        (sides[0][first.site.fqn], sides[1][second.site.fqn])
        for first, second in known.pairs
        if first.site.fqn in sides[0] and second.site.fqn in sides[1]
    ]
    # Gradients gather the rounding of the whole backward pass.
    return [(own, other, _same(own, other, 10 * close)) for own, other in sorted(pairs, key=lambda pair: pair[0].order)]


def answer_of(before: DiffResult, found: Flow) -> DiffResult:
    """The answer of a comparison by flow, in the place of one by name."""
    known = found.parameters
    total = len(known.pairs) + sum(len(own.parts) if own.side == "b" else 1 for own in known.merges)
    total_a = total + len(known.only_a)
    flows = f"{len(found.forward)} of {count(found.values[0], 'value')} of a's forward pass are among the "
    evidence = [
        f"{total} of {count(total_a, 'telling parameter')} of a are in b{_how(known)}",
        f"{flows}{found.values[1]:,} of b",
    ]
    verdict, sentence, first = _judged(found)
    evidence += _farthest(found)
    if known.only_a or known.only_b:
        evidence += [_missing("a", known.only_a), _missing("b", known.only_b)]
    note = (
        f"The runs share hardly a name: values were put together by what they hold, in step {found.step} alone, and "
        f"agree where their relative L2 distance is at most {found.close:g} (--rtol sets another)."
    )
    return replace(
        before,
        verdict=verdict,
        sentence=sentence,
        evidence=tuple(line for line in evidence if line),
        first=first,
        candidates=(first,) if first is not None else (),
        divergences=_listed(found, first),
        counts=_counts(before.counts, found, len(_listed(found, first))),
        notes=(note, *before.notes),
        suggestions=(),
        structure=_changes(found),
        map=None,
        tree=(),
        strip=(),
        suspect=None,
    )


def _listed(found: Flow, first: Divergence | None) -> tuple[Divergence, ...]:
    """The first divergence, and the modules with equal parameters whose outputs differ after it."""
    if first is None:
        return ()
    rest = [_divergence(found, own.one, own.two, "propagated") for own in found.pairs if not own.agree]
    return (first, *(own for own in rest if own.site != first.site))


def _counts(before: Counts, found: Flow, diverged: int) -> Counts:
    """What was compared: the values of a's forward pass in one step."""
    exact = sum(own.rel_l2 == 0 for own in found.forward)
    return Counts(
        steps_a=before.steps_a,
        steps_b=before.steps_b,
        steps_compared=1,
        steps_diverged=int(diverged > 0),
        records=found.values[0],
        equal=exact,
        diverged=diverged,
        within=len(found.forward) - exact,
    )


def _farthest(found: Flow) -> list[str]:
    """The modules whose agreeing outputs are farthest apart, and how far the ones before them are."""
    known = [pair for pair in found.pairs if pair.agree and pair.rel_l2 is not None]
    if not known:
        return []
    worst = max(known, key=lambda pair: pair.rel_l2 or 0.0)
    if not worst.rel_l2:
        return ["the outputs of modules with equal parameters that agree are equal bit for bit"]
    before = max((pair.rel_l2 or 0.0 for pair in known if pair.one.order < worst.one.order), default=0.0)
    told = f", at most {before:.1e} before" if before else ""
    return [f"of the outputs that agree, those of {worst.a} and {worst.b} are farthest apart: {worst.rel_l2:.1e}{told}"]


def _how(known: Parameters) -> str:
    parts = [f"{known.transposed} transposed, in another order or shape"] * bool(known.transposed)
    if known.merges:
        parts.append(f"{count(len(known.merges), 'tensor')} of one run {'are' if len(known.merges) > 1 else 'is'} "
                     "several of the other put together")  # fmt: skip
    return f" ({'; '.join(parts)})" if parts else ""


def _missing(name: str, values: Sequence[Value]) -> str:
    if not values:
        return ""
    shown = ", ".join(own.site.fqn for own in values[:_LISTED])
    rest = f" and {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    return f"found in {name} alone: {shown}{rest}"


def _judged(found: Flow) -> tuple[Verdict, str, Divergence | None]:
    """Verdict, sentence and first divergence."""
    at = f"step {found.step}"
    within = f"within {found.close:g}"
    apart = next((pair for pair in found.pairs if not pair.agree), None)
    if apart is None and found.end is not None:
        wrong = next(((one, two) for one, two, agree in found.gradients if not agree), None)
        same = (
            f"the values of both agree {within} through the forward pass of {at}, to {_both(found.end.a, found.end.b)}"
        )
        if wrong is not None:
            text = f"In the backward pass: {same}, but {_both(*wrong)} differs{_far(*wrong)}."
            return Verdict.DIVERGED, text, _divergence(found, *wrong, "backward")
        grads = f", and so do {count(len(found.gradients), 'gradient')} of parameters" if found.gradients else ""
        return Verdict.SAME, f"The implementations agree: {same}{grads}.", None
    if not found.forward:
        return Verdict.UNDECIDED, f"Could not tell: no value of a's forward pass is in b in {at}.", None
    if apart is None:
        last, second = found.ends
        if last is None or second is None:
            return Verdict.UNDECIDED, f"Could not tell: a run has no output in {at}.", None
        before = f" The last value that agrees {within} is {_last(found, last, None)}."
        text = f"The values stop agreeing before the end of {at}: {what(last.site)} of a is nowhere in b.{before}"
        return Verdict.DIVERGED, text, _divergence(found, last, second, "gap")
    names = (named(own.site, own.module_class) for own in (apart.one, apart.two))
    module = "{} in a, which is {} in b".format(*names)
    if apart.inputs:
        text = (
            f"The values stop agreeing at {at} in {module}: its input agrees {within}, its output differs"
            f"{_far(apart.one, apart.two)}. {_inside(found, apart)}"
        )
        return Verdict.DIVERGED, text, _divergence(found, apart.one, apart.two, "module")
    if apart.inputs is None:
        text = (
            f"The values stop agreeing at {at} in or before {module}: its output differs"
            f"{_far(apart.one, apart.two)}; its input was not recorded in both. "
            f"The last value that agrees {within} is {_last(found, apart.one, apart.two)}.{_between(found, apart)}"
        )
        if _odd(found, apart):
            text += f" {_inside(found, apart)}"
        return Verdict.DIVERGED, text, _divergence(found, apart.one, apart.two, "gap")
    text = (
        f"The values stop agreeing at {at} before {module}: its input differs already. "
        f"The last value that agrees {within} is {_last(found, apart.one, apart.two)}.{_between(found, apart)}"
    )
    return Verdict.DIVERGED, text, _divergence(found, apart.one, apart.two, "gap")


def _both(one: Value, two: Value) -> str:
    """A value in the names of both."""
    return f"{what(one.site)} in a, which is {what(two.site)} in b"


def _far(one: Value, two: Value) -> str:
    """How far apart two values are, in brackets; "" where that cannot be told."""
    rel = flow.measured(one, two)
    return "" if rel is None else f" ({amount(rel, 'float32', 'float32')})"


def _odd(found: Flow, apart: Pair) -> str:
    """What is wrong with the parameters of a module; "" where nothing is known to be."""
    known = found.parameters
    lone = [value.site.fqn for value in known.only_a if value.site.fqn.rpartition(".")[0] == apart.a]
    lone += [value.site.fqn for value in known.only_b if value.site.fqn.rpartition(".")[0] == apart.b]
    if lone:
        return f"{' and '.join(lone)} {'has' if len(lone) == 1 else 'have'} no equal on the other side"
    turned = [first.site.fqn for first, two in known.pairs if first.checksum != two.checksum
              and first.shape == two.shape and first.site.fqn.rpartition(".")[0] == apart.a]  # fmt: skip
    if not turned:
        return ""
    return (
        f"{' and '.join(turned)} {'holds' if len(turned) == 1 else 'hold'} the same numbers as in b, in another order"
    )


def _inside(found: Flow, apart: Pair) -> str:
    """What is known of the parameters of a module that is where to look."""
    odd = _odd(found, apart)
    if odd:
        return f"Look at its parameters: {odd}."
    pairs = (pair for pair in found.parameters.pairs if pair[0].site.fqn.rpartition(".")[0] == apart.a)
    own = [first.site.fqn for first, _ in pairs]
    told = "holds" if len(own) == 1 else "hold"
    return f"Its telling parameters, {', '.join(own)}, {told} the same numbers: look at its options and its code."


def _before(found: Flow, one: Value, two: Value | None) -> Match | None:
    """The last match before a value of a, and of b where that is given."""
    by_a, by_b = found.ordered if any(found.ordered) else (True, True)
    earlier = [
        own
        for own in found.forward
        if (not by_a or own.a.order < one.order) and (not by_b or two is None or own.b.order < two.order)
    ]
    given = [own for own in earlier if own.a.site.kind is not Kind.INPUT and own.b.site.kind is not Kind.INPUT]
    chosen = given or earlier
    return max(chosen, key=lambda own: own.a.order if by_a else own.b.order, default=None)


def _last(found: Flow, one: Value, two: Value | None) -> str:
    last = _before(found, one, two)
    if last is None:
        return "none"
    return f"{_both(last.a, last.b)}{', the same numbers in another order' if last.rel_l2 is None else ''}"


def _between(found: Flow, apart: Pair) -> str:
    """The modules that ran between the last agreeing value and the place, in both."""
    last = _before(found, apart.one, apart.two)
    since = (last.a.order, last.b.order) if last is not None else (-1, -1)
    told = []
    for name, ran, begin, end, ordered in (
        ("a", found.ran[0], since[0], apart.one.order, found.ordered[0]),
        ("b", found.ran[1], since[1], apart.two.order, found.ordered[1]),
    ):
        if not ordered:
            continue
        names = [own for order, own in ran if begin < order < end and own not in (apart.a, apart.b)]
        names = list(dict.fromkeys(names))
        if names:
            rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            told.append(f"{name} ran {', '.join(names[:_LISTED])}{rest}")
    return f" In between, {'; '.join(told)}." if told else ""


def _divergence(found: Flow, one: Value, two: Value, reason: str) -> Divergence:
    a, b = found.records[0][one.row], found.records[1][two.row]
    return Divergence(
        step=found.step,
        step_b=found.step,
        rank=found.rank,
        sequence=float(one.order),
        site=one.site,
        module_class=one.module_class,
        role=Role.ORIGIN if reason in ("module", "backward") else Role.PROPAGATED,
        reason=reason,
        a=a,
        b=b,
        rel_l2=flow.measured(one, two),
    )


def _changes(found: Flow) -> tuple[StructureChange, ...]:
    """Which module of a is which of b, and which parameters are put together."""
    changes = []
    for pair in found.pairs:
        if pair.call == 0:
            how = "its output agrees" if pair.agree else "its output differs"
            text = f"{pair.a} is {pair.b} in b"
            changes.append(StructureChange("renamed", pair.a, pair.b, text, evidence=f"equal parameters; {how}"))
    for own in found.parameters.merges:
        parts = " + ".join(own.parts)
        sides = (parts, own.whole) if own.side == "b" else (own.whole, parts)
        change = "merged" if own.side == "b" else "split"
        text = f"{sides[0]} {'are' if change == 'merged' else 'is'} {sides[1]} in b"
        changes.append(StructureChange(change, *sides, text, evidence="equal extrema, equal sums to rounding"))
    return tuple(changes)
