"""Blocks for a console that somebody else owns: a notebook, an application that prints with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from introspect_cli.render.blocks import Table, table_lines
from introspect_cli.render.console import STYLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from introspect_cli.render.blocks import Block


def rich_lines(blocks: Iterable[Block], width: int) -> Iterator[Text]:
    """The blocks as texts of rich, styled, never markup."""
    for block in blocks:
        for line in table_lines(block, width) if isinstance(block, Table) else (block,):
            text = Text(" " * line.indent)
            for content, style in line.spans:
                text.append(content, STYLES.get(style, ""))
            yield text
