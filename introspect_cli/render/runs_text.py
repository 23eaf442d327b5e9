"""A list of runs as a table, and as a document for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.inspect.runs import DEEPEST, MOST
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Column, Table, line
from introspect_cli.render.text import clean, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.inspect.runs import Found

_STYLES = {"complete": "", "running": "unsure", "unreadable": "unsure"}
_NAMED = 3


def runs_blocks(found: Found, places: Sequence[str]) -> list[Block]:
    """A row a run, the latest first, a line that adds them up, and where was not looked."""
    rows, unseen = found.rows, [line(told, "unsure") for told in unseen_told(found)]
    if not rows:
        return [line(f"No runs {'found ' * bool(unseen)}below {', '.join(map(clean, places))}."), *unseen]
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
    return [
        Table(columns, cells, tuple(_STYLES.get(row.ended, "bad") for row in rows)),
        line(),
        line(total, "dim"),
        *unseen,
    ]


def unseen_told(found: Found) -> list[str]:
    """Where a search did not look, in sentences; none where it looked everywhere."""
    told = []
    if found.unread:
        named = ", ".join(clean(str(path), 200) for path in found.unread[:_NAMED])
        more = f" and {len(found.unread) - _NAMED:,} more" if len(found.unread) > _NAMED else ""
        told.append(f"Not searched, for lack of permission or by another error: {named}{more}.")
    if found.deeper:
        told.append(f"Not searched, more than {DEEPEST} levels down: {_directories(found.deeper)}.")
    if found.left:
        enough = f"the search ends after {MOST:,}"
        told.append(f"Not searched, nor what is below: {_directories(found.left)}; {enough}. Name one further down.")
    return told


def _directories(number: int) -> str:
    return "1 directory" if number == 1 else f"{number:,} directories"


def runs_document(found: Found) -> dict[str, Any]:
    """The list as plain data; times are ISO 8601 in UTC, sizes bytes, `not_searched` directories."""
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
            for row in found.rows
        ],
        "not_searched": {
            "unreadable": [str(path) for path in found.unread],
            "too_deep": found.deeper,
            "too_many": found.left,
        },
    }
