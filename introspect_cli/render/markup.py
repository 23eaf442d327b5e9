"""What a terminal shows as blocks, as markup: every text is escaped here, control characters shown as escapes."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING

from introspect_cli.render.blocks import Block, Fold, Line, Span, Table
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 4000
_TAGS = {"name": "code", "small": "small"}


def text(value: object, limit: int = _LONGEST) -> str:
    """A value as escaped markup, control characters as visible escapes.

    It is cut to `limit` characters before `<` and `&` are escaped, so that the markup may be longer.
    """
    return escape(clean(str(value), limit))


def html_of(blocks: Iterable[Block]) -> str:
    """Blocks as markup; neighbouring lines that are not wrapped share a `<pre>`."""
    parts = []
    for as_it_is, together in groupby(blocks, lambda block: isinstance(block, Line) and not block.wrap):
        lines = [_block(block) for block in together]
        parts.append(f"<pre>{chr(10).join(lines)}</pre>" if as_it_is else "".join(lines))
    return "".join(parts)


def _block(block: Block) -> str:
    """One block as markup; an unwrapped line is left as text for a `<pre>`, an empty line is ""."""
    if isinstance(block, Line):
        said = "".join(map(_span, block.spans))
        return (
            f"{' ' * block.indent}{said}" if not block.wrap else f'<p class="in{block.indent}">{said}</p>' * bool(said)
        )
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Fold):
        return f"<details><summary>{text(block.title)}</summary>{html_of(block.blocks)}</details>"
    return block.drawing()


def _span(span: Span) -> str:
    """A text as markup in its style; one of style `name` may break after each dot."""
    content, style = span
    tag = _TAGS.get(style, "span")
    said = text(content).replace(".", ".<wbr>") if tag == "code" else text(content)
    return f'<{tag} class="{style}">{said}</{tag}>' if style and said else said


def _table(table: Table) -> str:
    """A table as markup that scrolls sideways; the first cell of a row is its heading.

    Cells are cut at 400 characters.
    """
    titles = "".join(f'<th scope="col">{text(column.title)}</th>' for column in table.columns)
    styles = (*table.styles, *[""] * len(table.rows))
    body = "".join(
        f'<tr class="{style}"><th scope="row">{text(row[0], 400)}</th>'
        f"{''.join(f'<td>{text(cell, 400)}</td>' for cell in row[1:])}</tr>"
        for row, style in zip(table.rows, styles, strict=False)
    )
    caption = text(table.caption or ", ".join(column.title for column in table.columns))
    head = f"<caption>{caption}</caption>" if table.caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>{head}'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def style() -> str:
    """The style sheet, which pages and notebooks share."""
    return (files("introspect_cli.render") / "assets" / "report.css").read_text(encoding="utf-8")


def fragment(markup: str) -> str:
    """Markup for a notebook, with a style sheet that applies to it alone."""
    return f'<div class="introspect"><style>@scope (.introspect) {{\n{style()}}}</style>{markup}</div>'


def card(title: str, big: str, rows: Iterable[tuple[str, str]], more: str = "") -> str:
    """A card as markup; rows without a value are left out. Title, `big`, `more` and rows are put in unescaped."""
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows if value)
    return f'<article class="card"><h3>{title}</h3><div class="big">{big}</div>{more}<dl>{listed}</dl></article>'
