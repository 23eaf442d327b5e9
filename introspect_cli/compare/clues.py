"""What lies around the first divergence and tells more than the divergence itself.

A gradient that is the other run's plus that of the step before means a missing zero_grad; a parameter that is after
the step what it was before was not stepped; a state that counts from 1 began afresh. Each clue is looked up in the
records of the diverging step and the one before, once, for the first divergence only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.align import KINDS, PHASES, Alignment
from introspect_cli.compare.facts import FORWARD, Facts, owner_of
from introspect_cli.compare.measure import ROUNDING, has_sketch
from introspect_cli.compare.result import Divergence, Reason
from introspect_cli.records import SETTING_KINDS, Kind, ModuleInfo, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.match import StepPair
    from introspect_cli.compare.origin import Cause

_SMALL = 64  # roundings; more is not summation order any more


@dataclass(frozen=True)
class Clues:
    """What was found.

    Attributes:
        first_step: first step that was compared, in a's numbering.
        batches_before: how many compared steps came before.
        same_values: the two tensors hold the same values in another order, as far as statistics tell.
        initial_differ: parameters and buffers that differ at the start.
        initial_total: parameters and buffers recorded at the start.
        unequal_tensors: tensors that the later of two captures did not begin with as the other had them.
        batches_seen: whether batches were recorded in this step.
        fed: what went into a module and is equal, in words.
        class_b: class of the module in run b, where it is another.
        rounding: whether the distance is a few roundings of the dtype.
        dtype_changed: whether dtypes differ.
        stale: the side whose gradient still holds that of the step before.
        grad_equal: whether the parameter's gradient was recorded and is equal.
        value_before_equal: whether the parameter's value before the step is known and equal.
        optimizers: names of the optimizers that stepped.
        optimizer_classes: optimizers of a and of b, where they differ.
        untouched: the side where the step left the tensor as it was.
        fresh: the side whose optimizer state began afresh.
        fresh_text: how that shows.
        hyperparameters: name to (value in a, value in b) of those that differ at this step.
        tied_to: what the parameter is tied to in the other run.
        calls: (name, calls in a, calls in b) of the outermost thing that runs another number of times.
        accumulation: whether that thing is a whole model.
        subject_missing: whether the other run never has the thing at all.
        before: records that agree before the divergence in this step.
        rng_equal: whether random states were recorded at this step and agree.
        gradients: (differing, recorded) gradients in this step.
        identity: the side where the module hands its input on unchanged while the other does not.
        frozen_buffers: the side where the module's buffers do not change in this step while the other's do.
        no_forward: the side whose step holds no forward pass at all.
        not_optimized: the side whose optimizer does not have the parameter.
    """

    first_step: int = 0
    batches_before: int = 0
    same_values: bool = False
    initial_differ: int = 0
    initial_total: int = 0
    unequal_tensors: tuple[str, ...] = ()
    batches_seen: bool = False
    fed: str = "inputs"
    class_b: str = ""
    rounding: bool = False
    dtype_changed: bool = False
    stale: str = ""
    grad_equal: bool = False
    value_before_equal: bool = False
    optimizers: str = ""
    optimizer_classes: tuple[str, str] | None = None
    untouched: str = ""
    fresh: str = ""
    fresh_text: str = ""
    hyperparameters: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    tied_to: str = ""
    calls: tuple[str, int, int] | None = None
    accumulation: bool = False
    subject_missing: bool = False
    before: int = 0
    rng_equal: bool | None = None
    gradients: tuple[int, int] = (0, 0)
    identity: str = ""
    frozen_buffers: str = ""
    no_forward: str = ""
    not_optimized: str = ""


class _Step:
    """A step's records by union number, on both sides."""

    def __init__(self, alignment: Alignment, pair: StepPair) -> None:
        self.alignment, self.pair = alignment, pair
        self.rows_a = {int(union): row for row, union in enumerate(np.asarray(pair.a.site))}
        self.rows_b = {int(union): row for row, union in enumerate(alignment.b_ids[np.asarray(pair.b.site)])}

    def checksum(self, union: int, side: str) -> int | None:
        rows, batch = (self.rows_a, self.pair.a) if side == "a" else (self.rows_b, self.pair.b)
        row = rows.get(union)
        return None if row is None else int(batch.checksum[row])

    def sketch(self, union: int, side: str) -> Any:
        rows, batch = (self.rows_a, self.pair.a) if side == "a" else (self.rows_b, self.pair.b)
        row = rows.get(union)
        return None if row is None or not has_sketch(batch) else np.asarray(batch.sketch[row], dtype=np.float64)

    def plain(self, union: int, side: str) -> str | None:
        """A value's text, or a scalar tensor's value."""
        rows, batch = (self.rows_a, self.pair.a) if side == "a" else (self.rows_b, self.pair.b)
        row = rows.get(union)
        if row is None:
            return None
        if batch.text[row]:
            return _short(batch.text[row])
        mean = batch.floats.get("mean")
        return None if mean is None else f"{float(mean[row]):g}"

    def unions(self, side: str) -> Iterable[int]:
        return self.rows_a if side == "a" else self.rows_b


