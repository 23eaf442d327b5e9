"""The module tree of one run, with what each module gave at the first recorded step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.inspect.nested import ValueRow, nested_values, stretches
from introspect_cli.inspect.overview import parameter_sizes, reader_of
from introspect_cli.records import Kind, ModuleInfo, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ModuleRow:
    """One module of the tree.

    Attributes:
        info: name, class, where it is defined.
        parameters: elements of its parameters, those inside it included.
        shape: shape of its first output at the first recorded step; None where none was recorded.
        dtype: dtype of that output.
        scale: standard deviation of that output; None where not recorded.
        calls: how often it ran in that step.
        folded: how many equal neighbours this row stands for beside itself.
        values: what was nested among its inputs and outputs.
    """

    info: ModuleInfo
    parameters: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scale: float | None = None
    calls: int = 0
    folded: int = 0
    values: tuple[ValueRow, ...] = ()


def module_tree(run: Any, *, fold: bool = True, rank: int | None = None, depth: int | None = None) -> list[ModuleRow]:
    """The module tree; of runs of equal numbered neighbours only the first and the last, unless told otherwise."""
    reader = reader_of(run, rank)
    sizes = parameter_sizes(reader)
    outputs = _outputs(reader)
    values = nested_values(reader, dict(run.settings))
    rows = []
    for info in reader.modules:
        prefix = info.fqn + "."
        inside = sum(size for name, size in sizes.items() if name.startswith(prefix))
        shape, dtype, scale, calls = outputs.get(info.fqn, (None, "", None, 0))
        rows.append(ModuleRow(info, inside, shape, dtype, scale, calls, values=values.get(info.fqn, ())))
    if fold:
        rows = _folded(rows)
    return rows if depth is None else [_cut(row, depth) for row in rows if row.info.fqn.count(".") <= depth]


def _cut(row: ModuleRow, depth: int) -> ModuleRow:
    """A row without the nested values that lie deeper than is wanted."""
    left = depth - row.info.fqn.count(".")
    return replace(row, values=tuple(value for value in row.values if value.depth <= left))


def _outputs(reader: Any) -> dict[str, tuple[tuple[int, ...] | None, str, float | None, int]]:
    """First output of each module at the first step: shape, dtype, scale, number of calls."""
    outputs: dict[str, tuple[tuple[int, ...] | None, str, float | None, int]] = {}
    if not len(reader):
        return outputs
    batch, sites = reader.read_row(0), reader.sites
    calls: dict[str, set[int]] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        if sites.kind[number] != Kind.OUTPUT.value or sites.phase[number] == Phase.RECOMPUTE.value:
            continue
        name = sites.fqn[number]
        calls.setdefault(name, set()).add(int(sites.call[number]))
        if name not in outputs:
            layout = reader.layouts[int(batch.layout[row])]
            var = batch.floats.get("var")
            scale = float(np.sqrt(var[row])) if var is not None and np.isfinite(var[row]) else None
            outputs[name] = (tuple(layout.shape), layout.dtype, scale, 0)
    return {name: (*value[:3], len(calls[name])) for name, value in outputs.items()}


def _folded(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Rows without the inner ones of runs of numbered siblings that look alike."""
    children: dict[str, list[ModuleRow]] = {}
    for row in rows:
        if row.info.fqn:  # a module without a name would be its own child
            children.setdefault(row.info.fqn.rpartition(".")[0], []).append(row)

    def look(row: ModuleRow) -> tuple[Any, ...]:
        inner = tuple(look(child) for child in children.get(row.info.fqn, []))
        return (row.info.module_class, row.parameters, row.shape, inner)

    hidden: set[str] = set()
    folded: dict[str, int] = {}
    for siblings in children.values():
        numbered = [row.info.fqn.rpartition(".")[2].isdecimal() for row in siblings]
        for start, end in stretches([look(row) for row in siblings], numbered):
            if end - start >= 2:
                hidden.update(row.info.fqn for row in siblings[start + 1 : end])
                folded[siblings[start].info.fqn] = end - start - 1
    out = []
    for row in rows:
        head = row.info.fqn
        while head and head not in hidden:
            head = head.rpartition(".")[0]
        if not head:
            out.append(replace(row, folded=folded.get(row.info.fqn, 0)))
    return out
