"""Answer for two implementations of one model whose values are paired by content (`flow.py`), not by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.terms.findings import StructureChange
from introspect_cli.compare.terms.result import Counts, DiffResult, Divergence, Role, Verdict
from introspect_cli.compare.terms.watched import lists, ordered
from introspect_cli.compare.terms.words import amount, named, some, what
from introspect_cli.compare.values import CLOSE, Flow, ModulePair, ValuePair, are_ports, ends, flow_of, sketch_distance
from introspect_cli.records import Kind
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.compare.values import Parameters, Value
    from introspect_cli.store.read.run import Run

_LISTED = 4


def by_flow(answer: DiffResult, runs: tuple[Run, Run], options: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer from values paired by content, where the runs are ports of one another; else `answer` unchanged."""
    a, b = (run.rank(outcome.rank) for run in runs)
    listed = any(lists(run.manifest) for run in runs)
    if answer.first is None and outcome.match.renamed and not listed:
        return answer  # what has other names was matched, and compared
    if not len(outcome.paired) or not are_ports(a, b, answer.first, listed=listed):
        return answer
    step = int(outcome.paired.steps[0])
    if step not in a or step not in b:
        return answer
    in_order = ordered(runs[0].manifest), ordered(runs[1].manifest)
    flow = flow_of((a, b), step, options.rtol or CLOSE, in_order)
    return _answer_of(answer, flow) if flow.related else answer


def _answer_of(before: DiffResult, flow: Flow) -> DiffResult:
    """`before` with verdict, sentence, evidence, divergences and counts replaced by those of `flow`."""
    parameters = flow.parameters
    total = len(parameters.pairs) + sum(len(merge.parts) if merge.side == "b" else 1 for merge in parameters.merges)
    total_a = total + len(parameters.only_a)
    flows = f"{len(flow.forward)} of {count(len(flow.values[0]), 'value')} of a's forward pass are among the "
    evidence = (
        f"{total} of {count(total_a, 'distinctive parameter')} of a are in b{_how(parameters)}",
        f"{flows}{len(flow.values[1]):,} of b",
        _farthest(flow),
        _missing("a", parameters.only_a),
        _missing("b", parameters.only_b),
    )
    verdict, sentence, first = _judged(flow)
    listed = _listed(flow, first)
    note = (
        f"The runs share almost no names: values were paired by what they hold, in step {flow.step} alone, and "
        f"agree where their relative L2 distance is at most {flow.close:g} (--rtol sets another)."
    )
    return replace(
        before.unexplained(),
        verdict=verdict,
        sentence=sentence,
        evidence=tuple(line for line in evidence if line),
        first=first,
        candidates=(first,) if first is not None else (),
        divergences=listed,
        counts=_counts(before.counts, flow, len(listed)),
        notes=(note, *before.notes),
        suggestions=(),
        map=None,
        strip=(),
    ).with_findings(StructureChange, _changes(flow))


def _listed(flow: Flow, first: Divergence | None) -> tuple[Divergence, ...]:
    """`first`, then divergences of modules with equal parameters whose outputs differ; () where `first` is None."""
    if first is None:
        return ()
    rest = [_divergence(flow, pair.a, pair.b, "propagated") for pair in flow.modules if not pair.agree]
    return (first, *(divergence for divergence in rest if divergence.site != first.site))


def _counts(before: Counts, flow: Flow, diverged: int) -> Counts:
    """Counts of the values of a's forward pass in one step, by whether they agree."""
    exact = sum(match.rel_l2 == 0 for match in flow.forward)
    return Counts(
        steps_a=before.steps_a,
        steps_b=before.steps_b,
        steps_compared=1,
        steps_diverged=int(diverged > 0),
        records=len(flow.values[0]),
        equal=exact,
        diverged=diverged,
        within=len(flow.forward) - exact,
    )


def _farthest(flow: Flow) -> str:
    """Clause on the agreeing module outputs with the largest distance, and the largest before them; "" without any."""
    measured_pairs = [(pair.rel_l2, pair) for pair in flow.modules if pair.agree and pair.rel_l2 is not None]
    if not measured_pairs:
        return ""
    rel, worst = max(measured_pairs, key=lambda pair: pair[0])
    if not rel:
        return "the outputs of modules with equal parameters that agree are equal bit for bit"
    most = max((other for other, pair in measured_pairs if pair.a.order < worst.a.order), default=0.0)
    before = f", at most {most:.1e} before" if most else ""
    farthest = f"those of {worst.a.site.fqn} and {worst.b.site.fqn} are farthest apart"
    return f"of the outputs that agree, {farthest}: {rel:.1e}{before}"


