"""Documents: what a run says of itself and its settings, and what a training framework calls its steps, in JSON.

A writer meets whatever objects a script left in its settings, and a reader whatever a stranger wrote. Documents are
reduced to plain data before they are written, and read with limits on size and depth, every text cleaned.
"""

from __future__ import annotations

import json
import math
import numbers
import re
import zlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from introspect_cli.labels import NAMES, NUMBERED
from introspect_cli.store.files import DamageError
from introspect_cli.texts import bounded

if TYPE_CHECKING:
    from introspect_cli.labels import Label, Labels


_MAX_DEPTH = 64
_LONGEST = 1 << 15  # characters of a text that a reader gives; a PATH has a tenth
_MAX_DIGITS = 1000  # int() is quadratic, and refuses more than 4300

_WORD = re.compile(r"[\w.-]{1,40}")
_MOST = 1 << 62


def plain(value: object, depth: int = 0) -> Any:
    """`value` as dicts, lists, texts, numbers, booleans and None; of anything else its `str`.

    Keys become texts, tuples lists, sets sorted lists, integers of 3000 bits or more hexadecimal texts, lone surrogates
    a backslash and their number, and whatever is no text or number and lies 62 levels deep or more `...`. Of keys that
    become equal the last wins.

    Args:
        value: any object.
        depth: how many levels it lies below the outermost one.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number).bit_length() < 3 * _MAX_DIGITS else hex(number)
    if isinstance(value, numbers.Real):
        return float(value)
    if depth >= _MAX_DEPTH - 2:
        return "..."
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((plain(item, depth + 1) for item in value), key=repr)
    return plain(str(value))


def dump(value: object) -> bytes:
    """`value`, reduced to plain data (`plain`), as JSON."""
    return json.dumps(plain(value), ensure_ascii=False).encode()


def sealed(value: Mapping[str, Any]) -> bytes:
    """A document with its CRC-32 as the last entry, for what stands in no log."""
    return dump({**value, "crc32": zlib.crc32(dump(value))})


def load(data: bytes, path: str) -> Any:
    """The plain data of a document, its size already bounded by the caller.

    Every text, keys too, is bounded to 32768 characters and cleaned by `texts.bounded`.

    Raises:
        DamageError: it is not JSON, or nested over 64 levels.
    """
    try:
        return _sanitized(json.loads(data))
    except (ValueError, RecursionError):
        raise DamageError(path, "it is not a document of a run") from None


def _sanitized(value: Any, depth: int = 0) -> Any:
    """A document's plain data with every text bounded and cleaned; ValueError over `_MAX_DEPTH` levels."""
    if depth > _MAX_DEPTH:
        raise ValueError(depth)
    if isinstance(value, str):
        return bounded(value, _LONGEST)
    if isinstance(value, dict):
        return {bounded(key, _LONGEST): _sanitized(item, depth + 1) for key, item in value.items()}
    return [_sanitized(item, depth + 1) for item in value] if isinstance(value, list) else value


# --- labels of steps


def encode_labels(labels: Labels) -> bytes:
    """The labels of a step (the framework's names for it, such as epoch and batch) as JSON."""
    return json.dumps(labels, separators=(",", ":")).encode()


def decode_labels(data: bytes, path: str) -> dict[str, Label]:
    """The labels of a step, by name; only those in `NAMES`, in that order.

    A label whose value no capture could have written is left out.

    Args:
        data: JSON.
        path: of the file, for the error.

    Raises:
        DamageError: it is no JSON object.
    """
    document = load(data, path)
    if not isinstance(document, dict):
        raise DamageError(path, "the labels of a step cannot be read")
    return {name: label for name in NAMES if (label := _label(name, document.get(name))) is not None}


def _label(name: str, value: Any) -> Label | None:
    """`value` where a capture could have written it as the label `name`; None for anything else.

    A label in `NUMBERED` is an integer below 2**62, a pair of these (given as a tuple) or a finite float; any other is
    a text of 1 to 40 letters, digits and `_.-`.
    """
    if name not in NUMBERED:
        return value if isinstance(value, str) and _WORD.fullmatch(value) else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    ends = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(type(end) is int and abs(end) < _MOST for end in ends):
        return None
    return (ends[0], ends[1]) if len(ends) == 2 else int(ends[0])
