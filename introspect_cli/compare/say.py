"""The English of `diff`: sites, distances and evidence, findings and what is left, and the sentences made of them.

A template's part in square brackets is left out where a field in it is empty. Nothing is decided here, and nothing
reads what was said.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from introspect_cli.compare.evidence import Evidence, Known, Thing
from introspect_cli.compare.measure import moments, rounding, same_numbers, shapes_differ
from introspect_cli.compare.result import RESOLUTION, Certainty, Divergence, Fact, Finding, Part, Resumption
from introspect_cli.compare.table import MODULE_KINDS
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
    "calls": "{module} runs {a} in this step of a and {b} in b",
    "recomputed": "{module} was recomputed under activation checkpointing: look at what it draws (preserve_rng_state)",
    # data and the script
    "scaler": "the scale of GradScaler {a} -> {b}",
    "repeated": "in {side} it is that of the time before, again",
    # gradients
    "stale": "in {side} it is the other's plus that of the {of} before: zero_grad is missing or late in {side}",
    "summed": "b is {times} times a, by as many as {of}: a sum where a mean was expected, or the other way round",
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
    "other-state": "{draw} draws from another state[: {since} took another number of draws][; {before} before agree]",
    "draws-differ": "the first draw or seeding that differs[, in a {a}][, in b {b}][; {before} draws before it agree]",
    "draws": "random numbers were drawn {before} {name} in {side} and not in {other}",
    "unseeded": "{names} was drawn from in step {step} and never seeded (capture --seed seeds all generators)",
    # what one run alone has
    "not-in-optimizer": "no optimizer that steps in {other} has this parameter",
    "tied": "in {other} it is tied to {target}",
    "losses": "backward runs {a} in this step of a and {b} in b",
    "not-run": "{module} does not run in this step of {other}",
    "exists-only": "the {kind} {name} exists only in {side}[ ({cls})]",
    "runs-only": "the {kind} {name} runs only in {side}[ ({cls})]",
    "optimizers-order": "the optimizers step in a different order ({a} in a; {b} in b)",
    "arguments": "it is called with different arguments[; only in a: {a}][; only in b: {b}]",
    "structure-of-value": "the structure of the value is different[; only in a: {a}][; only in b: {b}]",
    "model-not-run": "in {other} its model has not run in training by then",
    "not-stepped": "in {other} no optimizer steps it here",
    # ranks
    "copies": "in {side} its copies on the ranks differ[: {text}]",
    "not-reduced-proved": "the copies of {side} add up to, or average to, the other run's: it was not reduced",
    "parts": "in {side} its parts are not the whole: {text}",
    # splits
    "split-summed": "[gradients of b are {times} x those of a: ]in {side} the losses of the {number} microbatches of "
    "a step are added up, not averaged: divide each by {number}",
    "split-uneven": "in {side} the losses are means over {counts} {by}, and count alike: weighted by these they are "
    "that of {other}",
    "split-parts": "it takes statistics over each part of a batch, or draws numbers for it: splitting a batch by "
    "itself changes it",
}

_LIKELY: Final[Mapping[str, str]] = {
    "split": "a takes {a}, b {b}",
    "hyperparameter-elsewhere": "{name} {a} -> {b}",
    "gradient-not-taken": "in {other} it is frozen, cleared before the optimizer's step, or was replaced in the model",
    "no-gradient": "in {other} no gradient reaches it (frozen, detached, no_grad, not in the loss or the optimizer)",
    "split-clipped": "the norm of the gradients is {norm}, as clipping leaves it: {side} clips before all are added up",
    "not-reduced": "in {side} it was not reduced, or not over these ranks",
}

BATCH_OF, BACKWARD_PASS = "the batch from ", "the backward pass"
"""Before what something was drawn, where that is no module."""
LEFT_OUT_ARGUMENT, WHOLE_VALUE = "left out", "the value"
_FACTORS = {"world": "ranks", "group": "the data-parallel ranks"}

_LEFT: Final[Mapping[str, str]] = {
    "code": "its code, train/eval mode",
    "kernel": "its options, the kernel",
    "draws-before": "other random numbers drawn before it in this step",
    "parameters-after": "parameters that changed after they were recorded (.data, numpy)",
    "forward-code": "the forward code, or what it keeps from earlier calls",
    "backward-of-operator": "how it is computed, or the options of its forward operator",
    "batch-size": "batch size, sequence length, cropping or padding",
    "samples": "the data set, its files, order, seeds, workers, augmentation, conversion",
    "data": "the data pipeline (no data loader was recorded)",
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
    "backward-through": "the backward pass through this module",
    "backward-of-user": "the backward pass of what uses that output",
    "reduction": "its reduction over the ranks",
    "factors": "clipping, unscaling, accumulation",
    "zero-grad": "zero_grad",
    "gradient-by-hand": "another change of the gradient (by value, by hand)",
    "rounding-in-backward": "rounding in the backward pass of its module",
    "use-in-module": "how its module uses the parameter",
    "penalty": "a penalty on the parameters in the loss",
    "optimizer": "the optimizer, what was not recorded of its state and hyper-parameters",
    "gradients-in-step": "the gradients it computed (zero_grad)",
    "by-hand": "the script changes it by hand (a moving average, copying, in-place code)",
    "updates": "momentum, train/eval mode, a different number of updates",
    "other-rank": "buffers of another rank (DDP broadcasts them where broadcast_buffers is set)",
    "before-recorded": "it was built, copied or updated differently before",
    "built": "the model is built with other sizes or types",
    "initialisation": "its initialisation",
    "seed": "the seed",
    "checkpoint": "another checkpoint, a change by the script before it was recorded",
    "update-before": "the update of the step before",
    "rule-by-hand": "the script's update by hand, without an optimizer (gradient, learning rate or rule)",
    "evaluation-in-train": "an evaluation in train mode",
    "outside": "a change outside of an optimizer step (loading a checkpoint, a moving average, copying, in-place code)",
    "steps-between": "the steps between, which cannot be compared",
    "seed-or-draws": "the seed, a different number of draws before it",
    "draws-between": "draws of one run since the last random state that agrees, seeding or setting by the script",
    "sent": "what the ranks compute and send, the order of collectives",
    "elsewhere": "what is outside of the records or of what was selected",
}

MOMENTS: Final[Mapping[Phase, str]] = {
    Phase.START: " when the step begins",
    Phase.FORWARD: " in the forward pass",
    Phase.OPTIMIZER: " at the optimizer step",
}
"""When a tensor, gradient or state differs, after its name."""

_TOLD: Final[Mapping[str, str]] = {
    # where the runs agree
    "until": "up to and including {step}",
    "same": "[{name} is the same][The runs are the same{plain}][The runs have the same numbers{structure}]: {records} "
    "of {steps}[ that both runs kept{thinned}][, {within} of them only within tolerance,] agree {until}.",
    "same-results": "The runs have the same results[ within tolerance{tolerated}]: {names} agree {until}.[ What "
    "differs changed none of them, first at {first}: {what}.][ Not compared: {blind}.]",
    # what differs besides numbers
    "besides": "[ Besides numbers differ: {changes}.]",
    "renamed": "{a} is {b} in b",
    "only": "only {side} {verb} [{tensor} ]{name}[ ({cls})]",
    "more": "only {side} has {what} in step {step}",
    "evaluates": "only {side} evaluates, first in step {step}",
    "random": "the random state of {name} differs from step {step} on",
    "nan-throughout": " In the last step, of {all}, NaN throughout in both runs: {empty:,} (the first: {first}). They "
    "are equal whatever was computed.",
    # where nobody can tell
    "could-not-tell": "Could not tell[ of {of}]: {why}.",
    "evaluation-unseen": "Could not tell: of the evaluation, what {names} computes was not seen. What was seen: {text}",
    "but-ran-unseen": "all that both runs recorded agrees, but what {names} computes was not seen, and no result of "
    "it (losses, gradients, updates) is on record",
    "but-failed": "all that both runs recorded agrees, but part of the capture failed (run {runs}), and the rest was "
    "not seen",
    "no-results": "all that both runs recorded agrees, but results (losses, gradients, parameters) were not recorded, "
    "and something else differs",
    "no-common-step": "the runs have no step in common",
    "mostly-unseen": "of {all:,} records in common, too few could be observed, or none of the last step[ (about "
    "{unseen:,} could not)]",
    "cut-within": "all that both runs recorded agrees until run {run} ended ({how}) within step {step}",
    "blind": "{records} that only one run could see (the first: {first})",
    "seen-by-one": "all that both runs saw agrees, but not compared: {blind}",
    "ranks-missing": "all that both runs recorded agrees {until}, but {ranks} of {run} left nothing",
    "ends-before": "equal[ within tolerance{within}] {until}, where run {short} ends; run {run} has {more} more",
    # where they diverge
    "place": "First divergence at {step}[, {ranks}][, recomputed{recomputed}][, in evaluation{evaluation}]",
    "diverges": "{name} diverges at {step}: {what}.",
    "first-more": "First that is more than rounding: {what}[; likely: {lines}].",
    "rounding-alone": "Rounding alone can make such a difference.",
    "grown": "It may also have grown from differences within the tolerance, the first in {first}.",
    "nothing-changed": "No source file, setting or package on record differs[, but for comments and names{quiet}]. "
    "What is left: [randomness{random}, ]a race of threads or workers, the hardware, a file that the script reads.",
    "hidden": "[Some are NaN throughout in both runs, which hides what comes of it: {names}.]",
    "on-rank": "rank {rank}",
    "on-all-ranks": "on all {ranks} ranks",
    "only-has-it": "only {side} has {name}[, run at {source}][{moment}]",
    "differs": "{name} differs[ ({far})]",
    "differs-by": "{name}[, run at {source}][{moment}][, {size}][; b is {times} times a][; {place}]",
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
    "random-states": "random state of {names}",
    "part": "{part}[ ({text})]",
    "part-lost": "not restored: {part}",
    # notes
    "running": "Run {run} is still being written: {until} is compared.",
    "no-step": "no complete step",
    "interrupted": "Run {run} was interrupted: it holds {until}.",
    "ranks-ended": "Run {run}: {how}.",
    "thinned": "Run {run} does not hold {what}: what was there is not compared.",
    "only-has": "Only run {run} has {what}: not compared[ (run {stopped} was ended at its first divergence)].",
    "some-steps": "{steps} from {first} to {last}",
    "lean": "[{lean:,} records differ in bits and have no sketch to hold against the tolerance, as in lean steps, so "
    "they are not compared (`capture --full-every 1` keeps all sketches).]",
    "blind-both": "[About {blind:,} of {all} could not be observed, so they are not compared.]",
    "unopened": "[{steps:,} later steps were not compared: the first divergence does not depend on them (see --map).]",
    "noise-unused": "The noise runs are not used: they do not show what another layout changes.",
    # two implementations of one model
    "port": "The runs share almost no names: parameters were paired by what they hold, and step {step} alone is "
    "compared, where values agree within {close:g} (--rtol sets another).",
}

_FINDINGS = {code: (Certainty.PROVED, words) for code, words in _PROVED.items()} | {
    code: (Certainty.LIKELY, words) for code, words in _LIKELY.items()
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
    certainty, template = _FINDINGS[code]
    said = {**fields, "of": _FACTORS.get(str(fields.get("of")), fields.get("of"))} if "of" in fields else fields
    return Finding(code, certainty, fields, _filled(template, said))


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


def event_words(by: str, seed: str, name: str, line: str, *, mode: bool = False) -> str:
    """A seeding or draw before the first step, in words: `normal_ of GPT.wte.weight (model.py:15)`.

    Args:
        by: the function; "" where that is unknown (`a draw before model.py:15`); with `mode`, `train` or `eval`.
        seed: the seed; "" for none. One that begins with `#` is left out.
        name: the tensor or module; may be "".
        line: `file:line`; may be "".
        mode: whether it is a call of a module before the first step.
    """
    at = f" ({line})" if line else ""
    if mode:
        return f"{name}, called in {by} mode before the first step{at}"
    if not by:
        return f"a draw before {line}" if line else "a draw just before the first step"
    given = f"({seed})" if seed and not seed.startswith("#") else ""
    return f"{by}{given}{f' of {name}' if name else ''}{at}"


def sentence(head: str, findings: Sequence[Finding], likely: Sequence[str], rest: Sequence[str]) -> str:
    """The sentences of an answer: `head` with proved findings, else with what is left; then `likely`; then `rest`.

    Args:
        head: what diverges, without a stop.
        findings: those PROVED are used, those LEFT only where none is; others are not.
        likely: likely causes, as clauses.
        rest: sentences that follow.
    """
    proved, remaining = (
        [one.text for one in findings if one.certainty is it] for it in (Certainty.PROVED, Certainty.LEFT)
    )
    why = f"; cause: {'; '.join(proved)}" if proved else f"; left: {', '.join(remaining)}" if remaining else ""
    also = f" Likely: {'; '.join(likely)}." if likely else ""
    return " ".join([f"{head}{why}.{also}", *rest])


# --- sites and distances


def far(divergence: Divergence) -> str:
    """How far a and b are apart, without brackets; "" where one run lacks the site or nothing is known.

    Where shapes differ these alone; else dtypes, numbers of NaNs and infinities, and relative L2, as far as they
    differ, and whether b seems to have a's values in another order. Plain values have no distance.
    """
    rel, a, b = divergence.rel_l2, divergence.a, divergence.b
    if a is None or b is None:
        return ""
    if shapes_differ(a, b):
        shapes = ["x".join(map(str, side.layout.shape)) or "scalar" for side in (a, b)]
        return f"shape {' against '.join(shapes)}"
    parts = []
    if a.layout.dtype != b.layout.dtype:
        parts.append(f"{a.layout.dtype} against {b.layout.dtype}")
    for name, word in (("nans", "NaN"), ("infs", "Inf")):
        one, two = a.stats.get(name, 0), b.stats.get(name, 0)
        if one != two:
            parts.append(f"{one:.0f} {word} against {two:.0f}")
    if rel is not None and Status.VALUE not in (a.status, b.status):
        computed = divergence.coarse and divergence.site.kind in MODULE_KINDS
        parts.append(amount(rel, a.layout.dtype, b.layout.dtype, coarser=computed))
    if same_values(divergence):
        parts.append("by its statistics the same values in another order")
    return ", ".join(parts)


_PERMUTED = 1e-3
"""A smaller relative distance may be that of a few elements, which the statistics of a large tensor do not show."""


def same_values(divergence: Divergence) -> bool:
    """Whether b seems to hold the values of a in another order.

    By equal layout, extrema and counts of zeros, sums that agree to rounding, and a relative L2 of at least
    `_PERMUTED`; False for constants, for what is not finite, and where distance or statistics are unknown.
    """
    a, b, rel = divergence.a, divergence.b, divergence.rel_l2
    if a is None or b is None or rel is None or rel < _PERMUTED or a.layout != b.layout:
        return False
    one, two, zeros = moments(a), moments(b), (a.stats.get("zeros"), b.stats.get("zeros"))
    return one is not None and two is not None and zeros[0] == zeros[1] and same_numbers(one, two, 1e-11)


def what_diverges(divergence: Divergence) -> str:
    """Clause `x differs (distance)`, or `only a has x`."""
    name = what(divergence.site, divergence.module_class)
    if divergence.only:
        return told("only-has-it", side=divergence.only, name=name)
    return told("differs", name=name, far=far(divergence))


def amount(rel: float, dtype_a: str, dtype_b: str, *, coarser: bool = True) -> str:
    """A relative L2 distance in words, in rounding units too where it is few of them.

    Args:
        rel: the distance; below RESOLUTION only that is said.
        dtype_a: of a's value.
        dtype_b: of b's value.
        coarser: whether units of bfloat16 may be given for finer dtypes.
    """
    if rel < RESOLUTION:
        return f"less than {RESOLUTION:.0e} relative".replace("e-0", "e-")
    unit = rounding(rel, dtype_a, dtype_b)
    if unit is not None and (coarser or unit[1] in (dtype_a, dtype_b)):
        number = f"about {unit[0]:,.0f}" if unit[0] >= 9.5 else f"about {unit[0]:.1f}".removesuffix(".0")
        number = number if unit[0] >= 0.05 else "less than 0.1"
        return f"relative L2 {rel:.1e}, {number} {unit[1]} rounding unit{'s' * (number != 'about 1')}"
    return f"relative L2 {rel:.2g}" if rel >= 0.01 else f"relative L2 {rel:.1e}"


def key_of(path: str) -> str:
    """The last key of a path without brackets and quotes: `exp_avg` of `['exp_avg']`.

    The path itself where it has none.
    """
    return path.rpartition("[")[2].strip("]'")


_SITES: Final[Mapping[Kind, str]] = {
    Kind.BATCH: "the batch[ {call}] from {fqn}[ ({path})]",
    Kind.LOSS: "the loss[ of backward {call}][ {path}]",
    Kind.VALUE: "{one} {fqn}[ {path}][ (call {call})]",
    Kind.PRODUCT: "{one}[ {path}] of {fqn}[ (call {call})]",
    Kind.PARAM: "{one} {fqn}",
    Kind.BUFFER: "{one} {fqn}",
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
        module_class: class of its module, put behind the name of a module; "" to leave it out.
    """
    if site.kind is Kind.PRODUCT and site.phase is Phase.OPTIMIZER:
        return f"the copy {site.fqn}{site.path}"
    name, bracket, part = site.path.partition("[")
    fields = {"one": site.kind.one, "fqn": site.fqn, "path": site.path, "call": site.call, "name": name}
    fields |= {"named": named(site, module_class), "part": bracket + part, "backward": site.phase is Phase.BACKWARD}
    fields["where"] = "the script itself" if site.fqn == "script" else site.fqn
    if site.kind is Kind.RNG:
        where = {Phase.DATA: f"{BATCH_OF}{site.fqn}", Phase.LOSS: BACKWARD_PASS}.get(site.phase, site.fqn)
        fields |= {"name": site.path.removesuffix(DRAWN_BEFORE) or site.fqn, "where": site.path and where}
    elif site.kind is Kind.COLLECTIVE:
        message, _, part = site.path.partition(".")
        fields["name"] = message.partition("~")[0]
        fields |= {"given": part.startswith("in"), "taken": part.startswith("out")}
    return _filled(_SITES.get(site.kind, "{one}[ {path}] of {named}[ (call {call})]"), fields)