def _how(parameters: Parameters) -> str:
    """In brackets, how many parameters were matched transposed or merged; "" where none."""
    parts = [f"{parameters.transposed} transposed, in another order or shape"] * bool(parameters.transposed)
    if parameters.merges:
        are = "are" if len(parameters.merges) > 1 else "is"
        parts.append(f"{count(len(parameters.merges), 'tensor')} of one run {are} several of the other put together")
    return f" ({'; '.join(parts)})" if parts else ""


def _missing(name: str, values: Sequence[Value]) -> str:
    """Distinctive parameters without an equal in the other run, at most `_LISTED` named; "" for none."""
    return f"found in {name} only: {some([value.site.fqn for value in values], _LISTED)}" if values else ""


def _judged(flow: Flow) -> tuple[Verdict, str, Divergence | None]:
    """Verdict, sentence and first divergence (None unless diverged).

    Order: modules, end of the forward pass, gradients.
    """
    at, within = f"step {flow.step}", f"within {flow.close:g}"
    differing = next((pair for pair in flow.modules if not pair.agree), None)
    if differing is None and flow.end is not None:
        same = f"the values of both agree {within} through the forward pass of {at}, to {_both(flow.end.a, flow.end.b)}"
        wrong = next(((one, two) for one, two, agree in flow.gradients if not agree), None)
        if wrong is not None:
            text = f"In the backward pass: {same}, but {_both(*wrong)} differs{_far(*wrong)}."
            return Verdict.DIVERGED, text, _divergence(flow, *wrong, "backward")
        grads = f", and so do {count(len(flow.gradients), 'gradient')} of parameters" if flow.gradients else ""
        return Verdict.SAME, f"The implementations agree: {same}{grads}.", None
    if not flow.forward:
        return Verdict.UNDECIDED, f"Could not tell: no value of a's forward pass is in b in {at}.", None
    if differing is not None:
        text = _stops_at(flow, differing, at, within)
        reason = "module" if differing.inputs else "gap"
        return Verdict.DIVERGED, text, _divergence(flow, differing.a, differing.b, reason)
    last = [next(iter(ends(values)), None) for values in flow.values]
    if last[0] is None or last[1] is None:
        return Verdict.UNDECIDED, f"Could not tell: a run has no output in {at}.", None
    text = (
        f"The values stop agreeing before the end of {at}: {what(last[0].site)} of a is nowhere in b. "
        f"The last value that agrees {within} is {_last(flow, last[0], None)}."
    )
    return Verdict.DIVERGED, text, _divergence(flow, last[0], last[1], "gap")


def _stops_at(flow: Flow, differing: ModulePair, at: str, within: str) -> str:
    """Sentences on the first module whose output differs: whether its input agrees, differs or was not recorded."""
    module = "{} in a, which is {} in b".format(
        *(named(output.site, output.module_class) for output in (differing.a, differing.b))
    )
    far, odd = _far(differing.a, differing.b), _odd(flow, differing)
    if differing.inputs:
        look = f"Look at its parameters: {odd}." if odd else _equal_parameters(flow, differing)
        return (
            f"The values stop agreeing at {at} in {module}: its input agrees {within}, its output differs{far}. {look}"
        )
    before = (
        f"The last value that agrees {within} is {_last(flow, differing.a, differing.b)}.{_between(flow, differing)}"
    )
    if differing.inputs is False:
        return f"The values stop agreeing at {at} before {module}: its input differs already. {before}"
    look = f" Look at its parameters: {odd}." if odd else ""
    return (
        f"The values stop agreeing at {at} in or before {module}: its output differs{far}; its input was not recorded "
        f"in both. {before}{look}"
    )


def _both(one: Value, two: Value) -> str:
    """A pair of values in words: `the output of x in a, which is the output of y in b`."""
    return f"{what(one.site)} in a, which is {what(two.site)} in b"


def _far(one: Value, two: Value) -> str:
    """Relative L2 distance of two values in brackets; "" where it cannot be measured."""
    rel = sketch_distance(one, two)
    return "" if rel is None else f" ({amount(rel, 'float32', 'float32')})"


