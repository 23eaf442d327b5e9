"""Columns of variable length: texts and lists, kept as offsets into one buffer.

A batch of records has a text for each row and nearly all are empty, a table of sites has texts that most comparisons
never look at, and either may come from a stranger. So texts and lists stay in Arrow's own layout, decoded one value at
a time when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from introspect_cli.texts import bounded

Value = TypeVar("Value")
Offsets = NDArray[np.int32]
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Texts(Sequence[str]):
    """A column of texts.

    A reader gives them harmless: bounded, and without characters that do something to a terminal. So nobody who shows,
    exports or compares them need remember to.

    Attributes:
        offsets: int32 of length n + 1, from 0, never falling.
        data: UTF-8 bytes of all texts, one after another.
        limit: characters of a text that is given harmless; 0 where texts are given as they are.
    """

    offsets: Offsets
    data: bytes | memoryview
    limit: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        text = str(self.data[self.offsets[row] : self.offsets[row + 1]], "utf-8", "replace")
        return bounded(text, self.limit) if self.limit else text

    def tolist(self) -> list[str]:
        """All texts; nearly always all are harmless, which one look at all of them tells."""
        if not len(self.data):
            return [""] * len(self)
        data, offsets = bytes(self.data), self.offsets.tolist()
        texts = [str(data[a:b], "utf-8", "replace") for a, b in pairwise(offsets)]
        if not self.limit:
            return texts
        fits = int(np.diff(self.offsets).max()) <= self.limit
        if fits and data.isascii() and data.decode("ascii").isprintable():
            return texts
        return [bounded(text, self.limit) for text in texts]

    def sanitized(self, limit: int) -> Texts:
        """The same texts, given harmless."""
        return Texts(self.offsets, self.data, limit)


@dataclass(frozen=True, eq=False)
class Lists(Generic[Value]):
    """A column of lists.

    Attributes:
        offsets: int32 of length n + 1, from 0, never falling.
        values: what all lists hold, one after another: an int64 array, or `Texts`.
    """

    offsets: Offsets
    values: Array | Texts

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def tolist(self) -> list[tuple[Value, ...]]:
        """All lists, as tuples of plain values."""
        values: list[Any] = self.values.tolist()
        return [tuple(values[a:b]) for a, b in pairwise(self.offsets.tolist())]


ColumnData = Array | Texts | Lists[Any]


def texts(values: Sequence[str]) -> Texts:
    r"""A column of `values`; what UTF-8 cannot hold (lone surrogates) is written as `\udc80` and the like."""
    if isinstance(values, Texts) and not values.limit:
        return values
    if not any(values):
        return Texts(np.zeros(len(values) + 1, np.int32), b"")
    distinct = {value: value.encode("utf-8", "backslashreplace") for value in set(values)}  # mostly few
    encoded = [distinct[value] for value in values]
    return Texts(_offsets(encoded), b"".join(encoded))


def filled(column: Sequence[str]) -> Array:
    """Rows of a column of texts that are not empty: nearly none, so nothing is decoded to find them."""
    if isinstance(column, Texts):
        return np.flatnonzero(np.diff(column.offsets)) if len(column.data) else np.zeros(0, np.int64)
    return np.array([row for row, text in enumerate(column) if text], np.int64)


def sparse_texts(rows: int, values: Mapping[int, str]) -> Texts:
    """A column of so many texts, of which `values` has those that are not empty, by row: nearly none."""
    if not values:
        return Texts(np.zeros(rows + 1, np.int32), b"")
    encoded = {row: values[row].encode("utf-8", "backslashreplace") for row in sorted(values)}
    offsets = np.zeros(rows + 1, np.int32)
    offsets[[row + 1 for row in encoded]] = [len(text) for text in encoded.values()]
    return Texts(np.cumsum(offsets, dtype=np.int32), b"".join(encoded.values()))


def storable(text: str) -> str:
    r"""`text` as it comes back from a column: lone surrogates are written as `\udc80` and the like."""
    return text.encode("utf-8", "backslashreplace").decode()


def integer_lists(values: Sequence[Sequence[int]], kind: type[np.signedinteger[Any]] = np.int64) -> Lists[int]:
    """A column of lists of integers."""
    flat = [item for row in values for item in row]
    return Lists(_offsets(values), np.array(flat, kind))


def text_lists(values: Sequence[Sequence[str]]) -> Lists[str]:
    """A column of lists of texts."""
    return Lists(_offsets(values), texts([item for row in values for item in row]))


def _offsets(items: Sequence[Sequence[Any] | bytes]) -> Offsets:
    return np.fromiter(accumulate(map(len, items), initial=0), np.int32, len(items) + 1)


def concatenated(parts: Sequence[ColumnData]) -> ColumnData:
    """One column out of columns of one type, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    if isinstance(first, Texts):
        each = [part for part in parts if isinstance(part, Texts)]
        return Texts(_joined_offsets([part.offsets for part in each]), b"".join(part.data for part in each))
    lists = [part for part in parts if isinstance(part, Lists)]
    values = concatenated([part.values for part in lists])
    assert not isinstance(values, Lists)
    return Lists(_joined_offsets([part.offsets for part in lists]), values)


def _joined_offsets(parts: Sequence[Offsets]) -> Offsets:
    starts = np.cumsum([0, *(int(part[-1]) for part in parts)])
    moved = [part[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return np.concatenate([np.zeros(1), *moved]).astype(np.int32)
