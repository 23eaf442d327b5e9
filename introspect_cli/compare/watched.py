"""What a capture was told to record, by its manifest: the sites concerned, and notes.

A one-sided site may be a change of the model, or a kind the other capture left out; the manifests tell. A run made from
a list of arrays proves nothing by what it lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.names import ancestors
from introspect_cli.compare.table import MODULE_KINDS, PHASES, Alignment
from introspect_cli.records import SETTING_KINDS, Kind, Phase, perturbed_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from introspect_cli.compare.measure import Mask
    from introspect_cli.compare.table import Table

_TENSOR_KINDS = (Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE)
STATE_KINDS = (Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What a step begins with and an optimizer step leaves."""

_FILTERS = ("modules", "exclude", "max_depth")
"""Options of capture that choose modules."""

_TOLD_OTHERWISE = frozenset({"record", "until_step", "env", "packages", "source"})
"""Options of which other means tell what is missing."""


def observed_kinds(manifest: dict[str, Any]) -> frozenset[str]:
    """Kinds (their values) that a run was told to record; empty where its manifest does not say."""
    return frozenset(map(str, manifest.get("observed", ())))


def choosing(manifest: dict[str, Any]) -> list[str]:
    """Names of the options by which a capture was told to leave out steps or modules: `steps`, and `_FILTERS`."""
    options = manifest.get("options", {})
    return [name for name in ("steps", *_FILTERS) if options.get(name) not in (None, [], ":")]


def chooses_modules(manifest: dict[str, Any]) -> bool:
    """Whether a capture may have left modules out: it was given any of `modules`, `exclude` and `max_depth`."""
    return not set(_FILTERS).isdisjoint(choosing(manifest))


def is_list(manifest: dict[str, Any]) -> bool:
    """Whether a run was made of a list of values written elsewhere: what it lacks proves nothing."""
    return manifest.get("listed") is True


def is_ordered(manifest: dict[str, Any]) -> bool:
    """Whether a run's records are in the order in which they were computed; True unless its manifest says False."""
    return manifest.get("ordered") is not False


def passes_over(manifest: dict[str, Any], step: int) -> bool:
    """Whether a run's manifest has an evaluation in this step that ran and was not recorded."""
    spans = manifest.get("passed_over")
    pairs = [span for span in spans if isinstance(span, list) and len(span) == 2] if isinstance(spans, list) else []
    return any(isinstance(low, int) and isinstance(high, int) and low <= step <= high for low, high in pairs)


def evaluates(table: Table) -> tuple[bool, ...]:
    """(whether a has, whether b has) a record of the phase `eval` in the step."""
    return tuple(bool(table.alignment.are(Phase.EVAL, sites=half.sites).any()) for half in table.halves)


def ran_evaluation(table: Table, manifests: tuple[dict[str, Any], dict[str, Any]]) -> list[bool]:
    """Of each run, whether an evaluation ran in the step, recorded or not."""
    runs = zip(evaluates(table), manifests, (table.step, table.step_b), strict=True)
    return [ran or passes_over(manifest, number) for ran, manifest, number in runs]


def ran_unseen(manifests: Iterable[dict[str, Any]], phase: Phase) -> list[str]:
    """Methods and modules that ran unobserved in a phase of any run, each once: `Net.generate()`, or `Net.head`.

    Those inside one are left out.
    """
    found: dict[str, None] = {}
    for manifest in manifests:
        unseen = manifest.get("ran_unseen")
        entries = unseen.items() if isinstance(unseen, dict) else ()
        named = {name: of.get(phase.value) for name, of in entries if isinstance(of, dict)}
        ran = {name: methods for name, methods in named.items() if isinstance(methods, list)}
        every = [(name, method) for name in ran if ran.keys().isdisjoint(ancestors(name)) for method in ran[name]]
        found.update((f"{name}.{method}()" if method else name, None) for name, method in every)
    return [*found]


def stopped_within(manifest: dict[str, Any]) -> bool:
    """Whether a run ended within a step, by an interrupt or an exit code other than 0."""
    how, failed = manifest.get("how"), bool(manifest.get("exit_code"))
    return manifest.get("remainder") is True and (how == "interrupt" or (how == "exit" and failed))


def has_failed(manifest: dict[str, Any]) -> bool:
    """Whether part of the capture failed, by its manifest."""
    return bool(manifest.get("failures"))


def narrowed(manifest_a: dict[str, Any], manifest_b: dict[str, Any]) -> list[str]:
    """Names of options that narrow what is observed, and that both manifests have with unequal values."""
    one, two = (manifest.get("narrowing", {}) for manifest in (manifest_a, manifest_b))
    return [name for name in one if name in two and one[name] != two[name]]


def draws_recorded(manifest: dict[str, Any]) -> bool:
    """Whether a capture recorded draws within steps, and was told to record random states."""
    return manifest.get("draws") is True and Kind.RNG.value in observed_kinds(manifest)


# --- sites


