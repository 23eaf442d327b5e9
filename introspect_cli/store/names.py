"""Tables of names: the sites, layouts and modules of a rank, each column a list in JSON.

A site's name is a hundred bytes and recurs every step, so records name it by its number. Thousands of ranks have a
model each, most often the same one: what ranks have the same bytes of is decoded once, see `reader`. What a table
gives is harmless: a name comes from somebody's script, or from somebody.
"""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import SETTING_KINDS, Kind, Layout, ModuleInfo, Part, Phase, Site, SiteInfo
from introspect_cli.texts import bounded, shallow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Names = Mapping[str, Sequence[Any]]


SITE = ("phase", "kind", "fqn", "call", "path")
INFO = ("module_class", "op", "source")
LAYOUT = tuple(Layout.__dataclass_fields__)
MODULE = tuple(ModuleInfo.__dataclass_fields__)
"""The columns of tables."""

_LIMIT_NAME = 8192
"""Characters of a name that a reader gives; a model of 2,000 levels has names of half as many."""

_MAX_DIMS = 1024
_MAX_ELEMENTS = (1 << 63) - 1
_SETTING = frozenset(kind.value for kind in SETTING_KINDS)
_PHASES, _KINDS = frozenset(phase.value for phase in Phase), frozenset(kind.value for kind in Kind)
_SHORT = 64  # characters of a path that cannot be too deep


def columns_of(rows: Sequence[Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """The attributes `names` of rows, each as a column."""
    return {name: [getattr(row, name) for row in rows] for name in names}


def site_columns(rows: Sequence[tuple[Site, SiteInfo]]) -> dict[str, list[Any]]:
    """The columns of a table of sites."""
    return columns_of([site for site, _ in rows], SITE) | columns_of([info for _, info in rows], INFO)


def encode(columns: Names) -> bytes:
    """The bytes of a table."""
    return json.dumps(columns, separators=(",", ":"), default=astuple).encode()


class SiteTable:
    """All sites of a rank, by number.

    Attributes:
        phase, kind, fqn: texts of each.
        call: uint32 (n,).
        path: of each inside nested values; see `texts.shallow` for one that is nested too deeply.
        module_class: of the module, optimizer or loader.
        op, source: "" where there is none.
    """

    def __init__(self, columns: Names) -> None:
        """Clean the columns of `SITE` and `INFO`.

        Raises:
            ValueError, TypeError, OverflowError: a column has something else than belongs there.
        """
        self._recorded = columns
        self.call = np.fromiter(columns["call"], np.uint32, len(columns["call"]))
        self.phase, self.kind, self.fqn = (_cleaned(columns[name]) for name in ("phase", "kind", "fqn"))
        self.module_class, self.op, self.source = (_cleaned(columns[name]) for name in INFO)
        self.path = [shallow(path) if len(path) > _SHORT else path for path in _cleaned(columns["path"])]
        if not (_PHASES.issuperset(self.phase) and _KINDS.issuperset(self.kind)):
            raise ValueError("a phase or a kind that is not one")

    @cached_property
    def key(self) -> NDArray[np.uint64]:
        """uint64 (n,), `Site.key()` of each as it was recorded."""
        rows = zip(*(self._recorded[name] for name in SITE), strict=True)
        return np.array([Site(Phase(phase), Kind(kind), *rest).key() for phase, kind, *rest in rows], np.uint64)

    @cached_property
    def setting(self) -> NDArray[np.bool_]:
        """Bool (n,), True for sites of settings, which digests leave out."""
        return np.array([kind in _SETTING for kind in self.kind], np.bool_)

    def __len__(self) -> int:
        return len(self.call)

    def __getitem__(self, number: int) -> tuple[Site, SiteInfo]:
        """The site with a number, and its class, operator and source.

        Raises:
            IndexError: there is no such number.
        """
        phase, kind = Phase(self.phase[number]), Kind(self.kind[number])
        site = Site(phase, kind, self.fqn[number], int(self.call[number]), self.path[number])
        return site, SiteInfo(self.module_class[number], self.op[number], self.source[number])

    def __iter__(self) -> Iterator[tuple[Site, SiteInfo]]:
        return (self[number] for number in range(len(self)))


def layouts_of(columns: Names) -> list[Layout]:
    """All layouts, by number.

    Raises:
        ValueError, TypeError: a shape is no list of sizes, has over 1024 dimensions or over 2**63 - 1 elements, or a
            part cannot be.
    """
    names = [_cleaned(columns[name]) for name in ("dtype", "device", "strides")]
    parts = [None if part is None else _part(*part) for part in columns["part"]]
    return [Layout(*row) for row in zip(map(_sizes, columns["shape"]), *names, parts, strict=True)]


def _sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMS or not all(map(_is_size, shape)) or math.prod(shape) > _MAX_ELEMENTS:
        raise ValueError("a shape that no tensor has")
    return tuple(shape)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_ELEMENTS


def _part(dims: Any, reduction: Any, reduced_over: Any, source: Any) -> Part:
    """A part from its fields; ValueError or TypeError where they cannot be."""
    ranges = tuple(tuple((start, size) for start, size in ranges) for ranges in dims)
    if not all(map(_is_size, (reduced_over, *(number for each in ranges for pair in each for number in pair)))):
        raise ValueError("a part that has ranges that cannot be")
    [reduction, source] = _cleaned([reduction, source])
    return Part(ranges, reduction, reduced_over, source)


def modules_of(columns: Names) -> list[ModuleInfo]:
    """All rows of modules, in the order in which they were written.

    Raises:
        ValueError, TypeError, OverflowError: a column has something else than belongs there.
    """
    texts, lists = ("fqn", "module_class", "source", "variable"), ("parameters", "buffers", "aliases")
    plain: dict[str, list[Any]] = {name: _cleaned(columns[name]) for name in texts}
    plain |= {name: [tuple(_cleaned(row)) for row in columns[name]] for name in lists}
    attributes = [[_cleaned([name, value]) for name, value in row] for row in columns["attributes"]]
    plain |= {"attributes": [tuple(map(tuple, row)) for row in attributes]}
    plain |= {"step": np.fromiter(columns["step"], np.int64, len(columns["step"])).tolist()}
    return [ModuleInfo(*row) for row in zip(*(plain[name] for name in MODULE), strict=True)]


def _cleaned(values: Sequence[Any]) -> list[str]:
    """Texts, each bounded to `_LIMIT_NAME` characters and cleaned; TypeError where one is no text."""
    together = "".join(values)
    if together.isascii() and together.isprintable() and len(max(values, key=len, default="")) <= _LIMIT_NAME:
        return list(values)
    return [bounded(value, _LIMIT_NAME) for value in values]
