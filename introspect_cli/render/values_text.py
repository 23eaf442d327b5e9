"""Stored values as text: a tensor's, or two tensors' side by side with the elements that differ marked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.elements import differing, elements
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Column, Line, Table, line
from introspect_cli.render.text import clean, number, shape, site_text, two_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.compare.elements import Elements
    from introspect_cli.compare.result import Divergence
    from introspect_cli.inspect.values import Stored

_MOST_ROWS = 8


def values_blocks(found: Sequence[Stored], width: int) -> list[Block]:
    """The tensors of some records, large ones with their middle left out."""
    blocks: list[Block] = []
    for own in found:
        record = own.record
        layout = record.summary.layout
        title = f"step {record.step}: {site_text(record.site)} of {clean(record.site.fqn)} ({record.site.phase.value})"
        blocks.append(Line(((title, "heading"), (f"  {shape(layout.shape)} {layout.dtype}", "dim"))))
        if own.values is None:
            blocks.append(line(clean(record.summary.text, 400) or "not stored whole", "", 2))
            continue
        blocks += [line(text, "", 2, wrap=False) for text in _array(own.values, width)]
    return blocks


def _array(values: NDArray[Any], width: int) -> list[str]:
    text = np.array2string(
        values, max_line_width=max(min(width, 120) - 2, 20), threshold=200, edgeitems=3, precision=6, separator=" "
    )
    return clean_lines(text)


def clean_lines(text: str) -> list[str]:
    """Lines, each harmless."""
    return [clean(own) for own in text.splitlines()]


def elements_words(found: Elements) -> str:
    """How two whole tensors differ, in a line: how many elements, by how much, where."""
    share = f" ({number(100 * found.differing / found.total, 3)} %)" if found.total else ""
    verb = "differs" if found.differing == 1 else "differ"
    told = f"{found.differing:,} of {count(found.total, 'element')} {verb}{share}"
    if found.largest is not None:
        told += f", max |a-b| {number(found.largest, 3)} at {list(found.where)}"
    if found.first != found.where:
        told += f"; first at {list(found.first)}"
    return told


def side_by_side(divergence: Divergence, a: NDArray[Any] | None, b: NDArray[Any] | None, width: int) -> list[Block]:
    """The values of a divergence in both runs: around the first difference as rows, then the differing elements."""
    site = divergence.site
    title = f"step {divergence.step}: {site_text(site)} of {clean(site.fqn)}, a beside b"
    blocks: list[Block] = [line(), line(title, "heading")]
    if a is None or b is None:
        which = "neither run" if a is None and b is None else "run a" if a is None else "run b"
        verb = "stored" if a is None and b is None else "has not stored"
        blocks.append(line(f"{which} {verb} these values whole: capture both with --save-tensors GLOB.", "unsure", 2))
        return blocks
    found = elements(a, b)
    if found is None:
        blocks.append(line(f"{shape(a.shape)} {a.dtype} against {shape(b.shape)} {b.dtype}: not comparable.", "", 2))
        return blocks
    blocks.append(line(f"{elements_words(found)}.", "", 2))
    if not found.differing:
        return blocks
    blocks += _window(a, b, found, width)
    rows = []
    for index, one, two in found.rows[:_MOST_ROWS]:
        texts = pair_words(one, two)
        apart = abs(one - two)
        rows.append((str(list(index)), *texts, number(apart, 3) if math.isfinite(apart) else "-"))
    columns = (Column("element"), Column("a", right=True), Column("b", right=True), Column("|a-b|", right=True))
    blocks += [line(), Table(columns, tuple(rows))]
    if found.differing > len(rows):
        blocks.append(line(f"{found.differing - len(rows):,} more differ.", "dim"))
    return blocks


def pair_words(one: Any, two: Any) -> tuple[str, str]:
    """Two elements with as many digits as it takes to tell them apart, and about how far.

    2.9003549 and 2.9003551 are 2.90035 and 2.90036 in six digits: told apart, and fifty times too far.
    """
    if isinstance(one, complex):
        return f"{one:.6g}", f"{two:.6g}"
    apart = abs(one - two)
    for digits in range(4, 18):
        texts = two_numbers(one, two, digits, 17)
        shown = abs(float(f"{one:.{digits}g}") - float(f"{two:.{digits}g}"))
        if texts[0] != texts[1] and not abs(shown - apart) > apart / 5:
            break
    return texts


def _window(a: NDArray[Any], b: NDArray[Any], found: Elements, width: int) -> list[Block]:
    """The part of the last dimension around the first difference, a above b, what differs marked with a caret."""
    if not a.shape or a.shape[-1] < 2:
        return []
    room = max(2, min((min(width, 120) - 16) // 13, a.shape[-1], 8))
    at = found.first[-1]
    start = max(0, min(at - room // 2, a.shape[-1] - room))
    head: Any = (*found.first[:-1], slice(start, start + room))
    one, two = a[head], b[head]
    marks = differing(one, two)
    where = ", ".join([*map(str, found.first[:-1]), f"{start}:{start + room}"])
    texts = [pair_words(x.item(), y.item()) for x, y in zip(one, two, strict=True)]
    wide = max(len(text) for pair in texts for text in pair) + 2
    lines: list[Block] = [line(f"[{where}], what differs marked with *", "dim", 2)]
    for place, name in enumerate("ab"):
        spans: list[tuple[str, str]] = [(f"{name}  ", "dim")]
        for pair, mark in zip(texts, marks, strict=True):
            spans.append((f"{pair[place]}{'*' if mark else ' '}".rjust(wide), "hot" if mark else ""))
        lines.append(Line(tuple(spans), 2, wrap=False))
    return lines
