"""The numbers and schemas of the store; `docs/reference/store-format.md` says the same in words.

The writer, the reader and `verify` must agree to the byte. So every column and limit is here, and a log names the
columns of its rank's tables, for readers that are not this one.
"""

from __future__ import annotations

import json

import numpy as np

from introspect_cli.records import SKETCH_SIZE
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.format.columns import Column, Malformed, Schema

FIRST_CHAIN = bytes(16)

LIMIT_COLUMNS = 64 << 10
"""Bytes of the description of columns."""

LIMIT_FRAMES = 4 << 20
"""Frames of a log: as many steps, or half as many where each has labels."""

LIMIT_BATCH = 128 << 20
"""Bytes of one step's batch: a million records."""

LIMIT_NAMES = 64 << 20
"""Bytes of a table of sites, layouts or modules: half a million sites, and little memory when read."""

LIMIT_TEXT = 4096
"""Characters of a record's text."""

LIMIT_NAME = 8192
"""Characters of a name that a reader gives; a model of 2,000 levels has names of half as many."""

_NUMBERS = ("uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
_TYPES = {
    **{word: np.dtype(word).newbyteorder("<").str for word in _NUMBERS},
    "utf8": "utf8",
    "list<int32>": "list<i4>",
    "list<int64>": "list<i8>",
    "list<utf8>": "list<utf8>",
    f"float32[{SKETCH_SIZE}]": "vector",
}
"""The type of a column by the word for it in a log."""

_WORDS = {kind: word for word, kind in _TYPES.items()}


def _schema(described: str) -> Schema:
    """Columns from their names and types, `name type, ...`."""
    pairs = [column.split() for column in described.split(",")]
    return tuple(Column(name, _TYPES[word], SKETCH_SIZE * (_TYPES[word] == "vector")) for name, word in pairs)


SITE_COLUMNS = _schema(
    "key uint64, phase utf8, kind utf8, fqn utf8, call uint32, path utf8, module_class utf8, op utf8, source utf8"
)
LAYOUT_COLUMNS = _schema(
    "shape list<int64>, dtype utf8, device utf8, strides utf8, "
    "part list<int64>, part_owed utf8, part_owing int32, part_source utf8"
)
"""`part`: for each dimension how many ranges a rank holds, and each range's first index and length. `part_source` is
empty where a rank holds the whole."""

MODULE_COLUMNS = _schema(
    "fqn utf8, module_class utf8, source utf8, parameters list<utf8>, buffers list<utf8>, aliases list<utf8>, "
    "attribute_names list<utf8>, attribute_values list<utf8>, step int64, variable utf8"
)
"""`step`: from which the row holds. `variable`: what the script calls a root."""

RECORD_COLUMNS = _schema("site uint32, sequence uint32, layout uint32, status uint8, checksum uint64")
[TEXT] = _schema("text utf8")
[SKETCH] = _schema(f"sketch float32[{SKETCH_SIZE}]")
GIVEN_COLUMNS = _schema("given list<int32>, forward int32, node utf8")
"""What an operator was given, where operators are recorded."""

WHOLE_COLUMNS = _schema("joined uint8, ranks uint32, calls int64, elements int64")
"""How the records of several ranks became one, in a run that they were put together in; see `batch.StepBatch`."""


def described(records: Schema) -> bytes:
    """The description of the columns of a rank's tables, in JSON: of each table the names and types."""
    tables = {"records": records, "sites": SITE_COLUMNS, "layouts": LAYOUT_COLUMNS, "modules": MODULE_COLUMNS}
    every = {name: [[column.name, _WORDS[column.type]] for column in schema] for name, schema in tables.items()}
    return json.dumps(every, separators=(",", ":")).encode()


def parse_columns(description: bytes) -> Schema:
    """The columns of records that a log describes.

    Raises:
        Malformed: it is no description that this version would write.
    """
    try:
        names = [name for name, _ in json.loads(description)["records"]]
        schema = record_columns(
            stats="mean" in names,
            sketch="sketch" in names,
            sorted_stats=tuple(name for name in names if name in STATISTICS),
            operators="given" in names,
            whole="joined" in names,
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        schema = ()
    if described(schema) != description:
        raise Malformed("its columns are not those that this version writes: install the newest introspect-cli")
    return schema


def record_columns(
    *,
    stats: bool = True,
    sketch: bool = True,
    sorted_stats: tuple[str, ...] = (),
    operators: bool = False,
    whole: bool = False,
) -> Schema:
    """The schema of records.

    Args:
        stats: with the statistics that are always kept.
        sketch: with sketches.
        sorted_stats: names of statistics on request.
        operators: with the inputs of operators.
        whole: with the columns of records put together from several ranks.
    """
    kept = [
        Column(name, statistic.type)
        for name, statistic in STATISTICS.items()
        if (name in sorted_stats if statistic.on_request else stats)
    ]
    return (
        *RECORD_COLUMNS,
        *kept,
        *([SKETCH] if sketch else []),
        *(GIVEN_COLUMNS if operators else ()),
        *(WHOLE_COLUMNS if whole else ()),
        TEXT,
    )
