"""Answer for two implementations of one model, whose values are paired by content (`match.py`) and not by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare import say
from introspect_cli.compare.evidence import Evidence, Known, Thing
from introspect_cli.compare.match import CLOSE, ends, flow_of, sketch_distance
from introspect_cli.compare.result import Counts, DiffResult, Divergence, Fact, Origin, Role, StructureChange, Verdict
from introspect_cli.compare.say import amount, named, some, thing, what
from introspect_cli.compare.watched import is_list, is_ordered
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        known: what is known of the module's inputs, or, of a gradient, of the forward pass; else None.
        findings: what explains it, and what is left.
    """

    a: Value
    b: Value
    reason: str
    known: Known | None
    findings: tuple[Finding, ...]


def port_of(answer: DiffResult, runs: tuple[Run, Run], options: DiffOptions, outcome: RankOutcome) -> Flow | None:
    """Values of the first compared step paired by content; None where none is, and where no step was compared.

    Args:
        answer: of the comparison by names.
        runs: a and b, which share few names (`are_ports`).
        options: `rtol` says how close values have to be; `CLOSE` where it is 0 or None.
        outcome: of the rank to read.
    """
    a, b = (run.rank(outcome.rank) for run in runs)
    listed = any(is_list(run.manifest) for run in runs)
    if answer.first is None and outcome.match.renamed and not listed:
        return None  # what has other names was matched, and compared
    if not len(outcome.paired):
        return None
    step = int(outcome.paired.steps[0])
    if step not in a or step not in b:
        return None
    in_order = is_ordered(runs[0].manifest), is_ordered(runs[1].manifest)
    flow = flow_of((a, b), step, options.rtol or CLOSE, in_order)
    return flow if flow.related else None


def port_answer(by_name: DiffResult, flow: Flow) -> DiffResult:
    """The answer of `flow`, with settings, changed statements and notes of `by_name`, the comparison by names."""
    stop = _stop_of(flow)
    verdict, sentence = (Verdict.DIVERGED, "") if stop is not None else _agreement(flow)
    answer = DiffResult(
        a=by_name.a,
        b=by_name.b,
        verdict=verdict,
        sentence=sentence,
        evidence=_pairing_lines(flow),
        settings=by_name.settings,
        counts=_counts(by_name.counts, flow, 0),
        notes=(say.told("port", step=flow.step, close=flow.close), *by_name.notes),
        findings=(*(one for one in by_name.findings if not isinstance(one, _BY_NAME)), *_structure_changes(flow)),
        training=by_name.training,
        evaluation=by_name.evaluation,
        subject=by_name.subject,
    )
    return answer if stop is None else _answer_with_stop(answer, flow, stop)


def _answer_with_stop(answer: DiffResult, flow: Flow, stop: Stop) -> DiffResult:
    """`answer` with the first divergence at `stop`, its sentence and evidence, and then all modules that differ.

    The last pair that agrees before it is named, if there is one.
    """
    first = _divergence(flow, stop.a, stop.b, stop.reason)
    rest = [_divergence(flow, pair.a, pair.b, "propagated") for pair in flow.modules if not pair.agree]
    listed = (first, *(divergence for divergence in rest if divergence.site != first.site))
    facts = tuple[Fact, ...]()
    if stop.known is not None:
        fact = Evidence(Thing.FORWARD if stop.reason == "backward" else Thing.INPUTS, stop.known)
        facts = (Fact(fact.thing.name.lower(), fact.known.name.lower(), "", "", thing(fact)),)
    far = "" if first.rel_l2 is None else f", {amount(first.rel_l2, 'float32', 'float32')}"
    head = say.told("port-place", step=flow.step, a=_value_words(stop.a), b=_value_words(stop.b), far=far)
    last = _last_before(flow, stop)
    order = "" if last is None or last.rel_l2 is not None else say.told("port-order")
    also = () if last is None else (say.told("port-last", a=what(last.a.site), b=what(last.b.site), order=order),)
    return replace(
        answer,
        sentence=say.sentence(head, stop.findings, (), also),
        head=head,
        also=also,
        rests_on=facts,
        explains=stop.findings,
        first=first,
        candidates=(first,),
        divergences=listed,
        counts=_counts(answer.counts, flow, len(listed)),
    )


def _value_words(value: Value) -> str:
    """A value in words: `the output of Seen.cut (Conv2d)`, without the `the`."""
    return f"{value.site.kind.one.removeprefix('the ')} of {named(value.site, value.module_class)}"


def _stop_of(flow: Flow) -> Stop | None:
    """Where the values stop agreeing: the first module, else a gradient, else the last values; None where they do not.

    Modules and last values count if any forward value was paired. Gradients count, instead of last values, if all
    modules and the end of the forward pass agree.
    """
    module = next((pair for pair in flow.modules if not pair.agree), None)
    if module is not None and flow.forward:
        known = {True: Known.WITHIN, False: Known.DIFFERS, None: Known.UNSEEN}[module.inputs]
        return Stop(
            module.a, module.b, "module" if module.inputs else "gap", known, tuple(_module_findings(flow, module))
        )
    if module is None and flow.end is not None:
        wrong = next((pair for pair in flow.gradients if not pair.agree), None)
        left = tuple(say.left(["backward-through"]))
        return None if wrong is None else Stop(wrong.a, wrong.b, "backward", Known.WITHIN, left)
    one, two = (next(iter(ends(values)), None) for values in flow.values)
    if not flow.forward or one is None or two is None:
        return None
    return Stop(one, two, "gap", None, tuple(say.left(["between-agreeing"])))


