"""Labels on disk: what a person says of a run, and what a training framework calls its steps.

The first is a line of text in a file of its own, so that nothing recorded is touched. Of steps, most runs have
none, a run with them has one for each step, and whoever lists the steps of a run wants all of them and no record: so
they are lines of a file, each eight hex digits of CRC-32, a blank and JSON, written before the index entry of its step.
What is torn off at the end does not exist, as everywhere in a store.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import TYPE_CHECKING, Any

from introspect_cli.labels import NAMES, NUMBERED
from introspect_cli.store.files.folders import DamageError

if TYPE_CHECKING:
    from introspect_cli.labels import Label, Labels

LABELS = "labels.jsonl"

LIMIT_LABELS = 64 << 20
"""Bytes of the file."""

_WORD = re.compile(r"[\w.-]{1,40}")
_MOST = 1 << 62


def encode(step: int, labels: Labels) -> bytes:
    """The line of a step."""
    text = json.dumps({"step": step, **labels}, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode(data: bytes, path: str) -> dict[int, dict[str, Label]]:
    """Labels by step; of a step that was written twice, the later."""
    by_step: dict[int, dict[str, Label]] = {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1]):  # after the last line end is nothing, or a line that was torn off
        crc, _, text = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            raise DamageError(path, f"its line {number} was altered")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or type(document.get("step")) is not int:
            raise DamageError(path, f"its line {number} names no step")
        labels = {name: label for name in NAMES if (label := _label(name, document.get(name))) is not None}
        by_step[document["step"]] = labels
    return by_step


def _label(name: str, value: Any) -> Label | None:
    """A label as a capture writes it; None for anything else."""
    if name not in NUMBERED:
        return value if isinstance(value, str) and _WORD.fullmatch(value) else None
    if isinstance(value, list):
        if len(value) != 2 or not all(type(end) is int and abs(end) < _MOST for end in value):
            return None
        return value[0], value[1]
    if type(value) is int:
        return value if abs(value) < _MOST else None
    return value if isinstance(value, float) and math.isfinite(value) else None
