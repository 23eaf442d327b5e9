"""What is written once and named by number after: sites, layouts and modules.

Each is a stream of rows. The writer hands out numbers and encodes the rows not yet written; see `name_tables` for the
reader.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.format.arrow import Schema, encode_batch, schema_message
from introspect_cli.store.format.columns import ColumnData, integer_lists, storable, text_lists, texts
from introspect_cli.store.format.schemas import LIMIT_NAMES

if TYPE_CHECKING:
    from introspect_cli.records import Layout, ModuleInfo, Part, Site, SiteInfo

Row = TypeVar("Row")
Encoded = Mapping[str, ColumnData]


class Stream(NamedTuple):
    """What a stream of names holds up to some row.

    Attributes:
        rows: how many.
        length: bytes, the schema included.
        crc: CRC-32 of the bytes.
    """

    rows: int
    length: int
    crc: int


class Interner(Generic[Row]):
    """Numbers rows and encodes those not yet written. Several threads may intern; one writes.

    A site's name is a hundred bytes and recurs every step: a row gets the next number when it is first seen, and waits
    here until a step that was written holds it. An interrupt may come at any line: whoever writes keeps what counts as
    written, and no statement here leaves a number without its row.

    Attributes:
        begun: the stream before its first row.
    """

    def __init__(self, schema: Schema, encoder: Callable[[Sequence[Row]], Encoded]) -> None:
        self._schema = schema
        self._encoder = encoder
        self._numbers: dict[Hashable, int] = {}
        self._waiting: dict[int, Row] = {}
        self._lock = threading.Lock()
        first = schema_message(schema)
        self.begun = Stream(0, len(first), zlib.crc32(first))

    def keys(self) -> list[Hashable]:
        """Keys of all rows, written or not."""
        with self._lock:
            return list(self._numbers)

    def intern(self, key: Hashable, row: Row) -> int:
        """The number of the row known by `key`; the first row wins."""
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = len(self._numbers)
                self._waiting[number] = row  # before its number: one without the other is never read
                self._numbers[key] = number
            return number

    @property
    def waits(self) -> bool:
        """Whether any row may have to be written yet."""
        return bool(self._waiting)

    def rest(self, written: Stream) -> tuple[bytes, Stream]:
        """A batch of the rows that come after `written`, empty where there are none, and the stream with it.

        The same rows again until they count as written.
        """
        if not self._waiting:
            return b"", written
        with self._lock:
            for number in [number for number in self._waiting if number < written.rows]:
                del self._waiting[number]
            rows = [self._waiting[number] for number in range(written.rows, len(self._numbers))]
        if not rows:
            return b"", written
        data = encode_batch(self._schema, self._encoder(rows), len(rows))
        if written.length + len(data) > LIMIT_NAMES:
            raise StoreError(f"more names than a store holds ({LIMIT_NAMES >> 20} MB of them)")
        return data, Stream(written.rows + len(rows), written.length + len(data), zlib.crc32(data, written.crc))


def encode_sites(rows: Sequence[tuple[Site, SiteInfo]]) -> Encoded:
    """The columns of sites."""
    sites = [site if site.fqn.isascii() and site.path.isascii() else _storable(site) for site, _ in rows]
    infos = [info for _, info in rows]
    return {
        "key": np.array([site.key() for site in sites], np.uint64),  # of what is stored: it can be computed again
        "phase": texts([site.phase for site in sites]),
        "kind": texts([site.kind for site in sites]),
        "fqn": texts([site.fqn for site in sites]),
        "call": np.array([site.call for site in sites], np.uint32),
        "path": texts([site.path for site in sites]),
        "module_class": texts([info.module_class for info in infos]),
        "op": texts([info.op for info in infos]),
        "source": texts([info.source for info in infos]),
    }


def _storable(site: Site) -> Site:
    return replace(site, fqn=storable(site.fqn), path=storable(site.path))


def encode_layouts(rows: Sequence[Layout]) -> Encoded:
    """The columns of layouts."""
    return {
        "shape": integer_lists([row.shape for row in rows]),
        "dtype": texts([row.dtype for row in rows]),
        "device": texts([row.device for row in rows]),
        "strides": texts([row.strides for row in rows]),
        "part": integer_lists([_flat(row.part) for row in rows]),
        "part_owed": texts([row.part.owed if row.part is not None else "" for row in rows]),
        "part_owing": np.array([row.part.owing if row.part is not None else 1 for row in rows], np.int32),
        "part_source": texts([row.part.source if row.part is not None else "" for row in rows]),
    }


def _flat(part: Part | None) -> list[int]:
    """For each dimension how many ranges there are, then each range."""
    out: list[int] = []
    for ranges in part.ranges if part is not None else ():
        out.append(len(ranges))
        out += [number for span in ranges for number in span]
    return out


def encode_modules(rows: Sequence[ModuleInfo]) -> Encoded:
    """The columns of modules."""
    return {
        "fqn": texts([row.fqn for row in rows]),
        "module_class": texts([row.module_class for row in rows]),
        "source": texts([row.source for row in rows]),
        "parameters": text_lists([row.parameters for row in rows]),
        "buffers": text_lists([row.buffers for row in rows]),
        "aliases": text_lists([row.aliases for row in rows]),
        "attribute_names": text_lists([[name for name, _ in row.attributes] for row in rows]),
        "attribute_values": text_lists([[value for _, value in row.attributes] for row in rows]),
        "step": np.array([row.step for row in rows], np.int64),
        "variable": texts([row.variable for row in rows]),
    }