def _odd(flow: Flow, differing: ModulePair) -> str:
    """A module's parameters without an equal in the other run, or else transposed ones, in words; "" for neither."""
    parameters, owners = flow.parameters, (differing.a.site.fqn, differing.b.site.fqn)
    sides = zip((parameters.only_a, parameters.only_b), owners, strict=True)
    only = [value.site.fqn for values, owner in sides for value in values if value.owner == owner]
    if only:
        return f"{' and '.join(only)} {'has' if len(only) == 1 else 'have'} no equal on the other side"
    pairs = [(one, two) for one, two in parameters.pairs if one.owner == owners[0] and one.shape == two.shape]
    turned = [one.site.fqn for one, two in pairs if one.checksum != two.checksum]
    return f"{' and '.join(turned)} {_hold(turned)} the same numbers as in b, in another order" if turned else ""


def _equal_parameters(flow: Flow, differing: ModulePair) -> str:
    """Sentence that a module's parameters are equal, so that its options or code must differ."""
    names = [one.site.fqn for one, _ in flow.parameters.pairs if one.owner == differing.a.site.fqn]
    equal = f"{', '.join(names)}, {_hold(names)} the same numbers"
    return f"Its distinctive parameters, {equal}: look at its options and its code."


def _hold(names: Sequence[str]) -> str:
    return "holds" if len(names) == 1 else "hold"


def _before(flow: Flow, one: Value, two: Value | None) -> ValuePair | None:
    """The last matched pair that ran before `one` in a, and before `two` in b if given; outputs before inputs."""
    by_a, by_b = flow.ordered if any(flow.ordered) else (True, True)
    earlier = [
        match
        for match in flow.forward
        if (not by_a or match.a.order < one.order) and (not by_b or two is None or match.b.order < two.order)
    ]
    given = [match for match in earlier if match.a.site.kind is not Kind.INPUT and match.b.site.kind is not Kind.INPUT]
    chosen = given or earlier
    return max(chosen, key=lambda match: match.a.order if by_a else match.b.order, default=None)


def _last(flow: Flow, one: Value, two: Value | None) -> str:
    """The last matched pair before `one` and `two` in words; `none` where there is none."""
    last = _before(flow, one, two)
    if last is None:
        return "none"
    return f"{_both(last.a, last.b)}{', the same numbers in another order' if last.rel_l2 is None else ''}"


def _between(flow: Flow, differing: ModulePair) -> str:
    """A sentence on modules that ran in a and in b between the last matched value and this pair; "" for none."""
    last = _before(flow, differing.a, differing.b)
    ends, clauses = {differing.a.site.fqn, differing.b.site.fqn}, []
    for place, (name, end) in enumerate((("a", differing.a), ("b", differing.b))):
        since = -1 if last is None else (last.a, last.b)[place].order
        ran = [value for value in flow.values[place] if value.site.kind is Kind.OUTPUT]
        between = dict.fromkeys(value.site.fqn for value in ran if since < value.order < end.order)
        names = [module for module in between if module not in ends]
        if names and flow.ordered[place]:
            clauses.append(f"{name} ran {some(names, _LISTED)}")
    return f" In between, {'; '.join(clauses)}." if clauses else ""


def _divergence(flow: Flow, one: Value, two: Value, reason: str) -> Divergence:
    """A divergence of a pair of values; an origin if `reason` is `module` or `backward`."""
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


def _changes(flow: Flow) -> tuple[StructureChange, ...]:
    """Structural changes: modules renamed (first calls only), and parameters merged or split."""
    changes = []
    for pair in flow.modules:
        if pair.a.site.call == 0:
            evidence = f"equal parameters; its output {'agrees' if pair.agree else 'differs'}"
            changes.append(_change("renamed", pair.a.site.fqn, "is", pair.b.site.fqn, evidence))
    for merge in flow.parameters.merges:
        parts, evidence = " + ".join(merge.parts), "equal extrema, equal sums to rounding"
        merged = ("merged", parts, "are", merge.whole) if merge.side == "b" else ("split", merge.whole, "is", parts)
        changes.append(_change(*merged, evidence))
    return tuple(changes)


def _change(change: str, a: str, verb: str, b: str, evidence: str) -> StructureChange:
    return StructureChange(change, a, b, f"{a} {verb} {b} in b", evidence=evidence)
