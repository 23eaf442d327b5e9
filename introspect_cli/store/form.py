"""A step's batch as a form: the message in memory, in which what is filled in lies where it will be written.

A step must cost the training little, and most steps have as many records as the one before, of the same sites: then
all of the message is right already but for the numbers. So columns of fixed size are arrays within the message, for
whoever computes them to fill; what is put in and has not changed is not encoded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.store.arrow import encode_column, frame
from introspect_cli.store.columns import ColumnData, Texts, sparse_texts, texts
from introspect_cli.store.format import LIMIT_TEXT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.arrow import Column, Piece, Schema


class _Encoded(NamedTuple):
    """A column after the first of variable size.

    Attributes:
        data: what it was made from.
        nodes: rows by node.
        lengths: bytes by buffer.
        pieces: the buffers, each followed by what fills it up to 8 bytes.
    """

    data: ColumnData
    nodes: list[int]
    lengths: list[int]
    pieces: list[bytes | memoryview]


class Form:
    """The message of a batch of so many rows.

    Attributes:
        rows: how many.
        columns: by name, the columns before the first of variable size: arrays within the message.
    """

    def __init__(self, schema: Schema, rows: int) -> None:
        """A message of zeros, and of nothing in columns of variable size."""
        self.rows = rows
        self.columns: dict[str, NDArray[Any]] = {}
        self._frame = frame(schema)
        self._rest: dict[str, tuple[Column, _Encoded | None]] = {}
        self._nodes: list[int] = []
        self._lengths: list[int] = []
        self._framed: tuple[list[int], list[int]] | None = None  # what the header says
        self._names: tuple[int, int] | None = None
        empty: dict[str, NDArray[Any]] = {}
        for column in schema:
            if column.type == "utf8" or column.type.startswith("list<") or self._rest:
                self._rest[column.name] = (column, None)
                continue
            body: list[Piece] = []
            empty[column.name] = none = np.zeros((rows, column.width) if column.width else rows, _kind(column))
            encode_column(column, none, rows, self._nodes, body)
            self._lengths += map(_size, body)
        header = end = len(self._frame.template)
        memory = np.zeros(header + sum(-(-own.nbytes // 8) * 8 for own in empty.values()), np.uint8)
        for name, own in empty.items():
            self.columns[name] = memory[end : end + own.nbytes].view(own.dtype).reshape(own.shape)
            end += -(-own.nbytes // 8) * 8
        self._memory = memory.data
        self._header = self._memory[:header]

    def __contains__(self, name: str) -> bool:
        """Whether there is a column of that name."""
        return name in self.columns or name in self._rest

    def put(self, name: str, data: ColumnData) -> None:
        """Fill in a column.

        Args:
            name: of the column.
            data: as `encode_batch` takes it. `Texts` and `Lists` are not written to afterwards: those that are there
                already are not encoded again.
        """
        if name in self.columns:
            if name in ("site", "layout"):
                self._names = None
            self.columns[name][:] = data
            return
        column, known = self._rest[name]
        if known is not None and known.data is data and not isinstance(data, np.ndarray):
            return
        nodes: list[int] = []
        body: list[Piece] = []
        encode_column(column, data, self.rows, nodes, body)
        lengths = list(map(_size, body))
        pieces: list[bytes | memoryview] = []
        for piece, length in zip(body, lengths, strict=True):
            if length:
                pieces += (piece.data.cast("B") if isinstance(piece, np.ndarray) else piece, bytes(-length % 8))
        self._rest[name] = (column, _Encoded(data, nodes, lengths, pieces))

    def names(self) -> tuple[int, int]:
        """The largest number of a site and of a layout that are in it; -1 where there are no rows."""
        if self._names is None:
            site, layout = self.columns["site"], self.columns["layout"]
            self._names = (int(site.max()), int(layout.max())) if self.rows else (-1, -1)
        return self._names

    def message(self) -> bytes:
        """The message as it is filled in; every column must have been.

        Returns:
            What `encode_batch` gives for the same columns.
        """
        nodes, lengths = self._nodes.copy(), self._lengths.copy()
        pieces: list[bytes | memoryview] = [self._memory]
        for column, own in self._rest.values():
            if own is None:
                raise ValueError(f"the column {column.name} was not filled in")
            nodes += own.nodes
            lengths += own.lengths
            pieces += own.pieces
        if self._framed != (nodes, lengths):
            self._framed = None
            self._header[:] = self._frame.filled(self.rows, nodes, lengths)[0]
            self._framed = (nodes, lengths)
        return b"".join(pieces)


def _kind(column: Column) -> str:
    return "<f4" if column.type == "vector" else column.type


def _size(piece: Piece) -> int:
    return piece.nbytes if isinstance(piece, np.ndarray) else len(piece)


def short_texts(values: Sequence[str], rows: int) -> Texts:
    """A column of texts, cut where they are longer than a store holds; `values` may be empty where all texts are."""
    if isinstance(values, Texts) and (not values.data or int(np.diff(values.offsets).max()) <= LIMIT_TEXT):
        return values  # no text has more characters than bytes
    if not values or not any(values):
        return sparse_texts(rows, {})
    return texts([value and value[:LIMIT_TEXT] for value in values])
