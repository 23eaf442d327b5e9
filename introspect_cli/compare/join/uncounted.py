"""Operators of regions that ran as one, where not even the number of operators is known for sure.

An operator's site ends in how often it has run in its module before. Where one run compiled a module, some operators
are gone or made anew, and the numbers of the rest need not mean the same. Such a run says so, by one record for a
module and phase. There the results of an operator are compared only if both runs have as many of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import kind_code
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.join.sites import Alignment, Ids, Mask


def uncounted(alignment: Alignment, unions_a: Ids, unions_b: Ids) -> Mask | None:
    """By union number, operators of a step that cannot be told apart by their number; None where there are none.

    Args:
        alignment: the runs' sites.
        unions_a: sites that run a has in the step.
        unions_b: sites that run b has.
    """
    if not len(alignment.others):
        return None
    present = np.union1d(unions_a, unions_b)
    marks = np.intersect1d(alignment.others, present)
    if not len(marks):
        return None
    regions = {(alignment.fqn[mark], alignment.phase[mark]) for mark in marks}
    operators = present[alignment.kind[present] == kind_code(Kind.OP_OUTPUT)]
    inside = [number for number in operators if (alignment.fqn[number], alignment.phase[number]) in regions]
    group = {number: (alignment.fqn[number], alignment.phase[number], alignment.path[number]) for number in inside}
    counts = [Counter(group[number] for number in unions if number in group) for unions in (unions_a, unions_b)]
    mask = np.zeros(alignment.size, dtype=np.bool_)
    mask[[number for number in inside if counts[0][group[number]] != counts[1][group[number]]]] = True
    return mask
