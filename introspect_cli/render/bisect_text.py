"""What a bisection found, as blocks for the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.render.blocks import Block, Column, Table, line
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.render.text import clean

if TYPE_CHECKING:
    from introspect_cli.rerun.bisect import Culprit
    from introspect_cli.rerun.minimise import Difference, Smallest


def culprit_blocks(culprit: Culprit) -> list[Block]:
    """The first bad commit, what it changed, and what parts because of it."""
    tried = len(culprit.tried)
    if culprit.commit is None:
        blocks: list[Block] = [line("Could not tell: only commits that cannot be captured are left.", "bold")]
        blocks += [line(f"could be {commit[:10]}", indent=2) for commit in culprit.candidates]
        return [*blocks, line(f"{tried} commits tried; their runs are in {clean(str(culprit.directory))}", "dim")]
    blocks = [line(f"The first bad commit is {culprit.commit[:10]}: {clean(culprit.subject)}", "bold")]
    blocks += [line(clean(name), indent=2) for name in culprit.files]
    blocks.append(line())
    if culprit.result is not None:
        blocks += diff_blocks(culprit.result)
        blocks.append(line())
    return [*blocks, line(f"{tried} commits tried; their runs are in {clean(str(culprit.directory))}", "dim")]


def smallest_blocks(smallest: Smallest) -> list[Block]:
    """The smallest set of settings, and what parts because of it."""
    blocks: list[Block] = [line(f"{smallest.sentence[:1].upper()}{smallest.sentence[1:]}.", "bold")]
    if smallest.settings:
        columns = (Column("setting"), Column("where"), Column("a", least=8), Column("b", least=8))
        blocks.append(Table(columns, tuple(_row(item) for item in smallest.settings)))
    if smallest.unknown:
        names = ", ".join(map(clean, smallest.unknown))
        blocks.append(line(f"Not tried, since their values are redacted: {names}"))
    if smallest.verified and smallest.result is not None:
        blocks += [line(), *diff_blocks(smallest.result)]
    return [*blocks, line(f"{smallest.runs} captures", "dim")]


def _row(item: Difference) -> tuple[str, ...]:
    shown = ["-" if value is None else clean(str(value), 60) for value in (item.a, item.b)]
    return (clean(item.name), item.axis, *shown)