def _short(text: str) -> str:
    """A number without the digits that float repr adds; other texts as they are."""
    try:
        return f"{float(text):.6g}" if re.match(r"^-?[\d.]", text) and "." in text else text
    except ValueError:
        return text


def find_clues(
    facts: Facts,
    divergence: Divergence,
    cause: Cause,
    previous: StepPair | None,
    modules_a: list[ModuleInfo],
    modules_b: list[ModuleInfo],
    first_step: int,
    steps_before: int,
) -> Clues:
    """Look around the first divergence.

    Args:
        facts: its step.
        divergence: the divergence.
        cause: why it is one.
        previous: the compared step before, where there is one.
        modules_a: module tree of run a.
        modules_b: module tree of run b.
        first_step: first compared step.
        steps_before: compared steps before this one.
    """
    alignment = facts.alignment
    step = _Step(alignment, facts.pair)
    before = _Step(alignment, previous) if previous is not None else None
    site = divergence.site
    union = int(facts.items.union[_position(facts, divergence)])
    names_a, names_b = _optimizers(step, "a"), _optimizers(step, "b")
    kinds = {(PHASES[alignment.phase[u]], KINDS[alignment.kind[u]]) for u in step.rows_a}
    starts = [u for u in step.rows_a if _is_start_tensor(alignment, u)]
    grads = [u for u in step.rows_a if KINDS[alignment.kind[u]] is Kind.GRAD]
    start_items = [s for s in facts.sites if s.phase is Phase.START and s.kind in (Kind.PARAM, Kind.BUFFER)]
    known_before = _before(facts, step, before, union)
    subject = cause.subject or site.fqn
    other = "b" if divergence.b is None else "a"
    calls = _call_change(facts, step)
    fresh, fresh_text = _fresh(step, site.fqn) if cause.reason is Reason.OPTIMIZER else ("", "")
    return Clues(
        first_step=first_step,
        batches_before=steps_before,
        same_values=_same_values(divergence),
        initial_differ=len(start_items),
        initial_total=len(starts),
        unequal_tensors=tuple(sorted(facts.carried.params | facts.carried.buffers)),
        batches_seen=any(kind is Kind.BATCH for _, kind in kinds),
        fed=_fed(facts, kinds, site.fqn),
        class_b=alignment.b_class.get(union, ""),
        rounding=_is_rounding(divergence),
        dtype_changed=bool(divergence.a and divergence.b and divergence.a.layout.dtype != divergence.b.layout.dtype),
        stale=_stale(step, before, union) if cause.reason is Reason.GRADIENT else "",
        grad_equal=_grad_equal(facts, site.fqn),
        value_before_equal=known_before[0] and site.fqn not in facts.carried.params,
        optimizers=", ".join(names_a) if names_a == names_b else "",
        optimizer_classes=(", ".join(names_a), ", ".join(names_b))
        if names_a and names_b and names_a != names_b
        else None,
        untouched=known_before[1] if cause.reason in (Reason.OPTIMIZER, Reason.BUFFER) else "",
        fresh=fresh,
        fresh_text=fresh_text,
        hyperparameters=hyperparameter_changes(alignment, step),
        tied_to=_tied(modules_a if other == "a" else modules_b, site.fqn) if cause.reason is Reason.STRUCTURE else "",
        calls=calls,
        accumulation=bool(calls and not owner_of(calls[0])),
        subject_missing=_missing(alignment, subject, other),
        before=_agreeing_before(facts, divergence),
        rng_equal=None if not any(kind is Kind.RNG for _, kind in kinds) else not facts.rng_differs(),
        gradients=(sum(s.kind is Kind.GRAD for s in facts.sites), len(grads)),
        identity=_identity(facts, step, union) if cause.reason is Reason.MODULE else "",
        frozen_buffers=_frozen_buffers(facts, step, before, site.fqn) if cause.reason is Reason.MODULE else "",
        no_forward=_no_forward(step),
    )