def named(site: Site, module_class: str) -> str:
    """A module's name with its class, `GPT.head (Linear)`; the name alone where the class is "" or equal to it."""
    return f"{site.fqn} ({module_class})" if module_class and module_class != site.fqn else site.fqn


def both_values(divergence: Divergence) -> str:
    """`1 in a, 2 in b` where both runs have one number each: its text, else a tensor's mean, to six digits.

    "" for other tensors, where one run has none, or for equal texts.
    """
    a, b = divergence.a, divergence.b
    if a is None or b is None or a.layout.numel != 1 or b.layout.numel != 1:
        return ""
    one, two = (_value(side) for side in (a, b))
    return f"{one} in a, {two} in b" if one and two and one != two else ""


def _value(summary: Summary) -> str:
    """A single number as text; where ranks' numbers were gathered, their mean, with how many they are."""
    mean = f"{summary.stats['mean']:.6g}" if "mean" in summary.stats else ""
    if summary.joined is Joined.GATHERED and mean:
        return f"{mean} as the mean of {summary.text.removesuffix(' together')}"
    return summary.text or mean


# --- evidence


def thing(fact: Evidence) -> str:
    """What a fact is about, in words, not what is known of it: `its inputs`, `the parameters of GPT.head`."""
    words, is_held = fact.thing.value
    unseen = fact.known is Known.UNSEEN
    if fact.thing is Thing.RAN_UNSEEN:
        return f"what {fact.of} computes"
    if fact.thing is Thing.OUTPUTS and unseen:
        return "module outputs before it"
    if not is_held:
        inside = fact.inside and fact.thing in {Thing.DRAWN_FROM, Thing.INSIDE}
        return f"{words} inside {fact.inside}" if inside else words
    if not fact.of and fact.inside:  # those of the modules inside it count too, and of these some may be on record
        return f"{'some' if unseen else 'the'} {words} of {fact.inside}"
    return f"the {words} of {fact.of}" if fact.of else f"its {words}"


