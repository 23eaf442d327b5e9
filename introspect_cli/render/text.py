"""Text made harmless and names and numbers made short, for lines of a terminal."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from introspect_cli.records import clean as clean  # noqa: PLC0414 - who draws text finds it here

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from introspect_cli.records import Site, Summary

_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-:=+*#"


def shorten(text: str, width: int) -> str:
    """A name cut at its front, where names differ least, at a dot if there is one near."""
    if len(text) <= width:
        return text
    kept = text[-(width - 1) :] if width > 1 else ""
    dot = kept.find(".")
    return "…" + (kept[dot:] if 0 < dot <= width // 3 else kept)


def number(value: float | None, digits: int = 4) -> str:
    """A number in a few significant digits; whole numbers whole."""
    if value is None:
        return "-"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 10**6):
        return str(int(value))
    return f"{value:.{digits}g}"


def statistic(summary: Summary | None, name: str, digits: int = 4) -> str:
    """A statistic of a record; "" where it has none."""
    return "" if summary is None or name not in summary.stats else number(summary.stats[name], digits)


def two_numbers(a: float, b: float, least: int = 4, most: int = 9) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to tell them apart, `least` to `most`."""
    for digits in range(least, most + 1):
        one, two = number(a, digits), number(b, digits)
        if one != two:
            return one, two
    return number(a, most), number(b, most)


def distance(rel: float | None) -> str:
    """A relative distance in at most seven characters."""
    if rel is None or math.isnan(rel):
        return "-"
    if rel < 1e-7:
        return "<1e-07"
    return f"{rel:.1e}" if rel < 1e-3 or rel >= 1000 else f"{rel:.3g}"


def shape(sizes: Sequence[int]) -> str:
    """`2x3`, or `scalar`."""
    return "x".join(map(str, sizes)) if sizes else "scalar"


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Values as a row of little bars, folded by their mean to the width; `!` where not finite, a blank where absent."""
    marks = _PLAIN_SPARKS if ascii_only else _SPARKS
    fold = max(1, -(-len(values) // max(width, 1)))
    folded: list[float | None] = []
    for start in range(0, len(values), fold):
        part = [value for value in values[start : start + fold] if value is not None]
        if part and any(not math.isfinite(value) for value in part):
            folded.append(math.nan)
        else:
            folded.append(sum(value / len(part) for value in part) / 2 if part else None)  # sums of halves are finite
    finite = [value for value in folded if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    line = ""
    for value in folded:
        if value is None:
            line += " "
        elif math.isnan(value):
            line += "!"
        else:
            line += marks[len(marks) // 2 if span == 0 else min(int((value - low) / span * len(marks)), len(marks) - 1)]
    return line


_BRIEF = {"optimizer_state": "state", "hyperparameter": "hyper"}


def site_text(site: Site) -> str:
    """Kind, path, and the call where it is not the first: `output [0] #2`."""
    path = f" {clean(site.path)}" if site.path else ""
    return f"{site.kind.value}{path}{f' #{site.call}' if site.call else ''}"


def brief_what(site: Site) -> str:
    """The same with shorter words and no quotes: `state exp_avg`."""
    path = re.sub(r"^\['(\w+)'\]$", r"\1", clean(site.path))
    kind = _BRIEF.get(site.kind.value, site.kind.value)
    return f"{kind}{f' {path}' if path else ''}{f' #{site.call}' if site.call else ''}"


def write_whole(path: Path, text: str) -> None:
    """Write a file, or none: what a full disk cut short is removed.

    Raises:
        OSError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if path.is_file():
            path.unlink(missing_ok=True)
        raise
