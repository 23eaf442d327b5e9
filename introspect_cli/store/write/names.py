"""What is written once and named by number after: sites, layouts and modules.

Each is a table. The writer hands out numbers and encodes the rows not yet written; see `name_tables` for the
reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeVar

from introspect_cli.errors import StoreError
from introspect_cli.records import ModuleInfo, Part
from introspect_cli.store.format.columns import ColumnData, Schema, column_of, encode_rows, storable
from introspect_cli.store.format.schemas import LAYOUT_COLUMNS, LIMIT_NAMES, MODULE_COLUMNS, SITE_COLUMNS

if TYPE_CHECKING:
    from introspect_cli.records import Layout, Site, SiteInfo

Row = TypeVar("Row")
Encoded = Mapping[str, ColumnData]


class Interner(Generic[Row]):
    """Numbers rows from 0 and encodes those not yet written. Several threads may intern; one writes.

    A site's name is a hundred bytes and recurs every step: a row gets the next number when it is first seen, and waits
    here until a step that was written holds it. An interrupt may come at any line: whoever writes keeps what counts as
    written, and no statement here leaves a number without its row.
    """

    def __init__(self, schema: Schema, encoder: Callable[[Sequence[Row]], Encoded]) -> None:
        """Start without rows.

        Args:
            schema: the columns of the table.
            encoder: makes these columns of rows.
        """
        self._schema = schema
        self._encoder = encoder
        self._numbers: dict[Hashable, int] = {}
        self._waiting: dict[int, Row] = {}
        self._lock = threading.Lock()
        self._bytes: dict[int, int] = {0: 0}  # by the number of rows, bytes of all of them

    def keys(self) -> list[Hashable]:
        """Keys of all rows, written or not, in order of their numbers."""
        with self._lock:
            return list(self._numbers)

    def intern(self, key: Hashable, row: Row) -> int:
        """The number of `key`: the next for a new key, whose `row` is kept; later calls change neither."""
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = len(self._numbers)
                self._waiting[number] = row  # before its number: one without the other is never read
                self._numbers[key] = number
            return number

    @property
    def has_unwritten(self) -> bool:
        """Whether any row may still have to be written."""
        return bool(self._waiting)

    def rest(self, written: int) -> tuple[bytes, int]:
        """The encoded rows from number `written` on, and how many there are; rows below `written` are let go for good.

        Args:
            written: 0 at first; later that of the last call, to have its rows again, or that plus the number it
                returned.

        Raises:
            StoreError: the table would have more than LIMIT_NAMES bytes.
        """
        with self._lock:
            for number in [number for number in self._waiting if number < written]:
                del self._waiting[number]
            rows = [self._waiting[number] for number in range(written, len(self._numbers))]
        data = encode_rows(self._schema, self._encoder(rows)) if rows else b""
        self._bytes = {written: self._bytes[written], written + len(rows): self._bytes[written] + len(data)}
        if self._bytes[written + len(rows)] > LIMIT_NAMES:
            raise StoreError(f"more names than a store holds ({LIMIT_NAMES >> 20} MB of them)")
        return data, len(rows)


def encode_sites(rows: Sequence[tuple[Site, SiteInfo]]) -> Encoded:
    """The columns of sites; the key is that of the texts as they are stored, so that it can be computed again."""
    sites = [
        site
        if site.fqn.isascii() and site.path.isascii()
        else replace(site, fqn=storable(site.fqn), path=storable(site.path))
        for site, _ in rows
    ]
    infos = [info for _, info in rows]
    values = {
        "key": [site.key() for site in sites],
        **{name: [getattr(site, name) for site in sites] for name in ("phase", "kind", "fqn", "call", "path")},
        **{name: [getattr(info, name) for info in infos] for name in ("module_class", "op", "source")},
    }
    return {column.name: column_of(column, values[column.name]) for column in SITE_COLUMNS}


_WHOLE = Part((), "", 1, "")
"""What stands in the columns of parts where a rank holds the whole."""


def encode_layouts(rows: Sequence[Layout]) -> Encoded:
    """The columns of layouts, as `schemas.LAYOUT_COLUMNS` has them."""
    parts = [row.part or _WHOLE for row in rows]
    values = {
        **{name: [getattr(row, name) for row in rows] for name in ("shape", "dtype", "device", "strides")},
        "part": [[n for ranges in part.ranges for n in (len(ranges), *chain(*ranges))] for part in parts],
        "part_owed": [part.reduction for part in parts],
        "part_owing": [part.reduced_over for part in parts],
        "part_source": [part.source for part in parts],
    }
    return {column.name: column_of(column, values[column.name]) for column in LAYOUT_COLUMNS}


def encode_modules(rows: Sequence[ModuleInfo]) -> Encoded:
    """The columns of modules, as `schemas.MODULE_COLUMNS` has them."""
    values = {
        **{name: [getattr(row, name) for row in rows] for name in ModuleInfo.__dataclass_fields__},
        "attribute_names": [[name for name, _ in row.attributes] for row in rows],
        "attribute_values": [[value for _, value in row.attributes] for row in rows],
    }
    return {column.name: column_of(column, values[column.name]) for column in MODULE_COLUMNS}
