"""The terminal, and the only home of rich: blocks in, bytes out.

Colours only where there is a terminal and `NO_COLOR` does not forbid them; never markup, highlighting or emoji, since
the texts are strangers'; what the terminal's encoding cannot show is replaced, never an error.
"""

from __future__ import annotations

import os
import sys
import textwrap
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from introspect_cli.render.blocks import WIDEST, Block, Line, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterable

STYLES = {
    "bad": "bold color(160)",
    "good": "bold color(28)",
    "unsure": "bold color(166)",
    "heading": "bold",
    "origin": "bold",
    "dim": "dim",
    "name": "color(31)",
    "hot": "color(160)",
}
"""Colours of middling lightness: the named ones are the terminal's own, and yellow and cyan vanish on white."""


class Screen:
    """Standard output, on which blocks are drawn.

    Attributes:
        width: number of columns; `WIDEST` in a pipe.
    """

    def __init__(self) -> None:
        """Look now whether standard output is a terminal, how wide, and what it can show; nothing is written."""
        self._console = Console(
            file=sys.stdout,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
            no_color=True if os.environ.get("NO_COLOR") else None,
        )
        has_edge = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
        self.width = self._console.width if has_edge else WIDEST

    def draw(self, blocks: Iterable[Block]) -> None:
        """Draw the blocks, one below the other."""
        for row in lines_of(blocks, self.width):
            for text in self._texts(row):
                self._console.print(text)

    def _texts(self, line: Line) -> list[Text]:
        """A line, styled and wrapped at blanks to the screen's width, 120 columns at most; longer words are not cut.

        As one piece in a pipe, and where the line is not to be wrapped.
        """
        spans = ((content, STYLES.get(style, "")) for content, style in line.spans)
        text = Text.assemble(" " * line.indent, *spans)
        width, hang = max(min(self.width, 120), 20), line.hang or (line.indent + 2 if line.indent else 0)
        if not line.wrap or len(text) <= width or self.width >= WIDEST:
            return [text]
        wrapper = textwrap.TextWrapper(width - hang, break_long_words=False, break_on_hyphens=False)
        wrapper.drop_whitespace = wrapper.replace_whitespace = False
        pieces = wrapper.wrap(text.plain)
        parts = list(text.divide(list(accumulate(map(len, pieces[:-1])))))
        for place, part in enumerate(parts):
            part.rstrip()
            if place:
                parts[place] = Text(" " * hang) + part[len(part) - len(part.plain.lstrip(" ")) :]
        return parts