def fact_of(evidence: Evidence) -> Fact:
    """Evidence as it is told."""
    names = evidence.thing.name.lower(), evidence.known.name.lower()
    return Fact(*names, evidence.of, evidence.inside, thing(evidence))


def listed(names: Sequence[str]) -> str:
    """At least one name, as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def some(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """The first `most` names joined by `between`, then the number of others, if any: `a, b, c and 2 more`."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{rest}"


# --- what a resumed run restored


_NAMED = 3
"""Parts that the first sentence names."""


def head_of(resumed: Resumption) -> str:
    """Sentence on the first `_NAMED` parts that a resumed run lost; or that it restored all that was recorded."""
    unseen = [part._replace(text="") for part in resumed.unseen]
    lost, not_seen = (some(parts_words(parts), _NAMED) for parts in (resumed.lost, unseen))
    run = {"run": resumed.run, "step": resumed.at - 1, "whole": resumed.whole}
    drew = any(part.generator for part in resumed.lost)
    return told("resumed", **run, lost=lost, drew=drew, all=not lost, unseen=not_seen)


def parts_words(parts: Sequence[Part]) -> list[str]:
    """Parts in words, random states with the same text as one."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        names = by_name.setdefault(("" if part.generator else part.part, part.text), [])
        names += [part.generator] if part.generator else []
    return [
        told("part", part=name or told("random-states", names=listed(names)), text=text)
        for (name, text), names in by_name.items()
    ]
