"""The third pass: what ranks or microbatches share out is compared as the whole that it is.

Where the samples of both runs are equal, whichever rank has which, so are the records; of other values that were
gathered from several ranks, extrema and means are compared, and no more is claimed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.passes.tolerate import relative_tolerance
from introspect_cli.compare.table import EQUAL, WITHIN, Because, Table

if TYPE_CHECKING:
    from introspect_cli.compare.comparison import Comparison


def combine(table: Table, comparison: Comparison) -> Table:
    """The table in which what was gathered from several ranks is equal by its samples, or agrees by its extrema."""
    gathered = comparison.gathered
    if gathered is None:
        return table
    table = gathered.of_equal_amounts(table)
    same = gathered.same_samples(table)
    if same.any():
        checksums = np.array(table.b.checksum)  # whoever looks at checksums sees them equal too
        checksums[table.rows_b[same]] = table.a.checksum[table.rows_a[same]]
        table = table.marked(table.differing[same], EQUAL, Because.SAMPLES)
        table = replace(table, b=replace(table.b, checksum=checksums))
    if len(table.differing):
        agree = gathered.agree(table, relative_tolerance(table, comparison)) & gathered.of_one_dtype(table)
        table = table.marked(table.differing[agree], WITHIN, Because.GATHERED)
    return table
