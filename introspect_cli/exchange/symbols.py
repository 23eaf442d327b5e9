# ruff: noqa: RUF001 - the symbols are the format's own
"""A tensor in one line: its statistics with their symbols, as YAML introspection reports write it.

The parts come in one order and are joined by `|`: shape, dtype, infinities, NaN, zeros, median, mean, mean of absolute
values, standard deviation, variances, skewness, kurtosis, mode, minimum, maximum, hash. A part that was not asked for
is left out; a tensor without dimensions is its value.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from introspect_cli.records import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPE_WORDS = {
    "float": "fp",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "bool": "b",
    "complex": "c",
    "qint": "qi",
    "quint": "qui",
}
"""What stands for the word that a dtype's name begins with; what follows (`32`, `8_e4m3fn`) stays as it is."""

SYMBOLS = {
    "posinfs": "∞̟",
    "neginfs": "∞̠",
    "nans": "⚠",
    "zeros": "⌀",
    "med": "m̃",
    "mean": "μ",
    "amean": "μ⁺",
    "std": "σ",
    "var": "σ²",
    "uvar": "s²",
    "skew": "γ₁",
    "kurt": "γ₂",
    "mode": "Mo",
    "min": "↤",
    "max": "↦",
}
"""Statistics in the order in which they are written, and what stands behind each value."""

_COUNTS = frozenset({"posinfs", "neginfs", "nans", "zeros"})
_DTYPE_NAMES = {short: word for word, short in _DTYPE_WORDS.items()}
_DTYPE = re.compile(r"([a-z]+)(\d.*)?")
_BY_SYMBOL = {symbol: name for name, symbol in SYMBOLS.items()}
_VALUE = re.compile(r"([-+]?(?:nan|inf|\d+(?:\.\d*)?(?:e[-+]?\d+)?))(\D.*)")
_BOTH = re.compile(r"(\d+)∞̟(\d+)∞̠")
_SHAPE = re.compile(r"\d+(?:×\d+)*")
_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")


def _renamed_dtype(name: str, words: Mapping[str, str]) -> str:
    """A dtype's name with its first word replaced as `words` says; "" where that has none for it."""
    match = _DTYPE.fullmatch(name)
    return f"{words[match[1]]}{match[2] or ''}" if match is not None and match[1] in words else ""


def write_tensor(layout: Layout, stats: Mapping[str, float], digest: str) -> str:
    """A tensor in one line: shape, dtype, statistics with symbols, hash; a scalar with a `mean` is that value alone.

    Nine significant digits are enough to tell any two float32 apart.
    """
    if not layout.shape and "mean" in stats:
        value = stats["mean"]
        whole = layout.dtype.startswith(("int", "uint")) and math.isfinite(value)
        return str(int(value)) if whole else f"{value:.9g}"
    parts = ["×".join(map(str, layout.shape)), _renamed_dtype(layout.dtype, _DTYPE_WORDS) or layout.dtype]
    parts += [
        f"{int(stats[name]) if name in _COUNTS else format(stats[name], '.9g')}{symbol}"
        for name, symbol in SYMBOLS.items()
        if name in stats
    ]
    return "|".join([*parts, digest])


def read_tensor(text: str) -> tuple[Layout, dict[str, float], str] | None:
    """Layout, statistics by name, and the report's own hash ("" without one) of a tensor's line in a YAML report.

    Such a line has parts joined by `|`: shape, dtype, statistics with their symbols. None for any other text, also for
    a bare value, as reports write a tensor without dimensions. A missing dtype is `unknown`. Where the variance is
    missing, it follows from the unbiased one, or from `std`, which is that of n - 1.
    """
    parts = text.split("|")
    if len(parts) < 2:
        return None
    shape: tuple[int, ...] | None = None
    dtype, digest = "", ""
    stats: dict[str, float] = {}
    for place, part in enumerate(parts):
        both = _BOTH.fullmatch(part)
        if place == 0 and (part == "" or _SHAPE.fullmatch(part)):
            shape = tuple(int(size) for size in part.split("×")) if part else ()
        elif name := _renamed_dtype(part, _DTYPE_NAMES):
            dtype = name
        elif both:
            stats |= {"posinfs": int(both[1]), "neginfs": int(both[2])}
        elif (match := _VALUE.fullmatch(part)) and match[2] in _BY_SYMBOL:
            name = _BY_SYMBOL[match[2]]
            stats[name] = int(float(match[1])) if name in _COUNTS else float(match[1])
        elif place == len(parts) - 1 and _HASH.fullmatch(part):
            digest = part
        elif place == 1 and re.fullmatch(r"[a-z0-9_.]{1,32}", part):
            dtype = part  # a dtype that the format has no short name for
        else:
            return None
    if not stats and not digest and not dtype:
        return None
    layout = Layout(shape or (), dtype or "unknown", "", "")
    unbiased = stats["uvar"] if "uvar" in stats else stats["std"] ** 2 if "std" in stats else None
    if "var" not in stats and unbiased is not None and layout.numel:
        stats["var"] = unbiased * (layout.numel - 1) / layout.numel
    return layout, stats, digest
