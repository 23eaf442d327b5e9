"""The numbers and schemas of format 1; `docs/store-format.md` says the same in words.

The problem: the writer, the reader and `verify` must agree to the byte. The way: every magic number, column and
limit is here, and nowhere else.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from introspect_cli.records import COUNT_STATS, FLOAT_STATS, SKETCH_SIZE, SORTED_STATS
from introspect_cli.store.arrow import Column, Schema

MAGIC = b"INTROSPX"
HEADER = struct.Struct("<8sIIII16s20xI")
"""Index header: magic, format, bytes of an entry, rank, column bits, run id, 20 zeros, CRC of the 60 before."""

ENTRY = np.dtype(
    [
        ("step", "<i8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("rows", "<u4"),
        ("n_sites", "<u4"),
        ("n_layouts", "<u4"),
        ("n_modules", "<u4"),
        ("sites_length", "<u8"),
        ("layouts_length", "<u8"),
        ("modules_length", "<u8"),
        ("sites_crc", "<u4"),
        ("layouts_crc", "<u4"),
        ("modules_crc", "<u4"),
        ("batch_crc", "<u4"),
        ("digest", "V16"),
        ("chain", "V16"),
        ("kind", "<u4"),
        ("crc", "<u4"),
    ]
)
"""Index entry. `crc` covers the whole file up to itself, so that checking the last entry checks all."""

STEP_ENTRY = 0
END_ENTRY = 1
"""`kind` of an entry: a step, or the end of a run that closed its store itself."""

FIRST_CHAIN = bytes(16)

STATS_BIT, SKETCH_BIT = 1, 2
SORTED_BITS = {"med": 4, "mode": 8}

LIMIT_INDEX = 256 << 20
"""Bytes of an index: two million steps."""

LIMIT_BATCH = 128 << 20
"""Bytes of one step's batch: a million records."""

LIMIT_NAMES = 64 << 20
"""Bytes of a stream of sites, layouts or modules: half a million sites, and little memory when read."""

LIMIT_TEXT = 4096
"""Characters of a record's text."""

SITE_COLUMNS: Schema = (
    Column("key", "<u8"),
    Column("phase", "utf8"),
    Column("kind", "utf8"),
    Column("fqn", "utf8"),
    Column("call", "<u4"),
    Column("path", "utf8"),
    Column("module_class", "utf8"),
    Column("op", "utf8"),
    Column("source", "utf8"),
)

LAYOUT_COLUMNS: Schema = (
    Column("shape", "list<i8>"),
    Column("dtype", "utf8"),
    Column("device", "utf8"),
    Column("strides", "utf8"),
)

MODULE_COLUMNS: Schema = (
    Column("fqn", "utf8"),
    Column("module_class", "utf8"),
    Column("source", "utf8"),
    Column("parameters", "list<utf8>"),
    Column("buffers", "list<utf8>"),
    Column("aliases", "list<utf8>"),
)

NARROW = frozenset({"skew", "kurt"})
"""Statistics kept as float32: a shape of a distribution needs no more."""


def column_bits(*, stats: bool, sketch: bool, sorted_stats: tuple[str, ...]) -> int:
    """The bits that say which optional columns a records stream has."""
    bits = (STATS_BIT if stats else 0) | (SKETCH_BIT if sketch else 0)
    for name in sorted_stats:
        bits |= SORTED_BITS[name]
    return bits


@lru_cache(maxsize=16)
def float_columns(bits: int) -> tuple[str, ...]:
    """Names of the float statistics a records stream has, in column order."""
    stored = FLOAT_STATS if bits & STATS_BIT else ()
    return (*stored, *(name for name in SORTED_STATS if bits & SORTED_BITS[name]))


@lru_cache(maxsize=16)
def record_columns(bits: int) -> Schema:
    """The schema of a records stream."""
    columns = [
        Column("site", "<u4"),
        Column("sequence", "<u4"),
        Column("layout", "<u4"),
        Column("status", "|u1"),
        Column("checksum", "<u8"),
    ]
    if bits & STATS_BIT:
        columns += [Column(name, "<i8") for name in COUNT_STATS]
    columns += [Column(name, "<f4" if name in NARROW else "<f8") for name in float_columns(bits)]
    if bits & SKETCH_BIT:
        columns.append(Column("sketch", "vector", SKETCH_SIZE))
    columns.append(Column("text", "utf8"))
    return tuple(columns)


@lru_cache(maxsize=16)
def row_bytes(bits: int) -> int:
    """Bytes a record takes at least, without its text."""
    fixed = (column for column in record_columns(bits) if column.type != "utf8")
    return sum(4 * column.width or np.dtype(column.type).itemsize for column in fixed) + 4
