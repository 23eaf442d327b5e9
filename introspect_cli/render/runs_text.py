"""A list of runs as a table, and as a document for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Column, Table, line
from introspect_cli.render.text import clean, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.inspect.runs import RunRow

_STYLES = {"complete": "", "running": "unsure", "interrupted": "bad", "failed": "bad", "damaged": "bad"}


def runs_blocks(rows: Sequence[RunRow], places: Sequence[str]) -> list[Block]:
    """A row a run, the latest first, and a last line that adds them up."""
    if not rows:
        return [line(f"No runs below {', '.join(map(clean, places))}.")]
    labelled = (Column("label", least=8),) if any(row.label for row in rows) else ()
    columns = (
        Column("run", least=16),
        *labelled,
        Column("started (UTC)", drop_at=2),
        Column("steps", right=True),
        Column("size", right=True, drop_at=1),
        Column("ended", least=10),
        Column("ran", least=12, drop_at=3),
    )
    cells = tuple(
        (
            clean(str(row.path)),
            *((clean(row.label, 40),) if labelled else ()),
            f"{row.started:%Y-%m-%d %H:%M}" if row.started else "",
            f"{row.steps:,}",
            size(row.size),
            row.ended + (f": {clean(row.detail, 60)}" if row.detail else ""),
            clean(row.script, 80),
        )
        for row in rows
    )
    total = f"{count(len(rows), 'run')}, {size(sum(row.size for row in rows))}"
    return [Table(columns, cells, tuple(_STYLES[row.ended] for row in rows)), line(), line(total, "dim")]


def runs_document(rows: Sequence[RunRow]) -> dict[str, Any]:
    """The list as plain data; times are ISO 8601 in UTC, sizes bytes."""
    return {
        "format": 1,
        "runs": [
            {
                "path": str(row.path),
                "script": row.script,
                "started": row.started.isoformat() if row.started else None,
                "steps": row.steps,
                "size": row.size,
                "ended": row.ended,
                "detail": row.detail,
                "label": row.label,
            }
            for row in rows
        ],
    }
