"""What the records of a step, and of the one before, give away beyond that they differ.

A gradient that is the other run's plus that of the step before means a missing zero_grad; a parameter that is after
the step what it was before was not stepped; a state that counts from 1 began afresh. Sketches are linear, so sums and
multiples of tensors show in them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.distance import has_sketch
from introspect_cli.compare.join.sites import KINDS, PHASES, Alignment
from introspect_cli.compare.reasons.facts import FORWARD, Facts, owner_of
from introspect_cli.records import SETTING_KINDS, Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.join.rows import StepPair


class StepRecords:
    """A step's records by union number, on both sides."""

    def __init__(self, alignment: Alignment, pair: StepPair) -> None:
        self.alignment, self.pair = alignment, pair
        self.rows_a = {int(union): row for row, union in enumerate(np.asarray(pair.a.site))}
        self.rows_b = {int(union): row for row, union in enumerate(alignment.b_ids[np.asarray(pair.b.site)])}

    def _row(self, union: int, side: str) -> tuple[int | None, Any]:
        """The row of a site on a side, and the side's records."""
        rows, batch = (self.rows_a, self.pair.a) if side == "a" else (self.rows_b, self.pair.b)
        return rows.get(union), batch

    def status(self, union: int, side: str) -> Status | None:
        """How much of a site was seen; None where the side has no record of it."""
        row, batch = self._row(union, side)
        return None if row is None else Status(int(batch.status[row]))

    def checksum(self, union: int, side: str) -> int | None:
        """A site's checksum; None where the side has no record of it."""
        row, batch = self._row(union, side)
        return None if row is None else int(batch.checksum[row])

    def sequence(self, union: int, side: str) -> int | None:
        """When a side recorded a site; None where it did not."""
        row, batch = self._row(union, side)
        return None if row is None else int(batch.sequence[row])

    def sketch(self, union: int, side: str) -> Any:
        """A site's sketch, float64 (16,); None where there is none."""
        row, batch = self._row(union, side)
        return None if row is None or not has_sketch(batch) else np.asarray(batch.sketch[row], dtype=np.float64)

    def plain(self, union: int, side: str) -> str | None:
        """A value's text, or a scalar tensor's value."""
        row, batch = self._row(union, side)
        if row is None:
            return None
        if batch.text[row]:
            return _short(batch.text[row])
        mean = batch.floats.get("mean")
        return None if mean is None else f"{float(mean[row]):g}"

    def unions(self, side: str) -> Iterable[int]:
        """Union numbers of the sites a side recorded."""
        return self.rows_a if side == "a" else self.rows_b


def _short(text: str) -> str:
    """A number without the digits that float repr adds; other texts as they are."""
    try:
        return f"{float(text):.6g}" if re.match(r"^-?[\d.]", text) and "." in text else text
    except ValueError:
        return text


def value_before(facts: Facts, step: StepRecords, before: StepRecords | None, union: int) -> tuple[bool, str]:
    """(whether the value before the step is known, the side where the step did not change it)."""
    found = {side: last_value(facts.alignment, step, before, union, side) for side in ("a", "b")}
    known = found["a"] is not None and found["b"] is not None
    same = [side for side in ("a", "b") if found[side] is not None and found[side] == step.checksum(union, side)]
    return known, same[0] if len(same) == 1 else ""


def last_value(
    alignment: Alignment, step: StepRecords, before: StepRecords | None, union: int, side: str
) -> int | None:
    """Checksum of what a tensor was when last recorded before a record of it, in this step or the one before."""
    site = alignment.site(union)
    own = [
        u
        for u in alignment.by_fqn.get(site.fqn, [])
        if KINDS[alignment.kind[u]] is site.kind and alignment.path[u] == site.path
    ]
    now = step.sequence(union, side)
    earlier = {u: at for u in own if (at := step.sequence(u, side)) is not None and now is not None and at < now}
    if earlier:
        return step.checksum(max(earlier, key=lambda u: earlier[u]), side)
    last = {u: at for u in own if before is not None and (at := before.sequence(u, side)) is not None}
    return before.checksum(max(last, key=lambda u: last[u]), side) if before is not None and last else None


def stale_side(step: StepRecords, before: StepRecords | None, union: int) -> str:
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


def fresh_state(step: StepRecords, fqn: str) -> tuple[str, str]:
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


def identity_side(facts: Facts, step: StepRecords, union: int) -> str:
    """The side on which a module's output is its input, where that is so on one side only."""
    site = facts.alignment.site(union)
    inputs = facts.recorded(site.phase, Kind.INPUT, site.fqn, site.call)
    same = [
        side
        for side in ("a", "b")
        if any(step.checksum(u, side) == step.checksum(union, side) is not None for u in inputs)
    ]
    return same[0] if len(same) == 1 else ""


def frozen_buffers(facts: Facts, step: StepRecords, before: StepRecords | None, fqn: str) -> str:
    """The side where a module's own buffers stay as they are in the step, where the other's change."""
    for index in [i for i, site in enumerate(facts.sites) if site.kind is Kind.BUFFER and owner_of(site.fqn) == fqn]:
        side = value_before(facts, step, before, int(facts.items.union[index]))[1]
        if side:
            return side
    return ""


def no_forward_side(step: StepRecords) -> str:
    """The side whose step has no forward record while the other's has."""
    ran = [
        side
        for side in ("a", "b")
        if any(PHASES[step.alignment.phase[union]] is Phase.FORWARD for union in step.unions(side))
    ]
    return "" if len(ran) != 1 else "b" if ran == ["a"] else "a"


def losses_of(step: StepRecords, side: str) -> int:
    """How many losses a step has."""
    alignment = step.alignment
    return sum(KINDS[alignment.kind[union]] is Kind.LOSS for union in step.unions(side))


def call_change(facts: Facts, step: StepRecords) -> tuple[str, int, int] | None:
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


def optimizers_of(step: StepRecords, side: str) -> list[str]:
    """Names of the optimizers that stepped."""
    alignment = step.alignment
    names = (alignment.fqn[u] for u in step.unions(side) if KINDS[alignment.kind[u]] in SETTING_KINDS)
    return list(dict.fromkeys(names))


def other_paths(facts: Facts, step: StepRecords, union: int) -> tuple[str, str] | None:
    """What a call of a module is given, or gives, on either side, where both have something and not the same."""
    alignment, site = facts.alignment, facts.alignment.site(union)
    paths = []
    for side in ("a", "b"):
        recorded = set(step.unions(side))
        own = [u for u in facts.recorded(site.phase, site.kind, site.fqn, site.call) if u in recorded]
        paths.append([alignment.path[u] or "the value itself" for u in own])
    if not paths[0] or not paths[1]:
        return None
    shown = [", ".join(own[:4]) + (", ..." if len(own) > 4 else "") for own in paths]
    return shown[0], shown[1]


def phases_of(step: StepRecords, fqn: str) -> set[Phase]:
    """Phases in which anything of this name was recorded, on either side."""
    alignment = step.alignment
    return {
        PHASES[alignment.phase[union]]
        for union in alignment.by_fqn.get(fqn, [])
        if union in step.rows_a or union in step.rows_b
    }


def idle_side(step: StepRecords, fqn: str) -> str:
    """The side on which nothing of this module's forward pass was recorded in the step, though the other has some."""
    alignment = step.alignment
    ran = {
        side
        for side in ("a", "b")
        for union in alignment.by_fqn.get(fqn, [])
        if PHASES[alignment.phase[union]] in FORWARD and union in set(step.unions(side))
    }
    return "" if len(ran) != 1 else "b" if ran == {"a"} else "a"
