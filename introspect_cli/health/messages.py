"""Messages between two ranks held against one another: a send without its recv, or one that takes something else.

Messages of a pair arrive in the order in which they were sent, so the n-th send belongs to the n-th recv. Ranks may end
their steps before or after a message, and a schedule may send one ahead; but how far one is ahead of the other at the
end of a step does not change in a sound run.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

_TOLD = re.compile(r"(send to|recv from) rank (\d+) of (\w+) (\[[\d, ]*\])")


@dataclass
class _Pair:
    """What one rank sends to another.

    Attributes:
        waiting: sends and recvs that have no partner yet, each with what it carries and where it is.
        ahead: by how many messages the sender was ahead at the end of the first step.
        lost: the step since which that is another number, with the sentence.
        unlike: the first message that is sent as one thing and received as another.
    """

    waiting: tuple[deque[tuple[str, str]], deque[tuple[str, str]]] = field(default_factory=lambda: (deque(), deque()))
    ahead: int | None = None
    lost: tuple[int, str] | None = None
    unlike: tuple[int, str] | None = None


class MessageWalk:
    """Takes in steps, one after the other."""

    def __init__(self, readers: Sequence[RankReader]) -> None:
        """Start with the ranks' own readers."""
        self._readers = list(readers)
        self._of = [
            {number for number, kind in enumerate(own.sites.kind) if _is_message(kind, own.sites.fqn[number])}
            for own in readers
        ]
        self._pairs: dict[tuple[str, int, int], _Pair] = {}
        self._last: int | None = None
        self._whole = True

    def step(self, step: int, batches: Sequence[StepBatch]) -> None:
        """Take in a step of all ranks; what is between steps that were left out is not known."""
        self._whole &= self._last is None or step == self._last + 1
        self._last = step
        if not self._whole or not any(self._of):
            return
        counts: dict[tuple[str, int, int], list[int]] = {}
        ends: dict[tuple[str, int, int], list[str]] = {}
        ranks = {reader.rank for reader in self._readers}
        for at, (reader, batch) in enumerate(zip(self._readers, batches, strict=True)):
            numbers = np.asarray(batch.site)
            rows = np.flatnonzero(np.isin(numbers, list(self._of[at])))
            for row in rows[np.argsort(np.asarray(batch.sequence)[rows], kind="stable")].tolist():
                found = _TOLD.match(batch.text[row].strip("'\""))
                if found is None or int(found[2]) not in ranks:
                    continue
                takes = found[1] != "send to"
                ends_of = (int(found[2]), reader.rank) if takes else (reader.rank, int(found[2]))
                site = int(numbers[row])
                key = (reader.sites.fqn[site], *ends_of)
                where = f"{found[0]} at {reader.sites.source[site]}"
                self._pairs.setdefault(key, _Pair()).waiting[takes].append((f"{found[3]} {found[4]}", where))
                counts.setdefault(key, [0, 0])[takes] += 1
                ends.setdefault(key, ["", ""])[takes] = where
        for key, pair in self._pairs.items():
            self._match(step, key, pair, counts.get(key, [0, 0]), ends.get(key, ["", ""]))

    def _match(
        self, step: int, key: tuple[str, int, int], pair: _Pair, counts: Sequence[int], ends: Sequence[str]
    ) -> None:
        sent, got = pair.waiting
        while sent and got:
            (one, from_), (two, to) = sent.popleft(), got.popleft()
            if pair.unlike is None and pair.lost is None and _size(one) != _size(two):
                told = f"{from_} on rank {key[1]} meets {to} on rank {key[2]} in step {step}: another dtype or size"
                pair.unlike = step, told
        ahead = len(sent) - len(got)
        if pair.ahead is None:
            pair.ahead = ahead
        if ahead == pair.ahead:
            pair.lost = None
        elif pair.lost is None:
            more = ahead < pair.ahead
            told = (
                f"in step {step} rank {key[1]} sends {count(counts[0], 'message')} to rank {key[2]}, which receives "
                f"{counts[1]}: {ends[more] or ends[not more]} has no partner"
            )
            pair.lost = step, told

    def found(self) -> dict[str, tuple[int, int, str]]:
        """Step, rank and sentence of what is wrong, by the names of the messages."""
        out = {}
        for (name, sender, to), pair in self._pairs.items():
            hits = [hit for hit in (pair.unlike, pair.lost) if hit is not None]
            if hits:
                step, told = min(hits)
                out[f"{name}, {sender} to {to}"] = step, to, told
        return out


def _is_message(kind: str, fqn: str) -> bool:
    return kind == Kind.COLLECTIVE.value and fqn.startswith("messages of")


def _size(carried: str) -> tuple[str, int]:
    """Its dtype and how many elements it has."""
    dtype, _, shape = carried.partition(" ")
    return dtype, math.prod(int(size) for size in re.findall(r"\d+", shape))
