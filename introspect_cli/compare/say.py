"""The English of `diff`: sites, distances and evidence, findings and what is left, and the sentences made of them.

A template's part in square brackets is left out where a field in it is empty. Nothing is decided here, and nothing
reads what was said.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from introspect_cli.compare.evidence import Evidence, Known
from introspect_cli.compare.measure import moments, same_numbers, shapes_differ
from introspect_cli.compare.names import grouped
from introspect_cli.compare.result import RESOLUTION, Certainty, Divergence, Fact, Finding, Part, Resumption
from introspect_cli.derived import ROUNDING
from introspect_cli.records import DRAWN_BEFORE, Joined, Kind, Phase, Site, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROVED: Final[Mapping[str, str]] = {
    # modules and operators
    "class": "{module} is {a} in a and {b} in b",
    "mode": "{a} mode in a, {b} mode in b[ (of {of})]",
    "attribute": "{name} {a} -> {b}[ of {of}]",
    "dtype": "another precision: {a} -> {b}",
    "argument": "argument {name} {a} -> {b}",
    "other-operators": "different operators run there in {other}",
    "calls": "{module} runs {a} in this step of a and {b} in b[, evaluations of {aside} not counted]",
    "recomputed": "{module} was recomputed under activation checkpointing: look at what it draws (preserve_rng_state)",
    # data and the script
    "scaler": "the scale of GradScaler {a} -> {b}",
    "repeated": "in {side} it is that of the time before, again",
    # gradients
    "stale": "in {side} it is the other's plus that of the {of} before: zero_grad is missing or late in {side}",
    "summed": "b is {times} times a, as many as the {of} has ranks: a sum where a mean was expected, or vice versa",
    # updates
    "other-optimizer": "the optimizer is {a} in a and {b} in b",
    "owed": "in {side} the gradient is a partial sum on each rank when the optimizer takes it: it was not reduced",
    "changed-hands": "{a} steps it in a, {b} in b",
    "hyperparameter": "{name} {a} -> {b}",
    "untouched": "in {side} the optimizer[ ({name})] leaves it as it was",
    "fresh-state": "the optimizer state of {side} started from scratch (it has counted {a} steps in a and {b} in b)",
    "changed-in-one": "{side} alone changes it, and no optimizer does",
    # what tensors begin with
    "filled": "what initialises it[, in a {a}][, in b {b}]",
    "filled-with": "{by} initialises it with {a} in a, {b} in b",
    "changed-after-draw": "{by} drew the same values in both runs: the script changed it before it was recorded",
    "not-restored": "the later run began with other values ({names}): the checkpoint did not restore them",
    "upstream": "what went into it differs already, first of all {name}",
    # random states
    "seeded": "{by} {a} -> {b}[ ({line})]",
    "other-state": "{draw} draws from another state[: from {since} on, another number was drawn]"
    "[; {before} before agree]",
    "draws-differ": "the first draw or seeding that differs[, in a {a}][, in b {b}][; alike before it: {before}]",
    "draws": "random numbers were drawn {before} {name} in {side} and not in {other}",
    "unseeded": "{names} was drawn from in step {step} and never seeded (capture --seed seeds all generators)",
    # what one run alone has
    "not-stepped": "in {other} no optimizer steps it",
    "tied": "in {other} it is tied to {target}",
    "not-run": "{module} does not run in this step of {other}",
    "exists-only": "the {kind} {name} exists only in {side}[ ({cls})]",
    "runs-only": "the {kind} {name} runs only in {side}[ ({cls})]",
    "optimizers-order": "the optimizers step in a different order ({a} in a; {b} in b)",
    "arguments": "it is called with different arguments[; only in a: {a}][; only in b: {b}]",
    "structure-of-value": "the structure of the value is different[; only in a: {a}][; only in b: {b}]",
    "model-not-run": "in {other} its model has not run in training by then",
    # ranks
    "copies": "in {side} its copies on the ranks differ[: {text}]",
    "not-reduced-proved": "the copies of {side} add up to, or average to, the other run's: it was not reduced",
    "parts": "in {side} its parts are not the whole: {text}",
    # splits
    "split-summed": "[gradients of b are {times} x those of a: ]in {side} the losses of the {number} microbatches of "
    "a step are added up, not averaged: divide each by {number}",
    "split-uneven": "in {side} the losses are means over {counts} {by}, and count alike: weighted they are {other}'s",
    "split-parts": "it takes statistics over each part of a batch, or draws for it: a split alone changes it",
}

_LIKELY: Final[Mapping[str, str]] = {
    "split": "a takes {a}, b {b}",
    "hyperparameter-elsewhere": "{name} {a} -> {b}",
    "gradient-not-taken": "in {other} it is frozen, detached, cleared before the optimizer's step, or was replaced in "
    "the model",
    "no-gradient": "in {other} no gradient reaches it (frozen, detached, no_grad, not in the loss or the optimizer)",
    "split-clipped": "the norm of the gradients is {norm}, as clipping leaves it: {side} clips before all are added up",
    "not-reduced": "in {side} it was not reduced, or not over these ranks",
}

BATCH_OF, BACKWARD_PASS = "the batch from ", "the backward pass"
"""Before what something was drawn, where that is no module."""
LEFT_OUT_ARGUMENT, WHOLE_VALUE = "left out", "the value"

_LEFT: Final[Mapping[str, str]] = {
    "code": "its code, train/eval mode",
    "kernel": "its options, the kernel",
    "draws-before": "other random numbers drawn before it in this step",
    "parameters-after": "parameters that changed after they were recorded (.data, numpy)",
    "buffers-after": "buffers that changed since the step began",
    "forward-code": "the forward code, or what it keeps from earlier calls",
    "batch-size": "batch size, sequence length, cropping or padding",
    "samples": "the data set, its files, order, seeds, workers, augmentation, conversion",
    "data": "the data pipeline (no data loader was recorded)",
    "other-batches": "which batches it takes",
    "from-outputs": "what the script computes from module outputs, values of the script (targets, masks, weights)",
    "preparation": "the script's preparation of it (preprocessing, noise, masks, positions)",
    "passed-over": "a model that ran without gradients, which was not recorded",
    "ran-unseen": "a call of a module that was not seen",
    "code-of-value": "the code that computes it",
    "not-recorded": "what was not recorded",
    "operations": "operations of the script (no module is called: capture --level op records them)",
    "loss-code": "the loss code (reduction, mask, weighting, scale)",
    "targets": "the targets",
    "not-restored": "resuming did not restore it",
    "saving": "what is saved or kept (a moving average, a copy, a conversion, what resuming restored of it)",
    "backward-through": "the backward pass through this module or of what else uses that input",
    "backward-of-user": "the backward pass of what uses that output",
    "factors": "clipping, unscaling, accumulation",
    "zero-grad": "zero_grad",
    "gradient-by-hand": "another change of the gradient (by value, by hand)",
    "rounding-in-backward": "rounding in the backward pass of its module",
    "use-in-module": "how its module uses the parameter",
    "penalty": "a penalty on the parameters in the loss",
    "optimizer": "the optimizer, what was not recorded of its state and hyper-parameters",
    "by-hand": "the script changes it by hand (loading a checkpoint, a moving average, copying, in-place code)",
    "updates": "momentum, train mode (in an evaluation, too), the number of updates, buffers that ranks broadcast",
    "before-recorded": "it was built, copied or updated differently before",
    "built": "the model is built with other sizes or types",
    "initialisation": "its initialisation",
    "seed": "the seed, a different number of draws before it",
    "checkpoint": "another checkpoint, a change by the script before it was recorded",
    "update-before": "the update of the step before",
    "rule-by-hand": "the script's update by hand, without an optimizer (gradient, learning rate or rule)",
    "steps-between": "the steps between, which cannot be compared",
    "draws-between": "draws of one run since the last random state that agrees, seeding or setting by the script",
    "sent": "what the ranks compute and send, its reduction over them, the order of collectives",
    "elsewhere": "what is outside of the records or of what was selected",
}

_TOLD: Final[Mapping[str, str]] = {
    # where the runs agree
    "until": "up to and including {step}",
    "same": "[{name} is the same][The runs are the same{plain}][The runs have the same numbers{structure}]: {records} "
    "of {steps}[ that both runs kept{thinned}][, {within} of them only within tolerance,] agree {until}.",
    "same-results": "The runs have the same results[ within tolerance{tolerated}]: {names} agree {until}.[ What "
    "differs changed none of them, first at {first}: {what}.][ Not compared: {blind}.]",
    # seedings and draws before the first step
    "event": "{by}[({seed})][ of {name}][ ({line})]",
    "called": "{name}, called in {by} mode before the first step[ ({line})]",
    "draw": "a draw [before {line}][just before the first step{last}]",
    # what differs besides numbers
    "besides": "[ Besides numbers differ: {changes}.]",
    "renamed": "{a} is {b} in b",
    "only": "only {side} {verb} [{tensor} ]{name}[ ({cls})][ in step {step}]",
    "more": "only {side} has {what}[ and {more} more] in step {step}",
    "evaluates": "only {side} evaluates, first in step {step}",
    "random": "the random state of {name} differs from step {step} on",
    "nan-throughout": " In the last step, of {all}, NaN throughout in both runs: {empty:,} (the first: {first}). They "
    "are equal whatever was computed.",
    # where nobody can tell
    "could-not-tell": "Could not tell[ of {of}]: {why}.",
    "evaluation-unseen": "Could not tell: of the evaluation, what {names} computes was not seen. What was seen: {text}",
    "but": "all that both runs recorded agrees[ {until}], but [not compared: {blind}][{ranks} of {run} left nothing]"
    "[run {cut} ended ({how}) within step {step}][what {names} computes was not seen, and no result of it (losses, "
    "gradients, updates) is on record][part of the capture failed (run {failed}), and the rest was not seen]"
    "[results (losses, gradients, parameters) were not recorded, and something else differs{structure}]",
    "no-common-step": "the runs have no step in common",
    "mostly-unseen": "too few of {all:,} records could be observed, or none of the last step[ (about {unseen:,} not)]",
    "blind": "{records} that only one run could see (the first: {first})",
    "ends-before": "equal[ within tolerance{within}] {until}, where run {short} ends; run {run} has {more} more",
    "later": "equal[ within tolerance{within}] {until}; {more} after that were not compared (--steps chooses them)",
    # where they diverge
    "place": "First divergence at {step}[, rank {rank}][, on all {ranks} ranks][, recomputed{recomputed}][, in "
    "evaluation{evaluation}]",
    "diverges": "{name} diverges at {step}: {what}.",
    "answer": "{head}[; cause: {cause}][; left: {left}].[ Likely: {likely}.][ {rest}]",
    "first-more": "First that is more than rounding: {what}[; likely: {lines}].",
    "rounding-alone": "Rounding alone can make such a difference.",
    "grown": "It may also have grown from differences within the tolerance, the first in {first}.",
    "nothing-changed": "No source file, package or setting that could explain it differs on record[, but for comments, "
    "names and how lines are written{quiet}]. What is left: [randomness{random}, ]a race of threads or workers, the "
    "hardware, a file that the script reads.",
    "hidden": "[Some are NaN throughout in both runs, which hides what comes of it: {names}.]",
    "differs": "[only {side} has ]{name}[, run at {source}][ when the step begins{start}][ within the step{again}][ in "
    "the forward pass{forward}][ at the optimizer step{optimizer}][, {size}][; b is {times} times a][; {place}]",
    "between": "in the forward code of {module}[, after {after}][, before {before}]",
    # what a reader can check
    "steps-before": "Compared steps before that agree{how}: {steps:,}.",
    "records-before": "Of {all} before it in step {step}, equal: {equal:,}[; within tolerance: {within:,}][; not "
    "observed in both runs: {unseen:,}].",
    # a run that ended by an exception
    "exception": "{text}[, at {where}][ in {function}]",
    "raised": "[Run {run}][Both runs{both}] ended by an exception[ in {step}][ where run {other} goes on]: {words}.",
    # a resumed run
    "resumed": "Run {run}, resumed after step {step} of {whole}, [did not restore: {lost}][ (or drew from it before "
    "its first step){drew}][restored all that is on record{all}][; not recorded: {unseen}].",
    "part": "[{part}][random state of {names}][ ({text})]",
    # notes
    "running": "Run {run} is still being written: {until} is compared.",
    "no-step": "no complete step",
    "interrupted": "Run {run} was interrupted: it holds {until}.",
    "ranks-ended": "Run {run}: {how}.",
    "thinned": "Run {run} does not hold {what}: what was there is not compared.",
    "only-has": "Only run {run} has {what}: not compared[ (run {stopped} was ended at its first divergence)].",
    "some-steps": "{steps} from {first} to {last}",
    "lean": "[Not compared: {lean:,} that differ in bits and have no sketch to hold against the tolerance, as in lean "
    "steps (`capture --full-every 1`, without --no-sketch, keeps all sketches).]",
    "blind-both": "[About {blind:,} of {all} could not be observed, so they are not compared.]",
    "unopened": "[{steps:,} later steps were not compared: the first divergence does not depend on them (see --map).]",
    "noise-unused": "The noise runs are not used: they do not show what another layout changes.",
    # two implementations of one model
    "port": "The runs share almost no names: parameters were paired by what they hold, and step {step} alone is "
    "compared, where values agree within {close:g} (--rtol sets another).",
}

F = TypeVar("F", bound=Callable[..., Any])

_FINDERS: dict[str, list[Callable[[Any], Iterable[Finding]]]] = defaultdict(list)
"""What may be found of a divergence, by the word of its reason; of any under `*`."""

_PART = re.compile(r"\[([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)")


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """A template with its fields.

    A part of it in square brackets is dropped if any field in it is missing, None, "" or 0.

    A field that is True shows nothing: it only decides that its part stays.
    """

    def part(match: re.Match[str]) -> str:
        return match[1] if all(fields.get(name) not in {None, "", 0} for name in _FIELD.findall(match[1])) else ""

    shown = {name: "" if value is True else value for name, value in fields.items()}
    return _PART.sub(part, template).format_map(shown)


def finds(*reasons: str) -> Callable[[F], F]:
    """Decorator: register a function from a divergence's `View` to findings, to be asked for these reasons.

    `*` for all.
    """

    def registered(find: F) -> F:
        """Register `find` and return it unchanged."""
        for reason in reasons:
            _FINDERS[reason].append(find)
        return find

    return registered


def all_found(reason: str, at: Any) -> list[Finding]:
    """All findings on a divergence: of the functions registered for `reason`, then of those for `*`, in order.

    Args:
        reason: word of the divergence's reason.
        at: its `View`.
    """
    return [one for find in (*_FINDERS.get(reason, ()), *_FINDERS.get("*", ())) for one in find(at)]


def found(code: str, **fields: Any) -> Finding:
    """The finding with this code, its certainty and its words, filled with `fields` (`_filled`).

    KeyError for an unknown code.
    """
    certainty = Certainty.PROVED if code in _PROVED else Certainty.LIKELY
    return Finding(code, certainty, fields, _filled(_PROVED.get(code) or _LIKELY[code], fields))


def told(code: str, **fields: Any) -> str:
    """The words of the answer (`_TOLD`) with this code, filled with `fields` (`_filled`).

    KeyError for an unknown code.
    """
    return _filled(_TOLD[code], fields)


def left(codes: Iterable[str]) -> list[Finding]:
    """For each code, once, a finding with its words of what is left where nothing is proved (certainty LEFT).

    KeyError for an unknown code.
    """
    return [Finding(code, Certainty.LEFT, {}, _LEFT[code]) for code in dict.fromkeys(codes)]


def often(count: int) -> str:
    """A count as an adverb: `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def sentence(head: str, findings: Sequence[Finding], likely: Sequence[str], rest: Sequence[str]) -> str:
    """The sentences of an answer: `head` with proved findings and with what is left; then `likely`; then `rest`.

    Args:
        head: what diverges, without a stop.
        findings: those PROVED and those LEFT are used, others are not.
        likely: likely causes, as clauses.
        rest: sentences that follow.
    """
    texts = grouped((one.certainty, one.text) for one in findings)
    cause, remaining = "; ".join(texts[Certainty.PROVED]), ", ".join(texts[Certainty.LEFT])
    return told("answer", head=head, cause=cause, left=remaining, likely="; ".join(likely), rest=" ".join(rest))


# --- sites and distances


def what_diverges(divergence: Divergence, **more: Any) -> str:
    """Clause on what differs and by how much, or that one run alone has it; `more` are further fields of "differs"."""
    name, times = what(divergence.site, divergence.module_class), divergence.scale
    fields = {"side": divergence.only, "name": name, "size": far(divergence), "times": times and f"{times:.6g}"}
    return told("differs", **(fields | more))


def far(divergence: Divergence) -> str:
    """How far a and b are apart; "" where one run lacks the site or nothing is known.

    Of single numbers both, where shapes differ these alone; else dtypes, numbers of NaNs and infinities, and relative
    L2, as far as they differ, and whether b seems to have a's values in another order. Plain values have no distance.
    """
    rel, a, b = divergence.rel_l2, divergence.a, divergence.b
    if a is None or b is None:
        return ""
    one, two = (_value(side) if side.layout.numel == 1 else "" for side in (a, b))
    if one and two and one != two and divergence.site.kind is not Kind.RNG:
        return f"{one} in a, {two} in b"
    if shapes_differ(a, b):
        shapes = ["x".join(map(str, side.layout.shape)) or "scalar" for side in (a, b)]
        return f"shape {' against '.join(shapes)}"
    parts = [f"{a.layout.dtype} against {b.layout.dtype}"] if a.layout.dtype != b.layout.dtype else []
    for name, word in (("nans", "NaN"), ("infs", "Inf")):
        one, two = (f"{side.stats.get(name, 0):.0f}" for side in (a, b))
        parts += [f"{one} {word} against {two}"] if one != two else []
    if rel is not None and Status.VALUE not in (a.status, b.status):
        parts.append(_distance(rel, a.layout.dtype, b.layout.dtype))
        parts += ["by its statistics the same values in another order"] if _permuted(a, b, rel) else []
    return ", ".join(parts)


_PERMUTED = 1e-3
"""A smaller relative distance may be that of a few elements, which the statistics of a large tensor do not show."""


def _permuted(a: Summary, b: Summary, rel: float) -> bool:
    """Whether b seems to hold the values of a in another order.

    By equal layout, extrema and counts of zeros, sums that agree to rounding, and a relative L2 of at least
    `_PERMUTED`; False for constants, for what is not finite, and where statistics are unknown.
    """
    one, two, zeros = moments(a), moments(b), [side.stats.get("zeros") for side in (a, b)]
    close = one is not None and two is not None and same_numbers(one, two, 1e-11)
    return close and rel >= _PERMUTED and a.layout == b.layout and zeros[0] == zeros[1]


def _distance(rel: float, *dtypes: str) -> str:
    """A relative L2 distance in words, in units of rounding too where it is at most 64 of the coarser dtype.

    Args:
        rel: the distance; below RESOLUTION only that is said.
        dtypes: of a's value, and of b's.
    """
    if rel < RESOLUTION:
        return f"relative L2 below {RESOLUTION:.0e}"
    unit, dtype = max((ROUNDING.get(name, 0.0), name) for name in dtypes)
    if rel <= 64 * unit:
        return f"relative L2 {rel:.1e}, about {rel / unit:.2g} {dtype} rounding units"
    return f"relative L2 {rel:.2g}" if rel >= 0.01 else f"relative L2 {rel:.1e}"


def tensor_name(fqn: str, path: str) -> str:
    """A tensor's name, and before it the last key of its path, if any: `exp_avg of fc.weight`."""
    key = path.rpartition("[")[2].strip("]'")
    return f"{key} of {fqn}" if path else fqn


_SITES: Final[Mapping[Kind, str]] = {
    Kind.BATCH: "the batch[ {call}] from {fqn}[ ({path})]",
    Kind.LOSS: "the loss[ of backward {call}][ {path}]",
    **dict.fromkeys((Kind.VALUE, Kind.PARAM, Kind.BUFFER), "{one} {fqn}[ {path}][ (call {call})]"),
    Kind.OPTIMIZER_STATE: "the optimizer state {path} of {fqn}",
    Kind.RNG: "the random state of {name}[ before {where}][ (call {call})]",
    Kind.COLLECTIVE: "[what goes into {given}][what comes out of {taken}]{one}[ {name}] {call} of {fqn}",
    Kind.OP_OUTPUT: "[result {part} of ]the [{backward}backward ]operator {name} of {where}[ (call {call})]",
}
"""How a site of a kind is called, where not as what a module takes or gives."""


def what(site: Site, module_class: str = "") -> str:
    """A site in words, with its path, and its call unless that is 0: `the input [0] of GPT.head`.

    Args:
        site: the site.
        module_class: class of its module, put behind the name of a module unless it is that; "" to leave it out.
    """
    if site.kind is Kind.PRODUCT and site.phase is Phase.OPTIMIZER:
        return f"the copy {site.fqn}{site.path}"
    name, bracket, part = site.path.partition("[")
    fields = {"one": site.kind.one, "fqn": site.fqn, "path": site.path, "call": site.call, "name": name}
    fields |= {"part": bracket + part, "backward": site.phase is Phase.BACKWARD}
    fields["class"] = module_class if module_class != site.fqn else ""
    fields["where"] = "the script itself" if site.fqn == "script" else site.fqn
    if site.kind is Kind.RNG:
        where = {Phase.DATA: f"{BATCH_OF}{site.fqn}", Phase.LOSS: BACKWARD_PASS}.get(site.phase, site.fqn)
        fields |= {"name": site.path.removesuffix(DRAWN_BEFORE) or site.fqn, "where": site.path and where}
    elif site.kind is Kind.COLLECTIVE:
        message, _, part = site.path.partition(".")
        fields |= {"name": message.partition("~")[0], "given": part.startswith("in"), "taken": part.startswith("out")}
    return _filled(_SITES.get(site.kind, "{one}[ {path}] of {fqn}[ ({class})][ (call {call})]"), fields)


def _value(summary: Summary) -> str:
    """A single number as text; where ranks' numbers were gathered, their mean, with how many they are."""
    mean = f"{summary.stats['mean']:.6g}" if "mean" in summary.stats else ""
    if summary.joined is Joined.GATHERED and mean:
        return f"{mean} as the mean of {summary.text.removesuffix(' together')}"
    return summary.text or mean


# --- evidence


def fact_of(fact: Evidence) -> Fact:
    """Evidence as it is told, with what it is about in words: `its inputs`, `the parameters of GPT.head`."""
    owner = fact.of or fact.inside
    # those of the modules inside it count too, and of these some may be on record
    in_part = fact.known is Known.UNSEEN and not fact.of
    its = "its" if not owner else "some" if in_part else "the"
    text = _filled(fact.thing.value, {"its": its, "of": owner, "inside": fact.inside})
    return Fact(fact.thing.name.lower(), fact.known.name.lower(), fact.of, fact.inside, text)


def listed(names: Sequence[str]) -> str:
    """At least one name, as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def some(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """The first `most` names joined by `between`, then the number of others, if any: `a, b, c and 2 more`."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{rest}"


# --- what a resumed run restored


def head_of(resumed: Resumption) -> str:
    """Sentence on the first 3 parts that a resumed run lost; or that it restored all that was recorded."""
    lost, unseen = (some(parts_words(parts)) for parts in (resumed.lost, resumed.unseen))
    run = {"run": resumed.run, "step": resumed.at - 1, "whole": resumed.whole}
    drew = any(part.generator for part in resumed.lost)
    return told("resumed", **run, lost=lost, drew=drew, all=not lost, unseen=unseen)


def parts_words(parts: Sequence[Part]) -> list[str]:
    """Parts in words, random states with the same text as one."""
    by_name = grouped((("" if part.generator else part.part, part.text), part.generator) for part in parts)
    return [told("part", part=name, names=not name and listed(of), text=text) for (name, text), of in by_name.items()]
