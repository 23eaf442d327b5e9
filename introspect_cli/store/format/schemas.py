"""The numbers and schemas of the store; `docs/reference/store-format.md` says the same in words.

The writer, the reader and `verify` must agree to the byte, and a store must be able to grow by a column without
becoming unreadable. So every column and limit is here, and a log names the columns of its rank's tables. A reader keeps
statistics that it does not know by name, and passes over other columns that it does not know, unless they are marked
as needed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from introspect_cli.errors import StoreError
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

STATISTIC, NEEDED = "statistic", "needed"
"""What a column is to a reader that does not know it: a statistic to keep, or a reason to refuse the store."""

_NUMBERS = ("uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
_TYPES = {
    **{word: np.dtype(word).newbyteorder("<").str for word in _NUMBERS},
    "utf8": "utf8",
    "list<int32>": "list<i4>",
    "list<int64>": "list<i8>",
    "list<utf8>": "list<utf8>",
}
"""The type of a column by the word for it in a log."""

_WORDS = {kind: word for word, kind in _TYPES.items()}
_VECTOR = re.compile(r"float32\[([1-9]\d{0,3})\]")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MOST_COLUMNS = 256


def _column(described: list[str]) -> Column:
    """Decode `[name, type]` or `[name, type, role]`; ValueError, KeyError or TypeError for anything else."""
    if not isinstance(described, list):
        raise TypeError
    name, kind, *role = described
    vector = _VECTOR.fullmatch(kind)
    if not _NAME.fullmatch(name) or len(role) > 1 or (role and not _NAME.fullmatch(role[0])):
        raise ValueError
    return Column(name, "vector" if vector else _TYPES[kind], int(vector[1]) if vector else 0, *role)


def _schema(described: str) -> Schema:
    """Columns from their names, types and roles, `name type role, ...`, as a tuple; the role may be missing."""
    return tuple(_column(column.split()) for column in described.split(","))


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


@dataclass(frozen=True)
class Columns:
    """The columns of a rank's tables."""

    records: Schema
    sites: Schema = SITE_COLUMNS
    layouts: Schema = LAYOUT_COLUMNS
    modules: Schema = MODULE_COLUMNS

    def described(self) -> bytes:
        """The description of the columns, in JSON."""
        tables = {name: [_described(column) for column in schema] for name, schema in vars(self).items()}
        return json.dumps(tables, separators=(",", ":")).encode()


def _described(column: Column) -> list[str]:
    kind = f"float32[{column.width}]" if column.type == "vector" else _WORDS[column.type]
    return [column.name, kind, *([column.role] if column.role else [])]


@lru_cache(maxsize=16)
def parse_columns(description: bytes) -> Columns:
    """The columns that a log describes; cached.

    Raises:
        Malformed: it is no description, lacks what every store has, or names a column twice, with a wrong type or
            without the others of its group.
        StoreError: a column is needed that this version does not know.
    """
    every = vars(Columns((*RECORD_COLUMNS, TEXT)))
    try:
        described = json.loads(description)
        tables = {name: tuple(map(_column, described[name])) for name in every}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Malformed("its columns are not described") from None
    for name, columns in tables.items():
        _check_columns(name, columns, every[name], name == "records")
    return Columns(**tables)


def _check_columns(table: str, columns: Schema, every: Schema, of_records: bool) -> None:
    """Raise Malformed unless `columns` has all of `every`, and of each group of optional ones all or none.

    It is raised also for over `_MOST_COLUMNS` columns, a name that is there twice, and a type that no version writes.

    Args:
        table: name of the table, for messages.
        columns: those that the log describes.
        every: those that each store has.
        of_records: whether it is the table of records, which alone has groups and statistics.

    Raises:
        StoreError: a column is marked as needed.
    """
    by_name = {column.name: column for column in columns}
    groups = (GIVEN_COLUMNS, WHOLE_COLUMNS, (SKETCH,)) if of_records else ()
    if len(by_name) != len(columns) or len(columns) > _MOST_COLUMNS:
        raise Malformed(f"the columns of its {table} are too many, or one is there twice")
    if any(by_name.get(column.name) != column for column in every):
        raise Malformed(f"its {table} have not the columns that every store has")
    if any(by_name.get(column.name, column) != column for group in groups for column in group):
        raise Malformed(f"a column of its {table} has another type than it is written with")
    if any(len({column.name in by_name for column in group}) > 1 for group in groups):
        raise Malformed(f"its {table} lack a column of those that belong together")
    for column in columns:
        if column.role == NEEDED:
            raise StoreError(
                f"the {table} have a column {column.name!r}, which this version does not know and cannot leave out: "
                "install the newest introspect-cli"
            )
        known = STATISTICS.get(column.name)
        types = (known.type,) if known else ("<i8", "<f4", "<f8")
        if column.role == STATISTIC and not (of_records and column.type in types):
            raise Malformed(f"the statistic {column.name} has a type that no version writes")


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
        Column(name, statistic.type, role=STATISTIC)
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
