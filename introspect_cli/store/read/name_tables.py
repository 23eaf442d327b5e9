"""The sites, layouts and modules of ranks, read as columns that are decoded when they are first asked for.

Thousands of ranks have a model each, most often the same one: what ranks have the same bytes of is decoded once. What a
reader gives is harmless: a name comes from somebody's script, or from somebody.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from introspect_cli.records import SETTING_KINDS, Kind, Layout, ModuleInfo, Part, Phase, Site, SiteInfo
from introspect_cli.store.files.folders import DamageError
from introspect_cli.store.format.columns import Lists, Malformed, Texts, absent_column, concatenated, decode_rows
from introspect_cli.store.format.log import LAYOUTS, MODULES, SITES
from introspect_cli.store.format.schemas import LIMIT_NAME, LIMIT_NAMES
from introspect_cli.texts import shallow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from introspect_cli.store.format.columns import ColumnData, Schema
    from introspect_cli.store.format.log import Frames

TABLES = {SITES: "sites", LAYOUTS: "layouts", MODULES: "modules"}
Names = TypeVar("Names")


class Shared:
    """What the readers of a run's ranks share: open files, and tables of names where frames have the same digests.

    Attributes:
        opened: the readers that have their logs open, the latest last.
    """

    def __init__(self) -> None:
        """Start with no log open and no table read."""
        self.opened = deque[Any]()
        self._tables: dict[tuple[Any, ...], Any] = {}

    def table(
        self,
        frames: Frames,
        kind: bytes,
        schema: Schema,
        made: Callable[[dict[str, ColumnData], str], Names],
    ) -> Names:
        """The table that a rank's frames of `kind` hold; the same object for frames with equal digests.

        Args:
            frames: of the rank's log.
            kind: one of `TABLES`.
            schema: columns of the table.
            made: makes the table of its columns and a path for messages.

        Raises:
            DamageError: it was altered, or is longer than LIMIT_NAMES.
        """
        numbers, path = frames.numbers_of(kind, counting=False), f"{frames.path} ({TABLES[kind]})"
        heads = frames.heads[numbers]
        key = kind, schema, tuple(heads["rows"].tolist()), heads["digest"].tobytes()
        if key not in self._tables:
            self._tables[key] = made(_columns(frames, numbers, schema, path), path)
        return self._tables[key]  # type: ignore[no-any-return]  # what these very frames were made into


def _columns(frames: Frames, numbers: list[int], schema: Schema, path: str) -> dict[str, ColumnData]:
    """The columns of the table in the frames `numbers`, end to end.

    Raises:
        DamageError: the bytes are no such table, or it is longer than LIMIT_NAMES.
    """
    parts, size = [], 0
    for number in numbers:
        head = frames.heads[number]
        data = frames.body(number)
        size += len(data)
        if size > LIMIT_NAMES:
            raise DamageError(path, "it is longer than a table of names")
        try:
            parts.append(decode_rows(schema, memoryview(data), int(head["rows"])))
        except Malformed as error:
            raise DamageError(path, str(error)) from None
    parts = parts or [{column.name: absent_column(column, 0) for column in schema}]
    return {column.name: concatenated([part[column.name] for part in parts]) for column in schema}


_MAX_DIMS = 1024
_MAX_ELEMENTS = (1 << 63) - 1


def _part(flat: tuple[int, ...], reduction: str, reduced_over: int, source: str, path: str) -> Part | None:
    """Decode a row's part, from `[count, start, size, ...]` for each dimension; None where `source` is "".

    Raises:
        DamageError: the numbers are not such a list.
    """
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
    return Part(tuple(dims), reduction, reduced_over, source)


def layouts_of(columns: Mapping[str, ColumnData], path: str) -> list[Layout]:
    """Decode all layouts, by number.

    Raises:
        DamageError: a shape has a negative size, over 1024 dimensions or over 2**63 - 1 elements, or the ranges of a
            part cannot be.
    """
    shapes = columns["shape"]
    assert isinstance(shapes, Lists)
    if len(shapes) and int(np.diff(shapes.offsets).max()) > _MAX_DIMS:
        raise DamageError(path, "a shape has more dimensions than a tensor can have")
    if len(shapes.values) and np.asarray(shapes.values).min() < 0:
        raise DamageError(path, "a shape has a negative size")
    names = [plain_values(columns[name]) for name in ("dtype", "device", "strides")]
    columns_of_parts = [plain_values(columns[name]) for name in ("part", "part_owed", "part_owing", "part_source")]
    parts = [
        _part(flat, reduction, over, source, path)
        for flat, reduction, over, source in zip(*columns_of_parts, strict=True)
    ]
    layouts = [Layout(*row) for row in zip(shapes.tolist(), *names, parts, strict=True)]
    if any(math.prod(layout.shape) > _MAX_ELEMENTS for layout in layouts):
        raise DamageError(path, "a shape has more elements than a tensor can have")
    return layouts


def modules_of(columns: Mapping[str, ColumnData], path: str) -> list[ModuleInfo]:
    """All rows of modules, in the order in which they were written.

    Raises:
        DamageError: a module has another number of attributes than of values.
    """
    plain = {name: plain_values(column) for name, column in columns.items()}
    names, values = plain["attribute_names"], plain["attribute_values"]
    if any(len(keys) != len(other) for keys, other in zip(names, values, strict=True)):
        raise DamageError(path, "a module has another number of attributes than of values")
    attributes = [tuple(zip(keys, other, strict=True)) for keys, other in zip(names, values, strict=True)]
    every = ("fqn", "module_class", "source", "parameters", "buffers", "aliases")
    rows = zip(*(plain[name] for name in every), attributes, plain["step"], plain["variable"], strict=True)
    return [ModuleInfo(*row) for row in rows]


def plain_values(column: ColumnData) -> list[Any]:
    """The values of a column as a list, lists in it as tuples, texts bounded to LIMIT_NAME characters and cleaned."""
    if isinstance(column, Texts):
        return column.sanitized(LIMIT_NAME).tolist()
    if isinstance(column, Lists) and isinstance(column.values, Texts):
        values, offsets = column.values.sanitized(LIMIT_NAME).tolist(), column.offsets.tolist()
        return [tuple(values[start:end]) for start, end in pairwise(offsets)]
    return list(column.tolist())


_SETTING = frozenset(kind.value for kind in SETTING_KINDS)
_SHORT = 64  # characters of a path that cannot be too deep


def _texts(name: str) -> cached_property[list[str]]:
    """A lazily decoded text column `name` of a table of sites."""
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
        """Keep the columns; texts are decoded when they are asked for. `path` is for messages."""
        self.columns = columns
        self.path_of_file = path
        self.key = cast("NDArray[np.uint64]", columns["key"])
        self.call = cast("NDArray[np.uint32]", columns["call"])

    @cached_property
    def path(self) -> list[str]:
        """Path of each site inside nested values; see `texts.shallow` for one that is nested too deeply."""
        return [shallow(path) if len(path) > _SHORT else path for path in plain_values(self.columns["path"])]

    @cached_property
    def setting(self) -> NDArray[np.bool_]:
        """Bool (n,), True for sites of settings, which digests leave out."""
        return np.array([kind in _SETTING for kind in self.kind], np.bool_)

    def __len__(self) -> int:
        return len(self.key)

    def __getitem__(self, number: int) -> tuple[Site, SiteInfo]:
        """The site with a number, and its class, operator and source.

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
