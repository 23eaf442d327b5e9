"""What a summarizer has of a step, as a table in the order of its slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from introspect_cli.records import SKETCH_SIZE
from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors.columns import Columns
from introspect_cli.tensors.summarizer import Summarizer


@dataclass(frozen=True)
class Table:
    """Columns by name, of a row for each slot."""

    layouts: list
    layout_index: np.ndarray
    checksum: np.ndarray
    status: np.ndarray
    counts: dict
    floats: dict
    sketch: np.ndarray | None
    texts: dict

    def __len__(self):
        return len(self.layout_index)

    @property
    def text(self):
        return [self.texts.get(row, "") for row in range(len(self))]


def arrays_of(count, names, *, with_sketch):
    """Arrays for so many records."""
    arrays = {"status": np.full(count, 9, "u1"), "checksum": np.full(count, 9, "<u8")}
    arrays |= {name: np.full(count, 9, STATISTICS[name].type) for name in names}
    return arrays | ({"sketch": np.full((count, SKETCH_SIZE), 9, "<f4")} if with_sketch else {})


def taken(summarizer):
    """The table of all slots of the current step, waited for; the next begins."""
    names = [
        name
        for name, kept in STATISTICS.items()
        if (name in summarizer._sorted_stats if kept.on_request else summarizer._flags & k.STATS)
    ]
    count = len(summarizer._layout_of)
    arrays = arrays_of(count, names, with_sketch=bool(summarizer._flags & k.SKETCH))
    columns = Columns(arrays)
    summarizer.end_step((columns, list(range(count)))).finish()
    of = {kind: {name: arrays[name] for name in names if arrays[name].dtype.kind == kind} for kind in "if"}
    return Table(
        list(summarizer.layouts), columns.layout, arrays["checksum"], arrays["status"], of["i"], of["f"],
        arrays.get("sketch"), columns.texts,
    )  # fmt: skip


def checksum(tensor):
    """The checksum that a summary of a tensor has."""
    summarizer = Summarizer()
    try:
        slot = summarizer.add(tensor)
        return int(taken(summarizer).checksum[slot])
    finally:
        summarizer.close()
