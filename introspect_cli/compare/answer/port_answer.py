"""Answer for two implementations of one model, whose values are paired by content (`match.py`) and not by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare import say
from introspect_cli.compare.evidence import Evidence, Known, Thing
from introspect_cli.compare.match import CLOSE, ends, flow_of, sketch_distance
from introspect_cli.compare.result import Counts, DiffResult, Divergence, Origin, Role, StructureChange, Verdict
from introspect_cli.compare.say import amount, fact_of, named, some, what
from introspect_cli.compare.watched import is_list, is_ordered
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.match import Flow, Value, ValuePair
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import DiffOptions, Finding
    from introspect_cli.store.run import Run

_BY_NAME = StructureChange, Origin
"""Findings of a comparison by name, which say nothing of two implementations."""
_LISTED = 4
"""Names that a line of evidence lists."""


class Stop(NamedTuple):
    """The pair of values at which two implementations stop agreeing.

    Attributes:
        a: the value of a.
        b: that of b which should equal it.
        reason: `module` or `backward` where what went in agrees, else `gap`.
        findings: what explains it, and what is left.
        rests_on: what is known of the module's inputs, or, of a gradient, of the forward pass; else None.
    """

    a: Value
    b: Value
    reason: str
    findings: Sequence[Finding]
    rests_on: Evidence | None = None


def port_of(answer: DiffResult, runs: tuple[Run, Run], options: DiffOptions, outcome: RankOutcome) -> Flow | None:
    """Values of the first compared step paired by content; None where none is, and where no step was compared.

    Args:
        answer: of the comparison by names.
        runs: a and b, which share few names (`are_ports`).
        options: `rtol` says how close values have to be; `CLOSE` where it is 0 or None.
        outcome: of the rank to read.
    """
    a, b = (run.rank(outcome.rank) for run in runs)
    listed, in_order = any(is_list(run.manifest) for run in runs), [is_ordered(run.manifest) for run in runs]
    step = next(iter(outcome.paired.steps.tolist()), None)
    by_names = answer.first is None and outcome.match.renamed and not listed  # what has other names was matched
    if by_names or step is None or step not in a or step not in b:
        return None
    flow = flow_of((a, b), step, options.rtol or CLOSE, (in_order[0], in_order[1]))
    return flow if flow.related else None


def port_answer(by_name: DiffResult, flow: Flow) -> DiffResult:
    """The answer of `flow`, with settings, changed statements and notes of `by_name`, the comparison by names.

    The first divergence is where the values stop agreeing; all modules that differ are listed after it.
    """
    stop, listed, exact = _stop_of(flow), list[Divergence](), sum(match.rel_l2 == 0 for match in flow.forward)
    if stop is not None:
        rest = [_divergence(flow, pair.a, pair.b, "propagated") for pair in flow.modules if not pair.agree]
        listed = [_divergence(flow, stop.a, stop.b, stop.reason)]
        listed += [divergence for divergence in rest if divergence.site != listed[0].site]
    said = say.told("port-undecided", step=flow.step)
    if flow.end is not None:
        ends_at = {"a": what(flow.end.a.site), "b": what(flow.end.b.site)}
        said = say.told("port-agrees", step=flow.step, gradients=len(flow.gradients), **ends_at)
    steps = by_name.counts.steps_a, by_name.counts.steps_b
    found, within = len(listed), len(flow.forward) - exact
    answer = replace(
        by_name.unexplained(),
        verdict=Verdict.UNDECIDED if flow.end is None else Verdict.SAME,
        sentence=said,
        evidence=_pairing_lines(flow),
        counts=Counts(*steps, 1, min(found, 1), len(flow.values[0]), exact, found, within=within),
        notes=(say.told("port", step=flow.step, close=flow.close), *by_name.notes),
        findings=(*(one for one in by_name.findings if not isinstance(one, _BY_NAME)), *_structure_changes(flow)),
        first=listed[0] if listed else None,
        candidates=tuple(listed[:1]),
        divergences=tuple(listed),
        map=None,
        strip=(),
    )
    if stop is None:
        return answer
    in_b, names = flow.ordered == (False, True), [named(value.site, value.module_class) for value in (stop.a, stop.b)]
    kind, rel = stop.a.site.kind.one.removeprefix("the "), listed[0].rel_l2
    far = "" if rel is None else amount(rel, "float32", "float32")
    head = say.told("port-place", step=flow.step, kind=kind, a=names[0], b=names[1], far=far)
    until = (stop.b if in_b else stop.a).order  # where only b recorded in order, by b
    agree = [((pair.b if in_b else pair.a).order, pair) for pair in flow.forward if pair.a.site.kind is not Kind.INPUT]
    _, last = max((each for each in agree if each[0] < until), key=lambda each: each[0], default=(0, None))
    also = () if last is None else (say.told("port-last", a=what(last.a.site), b=what(last.b.site)),)
    return replace(
        answer,
        verdict=Verdict.DIVERGED,
        sentence=say.sentence(head, stop.findings, (), also),
        head=head,
        also=also,
        rests_on=() if stop.rests_on is None else (fact_of(stop.rests_on),),
        explains=tuple(stop.findings),
    )


def _stop_of(flow: Flow) -> Stop | None:
    """Where the values stop agreeing: the first module, else a gradient, else the last values; None where they do not.

    Modules and last values count if any forward value was paired. Gradients count, instead of last values, if all
    modules and the end of the forward pass agree.
    """
    module = next((pair for pair in flow.modules if not pair.agree), None)
    if module is not None and flow.forward:
        known = {True: Known.WITHIN, False: Known.DIFFERS, None: Known.UNSEEN}[module.inputs]
        reason = "module" if module.inputs else "gap"
        return Stop(module.a, module.b, reason, _module_findings(flow, module), Evidence(Thing.INPUTS, known))
    if module is None and flow.end is not None:
        backward, forward = say.left(["backward-through"]), Evidence(Thing.FORWARD, Known.WITHIN)
        wrong = (pair for pair in flow.gradients if not pair.agree)
        return next((Stop(pair.a, pair.b, "backward", backward, forward) for pair in wrong), None)
    one, two = (next(iter(ends(values)), None) for values in flow.values)
    between = say.left(["between-agreeing"])
    return None if not flow.forward or one is None or two is None else Stop(one, two, "gap", between)


def _module_findings(flow: Flow, module: ValuePair) -> list[Finding]:
    """Findings on why a module's output differs.

    Where its inputs differ, code between agreeing values. Else its parameters without an equal in the other run, or
    that are equal in another order; without either, the causes that remain.
    """
    parameters, owners = flow.parameters, (module.a.site.fqn, module.b.site.fqn)
    unequal = [value.site.fqn for value in (*parameters.only_a, *parameters.only_b) if value.owner in owners]
    unequal += [
        one.site.fqn
        for one, two in parameters.pairs
        if one.owner == owners[0] and one.shape == two.shape and one.checksum != two.checksum
    ]
    if unequal and module.inputs is not False:
        return [say.found("port-unequal", names=", ".join(unequal))]
    inside, between = ["code", "options"] * (module.inputs is not False), ["between-agreeing"] * (not module.inputs)
    return say.left([*inside, *between])


def _pairing_lines(flow: Flow) -> tuple[str, ...]:
    """Lines on how many of a's parameters and forward values are in b, and on parameters that one run alone has."""
    parameters = flow.parameters
    found = len(parameters.pairs) + sum(len(merge.parts) if merge.side == "b" else 1 for merge in parameters.merges)
    only = parameters.only_a, parameters.only_b
    alone = [some([value.site.fqn for value in side], _LISTED) if side else "" for side in only]
    numbers = {"found": found, "all": found + len(only[0]), "turned": parameters.transposed}
    values = {"found": len(flow.forward), "a": len(flow.values[0]), "b": len(flow.values[1])}
    return say.told("port-parameters", **numbers, only_a=alone[0], only_b=alone[1]), say.told("port-values", **values)


