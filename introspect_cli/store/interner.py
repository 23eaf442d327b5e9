"""Rows that are written once and named by number after: sites, layouts, modules.

The problem: a site's name is a hundred bytes and recurs every step. The way: a row gets the next number when it is
first seen, and waits here until the next step is written.
"""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, Generic, TypeVar

from introspect_cli.errors import StoreError
from introspect_cli.store.arrow import Schema, encode_batch, schema_message
from introspect_cli.store.format import LIMIT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from introspect_cli.store.columns import ColumnData

Row = TypeVar("Row")


class Interner(Generic[Row]):
    """Numbers rows and encodes those not yet written. Several threads may intern; one writes.

    Attributes:
        count: rows written.
        length: bytes written, the schema included.
        crc: CRC-32 of the bytes written.
    """

    def __init__(self, schema: Schema, encoder: Callable[[Sequence[Row]], Mapping[str, ColumnData]]) -> None:
        self._schema = schema
        self._encoder = encoder
        self._numbers: dict[Hashable, int] = {}
        self._pending: list[Row] = []
        self._lock = threading.Lock()
        first = schema_message(schema)
        self.count = 0
        self.length = len(first)
        self.crc = zlib.crc32(first)

    def intern(self, key: Hashable, row: Row) -> int:
        """The number of the row known by `key`; the first row wins."""
        known = self._numbers.get(key)
        if known is not None:
            return known
        with self._lock:
            number = self._numbers.setdefault(key, len(self._numbers))
            if number == self.count + len(self._pending):
                self._pending.append(row)
        return number

    def take(self) -> bytes:
        """The bytes of a batch of the rows that wait, now counted as written; empty where none does.

        Raises:
            StoreError: the stream would grow past its limit.
        """
        if not self._pending:
            return b""
        with self._lock:
            rows, self._pending = self._pending, []
            self.count += len(rows)
        data = b"".join(encode_batch(self._schema, self._encoder(rows), len(rows)))
        if self.length + len(data) > LIMIT_NAMES:
            raise StoreError(f"more names than a store holds ({LIMIT_NAMES >> 20} MB of them)")
        self.length += len(data)
        self.crc = zlib.crc32(data, self.crc)
        return data
