"""Random generators that a script draws from without having seeded them.

Such a generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import kind_code
from introspect_cli.compare.reasons.step_view import StepRecords
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment


def unseeded(alignment: Alignment, now: StepPair | None, after: Callable[[], StepPair | None]) -> tuple[str, ...]:
    """Generators untouched in both runs when one step begins, and drawn from, differently, when the next does.

    Args:
        alignment: the runs' sites.
        now: the one step.
        after: gives the next, and is asked only where a generator is untouched.
    """
    untouched = _with_status(alignment, now, Status.VALUE)
    following = after() if untouched else None
    if following is None:
        return ()
    records = StepRecords(alignment, following)
    drawn = [union for union in _with_status(alignment, following, Status.OBSERVED) if union in untouched]
    return tuple(alignment.fqn[u] for u in drawn if records.checksum(u, "a") != records.checksum(u, "b"))


def _with_status(alignment: Alignment, pair: StepPair | None, status: Status) -> list[int]:
    """Random states of a step that both runs recorded with that status."""
    if pair is None:
        return []
    records = StepRecords(alignment, pair)
    states = map(int, np.flatnonzero(alignment.kind == kind_code(Kind.RNG)))
    return [union for union in states if all(records.status(union, side) is status for side in "ab")]