def _divergence(flow: Flow, one: Value, two: Value, reason: str) -> Divergence:
    """A divergence of the pair `one` (of a) and `two` (of b); an origin if `reason` is `module` or `backward`."""
    a, b = (
        reader.record(reader.read(flow.step), value.row, flow.step).summary
        for reader, value in zip(flow.readers, (one, two), strict=True)
    )
    role = Role.ORIGIN if reason in {"module", "backward"} else Role.PROPAGATED
    rank, far = flow.readers[0].rank, sketch_distance(one, two)
    return Divergence(
        flow.step, flow.step, rank, float(one.order), one.site, one.module_class, role, reason, a, b, rel_l2=far
    )


def _structure_changes(flow: Flow) -> Iterator[StructureChange]:
    """Structural changes: `renamed` for the first call of each pair of modules, then parameters merged or split."""
    for pair in flow.modules:
        if pair.a.site.call == 0:
            a, b = pair.a.site.fqn, pair.b.site.fqn
            evidence = say.told("port-module", how="agrees" if pair.agree else "differs")
            yield StructureChange("renamed", a, b, say.told("port-in-b", a=a, b=b), evidence=evidence)
    for merge in flow.parameters.merges:
        parts = " + ".join(merge.parts)
        a, b = (parts, merge.whole) if merge.side == "b" else (merge.whole, parts)
        words, change = say.told("port-in-b", a=a, b=b), "merged" if merge.side == "b" else "split"
        yield StructureChange(change, a, b, words, evidence=say.told("port-merged"))
