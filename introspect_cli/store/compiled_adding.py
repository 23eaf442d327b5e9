"""What `adding` adds up with numpy, by the compiled functions: the same numbers in one pass over all columns.

Numpy goes over the records of all ranks some twenty times, and each time they come from memory. Columns of a step that
is read into the memory of the one before are where those were, so their addresses are asked for once.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from introspect_cli.records import SKETCH_SIZE
from introspect_cli.store.alike import Added
from introspect_cli.store.compiled import address
from introspect_cli.store.side_by_side import side_by_side
from introspect_cli.sums import mix

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from introspect_cli.store.alike import Alike
    from introspect_cli.store.batch import StepBatch

    Array = NDArray[Any]

_COUNTS: Final = ("nans", "posinfs", "neginfs", "zeros")
_EXTREMA: Final = ("min", "max", "absmin")
_MEANS: Final = ("mean", "amean", "var")
_FLOATS: Final = (*_EXTREMA, *_MEANS)
_COLUMNS: Final = ("checksum", "sketch", *_COUNTS, *_FLOATS)
"""In the order of the columns of `adding.h`."""

_NONFINITE = slice(2, 5)
"""Which of them count elements that are not finite."""

_ROWS = 128
"""Rows that a thread adds up at a time."""


class CompiledAdding:
    """Adds up some rows of each rank."""

    def __init__(self, extension: ModuleType, alike: Sequence[Alike], head: Array) -> None:
        """Take what is added to which sum.

        Args:
            extension: the compiled functions.
            alike: ranks and their rows.
            head: uint64, what the checksum of each sum's whole has beside its elements.
        """
        self._extension, self._alike, self._size = extension, alike, len(head)
        self._head = head.copy()
        for own in alike:
            self._head[own.to] -= own.heads.sum(axis=0, dtype=np.uint64)
        self._seen: list[tuple[Any, ...]] = []
        self._names: set[str] | None = None
        self._kept: list[Any] = []
        self._work: list[tuple[int, int]] = []

    def add(self, batches: Sequence[StepBatch], names: set[str]) -> Added | None:
        """The sums of columns that all ranks have; None where they are not as the compiled functions want them.

        Args:
            batches: of the ranks.
            names: of statistics that all ranks have.
        """
        seen = [(own.checksum, own.sketch, own.counts, own.floats) for own in batches]
        if not _same(seen, self._seen):
            self._seen, self._names = seen, self._found(batches, names)
        if self._names is None:
            return None
        out: dict[str, Array] = {name: _empty(name, self._size) for name in _COLUMNS if name in self._names}
        known = np.ones((len(_COUNTS), self._size), np.bool_)
        total = np.zeros(self._size)
        sums = [address(out[name]) if name in out else 0 for name in _COLUMNS]
        words = np.array([*sums, address(known), self._size, address(total), 0], np.uint64)
        with np.errstate(all="ignore"):
            self._each(self._extension.add, words)
            for name in filter(out.__contains__, _MEANS):
                if name == "var":  # it follows from the mean
                    words[-1] = address(out["mean"])
                    if known.all() and not any(out[own].any() for own in _COLUMNS[_NONFINITE] if own in out):
                        words[_NONFINITE] = 0  # so that they are not read once more
                    self._each(self._extension.spread, words)
                out[name] = np.divide(out[name], total, out=np.full(self._size, np.nan), where=total > 0)
        counts: dict[str, Array] = {name: out[name] for name in _COUNTS if name in out}
        for name, counted in zip(_COUNTS, known, strict=True):
            if name in counts:
                counts[name][~counted] = -1
        floats: dict[str, Array] = {name: out[name] for name in _FLOATS if name in out}
        return Added(mix(out["checksum"] + self._head), out.get("sketch"), counts, floats)

    def _each(self, function: Any, words: Array) -> None:
        """Let threads share the rows; ranks that are not alike may have rows for one sum, so they take turns."""
        sums = address(words)
        for at, count in self._work:
            pieces = range(0, count, _ROWS)
            side_by_side([partial(function, at, sums, first, min(first + _ROWS, count)) for first in pieces])

    def _found(self, batches: Sequence[StepBatch], names: set[str]) -> set[str] | None:
        """Note where the ranks' columns are: the names of those that add up; None where one cannot be read there."""
        wanted = {"checksum", *names}.intersection(_COLUMNS) - ({"var"} if "mean" not in names else set())
        if all(batch.sketch is not None for batch in batches):
            wanted.add("sketch")
        table = np.zeros((len(batches), len(_COLUMNS)), np.uint64)
        for rank, batch in enumerate(batches):
            columns = {"checksum": batch.checksum, "sketch": batch.sketch, **batch.counts, **batch.floats}
            for name in wanted:
                own, like = np.asarray(columns[name]), _empty(name, 0)
                kind = np.float32 if name == "sketch" else like.dtype
                if (
                    own.dtype != kind
                    or own.shape[1:] != like.shape[1:]
                    or not (own.flags.c_contiguous and own.flags.aligned)
                ):
                    return None
                table[rank, _COLUMNS.index(name)] = address(own)
        self._kept, self._work = [], []
        for alike in self._alike:
            rows, first = (None, alike.rows.start) if isinstance(alike.rows, slice) else (_numbers(alike.rows), 0)
            to, taken = _numbers(alike.to), table[list(alike.ranks)]
            at = [0 if rows is None else address(rows), first, *map(address, (to, alike.held, taken))]
            words = np.array([len(alike.ranks), len(to), *at], np.uint64)
            self._kept += [rows, to, taken, words]
            self._work.append((address(words), len(to)))
        return wanted


def _empty(name: str, size: int) -> Array:
    """A column before anything is added to it."""
    if name == "checksum":
        return np.zeros(size, np.uint64)
    if name == "sketch":
        return np.zeros((size, SKETCH_SIZE))
    return np.zeros(size, np.int64) if name in _COUNTS else np.full(size, np.nan if name in _EXTREMA else 0.0)


def _numbers(span: Array | slice) -> Array:
    own = np.arange(span.start, span.stop) if isinstance(span, slice) else span
    return np.ascontiguousarray(own, np.int64)


def _same(one: Sequence[tuple[Any, ...]], two: Sequence[tuple[Any, ...]]) -> bool:
    return len(one) == len(two) and all(map(is_, chain.from_iterable(one), chain.from_iterable(two)))
