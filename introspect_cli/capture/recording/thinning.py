"""Drop steps from a store while it is written: those that have expired, or for which there is no room.

Each time, the rest is written anew; so steps are dropped in batches, and each byte is copied about once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.schedule.rule import ALWAYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.recording.black_box import BlackBox
    from introspect_cli.store.write.rank_writer import RankWriter
    from introspect_cli.store.write.run_writer import StoreWriter

_LEAST_DROPPED = 16
_SHARE = 2 / 3
"""How full a store may be before it is thinned, and the half of it that is then left: while the rest is written anew,
old and new are there together."""


@dataclass
class Kept:
    """A step in the store.

    Attributes:
        step: its number.
        expiry: the step from which on it need not be kept.
        size: bytes of its records.
        tensors: checksums of what was stored whole in it.
    """

    step: int
    expiry: int
    size: int
    tensors: frozenset[int]


class Thinning:
    """Drops steps.

    Attributes:
        dropped: how many.
    """

    def __init__(
        self,
        rank: RankWriter,
        store: StoreWriter,
        note: Callable[[str], None],
        *,
        max_size: int | None,
        why: str,
        box: BlackBox | None,
    ) -> None:
        """Start with no step in the store.

        Args:
            rank: the writer that drops steps.
            store: the store that drops whole tensors.
            note: is told once what cannot be done.
            max_size: bytes that the rank may take; None for no limit.
            why: what the store says of steps that have expired, a key of `thinned.OPTIONS`.
            box: writes whole tensors, too; None where nothing does.
        """
        self.dropped = 0
        self._rank, self._store, self._note, self._box = rank, store, note, box
        self._max_size = max_size
        self._why = why
        self._kept: dict[int, Kept] = {}
        self._mortal: list[tuple[int, int]] = []  # a heap of expiries, with their steps
        self._expired: dict[int, None] = {}  # in their order
        self._gave_up = False

    def restart(self) -> None:
        """All steps so far are taken back."""
        self._kept.clear()
        self._mortal.clear()
        self._expired.clear()
        self.dropped = 0

    def written(self, step: int, expiry: int, size: int, tensors: frozenset[int]) -> None:
        """Hear of a step that was written and how long it is kept, and drop others if it is time."""
        self._kept[step] = Kept(step, expiry, size, tensors)
        if expiry < ALWAYS:
            heapq.heappush(self._mortal, (expiry, step))
        self._expire(step)
        if len(self._expired) >= max(_LEAST_DROPPED, len(self._kept) - len(self._expired)):
            self._drop_expired()
        if self._max_size is not None and self._size() > _SHARE * self._max_size:
            self._drop(self._crowded(), "max_size")

    def finish(self, last: int) -> None:
        """Drop what has expired when the run is over; `last` is its last step."""
        self._expire(last)
        self._drop_expired()

    def _expire(self, step: int) -> None:
        while self._mortal and self._mortal[0][0] <= step:
            self._expired[self._mortal[0][1]] = None
            heapq.heappop(self._mortal)

    def _drop_expired(self) -> None:
        self._drop([self._kept[step] for step in self._expired if step in self._kept], self._why)
        self._expired.clear()

    def _size(self) -> int:
        return self._rank.bytes_written + self._store.tensor_bytes

    def _crowded(self) -> list[Kept]:
        """Steps to drop until half the room is free, every second of the older ones; never the first or the last."""
        assert self._max_size is not None
        spare = self._size() - _SHARE / 2 * self._max_size
        rest, dropped = list(self._kept.values()), []
        while len(rest) > 2 and spare > 0:
            middle = rest[1 : max(len(rest) * 3 // 4, 2)]
            going = [kept for at, kept in enumerate(middle) if at % 2 == 0]
            for kept in going:
                if spare <= 0:
                    break
                dropped.append(kept)
                rest.remove(kept)
                spare -= kept.size
        if len(rest) <= 2 and spare > 0 and self._size() - sum(kept.size for kept in dropped) > self._max_size:
            self._note("two steps and the names take more than --max-size: the run grows beyond it")
        return dropped

    def _tensors_of(self, kept: Kept) -> frozenset[int]:
        """Checksums of what of a step was stored whole."""
        return kept.tensors if self._box is None else kept.tensors | self._box.stored.get(kept.step, frozenset())

    def _drop(self, steps: list[Kept], why: str) -> None:
        latest = next(reversed(self._kept), None)
        gone = [kept for kept in steps if kept.step != latest]
        if not gone or self._gave_up:
            return
        try:
            self._rank.thin([kept.step for kept in gone], why)
        except StoreError as error:
            self._gave_up = True
            self._note(f"{error}; no step is dropped from here on")
            return
        numbers = {kept.step for kept in gone}
        lost = {checksum for kept in gone for checksum in self._tensors_of(kept)}
        if lost:
            staying = [kept for kept in self._kept.values() if kept.step not in numbers]
            self._store.drop_tensors(lost.difference(*map(self._tensors_of, staying)))
        self.dropped += len(numbers)
        for step in numbers:  # last: an exception before leaves them to the next time
            del self._kept[step]
