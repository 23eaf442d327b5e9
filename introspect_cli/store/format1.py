"""What format 1 did differently: the columns of its records by number, and what operators were given as text.

Offset 20 of an index of format 1 says which columns the records have: 1 the statistics but `med` and `mode`, 2
`sketch`, 4 `med`, 8 `mode`. No description follows, offset 40 is zero, and entries begin at 64. `modules` ends at
`aliases`. The text of an operator's record begins with remarks, separated by blanks: `<12,-,7` for the sites that wrote
its inputs, `^34` or `^name` for the forward operator it belongs to.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Given, Kind
from introspect_cli.store.arrow import Column
from introspect_cli.store.batch import StepBatch, given_columns
from introspect_cli.store.format import (
    LAYOUT_COLUMNS,
    MODULE_COLUMNS,
    RECORD_COLUMNS,
    SITE_COLUMNS,
    SKETCH,
    STATISTIC,
    TEXT,
    Columns,
)

if TYPE_CHECKING:
    from introspect_cli.store.names import SiteTable

_COUNTS = ("nans", "posinfs", "neginfs", "zeros")
_WIDE = ("min", "max", "absmin", "mean", "amean", "var")
_NARROW = ("skew", "kurt")
_STATS, _SKETCH, _MEDIAN, _MODE = 1, 2, 4, 8
KNOWN_BITS = 15

_INPUTS = re.compile(r"<((?:-|\d{1,9})(?:,(?:-|\d{1,9}))*)(?: |$)")
_FORWARD = re.compile(r"\^(\S+)(?: |$)")


def columns_of(bits: int) -> Columns:
    """The columns of a store of format 1, by the bits in its index."""
    stats = [
        *(Column(name, "<i8", role=STATISTIC) for name in _COUNTS),
        *(Column(name, "<f8", role=STATISTIC) for name in _WIDE),
        *(Column(name, "<f4", role=STATISTIC) for name in _NARROW),
    ]
    records = (
        *RECORD_COLUMNS,
        *(stats if bits & _STATS else ()),
        *([Column("med", "<f8", role=STATISTIC)] if bits & _MEDIAN else ()),
        *([Column("mode", "<f8", role=STATISTIC)] if bits & _MODE else ()),
        *([SKETCH] if bits & _SKETCH else ()),
        TEXT,
    )
    return Columns(records, SITE_COLUMNS, LAYOUT_COLUMNS, MODULE_COLUMNS)


def with_given(batch: StepBatch, sites: SiteTable) -> StepBatch:
    """The batch with the remarks on operators as columns rather than in its texts."""
    operators = np.array([kind == Kind.OP_OUTPUT.value for kind in sites.kind], np.bool_)
    rows = np.flatnonzero(operators[batch.site]).tolist() if len(operators) else []
    if not rows:
        return batch
    texts = list(batch.text)
    given = {}
    for row in rows:
        given[row], texts[row] = _remarks(texts[row])
    return replace(batch, text=texts, given=given_columns(given, len(batch)))


def _remarks(text: str) -> tuple[Given, str]:
    """What a text says of an operator's inputs, and the rest of it."""
    inputs: tuple[int, ...] = ()
    forward, node = -1, ""
    found = _INPUTS.match(text)
    if found:
        inputs = tuple(-1 if word == "-" else int(word) for word in found[1].split(","))
        text = text[found.end() :]
    found = _FORWARD.match(text)
    if found:
        forward, node = (int(found[1]), "") if found[1].isdecimal() and len(found[1]) < 10 else (-1, found[1])
        text = text[found.end() :]
    return Given(inputs, forward, node), text
