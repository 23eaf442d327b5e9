"""Explanation of a divergence: findings of its reason, else the causes that remain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from introspect_cli.compare import say
from introspect_cli.compare.reasons.draws import find_resume_point, one_sided_draw, unseeded_generators
from introspect_cli.compare.reasons.forward import batch_before, calls, draws_nothing
from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.reasons.ranks import unequal_copies
from introspect_cli.compare.reasons.start import late
from introspect_cli.compare.settings.beginning import MAY_REST_ON_THEM, script_generators
from introspect_cli.compare.step.rests_on import lacks_gradient
from introspect_cli.compare.terms.evidence import RANDOM, Evidence
from introspect_cli.compare.terms.findings import Certainty, Finding
from introspect_cli.compare.terms.result import Role
from introspect_cli.compare.terms.table import EQUAL, NOT_SEEN, WITHIN
from introspect_cli.compare.terms.words import although, both_values, how_far, lines, what
from introspect_cli.records import GIVEN, Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.reasons.view import View

_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE})
_OF_ALL = (unequal_copies, unseeded_generators)
"""What may be found of any divergence, after what its reason finds."""
_NEVER_RANDOM = frozenset({"backward", "plain", "loss"})


@dataclass(frozen=True)
class Explained:
    """The explanation of a divergence, in words and findings.

    Attributes:
        head: what differs, when and by how much, or that one run alone has it.
        subject: the same in a sentence, with what it rests on.
        evidence: what it rests on, as far as that says something of it.
        findings: what explains it: on record, else what is left, and what is likely.
        more: sentences on roundings and tolerance.
    """

    head: str
    subject: str
    evidence: tuple[Evidence, ...]
    findings: tuple[Finding, ...]
    more: tuple[str, ...] = ()

    def sentence(self, likely: Sequence[str] = ()) -> str:
        """The full sentence: subject, findings, likely causes (`likely` appended), further sentences."""
        return say.sentence(self.subject, self.findings, likely, self.more)

    @property
    def proved(self) -> tuple[Finding, ...]:
        """The findings of certainty PROVED."""
        return tuple(one for one in self.findings if one.certainty is Certainty.PROVED)


def explained(at: View) -> Explained:
    """All findings on a divergence, proved first; remaining causes only where none is proved."""
    reason, evidence = reason_named(at.tells), shown_evidence(at)
    findings = [one for find in (*reason.find, *_OF_ALL) for one in find(at)]
    if at.cause.role is not Role.ORIGIN and at.tells == "gap":
        findings = [replace(one, certainty=Certainty.LIKELY) for one in findings]
    # that copies differ is on record, and tells no cause
    proved = any(one.certainty is Certainty.PROVED and one.code != "copies" for one in findings)
    findings += [] if proved else say.left(reason.left(at))
    findings.sort(key=lambda one: list(Certainty).index(one.certainty))
    more = [] if proved or not at.rounding else ["Rounding alone can make such a difference."]
    if at.cause.grown and at.tolerated:
        more.append(f"It may also have grown from differences within the tolerance, the first in {at.tolerated}.")
    return Explained(head_of(at), subject_of(at, evidence), evidence, tuple(findings), tuple(more))


def shown_evidence(at: View) -> tuple[Evidence, ...]:
    """The cause's evidence, without random states for modules that draw no numbers."""
    quiet = at.tells in _NEVER_RANDOM or (at.tells == "module" and draws_nothing(at.first.module_class))
    return tuple(fact for fact in at.cause.evidence if not (quiet and fact.thing in RANDOM))


def _parts(at: View) -> tuple[str, str, str, str]:
    """(record, moment, distance, factor and place) of the divergence, in words."""
    first, site = at.first, at.site
    name = what(site, "" if at.tells in {"script", "backward", "propagated"} else first.module_class)
    moment = say.MOMENTS[_moment(at)].format(step=first.step, call=site.call, source=first.source)
    far = (both_values(first) if site.kind is not Kind.RNG else "") or how_far(first)
    times = "" if first.scale is None else f"; b is {first.scale:.6g} times a"
    return name, moment, far, f"{times}{between(at) if at.tells == 'own_code' else ''}"


def subject_of(at: View, evidence: tuple[Evidence, ...]) -> str:
    """Clause: what differs, when, by how much, although what is equal; or that one run alone has it."""
    name, moment, far, rest = _parts(at)
    if at.first.only:
        return f"only {at.first.only} has {name}{moment.rstrip(',')}"
    aside = moment if moment.endswith(",") else ""
    return f"{name}{aside} differs{moment[len(aside) :]}{far}{although(evidence)}{rest}"


