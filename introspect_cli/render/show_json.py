"""One run as plain nested data, for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.render.json import finite, label_document, summary_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.inspect.history import History
    from introspect_cli.inspect.module_tree import ModuleRow
    from introspect_cli.inspect.nested import ValueRow
    from introspect_cli.inspect.overview import Overview
    from introspect_cli.inspect.values import Stored
    from introspect_cli.labels import Labels
    from introspect_cli.records import Record


def overview_document(run: Overview) -> dict[str, Any]:
    """What a run is."""
    return {"format": 1, **dict(vars(run)), "ranks": list(run.ranks)}


def tree_document(rows: Sequence[ModuleRow]) -> dict[str, Any]:
    """The module tree, flat, in order."""
    return {
        "format": 1,
        "modules": [
            {
                "fqn": row.info.fqn,
                "class": row.info.module_class,
                "variable": row.info.variable or None,
                "source": row.info.source,
                "own_parameters": list(row.info.parameters),
                "own_buffers": list(row.info.buffers),
                "aliases": list(row.info.aliases),
                "parameters": row.parameters,
                "output_shape": list(row.shape) if row.shape is not None else None,
                "output_dtype": row.dtype or None,
                "output_std": row.scale,
                "calls": row.calls,
                "folded": row.folded,
                "values": [
                    {
                        "side": _side(row.values, place),
                        "path": value.path,
                        "class": value.value_class or None,
                        "shape": list(value.shape) if value.shape is not None else None,
                        "dtype": value.dtype or None,
                        "std": value.scale,
                        "folded": value.folded,
                    }
                    for place, value in enumerate(row.values)
                ],
            }
            for row in rows
        ],
    }


def _side(values: Sequence[ValueRow], place: int) -> str:
    """`input` or `output`: the outermost line that a value stands under."""
    return next(value.name for value in reversed(values[: place + 1]) if value.depth == 1)


def records_document(records: Sequence[Record], step: int, labels: Labels) -> dict[str, Any]:
    """The records of one step, and what its framework calls it."""
    return {
        "format": 1,
        "step": step,
        "labels": label_document(labels),
        "records": [
            {
                "rank": record.rank,
                "sequence": record.sequence,
                "phase": record.site.phase.value,
                "kind": record.site.kind.value,
                "fqn": record.site.fqn,
                "module_class": record.info.module_class,
                "call": record.site.call,
                "path": record.site.path,
                **(summary_document(record.summary) or {}),
            }
            for record in records
        ],
    }


def history_document(histories: Sequence[History], stat: str) -> dict[str, Any]:
    """Sites over all steps."""
    return {
        "format": 1,
        "stat": stat,
        "histories": [
            {
                "site": own.site,
                "kind": own.kind,
                "steps": list(own.steps),
                "values": [finite(value) for value in own.values],
                "texts": list(own.texts) or None,
            }
            for own in histories
        ],
    }


def values_document(found: Sequence[Stored]) -> dict[str, Any]:
    """Stored tensors, nested lists of numbers; null where one was not stored."""
    return {
        "format": 1,
        "values": [
            {
                "step": own.record.step,
                "fqn": own.record.site.fqn,
                "kind": own.record.site.kind.value,
                "path": own.record.site.path,
                "summary": summary_document(own.record.summary),
                "values": _listed(own.values) if own.values is not None else None,
            }
            for own in found
        ],
    }


def _listed(values: Any) -> Any:
    """An array as nested lists that JSON can hold."""
    if values.dtype.kind == "c":
        return [_listed(values.real), _listed(values.imag)]

    def plain(value: Any) -> Any:
        return [plain(own) for own in value] if isinstance(value, list) else finite(value)

    return plain(values.tolist())
