"""What a divergence did not change: the results of the steps.

A layer that gives half as much where the next one takes it twice has another output and trains to the same bits. The
runs diverge, as one value of both differs. Somebody who bisects a change of the numbers wants to know that the losses,
gradients and parameters do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.effects import RESULTS, matched_sites
from introspect_cli.compare.join.sites import KINDS, phase_code
from introspect_cli.compare.reasons.evidence import listed
from introspect_cli.compare.reasons.words import what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment, Ids
    from introspect_cli.compare.outcome import RankOutcome

_NAMES = {
    Kind.LOSS: "losses",
    Kind.GRAD: "gradients of the parameters",
    Kind.PARAM: "parameters",
    Kind.BUFFER: "buffers",
    Kind.OPTIMIZER_STATE: "optimizer states",
}


def _kinds(alignment: Alignment, unions: Ids) -> frozenset[Kind]:
    """The kinds of those of the sites that are results."""
    return frozenset(KINDS[code] for code in set(alignment.kind[unions].tolist())) & frozenset(RESULTS)


def agreed_kinds(alignment: Alignment, pair: StepPair) -> frozenset[Kind]:
    """The kinds of results of which all that either run recorded in a step agrees.

    Initial values count too: a parameter that differs before a step is one that differs.
    """
    site_a, site_b = pair.sites(alignment)
    rows = [site_a[pair.rows_a], site_a[pair.unseen_a], site_a[pair.only_a], site_b[pair.only_b], pair.alone]
    apart = _kinds(alignment, np.concatenate(rows))
    unions, _, agree = matched_sites(alignment, pair)
    return _kinds(alignment, unions[agree & (alignment.phase[unions] != phase_code(Phase.START))]) - apart


def unchanged(outcome: RankOutcome) -> str:
    """The sentence on the results that agree in every step, "" where the parameters do not, or were not recorded."""
    first, kinds, steps = outcome.first, outcome.agreed, len(outcome.paired)
    if first is None or not kinds or Kind.PARAM not in kinds:
        return ""
    names = listed([name for kind, name in _NAMES.items() if kind in kinds])
    which = "the step" if steps == 1 else f"all {steps:,} steps"
    told = f"The {names} of {which} compared agree: what differs changed none of them."
    both = outcome.shared
    if both is None:
        return told
    return f"{told} The first value of both runs that differs is {what(both.site)} in step {both.step}."