def _position(facts: Facts, divergence: Divergence) -> int:
    return facts.sites.index(divergence.site)


def _is_start_tensor(alignment: Alignment, union: int) -> bool:
    return PHASES[alignment.phase[union]] is Phase.START and KINDS[alignment.kind[union]] in (Kind.PARAM, Kind.BUFFER)


def _optimizers(step: _Step, side: str) -> list[str]:
    alignment = step.alignment
    names = (alignment.fqn[u] for u in step.unions(side) if KINDS[alignment.kind[u]] in SETTING_KINDS)
    return list(dict.fromkeys(names))


def _same_values(divergence: Divergence) -> bool:
    a, b = divergence.a, divergence.b
    if a is None or b is None or a.layout != b.layout or a.layout.numel < 2:
        return False
    names = ("min", "max", "zeros", "nans", "posinfs", "neginfs")
    if not a.stats or any(a.stats.get(name) != b.stats.get(name) for name in names) or a.stats["min"] == a.stats["max"]:
        return False
    return all(
        abs(a.stats.get(name, 0.0) - b.stats.get(name, 0.0)) <= 1e-9 * max(abs(a.stats.get(name, 0.0)), 1e-30)
        for name in ("mean", "var")
    )


def _is_rounding(divergence: Divergence) -> bool:
    a, b, rel = divergence.a, divergence.b, divergence.rel_l2
    if a is None or b is None or rel is None or a.layout.dtype != b.layout.dtype:
        return False
    unit = ROUNDING.get(a.layout.dtype)
    return unit is not None and rel <= _SMALL * unit


def _fed(facts: Facts, kinds: set[tuple[Phase, Kind]], fqn: str) -> str:
    """What went into a module and is equal, in words."""
    alignment = facts.alignment
    inputs = [u for u in alignment.by_fqn.get(fqn, []) if KINDS[alignment.kind[u]] is Kind.INPUT]
    parts = ["inputs" if inputs else "everything recorded before it"]
    prefix = fqn + "."
    held = {KINDS[kind] for kind, name in zip(alignment.kind, alignment.fqn, strict=True) if name.startswith(prefix)}
    if Kind.PARAM in held:
        parts.append("parameters")
    if Kind.BUFFER in held:
        parts.append("buffers")
    if any(kind is Kind.RNG for _, kind in kinds):
        parts.append("random state")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _grad_equal(facts: Facts, fqn: str) -> bool:
    alignment = facts.alignment
    recorded = any(KINDS[alignment.kind[u]] is Kind.GRAD for u in alignment.by_fqn.get(fqn, []))
    return recorded and not facts.differing(Kind.GRAD, fqn)


def _before(facts: Facts, step: _Step, before: _Step | None, union: int) -> tuple[bool, str]:
    """(whether the value before the step is known, the side where the step did not change it)."""
    alignment = facts.alignment
    site = alignment.site(union)
    found: dict[str, int | None] = {}
    start = [
        u
        for u in alignment.by_fqn.get(site.fqn, [])
        if PHASES[alignment.phase[u]] is Phase.START and KINDS[alignment.kind[u]] is site.kind
    ]
    for side in ("a", "b"):
        value = next((v for u in start if (v := step.checksum(u, side)) is not None), None)
        if value is None and before is not None:
            value = before.checksum(union, side)
            if value is None:
                value = next((v for u in start if (v := before.checksum(u, side)) is not None), None)
        found[side] = value
    known = found["a"] is not None and found["b"] is not None
    same = [side for side in ("a", "b") if found[side] is not None and found[side] == step.checksum(union, side)]
    return known, same[0] if len(same) == 1 else ""