def covered(
    alignment: Alignment, manifest_a: dict[str, Any], manifest_b: dict[str, Any], *, same_start: bool
) -> tuple[Mask, Mask]:
    """Masks of sites that are divergences where only a, and where only b, has them.

    All False if either capture failed or either run is a list. Else those of a kind that the other run was told to
    record; of operators, of evaluation, of the optimizer phase, and of what is looked at once more as a step begins,
    only if it has any such record; buffers in the forward pass only if it had one rank. Not recomputation and random
    states; nor, where an option that chooses modules was given differently, sites of modules that one run alone has;
    nor, unless `same_start`, start values.

    Args:
        alignment: both runs' sites.
        manifest_a: of run a.
        manifest_b: of run b.
        same_start: whether the first steps of both runs correspond.
    """
    # what has failed may have named modules and parameters, so that the other run's sites have no partner either
    broken = any(has_failed(manifest) or is_list(manifest) for manifest in (manifest_a, manifest_b))
    counts = np.full(len(alignment), not broken) & ~alignment.are(Phase.RECOMPUTE) & ~alignment.are(Kind.RNG)
    if not same_start:
        counts &= ~alignment.are(*STATE_KINDS, Phase.START)
    if set(_FILTERS) & set(narrowed(manifest_a, manifest_b)):
        counts &= alignment.in_both | ~alignment.are(*MODULE_KINDS, *_TENSOR_KINDS)
    again = alignment.are(Phase.START) & (alignment.call > 0)
    usual = ~(again | alignment.are(Phase.EVAL, Phase.OPTIMIZER) | alignment.are(Kind.OP_OUTPUT))
    both, masks = (alignment.kind * np.int64(len(PHASES)) + alignment.phase) * 2 + again, []
    for manifest, sites in ((manifest_b, alignment.b_ids), (manifest_a, slice(len(alignment.a)))):
        observed = observed_kinds(manifest)
        told = alignment.are(*(kind for kind in Kind if kind.value in observed))
        looks = usual & ~(alignment.are(Kind.BUFFER, Phase.FORWARD) & (manifest.get("world_size") not in {None, 1}))
        masks.append(counts & told & (looks | np.isin(both, both[sites])))
    return masks[0], masks[1]


def draws_at_one_moment(manifest_a: dict[str, Any], manifest_b: dict[str, Any], *, evaluates: bool) -> bool:
    """Whether the captures looked at generators within a step at the same moments, so that states are comparable.

    They did not if an option that chooses modules, or `compile`, or, with evaluation on record, `eval` was given
    differently, or if only one recorded any of the kinds of an entry of `_LOOKS`.
    """
    hiding = {*_FILTERS, "compile", *(["eval"] if evaluates else ())}
    kinds = map(observed_kinds, (manifest_a, manifest_b))
    one, two = ([not observed.isdisjoint(looked) for looked in _LOOKS] for observed in kinds)
    return one == two and hiding.isdisjoint(narrowed(manifest_a, manifest_b))


_LOOKS = (frozenset(MODULE_KINDS), {Kind.BATCH}, {Kind.LOSS})
"""Kinds that are recorded at the moments at which a capture looks at the generators."""


# --- notes


def notes_on_captures(manifest_a: dict[str, Any], manifest_b: dict[str, Any]) -> Iterator[str]:
    """Notes on what the captures left out, chose by other options, or could not observe, and on perturbed runs.

    Of what is left out, only that a run is a list of values, where either is one. A note may be there twice.
    """
    lists, settings = is_list(manifest_a) or is_list(manifest_b), {kind.value for kind in SETTING_KINDS}
    for name, own, other in (("a", manifest_a, manifest_b), ("b", manifest_b, manifest_a)):
        observed = observed_kinds(own)
        if is_list(own):
            yield f"Run {name} lists values that were written elsewhere: what it does not list is not compared."
        elif not lists and observed and (left_out := sorted(observed_kinds(other) - observed - settings)):
            yield f"Run {name} did not record {', '.join(left_out)}: not compared."
        if (seed := perturbed_by(own)) is not None:
            yield f"Run {name} is not an ordinary run: its parameters were moved by one rounding (--perturb {seed})."
        blind, others = (list(map(str, manifest.get("not_observed") or ())) for manifest in (own, other))
        for text in blind:
            who = "Neither run could" if text in others else f"Run {name} could not"
            yield f"{who} see everything: {text}"
    names = [name for name in narrowed(manifest_a, manifest_b) if name not in _TOLD_OTHERWISE]
    if names and not lists:
        text = "what only one recorded is not compared, and where one keeps fewer statistics, distances are missing."
        yield f"The captures had other options ({_options(names)}): {text}"


def notes_on_neither(manifest_a: dict[str, Any], manifest_b: dict[str, Any], results: frozenset[str]) -> Iterator[str]:
    """Notes on what both captures were told to leave out: kinds of `results`, and steps or modules.

    Nothing where either run is a list.
    """
    if any(is_list(manifest) or not observed_kinds(manifest) for manifest in (manifest_a, manifest_b)):
        return
    if missing := sorted(results - observed_kinds(manifest_a) - observed_kinds(manifest_b)):
        yield f"Neither run recorded {', '.join(missing)}: not compared."
    if chosen := [name for name in choosing(manifest_a) if name in choosing(manifest_b)]:
        yield f"Both captures left records out ({_options(chosen)}): what neither has is not compared."


def _options(names: Iterable[str]) -> str:
    """Options as they are written: `--steps, --max-depth`."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
