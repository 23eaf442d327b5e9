"""The sites, layouts and modules of ranks, read as columns that are decoded when they are first asked for.

Thousands of ranks have a model each, most often the same one: what ranks have the same bytes of is read once. What a
reader gives is harmless: a name comes from somebody's script, or from somebody.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from introspect_cli.records import SETTING_KINDS, Kind, Layout, ModuleInfo, Part, Phase, Site, SiteInfo
from introspect_cli.store.files.folders import DamageError, Directory, unreadable
from introspect_cli.store.format.arrow_decoder import Decoder
from introspect_cli.store.format.arrow_schema import Malformed, schema_message
from introspect_cli.store.format.columns import Lists, Texts, concatenated
from introspect_cli.store.format.schemas import LIMIT_NAME
from introspect_cli.texts import shallow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from introspect_cli.store.format.arrow_decoder import Batch
    from introspect_cli.store.format.arrow_schema import Schema
    from introspect_cli.store.format.columns import ColumnData
    from introspect_cli.store.format.index import Index


Names = TypeVar("Names")


class NameTables:
    """Sites, layouts and modules, by what tells the bytes that they were read from; and what decodes them."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, Schema], tuple[dict[tuple[str, int, int, int], Any], Decoder]] = {}

    def read(
        self, run: Directory, rank: int, index: Index, stream: str, made: Callable[[dict[str, ColumnData], str], Names]
    ) -> Names:
        """What is made of the content of a rank's `sites`, `layouts` or `modules` that its index vouches for."""
        last, schema, path = index.last, getattr(index.columns, stream), f"{run.path}/rank{rank}/{stream}.arrow"
        if last is None:
            return made(no_rows(schema), path)
        length, crc, count = int(last[f"{stream}_length"]), int(last[f"{stream}_crc"]), int(last[f"n_{stream}"])
        if (stream, schema) not in self._tables:
            self._tables[stream, schema] = {}, Decoder(schema)
        kept, decoder = self._tables[stream, schema]
        try:
            with run.rank(rank) as folder:
                key = folder.content(f"{stream}.arrow"), length, crc, count
                if not key[0] or key not in kept:
                    with folder.file(f"{stream}.arrow") as handle:
                        data = handle.read(0, length)
                    if len(data) < length:
                        raise DamageError(path, "it ends before the names that the index counts")
                    if zlib.crc32(data) != crc:
                        raise DamageError(path, "its bytes are not those that were indexed")
                    key = key[0] or blake2b(data).hexdigest(), *key[1:]
        except FileNotFoundError:
            raise DamageError(path, "it is missing") from None
        except OSError as error:
            raise unreadable(path, error) from None
        if key not in kept:
            kept[key] = made(decode_names(data, decoder, count, path), path)
        return kept[key]  # type: ignore[no-any-return]  # what this very stream was made into


_MAX_DIMS = 1024
_MAX_ELEMENTS = (1 << 63) - 1


