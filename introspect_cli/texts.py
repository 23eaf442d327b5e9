"""Texts for people: made harmless, cut short, counted.

Names and values in a store come from somebody's script, or from somebody: a parameter may hold an escape code that
repaints the terminal, a right-to-left mark turns a line around.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEVEL = re.compile(r"[.\[]")
_DEEPEST = 64


def clean(text: str, limit: int = 0) -> str:
    """The text on one line, without control, format, surrogate or private characters; cut to `limit` if given.

    What is no plain visible character is shown as its escape.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(char if _visible(char) else char.encode("unicode_escape").decode() for char in text)
    return text if not limit or len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def bounded(text: str, limit: int) -> str:
    """The text cleaned, and cut to some `limit` characters; two that differ only beyond still differ."""
    if len(text) > limit:
        text = f"{text[:limit]}...({len(text)} characters, {_mark(text)})"
    return clean(text)


def shallow(path: str) -> str:
    """A value's path with at most 64 levels: nothing that people write is nested deeper, and readers walk it down."""
    for level, match in enumerate(_LEVEL.finditer(path)):
        if level == _DEEPEST:
            return f"{path[: match.start()]}['...{_mark(path)}']"
    return path


def _mark(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"


def _visible(char: str) -> bool:
    category = unicodedata.category(char)
    if category == "Zs":
        return char == " "
    return category[0] not in "CZ" and not unicodedata.combining(char)


def count(number_of: int, word: str, plural: str = "") -> str:
    """`1 step`, `2 steps`."""
    return f"{number_of:,} {word if number_of == 1 else plural or word + 's'}"


def human_size(number: float) -> str:
    """Bytes in units people read."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def begin_alike(one: Sequence[object], two: Sequence[object]) -> int:
    """How many items two sequences, or characters two texts, begin with alike."""
    return next((at for at, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
