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


def untouched_side(step: StepRecords, before: StepRecords | None, union: int) -> str:
    """The side where a step did not change a tensor, where the other side's step did."""
    found = {side: last_value(step, before, union, side) for side in ("a", "b")}
    same = [side for side in ("a", "b") if found[side] is not None and found[side] == step.checksum(union, side)]
    return same[0] if len(same) == 1 else ""


def last_value(step: StepRecords, before: StepRecords | None, union: int, side: str) -> int | None:
    """Checksum of what a tensor was when last recorded before a record of it, in this step or the one before."""
    alignment = step.alignment
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


def losses_of(step: StepRecords, side: str) -> int:
    """How many losses a step has."""
    alignment = step.alignment
    return sum(KINDS[alignment.kind[union]] is Kind.LOSS for union in step.unions(side))


def call_change(step: StepRecords) -> tuple[str, int, int] | None:
    """The outermost module that both runs call, but a different number of times in this step."""
    alignment = step.alignment
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
