"""Random generators that a script draws from without having seeded them.

Such a generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.align import kind_code
from introspect_cli.compare.traces import StepRecords
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from introspect_cli.compare.align import Alignment
    from introspect_cli.compare.match import StepPair


def unseeded(alignment: Alignment, now: StepPair | None, after: StepPair | None) -> tuple[str, ...]:
    """Generators untouched in both runs when one step begins, and drawn from, differently, when the next does."""
    if now is None or after is None:
        return ()
    first, second = StepRecords(alignment, now), StepRecords(alignment, after)
    found = []
    for union in np.flatnonzero(alignment.kind == kind_code(Kind.RNG)):
        number = int(union)
        untouched = all(first.status(number, side) is Status.VALUE for side in "ab")
        drawn = all(second.status(number, side) is Status.OBSERVED for side in "ab")
        if untouched and drawn and second.checksum(number, "a") != second.checksum(number, "b"):
            found.append(alignment.fqn[number])
    return tuple(found)