def _stale(step: _Step, before: _Step | None, union: int) -> str:
    """The side whose gradient is the other's plus that of the step before, by the sketches' linearity."""
    if before is None:
        return ""
    a, b, old = step.sketch(union, "a"), step.sketch(union, "b"), before.sketch(union, "a")
    if a is None or b is None or old is None or not np.linalg.norm(old) > 0:
        return ""
    if _is_mix(b, a, old):
        return "b"
    return "a" if _is_mix(a, b, old) else ""


def _is_mix(mixed: Any, fresh: Any, old: Any) -> bool:
    """Whether a sketch is a positive mix of two others; clipping rescales the whole, so the weights are free."""
    basis = np.stack([fresh, old], axis=1)
    if np.linalg.matrix_rank(basis, tol=1e-6 * float(np.linalg.norm(basis))) < 2:
        return False
    weights = np.linalg.lstsq(basis, mixed, rcond=None)[0]
    rest = float(np.linalg.norm(basis @ weights - mixed)) / max(float(np.linalg.norm(mixed)), 1e-300)
    return rest < 1e-5 and min(weights) > 1e-2 * max(weights)


def _fresh(step: _Step, fqn: str) -> tuple[str, str]:
    """The side whose optimizer counts fewer steps for a parameter, and both counts in words."""
    alignment = step.alignment
    for union in alignment.by_fqn.get(fqn, []):
        if KINDS[alignment.kind[union]] is Kind.OPTIMIZER_STATE and "step" in alignment.path[union]:
            one, two = step.plain(union, "a"), step.plain(union, "b")
            try:
                counts = float(one or "nan"), float(two or "nan")
            except ValueError:
                return "", ""
            if counts[0] != counts[1] and 1.0 in counts:
                return ("a" if counts[0] == 1.0 else "b"), f"it has counted {one} steps in a and {two} in b"
    return "", ""


def hyperparameter_changes(alignment: Alignment, step: _Step) -> dict[str, tuple[str | None, str | None]]:
    """Hyper-parameters that differ in a step: name to both values; equal changes of several groups are folded."""
    found: dict[tuple[str, str], dict[tuple[str | None, str | None], list[str]]] = {}
    groups: set[tuple[str, str]] = set()
    for union in dict.fromkeys([*step.rows_a, *step.rows_b]):
        if KINDS[alignment.kind[union]] not in SETTING_KINDS:
            continue
        match = re.match(r"^\[(\d+)\](.*)$", alignment.path[union])
        group, rest = (match[1], match[2]) if match else ("", alignment.path[union])
        groups.add((alignment.fqn[union], group))
        if step.checksum(union, "a") == step.checksum(union, "b"):
            continue
        name = re.sub(r"^\.", "", re.sub(r"\['?([^'\]]*)'?\]", r".\1", rest))
        values = (step.plain(union, "a"), step.plain(union, "b"))
        if values[0] != values[1]:
            found.setdefault((alignment.fqn[union], name), {}).setdefault(values, []).append(group)
    named: dict[str, tuple[str | None, str | None]] = {}
    several = len({fqn for fqn, _ in groups}) > 1
    for (fqn, name), by_values in found.items():
        count = sum(1 for owner, _ in groups if owner == fqn)
        for values, own in by_values.items():
            label = f"{fqn} {name}" if several else name
            if len(own) < count:
                label += f" (group {', '.join(dict.fromkeys(own))})"
            named[label] = values
    if "lr" in named:
        named.pop("initial_lr", None)  # a scheduler's note of where lr began; it says nothing more
    return named


def _tied(modules: list[ModuleInfo], fqn: str) -> str:
    """What a parameter is tied to, by the aliases of its module."""
    owner, _, name = fqn.rpartition(".")
    for module in modules:
        for alias in module.aliases:
            own, equals, target = alias.partition("=")
            if equals and module.fqn == owner and own == name:
                return target
            if equals and target == fqn:
                return f"{module.fqn}.{own}"
    return ""


