"""Explanation of a divergence: findings of its reason, else the causes that remain."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare import say
from introspect_cli.compare.evidence import RANDOM, Evidence, Known, Thing, with_state
from introspect_cli.compare.reasons.draws import find_one_sided_draw
from introspect_cli.compare.reasons.forward import draws_nothing, find_call_counts
from introspect_cli.compare.reasons.rows import reason_named
from introspect_cli.compare.result import Certainty, Finding, Role
from introspect_cli.compare.say import told, what
from introspect_cli.compare.settings.beginning import MAY_REST_ON_THEM, SCRIPT, find_first_event
from introspect_cli.compare.table import ABSENT, EQUAL, NOT_SEEN, WITHIN
from introspect_cli.records import SETTING_KINDS, Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.view import View

_HELD = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE, Kind.RNG})
_RAN_UNSEEN = {Thing.PASSED_OVER: "passed-over", Thing.RAN_UNSEEN: "ran-unseen"}
_NEVER_RANDOM = frozenset({"backward", "plain", "loss"})


class Explanation(NamedTuple):
    """The explanation of a divergence, in words and findings.

    Attributes:
        head: what differs, when and by how much, or that one run alone has it.
        evidence: what it rests on, as far as that says something of it.
        findings: what explains it: on record, else what is left, and what is likely.
        more: sentences on roundings and tolerance.
    """

    head: str
    evidence: tuple[Evidence, ...]
    findings: tuple[Finding, ...]
    more: tuple[str, ...] = ()


def explanation_of(at: View) -> Explanation:
    """All findings on a divergence, proved ones first; the remaining causes only where none is proved.

    That copies differ (`copies`) proves no cause. For a gap, all findings are at most likely.
    """
    reason = reason_named(at.explained_reason)
    quiet = reason.word in _NEVER_RANDOM or (reason.word == "module" and draws_nothing(at.first.module_class))
    evidence = tuple(fact for fact in at.cause.evidence if not (quiet and fact.thing in RANDOM))
    findings = say.all_found(reason.word, at)
    if at.cause.role is not Role.ORIGIN and at.explained_reason == "gap":
        findings = [one._replace(certainty=Certainty.LIKELY) for one in findings]
    # that copies differ is on record, and tells no cause
    proved = any(one.certainty is Certainty.PROVED and one.code != "copies" for one in findings)
    unseen = (code for thing, code in _RAN_UNSEEN.items() if at.cause.rests_on(thing))
    findings += [] if proved else say.left([*reason.remaining(at), *unseen])
    findings.sort(key=lambda one: list(Certainty).index(one.certainty))
    more = [told("rounding-alone")] if at.rounding and not proved else []
    more += [told("grown", first=at.tolerated)] if with_state(at.cause.evidence, Known.WITHIN) and at.tolerated else []
    return Explanation(_head_of(at), evidence, tuple(findings), tuple(more))


def _head_of(at: View) -> str:
    """Clause on what differs, at which moment and by how much, or that one run alone has it."""
    first, site, cause, (after, before) = at.first, at.site, at.cause, (at.cause.after, at.cause.before)
    if after and after == before:
        after, before = f"call {site.call - 1} of {after}", f"call {site.call}"
    name = what(site, "" if at.explained_reason in {"script", "backward", "propagated"} else first.module_class)
    place = told("between", after=after, before=before, module=cause.module) if cause.reason == "own_code" else ""
    again = site.phase is Phase.START and site.call > 0  # as a model is called once more, or saved
    when = {"again" if again else site.phase.value: site.kind in _HELD}
    return say.what_diverges(first, name=name, source=first.source, place=place, **when)


# --- what a reader can check


def evidence_lines(at: View, story: Explanation) -> tuple[str, ...]:
    """Lines of evidence under the answer, in this order.

    Compared steps before the divergence, and records before it in its step that agree; evidence that is equal, within
    tolerance, in another form, or not observed (none that differs); modules called another number of times; draws of
    one run alone; the script's seedings, in the first step and for reasons that may rest on them. Of the last three,
    findings whose text is in `story` are left out.
    """
    clauses = []
    if not at.is_first_step:
        narrowed = at.step.comparison.options.narrowed
        how = " within tolerance" if at.tolerated else " in what was selected" if narrowed else " entirely"
        clauses.append(told("steps-before", how=how, steps=int((at.compared < at.first.step).sum())))
    settings = at.step.alignment.are(*SETTING_KINDS)
    before = Counter(at.step.state[(at.table.order_of < at.first.sequence) & ~settings].tolist())
    if before[EQUAL] or before[WITHIN]:
        every = count(sum(before.values()) - before[ABSENT], "record")
        numbers = {"equal": before[EQUAL], "within": before[WITHIN], "unseen": before[NOT_SEEN]}
        clauses.append(told("records-before", all=every, step=at.first.step, **numbers))
    things = {state: ", ".join(say.fact_of(fact).text for fact in with_state(story.evidence, state)) for state in Known}
    clauses += [f"{of.value.capitalize()}: {text}." for of, text in things.items() if text and of is not Known.DIFFERS]
    further = [*find_call_counts(at), *find_one_sided_draw(at)]
    if at.is_first_step and at.explained_reason in MAY_REST_ON_THEM:
        further += find_first_event(at.runs, at.first.rank, SCRIPT)
    said = {one.text for one in story.findings}
    clauses += [f"{one.text[:1].upper()}{one.text[1:]}." for one in further if one.text not in said]
    return tuple(clauses)