def _module_findings(flow: Flow, module: ValuePair) -> Iterator[Finding]:
    """Findings on why a module's output differs.

    Where its inputs differ, code between agreeing values. Else its parameters without an equal in the other run; else
    those equal only when transposed; without either, the causes that remain.
    """
    parameters, owners = flow.parameters, (module.a.site.fqn, module.b.site.fqn)
    alone = [
        value.site.fqn
        for values, owner in zip((parameters.only_a, parameters.only_b), owners, strict=True)
        for value in values
        if value.owner == owner
    ]
    turned = [
        one.site.fqn
        for one, two in parameters.pairs
        if one.owner == owners[0] and one.shape == two.shape and one.checksum != two.checksum
    ]
    if module.inputs is False:
        yield from say.left(["between-agreeing"])
    elif alone or turned:
        yield say.found("port-unequal" if alone else "port-turned", names=", ".join(alone or turned))
    else:
        yield from say.left(["code", "options"] if module.inputs else ["code", "options", "between-agreeing"])


def _agreement(flow: Flow) -> tuple[Verdict, str]:
    """Verdict and sentence where no pair of values differs.

    SAME if the last value of the forward pass has a partner, else UNDECIDED.
    """
    if flow.end is None:
        return Verdict.UNDECIDED, say.told("port-undecided", step=flow.step)
    ends_at = {"a": what(flow.end.a.site), "b": what(flow.end.b.site)}
    return Verdict.SAME, say.told("port-agrees", step=flow.step, gradients=len(flow.gradients), **ends_at)


def _pairing_lines(flow: Flow) -> tuple[str, ...]:
    """Lines on how many of a's parameters and forward values are in b, and on parameters that one run alone has."""
    parameters = flow.parameters
    found = len(parameters.pairs) + sum(len(merge.parts) if merge.side == "b" else 1 for merge in parameters.merges)
    lines = [
        say.told("port-parameters", found=found, all=found + len(parameters.only_a), turned=parameters.transposed),
        say.told("port-values", found=len(flow.forward), a=len(flow.values[0]), b=len(flow.values[1])),
    ]
    for side, alone in (("a", parameters.only_a), ("b", parameters.only_b)):
        names = some([value.site.fqn for value in alone], _LISTED) if alone else ""
        lines += [say.told("port-alone", side=side, names=names)] if names else []
    return tuple(lines)


def _counts(by_name: Counts, flow: Flow, diverged: int) -> Counts:
    """Counts of a's forward values in the one compared step; `diverged` is the number of listed divergences.

    Of `by_name`, those of the comparison by name, only the two runs' numbers of steps are taken.
    Values that were paired count as `equal` where their distance is 0, else as `within`.
    """
    exact = sum(match.rel_l2 == 0 for match in flow.forward)
    return Counts(
        steps_a=by_name.steps_a,
        steps_b=by_name.steps_b,
        steps_compared=1,
        steps_diverged=int(diverged > 0),
        records=len(flow.values[0]),
        equal=exact,
        diverged=diverged,
        within=len(flow.forward) - exact,
    )


def _last_before(flow: Flow, stop: Stop) -> ValuePair | None:
    """The last pair of agreeing values before `stop`, of outputs if there are any; None for none.

    Before is by the runs that recorded in order, by both if neither says so.
    """
    by_a, by_b = flow.ordered if any(flow.ordered) else (True, True)
    earlier = [
        match
        for match in flow.forward
        if (not by_a or match.a.order < stop.a.order) and (not by_b or match.b.order < stop.b.order)
    ]
    outputs = [match for match in earlier if Kind.INPUT not in (match.a.site.kind, match.b.site.kind)]
    return max(outputs or earlier, key=lambda match: match.a.order if by_a else match.b.order, default=None)


def _divergence(flow: Flow, one: Value, two: Value, reason: str) -> Divergence:
    """A divergence of the pair `one` (of a) and `two` (of b); an origin if `reason` is `module` or `backward`."""
    a, b = (
        reader.record(reader.read(flow.step), value.row, flow.step).summary
        for reader, value in zip(flow.readers, (one, two), strict=True)
    )
    return Divergence(
        step=flow.step,
        step_b=flow.step,
        rank=flow.readers[0].rank,
        sequence=float(one.order),
        site=one.site,
        module_class=one.module_class,
        role=Role.ORIGIN if reason in ("module", "backward") else Role.PROPAGATED,
        reason=reason,
        a=a,
        b=b,
        rel_l2=sketch_distance(one, two),
    )


def _structure_changes(flow: Flow) -> tuple[StructureChange, ...]:
    """Structural changes: `renamed` for the first call of each pair of modules, then parameters merged or split."""
    changes = [
        ("renamed", pair.a.site.fqn, pair.b.site.fqn, "port-module-agrees" if pair.agree else "port-module-differs")
        for pair in flow.modules
        if pair.a.site.call == 0
    ]
    for merge in flow.parameters.merges:
        parts, change = " + ".join(merge.parts), "merged" if merge.side == "b" else "split"
        changes.append((change, *((parts, merge.whole) if merge.side == "b" else (merge.whole, parts)), "port-merged"))
    return tuple(
        StructureChange(change, a, b, say.told("port-in-b", a=a, b=b), evidence=say.told(code))
        for change, a, b, code in changes
    )