def head_of(at: View) -> str:
    """Clause as in `subject_of`, without the evidence."""
    name, moment, far, rest = _parts(at)
    if at.first.only:
        return f"only {at.first.only} has {name}{moment.rstrip(',')}"
    size = f", {far.strip(' ()')}" if far else ""
    return f"{name}{moment.rstrip(',')}{size}{rest}"


def between(at: View) -> str:
    """Clause naming the modules before and after the code that differs, inside `cause.module`."""
    cause = at.cause
    if cause.after and cause.after == cause.before:
        return f"; between calls {at.site.call - 1} and {at.site.call} of {cause.after}, in {cause.module}"
    place = f"after {cause.after}" if not cause.before else f"before {cause.before}"
    place = f"between {cause.after} and {cause.before}" if cause.after and cause.before else place
    return f"; {place}, in the forward code of {cause.module}"


def _moment(at: View) -> str:
    """Code in `say.MOMENTS` of the record's moment; "" where none needs saying."""
    site, first = at.site, at.is_first_step
    if site.kind is Kind.OP_OUTPUT and at.first.source and not at.first.only:
        return "run-at"
    if site.kind is Kind.RNG and site.phase is Phase.START:
        return ("later-run" if find_resume_point(at) else "first-rng") if first else "begins"
    if site.kind is Kind.GRAD and site.phase is Phase.OPTIMIZER:
        return "evaluation" if site.call else "taken"
    if site.kind not in _TENSORS:
        return ""
    if site.phase is Phase.START:
        if at.tells == "initial":
            return "late" if not first else "recording" if late(at) else "untrained"
        return "first-step" if first and site.kind is Kind.OPTIMIZER_STATE else "again" if site.call else "begins"
    if site.path == GIVEN:
        return "given"
    if site.phase is Phase.FORWARD:
        return "forward"
    if site.call:
        return "within"
    ends = "ends" if site.kind is Kind.BUFFER else "stepped" if lacks_gradient(at.step, site.fqn) else "updated"
    return ends if site.phase is Phase.OPTIMIZER else ""


# --- what a reader can check


def before_it(at: View) -> tuple[str, ...]:
    """Lines on compared steps before the first divergence, and records before it in its step, that agree."""
    clauses = []
    if at.steps_before:
        how = " within tolerance" if at.tolerated else " in what was selected" if at.narrowed else " entirely"
        clauses.append(f"{count(at.steps_before, 'compared step')} before: all agree{how}.")
    states = at.agreeing_before
    every = sum(states.values())
    if states[EQUAL] or states[WITHIN]:
        rest = f"; {states[WITHIN]:,} within tolerance" if states[WITHIN] else ""
        rest += f"; {states[NOT_SEEN]:,} not observed in both runs" if states[NOT_SEEN] else ""
        clauses.append(f"{states[EQUAL]:,} of {count(every, 'record')} before it in step {at.first.step} equal{rest}.")
    return tuple(clauses)


def _counted(at: View) -> Iterator[str]:
    """Lines counting the gradients or tensors that differ, and on the batch or step before."""
    if at.tells == "gradient":
        differ, recorded = at.gradients
        yield f"{differ} of {recorded} gradients differ in this step."
    if at.tells in {"initial", "outside"} and not at.first.only:
        differ, states = at.initial
        equal = states.count(EQUAL)
        yield f"Of {count(len(states), 'tensor')} recorded there, {differ} differ and {equal} are equal."
    if at.tells == "batch" and (known := batch_before(at)):
        yield f"The batch before it is {known}."
    if at.step.gap and at.cause.reason == "gap":
        earlier = at.compared[at.compared < at.first.step]
        last = f"The records of step {int(earlier[-1])} agree" if len(earlier) else "No step before is on record"
        yield f"{last}, and no step between can be compared: the runs diverged by step {at.first.step}."


def evidence_lines(at: View, told: Explained) -> tuple[str, ...]:
    """Lines of evidence under the answer; findings that the answer names are left out."""
    clauses = []
    if at.tolerated:
        clauses.append(f"The first difference within the tolerance is {at.tolerated}.")
    clauses += lines(told.evidence)
    clauses += _counted(at)
    further = [*calls(at)]
    if at.cause.reason != "rng":
        further += one_sided_draw(at)
    if at.is_first_step and at.tells in MAY_REST_ON_THEM:
        further += script_generators(at.runs, at.first.rank)
    said = {one.text for one in told.findings}
    clauses += [f"{one.text[:1].upper()}{one.text[1:]}." for one in further if one.text not in said]
    return tuple(clauses)