def _part(flat: tuple[int, ...], owed: str, owing: int, source: str, path: str) -> Part | None:
    """The part that a row of layouts names."""
    if not source:
        return None
    dims, at = [], 0
    while at < len(flat):
        length = flat[at]
        numbers = flat[at + 1 : at + 1 + 2 * length]
        if min(flat) < 0 or len(numbers) < 2 * length:
            raise DamageError(path, "a part of a tensor has ranges that cannot be")
        dims.append(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
        at += 1 + 2 * length
    return Part(tuple(dims), owed, owing, source)


def decode_names(data: bytes, decoder: Decoder, count: int, path: str) -> dict[str, ColumnData]:
    """The columns of a whole stream of `count` rows."""
    schema = decoder.schema
    first = schema_message(schema)
    if data[: len(first)] != first:
        raise DamageError(path, "its columns are not those that its index names")
    batches: list[Batch] = []
    rest = memoryview(data)[len(first) :]
    try:
        while rest:
            batches.append(decoder.decode(rest))
            rest = rest[batches[-1].length :]
    except Malformed as error:
        raise DamageError(path, str(error)) from None
    if sum(batch.rows for batch in batches) != count:
        raise DamageError(path, "it holds another number of names than the index counts")
    if not batches:
        return no_rows(schema)
    return {c.name: concatenated([batch.columns[c.name] for batch in batches]) for c in schema}


def no_rows(schema: Schema) -> dict[str, ColumnData]:
    """The columns of a stream that holds nothing."""
    none = np.zeros(1, np.int32)

    def empty(kind: str) -> ColumnData:
        if kind == "utf8":
            return Texts(none, b"")
        if kind.startswith("list<"):
            inside = empty(kind[5:-1])
            assert not isinstance(inside, Lists)
            return Lists(none, inside)
        return np.zeros(0, kind)

    return {c.name: np.zeros((0, c.width)) if c.type == "vector" else empty(c.type) for c in schema}


def layouts_of(columns: Mapping[str, ColumnData], path: str) -> list[Layout]:
    """All layouts, by number."""
    shapes = columns["shape"]
    assert isinstance(shapes, Lists)
    if len(shapes) and int(np.diff(shapes.offsets).max()) > _MAX_DIMS:
        raise DamageError(path, "a shape has more dimensions than a tensor can have")
    if len(shapes.values) and np.asarray(shapes.values).min() < 0:
        raise DamageError(path, "a shape has a negative size")
    names = [plain_values(columns[name]) for name in ("dtype", "device", "strides")]
    columns_of_parts = [plain_values(columns[name]) for name in ("part", "part_owed", "part_owing", "part_source")]
    parts = [
        _part(flat, owed, owing, source, path) for flat, owed, owing, source in zip(*columns_of_parts, strict=True)
    ]
    layouts = [Layout(*row) for row in zip(shapes.tolist(), *names, parts, strict=True)]
    if any(_too_many(layout.shape) for layout in layouts):
        raise DamageError(path, "a shape has more elements than a tensor can have")
    return layouts


def _too_many(shape: tuple[int, ...]) -> bool:
    elements = 1
    for size in shape if 0 not in shape else ():
        elements *= size
        if elements > _MAX_ELEMENTS:
            return True
    return False


def modules_of(columns: Mapping[str, ColumnData], path: str) -> list[ModuleInfo]:
    """All rows of modules, in the order they were found."""
    plain = {name: plain_values(column) for name, column in columns.items()}
    names, values = plain["attribute_names"], plain["attribute_values"]
    if any(len(keys) != len(other) for keys, other in zip(names, values, strict=True)):
        raise DamageError(path, "a module has another number of attributes than of values")
    attributes = [tuple(zip(keys, other, strict=True)) for keys, other in zip(names, values, strict=True)]
    every = ("fqn", "module_class", "source", "parameters", "buffers", "aliases")
    rows = zip(*(plain[name] for name in every), attributes, plain["step"], plain["variable"], strict=True)
    return [ModuleInfo(*row) for row in rows]


def plain_values(column: ColumnData) -> list[Any]:
    """The values of a column, texts made harmless."""
    if isinstance(column, Texts):
        return column.sanitized(LIMIT_NAME).tolist()
    if isinstance(column, Lists) and isinstance(column.values, Texts):
        values, offsets = column.values.sanitized(LIMIT_NAME).tolist(), column.offsets.tolist()
        return [tuple(values[start:end]) for start, end in pairwise(offsets)]
    return list(column.tolist())


_SETTING = frozenset(kind.value for kind in SETTING_KINDS)
_SHORT = 64  # characters of a path that cannot be too deep


def _texts(name: str) -> cached_property[list[str]]:
    """A column of a table of sites that is decoded when it is first asked for."""
    return cached_property(lambda table: plain_values(table.columns[name]))


class SiteTable:
    """All sites of a rank, by number.

    Attributes:
        columns: as they are stored.
        key: uint64 (n,), `Site.key()` of each, as stored; `verify` recomputes it.
        call: uint32 (n,).
        path_of_file: where the table is stored, for messages.
        phase, kind, fqn: texts of each, made when they are asked for.
        module_class: of the module, optimizer or loader.
        op, source: "" where there is none.
    """

    phase, kind, fqn = _texts("phase"), _texts("kind"), _texts("fqn")
    module_class, op, source = _texts("module_class"), _texts("op"), _texts("source")

    def __init__(self, columns: dict[str, ColumnData], path: str) -> None:
        self.columns = columns
        self.path_of_file = path
        self.key = cast("NDArray[np.uint64]", columns["key"])
        self.call = cast("NDArray[np.uint32]", columns["call"])

    @cached_property
    def path(self) -> list[str]:
        """Path of each site inside nested values."""
        return [shallow(path) if len(path) > _SHORT else path for path in plain_values(self.columns["path"])]

    @cached_property
    def setting(self) -> NDArray[np.bool_]:
        """Whether digests leave a site out, bool (n,); True for sites that digests leave out."""
        return np.array([kind in _SETTING for kind in self.kind], np.bool_)

    def __len__(self) -> int:
        return len(self.key)

    def __getitem__(self, number: int) -> tuple[Site, SiteInfo]:
        """The site and what is known of it.

        Raises:
            IndexError: there is no such number.
            StoreError: its phase or kind is not one.
        """
        try:
            phase, kind = Phase(self.phase[number]), Kind(self.kind[number])
        except ValueError:
            raise DamageError(self.path_of_file, f"site {number} has a phase or a kind that is not one") from None
        site = Site(phase, kind, self.fqn[number], int(self.call[number]), self.path[number])
        return site, SiteInfo(self.module_class[number], self.op[number], self.source[number])

    def key_of(self, number: int) -> int:
        """The key of a site, computed from its texts as they are stored."""
        fqn, path = (cast("Texts", self.columns[name])[number] for name in ("fqn", "path"))
        site, _ = self[number]
        return replace(site, fqn=fqn, path=path).key()

    def __iter__(self) -> Iterator[tuple[Site, SiteInfo]]:
        return (self[number] for number in range(len(self)))
