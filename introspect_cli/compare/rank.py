"""One rank of both runs, compared step by step.

Only steps whose digests differ are opened, one at a time, so memory stays at one step whatever the size of a run.
Counting is done on arrays; divergences become objects only as far as they are to be listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.sites import Mask, columns, selected
from introspect_cli.compare.join.steps import Paired, differing, pair_steps
from introspect_cli.records import Status

if TYPE_CHECKING:
    from introspect_cli.compare.divergence_map import Heat
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sides import Sides
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.compare.reasons.origin import Cause
    from introspect_cli.compare.result import Divergence


@dataclass(frozen=True)
class Tally:
    """Counts of one rank; the words are those of `result.Counts`.

    Attributes:
        blind: records that only one side could see.
        blind_both: records that run a could not see, by estimate.
    """

    records: int = 0
    diverged_steps: int = 0
    diverged: int = 0
    only_a: int = 0
    only_b: int = 0
    within: int = 0
    not_observed: int = 0
    blind: int = 0
    blind_both: int = 0


@dataclass
class RankOutcome:
    """What came out of comparing one rank.

    Attributes:
        rank: process.
        paired: the steps of both.
        offset: step k of b was compared with step k + offset of a.
        tally: counts.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        cause: why the first one is what it is.
        facts: the first diverging step.
        previous: the compared step before it; None where there is none.
        blind_site: a site that only one side could see, as an example.
        heat: the divergence map in the making.
    """

    rank: int
    paired: Paired
    offset: int = 0
    tally: Tally = field(default_factory=Tally)
    listed: list[Divergence] = field(default_factory=list)
    first: Divergence | None = None
    cause: Cause | None = None
    facts: Facts | None = None
    previous: StepPair | None = None
    blind_site: str = ""
    heat: Heat | None = None


def compare_rank(sides: Sides, options: DiffOptions, offset: int) -> RankOutcome:
    """Compare one rank of two runs."""
    wanted = options.wants_step if options.steps else None
    paired = pair_steps(sides.a, sides.b, offset, wanted)
    outcome = RankOutcome(sides.rank, paired, offset)
    places = differing(paired)
    own = columns(sides.a.sites, sides.rename)
    counted = selected(own.kind, own.fqn, options.kinds, options.modules)
    records = _records(paired, None if counted.all() else counted)
    blind = _blind_rows(sides.a, paired, counted)
    if not places:
        outcome.tally = Tally(records=records, blind_both=blind)
        return outcome
    from introspect_cli.compare.walk import Walk  # runs that are equal need none of it

    Walk(sides, options, outcome, places).run()
    outcome.tally = replace(outcome.tally, records=records, blind_both=blind)
    return outcome


def _records(paired: Paired, counted: Mask | None) -> int:
    """How many records of run a count in the common steps; `counted` says it by site number, None for all."""
    if counted is None:
        return paired.records
    return sum(int(counted[np.asarray(paired.a.read(entry.step).site)].sum()) for entry, _ in paired)


def _blind_rows(reader: Any, paired: Paired, counted: Mask) -> int:
    """How many records run a could not see, in all compared steps.

    Steps with equal digests are not opened to find out, and what a run cannot see hardly changes from step to step: the
    first and the last common step are counted, and the last stands for those between.
    """
    if not len(paired):
        return 0
    first, last = (_blind_in(reader, paired[place][0], counted) for place in (0, len(paired) - 1))
    return first + last * (len(paired) - 1)


def _blind_in(reader: Any, entry: Any, counted: Mask) -> int:
    batch = reader.read(entry.step)
    status = np.asarray(batch.status)
    partial = (status == int(Status.PARTIAL)) & (np.asarray(batch.checksum) == 0)
    unseen = (status == int(Status.NOT_OBSERVED)) | partial
    return int((unseen & counted[np.asarray(batch.site)]).sum())
