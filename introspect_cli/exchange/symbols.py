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

from introspect_cli.exchange.incoming import add_biased_variance
from introspect_cli.records import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = {
    "float32": "fp32",
    "float64": "fp64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b",
    "complex64": "c64",
    "complex128": "c128",
    "qint8": "qi8",
    "quint8": "qui8",
    "qint32": "qi32",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "float8_e8m0fnu": "fp8_e8m0fnu",
}
"""Our name of each dtype and theirs."""

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
_DTYPE_NAMES = {short: name for name, short in DTYPES.items()}
_BY_SYMBOL = {symbol: name for name, symbol in SYMBOLS.items()}
_VALUE = re.compile(r"([-+]?(?:nan|inf|\d+(?:\.\d*)?(?:e[-+]?\d+)?))(\D.*)")
_BOTH = re.compile(r"(\d+)∞̟(\d+)∞̠")
_SHAPE = re.compile(r"\d+(?:×\d+)*")
_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")


def number(value: float) -> str:
    """A value as text in nine significant digits, enough to tell any two float32 apart."""
    return f"{value:.9g}"


def write_tensor(layout: Layout, stats: Mapping[str, float], digest: str) -> str:
    """A tensor in one line: shape, dtype, statistics with symbols, hash; a scalar with a `mean` is that value alone."""
    if not layout.shape and "mean" in stats:
        value = stats["mean"]
        whole = layout.dtype.startswith(("int", "uint")) and math.isfinite(value)
        return str(int(value)) if whole else number(value)
    parts = ["×".join(map(str, layout.shape)), DTYPES.get(layout.dtype, layout.dtype)]
    parts += [
        f"{int(stats[name]) if name in _COUNTS else number(stats[name])}{symbol}"
        for name, symbol in SYMBOLS.items()
        if name in stats
    ]
    return "|".join([*parts, digest])


def read_tensor(text: str) -> tuple[Layout, dict[str, float], str] | None:
    """Layout, statistics by name, and the report's own hash ("" without one) of a tensor's line in a YAML report.

    Such a line has parts joined by `|`: shape, dtype, statistics with their symbols. None for any other text, also for
    a bare value, as reports write a tensor without dimensions. A missing dtype is `unknown`. Where the variance is
    missing, `add_biased_variance` computes it from the unbiased one, or from `std`, which is that of n - 1.
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
        elif part in _DTYPE_NAMES:
            dtype = _DTYPE_NAMES[part]
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
    add_biased_variance(stats, layout.numel)
    return layout, stats, digest
