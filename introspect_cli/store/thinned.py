"""What an index says of steps that were dropped: how many, from where to where, why; and which records are its own."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from introspect_cli.store.arrow import Malformed
from introspect_cli.store.files import RECORDS

if TYPE_CHECKING:
    from collections.abc import Iterable

OPTIONS = {"last": "--last", "max_size": "--max-size", "rule": "--schedule"}
"""What drops steps, and the option that asks for it."""

OLDER_RECORDS = re.compile(r"records-[1-9]\d{0,8}\.arrow")

_MOST = 1 << 62


@dataclass(frozen=True)
class Thinned:
    """Steps that were recorded and are no longer there.

    Attributes:
        why: what dropped them, a key of `OPTIONS`.
        count: how many.
        first: the first of them.
        last: the last of them.
        times: in how many goes.
    """

    why: str
    count: int
    first: int
    last: int
    times: int

    def __str__(self) -> str:
        steps = (
            f"step {self.first}" if self.count == 1 else f"{self.count:,} steps between {self.first} and {self.last}"
        )
        return f"{steps} (recorded, then dropped by {OPTIONS[self.why]})"


def records_name(generation: int) -> str:
    """The file of records that belongs to an index."""
    return RECORDS if not generation else f"records-{generation}.arrow"


def added(thinned: Iterable[Thinned], why: str, steps: list[int]) -> tuple[Thinned, ...]:
    """What is to be said once some more steps, at least one, are dropped."""
    more = Thinned(why, len(steps), min(steps), max(steps), 1)
    found = {own.why: own for own in thinned}
    before = found.get(why)
    if before is not None:
        more = replace(
            more,
            count=before.count + more.count,
            first=min(before.first, more.first),
            last=max(before.last, more.last),
            times=before.times + 1,
        )
    return tuple((found | {why: more}).values())


def described(about: bytes, generation: int, thinned: Iterable[Thinned]) -> bytes:
    """A description of columns with this beside it."""
    told = json.loads(about) | {"generation": generation, "thinned": [list(astuple(own)) for own in thinned]}
    text = json.dumps(told, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def parse(about: bytes) -> tuple[int, tuple[Thinned, ...]]:
    """Which records belong to an index, by number, and what was dropped from them.

    Raises:
        Malformed: it says neither as a capture does.
    """
    if b'"generation"' not in about:
        return 0, ()
    try:
        told = json.loads(about)
        generation, rows = told["generation"], [_thinned(row) for row in told["thinned"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Malformed("what it says of dropped steps cannot be read") from None
    if not _is_number(generation, 1) or generation > 10**9 or len(rows) > len(OPTIONS):
        raise Malformed("what it says of dropped steps cannot be")
    return generation, tuple(rows)


def _thinned(row: Any) -> Thinned:
    why, count, first, last, times = row
    if why not in OPTIONS or not all(_is_number(own, 0) for own in (count, first, last, times)) or first > last:
        raise ValueError(row)
    return Thinned(why, count, first, last, times)


def _is_number(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < _MOST
