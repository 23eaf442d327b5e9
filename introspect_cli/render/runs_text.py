"""A list of runs as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.inspect.runs import DEEPEST, MOST, RunList, RunRow
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Column, line, table_of
from introspect_cli.render.text import clean, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_STYLES = {"complete": "", "running": "unsure", "unreadable": "unsure"}
_NAMED = 3


def runs_blocks(search: RunList, places: Sequence[str]) -> list[Block]:
    """A row a run, the latest first, a line that adds them up, and where was not looked."""
    rows, unseen = search.rows, [line(sentence, "unsure") for sentence in unseen_sentences(search)]
    if not rows:
        return [line(f"No runs {'found ' * bool(unseen)}below {', '.join(map(clean, places))}."), *unseen]
    columns: list[tuple[Column, Callable[[RunRow], str]]] = [
        (Column("run", least=16), lambda row: clean(str(row.path))),
        (Column("label", least=8), lambda row: clean(row.label, 40)),
        (Column("started (UTC)", drop_at=2), lambda row: f"{row.started:%Y-%m-%d %H:%M}" if row.started else ""),
        (Column("steps", right=True), lambda row: f"{row.steps:,}"),
        (Column("size", right=True, drop_at=1), lambda row: size(row.size)),
        (Column("ended", least=10), lambda row: row.ended + (f": {clean(row.detail, 60)}" if row.detail else "")),
        (Column("ran", least=12, drop_at=3), lambda row: clean(row.script, 80)),
        (Column("perturbed"), lambda row: "" if row.perturbed is None else f"--perturb {row.perturbed}"),
    ]
    if all(row.perturbed is None for row in rows):
        del columns[-1]
    if not any(row.label for row in rows):
        del columns[1]
    total = f"{count(len(rows), 'run')}, {size(sum(row.size for row in rows))}"
    table = table_of(rows, columns, lambda row: _STYLES.get(row.ended, "bad"))
    return [table, line(), line(total, "dim"), *unseen]


def unseen_sentences(search: RunList) -> list[str]:
    """Where a search did not look, in sentences; none where it looked everywhere."""
    sentences = []
    if search.unread:
        named = ", ".join(clean(str(path), 200) for path in search.unread[:_NAMED])
        more = f" and {len(search.unread) - _NAMED:,} more" if len(search.unread) > _NAMED else ""
        sentences.append(f"Not searched, for lack of permission or by another error: {named}{more}.")
    if search.deeper:
        sentences.append(f"Not searched, more than {DEEPEST} levels down: {_directories(search.deeper)}.")
    if search.left:
        enough = f"the search ends after {MOST:,}"
        sentences.append(
            f"Not searched, nor what is below: {_directories(search.left)}; {enough}. Name one further down."
        )
    return sentences


def _directories(number: int) -> str:
    return "1 directory" if number == 1 else f"{number:,} directories"