def _identity(facts: Facts, step: _Step, union: int) -> str:
    """The side on which a module's output is its input, where that is so on one side only."""
    site = facts.alignment.site(union)
    inputs = facts.recorded(site.phase, Kind.INPUT, site.fqn, site.call)
    same = [
        side
        for side in ("a", "b")
        if any(step.checksum(u, side) == step.checksum(union, side) is not None for u in inputs)
    ]
    return same[0] if len(same) == 1 else ""


def _frozen_buffers(facts: Facts, step: _Step, before: _Step | None, fqn: str) -> str:
    """The side where a module's own buffers stay as they are in the step, where the other's change."""
    for index in [i for i, site in enumerate(facts.sites) if site.kind is Kind.BUFFER and owner_of(site.fqn) == fqn]:
        side = _before(facts, step, before, int(facts.items.union[index]))[1]
        if side:
            return side
    return ""


def _no_forward(step: _Step) -> str:
    """The side whose step has no forward record while the other's has."""
    ran = [
        side
        for side in ("a", "b")
        if any(PHASES[step.alignment.phase[union]] is Phase.FORWARD for union in step.unions(side))
    ]
    return "" if len(ran) != 1 else "b" if ran == ["a"] else "a"


def _missing(alignment: Alignment, subject: str, side: str) -> bool:
    """Whether a run has nothing at all of this name or inside it."""
    names = alignment.a.fqn if side == "a" else alignment.b.fqn
    prefix = subject + "."
    return not any(name == subject or name.startswith(prefix) for name in set(names))


def _call_change(facts: Facts, step: _Step) -> tuple[str, int, int] | None:
    """The outermost module that both runs call, but another number of times in this step."""
    alignment = facts.alignment
    counts: dict[str, list[set[int]]] = {}
    for side in ("a", "b"):
        for union in step.unions(side):
            if (
                KINDS[alignment.kind[union]] in (Kind.OUTPUT, Kind.INPUT)
                and PHASES[alignment.phase[union]] is Phase.FORWARD
            ):
                name = alignment.fqn[union]
                counts.setdefault(name, [set(), set()])[side == "b"].add(int(alignment.call[union]))
    changed = [(name, len(a), len(b)) for name, (a, b) in counts.items() if a and b and len(a) != len(b)]
    return min(changed, key=lambda item: item[0].count("."), default=None)


def _agreeing_before(facts: Facts, divergence: Divergence) -> int:
    return int((np.asarray(facts.pair.a.sequence) < divergence.sequence).sum())


def often(count: int) -> str:
    """How often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def evidence(clues: Clues, divergence: Divergence, cause: Cause, facts: Facts) -> tuple[str, ...]:
    """The equalities that the conclusion rests on, one sentence each."""
    lines = []
    if clues.batches_before:
        last = "all steps before agree" if clues.batches_before > 1 else "the step before agrees"
        lines.append(f"{clues.batches_before} compared step{'s' * (clues.batches_before > 1)}: {last} entirely.")
    if clues.before:
        lines.append(f"{clues.before} records before it in step {divergence.step} agree.")
    if cause.reason in (Reason.MODULE, Reason.OWN_CODE) and divergence.site.kind is Kind.OUTPUT:
        lines.append(f"Equal going in: {clues.fed}.")
    if clues.rng_equal is not None and cause.reason is not Reason.RNG:
        lines.append(f"Random states at the start of the step {'agree' if clues.rng_equal else 'differ'}.")
    if cause.reason is Reason.GRADIENT and clues.gradients[1]:
        differ, total = clues.gradients
        lines.append(f"{differ} of {total} gradients differ in this step.")
    if clues.calls and cause.reason is not Reason.STRUCTURE:
        name, one, two = clues.calls
        lines.append(f"{name} runs {often(one)} in this step of a and {often(two)} in b.")
    forward = any(site.phase in FORWARD for site in facts.sites)
    if cause.reason in (Reason.GRADIENT, Reason.OPTIMIZER) and not forward:
        lines.append("Every recorded value of the forward pass agrees in this step.")
    return tuple(lines)
