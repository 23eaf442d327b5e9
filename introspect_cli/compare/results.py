"""What a divergence did not change: the results of the steps.

A layer that gives half as much where the next one takes it twice has another output and trains to the same bits. The
runs diverge, as one value of both differs. Somebody who bisects a change of the numbers wants to know that the losses,
gradients and parameters do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.effects import RESULTS, matched_sites
from introspect_cli.compare.join.sites import KINDS, kind_code, phase_code
from introspect_cli.compare.reasons.evidence import listed
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment, Ids, Mask
    from introspect_cli.compare.outcome import RankOutcome

_NAMES = {
    Kind.LOSS: "losses",
    Kind.GRAD: "gradients of the parameters",
    Kind.PARAM: "parameters",
    Kind.BUFFER: "buffers",
    Kind.OPTIMIZER_STATE: "optimizer states",
}


def _of_results(alignment: Alignment, unions: Ids) -> Mask:
    return np.asarray(np.isin(alignment.kind[unions], [kind_code(kind) for kind in RESULTS]))


def agreed_kinds(alignment: Alignment, pair: StepPair) -> frozenset[Kind]:
    """The kinds of results of which all that either run recorded in a step agrees; none where one does not.

    Initial values count too: a parameter that differs before a step is one that differs.
    """
    site_a, site_b = pair.sites(alignment)
    rows = [site_a[pair.rows_a], site_a[pair.unseen_a], site_a[pair.only_a], site_b[pair.only_b], pair.alone]
    if _of_results(alignment, np.concatenate(rows)).any():
        return frozenset()
    unions, _, agree = matched_sites(alignment, pair)
    unions = unions[agree & (alignment.phase[unions] != phase_code(Phase.START))]
    return frozenset(KINDS[code] for code in set(alignment.kind[unions[_of_results(alignment, unions)]].tolist()))


def unchanged(outcome: RankOutcome) -> str:
    """The sentence on the results that agree in every step, "" where one does not, or none was recorded."""
    kinds, steps = outcome.agreed, len(outcome.paired)
    if outcome.first is None or not kinds:
        return ""
    names = listed([name for kind, name in _NAMES.items() if kind in kinds])
    which = "the step" if steps == 1 else f"all {steps:,} steps"
    return f"The {names} of {which} compared agree: what differs changed none of them."
