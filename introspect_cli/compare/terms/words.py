"""Wording of sites, distances and evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.terms.distance import rounding, shapes_differ
from introspect_cli.compare.terms.evidence import Evidence, Known, Thing, with_state
from introspect_cli.compare.terms.result import RESOLUTION, Divergence
from introspect_cli.compare.terms.sites import MODULE_KINDS
from introspect_cli.records import DRAWN_BEFORE, Joined, Kind, Phase, Site, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def far(divergence: Divergence) -> str:
    """How far a and b are apart, without brackets; "" where one run lacks the site or nothing is known.

    Where shapes differ these alone; else dtypes, numbers of NaNs and infinities, and relative L2, as far as they
    differ, and whether b seems to have a's values in another order. Plain values have no distance.
    """
    rel, a, b = divergence.rel_l2, divergence.a, divergence.b
    if a is None or b is None:
        return ""
    if shapes_differ(a, b):
        return f"shape {_shape(a.layout.shape)} against {_shape(b.layout.shape)}"
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

    By equal layout, extrema and counts of zeros, NaNs and infinities, moments that agree to rounding, and a relative L2
    of at least `_PERMUTED`; False for constants and single numbers, and where distance or statistics are unknown.
    """
    a, b, rel = divergence.a, divergence.b, divergence.rel_l2
    if a is None or b is None or rel is None or rel < _PERMUTED or a.layout != b.layout or a.layout.numel < 2:
        return False
    names = ("min", "max", "absmin", "zeros", "nans", "posinfs", "neginfs")
    one, two = a.stats, b.stats
    if not one or any(one.get(name) != two.get(name) for name in names) or one.get("min") == one.get("max"):
        return False
    size = one.get("amean", 0.0)  # a mean near zero is what is left of larger numbers
    return all(
        abs(one.get(name, 0.0) - two.get(name, 0.0)) <= tolerance * scale
        for name, tolerance, scale in (
            ("mean", 1e-12, size),
            ("amean", 1e-12, size),
            ("var", 1e-11, one.get("var", 0.0)),
            ("skew", 1e-5, 1.0 + abs(one.get("skew", 0.0))),
            ("kurt", 1e-5, 1.0 + abs(one.get("kurt", 0.0))),
        )
    )


def how_far(divergence: Divergence) -> str:
    """`far` in brackets, after a blank; "" where that is empty."""
    distance = far(divergence)
    return f" ({distance})" if distance else ""


def what_diverges(divergence: Divergence) -> str:
    """Clause `x differs (distance)`, or `only a has x`."""
    name = what(divergence.site, divergence.module_class)
    if divergence.only:
        return f"only {divergence.only} has {name}"
    return f"{name} differs{how_far(divergence)}"


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
    if rel >= 0.01:
        return f"relative L2 {rel:.2g}"
    return f"relative L2 {rel:.1e}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def key_of(path: str) -> str:
    """The last key of a path without brackets and quotes: `exp_avg` of `['exp_avg']`.

    The path itself where it has none.
    """
    return path.rpartition("[")[2].strip("]'")


def is_kept(site: Site) -> bool:
    """Whether a site is a copy of trained tensors in memory (a moving average), as opposed to a saved file."""
    return site.kind is Kind.PRODUCT and site.phase is Phase.OPTIMIZER


def what(site: Site, module_class: str = "") -> str:
    """A site in words, with its path, and its call unless that is 0: `the input [0] of GPT.head`.

    Args:
        site: the site.
        module_class: class of its module, put behind the name of a module; "" to leave it out.
    """
    path = f" {site.path}" if site.path else ""
    call = f" (call {site.call})" if site.call else ""
    if site.kind is Kind.BATCH:
        return (
            f"the batch{f' {site.call}' if site.call else ''} from {site.fqn}{f' ({site.path})' if site.path else ''}"
        )
    if site.kind is Kind.RNG:
        return _random_state(site, call)
    if site.kind is Kind.LOSS:
        return f"the loss{f' of backward {site.call}' if site.call else ''}{path}"
    if site.kind is Kind.COLLECTIVE:
        return _collective(site)
    if site.kind is Kind.VALUE:
        return f"{site.kind.one} {site.fqn}{path}{call}"
    if is_kept(site):
        return f"the copy {site.fqn}{site.path}"
    if site.kind is Kind.PRODUCT:
        return f"{site.kind.one}{path} of {site.fqn}{call}"
    if site.kind in {Kind.PARAM, Kind.BUFFER}:
        return f"{site.kind.one} {site.fqn}"
    if site.kind is Kind.OPTIMIZER_STATE:
        return f"the optimizer state {site.path} of {site.fqn}"
    if site.kind is Kind.OP_OUTPUT:
        return _operator(site) + call
    return f"{site.kind.one}{path} of {named(site, module_class)}{call}"


def _collective(site: Site) -> str:
    """A collective or message in words, with whether it is what goes in or comes out."""
    name, _, part = site.path.partition(".")
    name = name.partition("~")[0]
    text = f"collective {site.call} of {site.fqn}"
    if name:
        text = f"message {site.call} ({name}) of {site.fqn.removeprefix('messages of ')}"
    given = {"in": "what goes into ", "out": "what comes out of "}
    return given.get(part.partition("[")[0], "") + text


def _random_state(site: Site, call: str) -> str:
    """A random state in words: at the start of a step, drawn from in a module, or recorded before a draw.

    Args:
        site: of kind RNG.
        call: words for its call, ` (call 1)`; "" for the first.
    """
    if not site.path:
        return f"the random state of {site.fqn}"
    generator = site.path.removesuffix(DRAWN_BEFORE)
    if generator == site.path:
        return f"the random state of {generator} from which {site.fqn}{call} draws"
    place = {Phase.DATA: f"the batch from {site.fqn}", Phase.LOSS: "the backward pass"}.get(site.phase, site.fqn)
    return f"the random state of {generator} before {place}{call}"


def _operator(site: Site) -> str:
    """The result of an operator: `result [0] of the backward operator aten.gelu_backward.default of GPT.act`."""
    name, bracket, place = site.path.partition("[")
    backward = "backward " if site.phase is Phase.BACKWARD else ""
    text = f"result [{place} of the " if bracket else "the "
    where = "the script itself" if site.fqn == "script" else site.fqn
    return f"{text}{backward}operator {name} of {where}"


def named(site: Site, module_class: str) -> str:
    """A module's name with its class, `GPT.head (Linear)`; the name alone where the class is "" or equal to it."""
    return f"{site.fqn} ({module_class})" if module_class and module_class != site.fqn else site.fqn


def both_values(divergence: Divergence) -> str:
    """` (1 in a, 2 in b)` where both runs have one number each: its text, else a tensor's mean, to six digits.

    "" for other tensors, where one run has none, or for equal texts.
    """
    a, b = divergence.a, divergence.b
    if a is None or b is None or a.layout.numel != 1 or b.layout.numel != 1:
        return ""
    one, two = (_value(side) for side in (a, b))
    return f" ({one} in a, {two} in b)" if one and two and one != two else ""


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


def evidence_words(evidence: Iterable[Evidence], known: Known) -> str:
    """What the facts are about whose state is `known`, with commas: `its inputs, its parameters`; "" for none."""
    return ", ".join(map(thing, with_state(evidence, known)))


def listed(names: Sequence[str]) -> str:
    """At least one name, as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def some(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """The first `most` names joined by `between`, then the number of others, if any: `a, b, c and 2 more`."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{rest}"
