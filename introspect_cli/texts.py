"""Texts for people: made harmless, cut short, counted.

Names and values in a store come from somebody's script, or from somebody: a parameter may hold an escape code that
repaints the terminal, a right-to-left mark turns a line around.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LEVEL = re.compile(r"[.\[]")
_DEEPEST = 64


def clean(text: str, limit: int = 0) -> str:
    """The text on one line: control, format, surrogate, private and combining characters as escapes.

    So are line ends, tabs and every space but " ".

    Args:
        text: any text.
        limit: the most characters after that, `...` at the end included; 0 for any number.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(char if _visible(char) else char.encode("unicode_escape").decode() for char in text)
    return text if not limit or len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def bounded(text: str, limit: int) -> str:
    """Text cleaned; of one over `limit` characters the first `limit`, and then its length and CRC-32."""
    if len(text) > limit:
        text = f"{text[:limit]}...({len(text)} characters, {_crc32(text)})"
    return clean(text)


def shallow(path: str) -> str:
    """A path with at most 64 `.` and `[` as it is; of a deeper one what is before the 65th, then `['...CRC-32']`."""
    for level, match in enumerate(_LEVEL.finditer(path)):
        if level == _DEEPEST:
            return f"{path[: match.start()]}['...{_crc32(path)}']"
    return path


def _crc32(text: str) -> str:
    """CRC-32 of a text, 8 hex digits."""
    return f"{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"


def _visible(char: str) -> bool:
    """Whether a character is printable: no control, format or combining character, no space but " "."""
    category = unicodedata.category(char)
    if category == "Zs":
        return char == " "
    return category[0] not in "CZ" and not unicodedata.combining(char)


def count(number_of: int, word: str, plural: str = "") -> str:
    """`1 step`, `2,000 steps`; the plural is `word + "s"` unless given."""
    return f"{number_of:,} {word if number_of == 1 else plural or word + 's'}"


def human_size(number: float) -> str:
    """Bytes as `999 B`, `1.5 kB`, `20.0 MB`, `200 MB`; units of 1000, up to TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def begin_alike(one: Sequence[object], two: Sequence[object]) -> int:
    """Number of equal items at the beginning of two sequences or texts, up to the first that differs."""
    return next((at for at, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))


# --- ranks

_SHOWN = 8


def group_label(ranks: list[int]) -> str:
    """Name of a group of ranks, given rising: `ranks 0-3`, with a constant stride `ranks 0-4094/2`, else `ranks 0,2,5`.

    Without stride (and of two) the first 8 are listed; of more the number follows: `ranks 0,1,3,4,6,7,9,12,... (12)`.
    One is `rank 3`, none `no ranks`.
    """
    if not ranks:
        return "no ranks"
    steps = {two - one for one, two in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and min(steps) > 0:
        stride = min(steps)
        return f"ranks {ranks[0]}-{ranks[-1]}{f'/{stride}' if stride > 1 else ''}"
    shown = ",".join(map(str, ranks[:_SHOWN]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f",... ({len(ranks)})" if len(ranks) > _SHOWN else "")


def rank_list(ranks: list[int]) -> str:
    """Ranks by number, `rank 3`, `ranks 1, 2`: the first 8 as given, then `, ...` if there are more."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def gpu_names(gpus: Sequence[Mapping[str, Any]]) -> str:
    """The GPUs that a run's settings list, as words: `2 x NVIDIA H100 80GB HBM3`.

    Names are in the order in which they first occur, with `GPU` for one without a name; "" without GPUs.
    """
    counts = Counter(str(gpu.get("name", "GPU")) for gpu in gpus)
    return ", ".join(name if number == 1 else f"{number} x {name}" for name, number in counts.items())
