"""Plain values: what is kept of a number, a string or anything else that is no tensor.

A value must compare equal between two runs exactly when a reader would call it the same. Its repr says that, apart from
memory addresses and the order of sets. So what is kept is type name and masked repr, hashed in full, kept for reading
in its first 200 characters.
"""

from __future__ import annotations

import functools
import re
from typing import Final

import numpy as np

from introspect_cli.records import Layout
from introspect_cli.sums import hex_digest
from introspect_cli.tensors import checksum

TEXT_LIMIT: Final = 200
"""Characters of a value's text that are kept."""

_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-fA-F]+")


def plain(value: object) -> object:
    """Convert a numpy scalar to python's; return any other value as it is."""
    return value.item() if issubclass(type(value), np.generic) else value  # type: ignore[attr-defined] # it is one


def masked(text: str) -> str:
    """Text with memory addresses (`at 0x7f...`) replaced by `at 0x...`, since they differ between equal runs."""
    return _ADDRESS.sub("at 0x...", text) if "0x" in text else text


def shortened(text: str) -> str:
    """Text of at most 200 characters: a longer one is cut, its end being `...`."""
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."


def summarised(value: object) -> tuple[Layout, int, str]:
    """Layout, checksum and text of a plain value; two values count as equal if type name and masked repr are equal.

    The checksum is of both in full, the text is the repr cut to 200 characters. Numbers but 0.0 and short texts are
    cached.

    Raises:
        Exception: whatever the value's own `__repr__` raises.
    """
    if type(value) is float:
        return _summarise_cached(value) if value else _summarise(value)
    if type(value) is int or type(value) is bool or (type(value) is str and len(value) <= TEXT_LIMIT):
        return _summarise_cached(value)
    return _summarise(value)


def _summarise(value: object) -> tuple[Layout, int, str]:
    """`summarised` without the cache."""
    dtype, text = describe(value)
    return Layout((), dtype), checksum.text_checksum(f"{dtype} {text}"), shortened(text)


@functools.lru_cache(maxsize=256, typed=True)
def _summarise_cached(value: float | str) -> tuple[Layout, int, str]:
    """`_summarise`, cached for the last 256 values by type and value: the same rates come every step."""
    return _summarise(value)


def describe(value: object) -> tuple[str, str]:
    """Type name (`python.int`, `numpy.float32`, `python.MyClass`) and full repr of a value, which runs are compared by.

    Memory addresses are masked and sets are sorted; a numpy array has a digest of its bytes after its repr.
    """
    cls = type(value)
    owner = "numpy" if cls.__module__.partition(".")[0] == "numpy" else "python"
    unordered = isinstance(value, (set, frozenset))
    text = f"{cls.__name__}({sorted(map(repr, value))})" if unordered else repr(value)  # type: ignore[call-overload]
    text = masked(text)
    if owner == "numpy" and cls.__name__ == "ndarray" and value.dtype.kind != "O":  # type: ignore[attr-defined]
        # the repr of a long array leaves out its middle
        text += f" {hex_digest(value.tobytes())}"  # type: ignore[attr-defined]
    return f"{owner}.{cls.__name__}", text
