"""Which steps a capture observes, writes and keeps.

Some steps are known to be unwanted before they begin and cost next to nothing; of others it shows when they are over
(the loss jumped), and those are summarised and then not written; of others again much later (only the last hundred
count, or the disk is to hold two gigabytes), and those are dropped from the store. Rules say which (`schedule`); this
asks them at the right moments, and drops steps in batches, so that each byte is copied about once.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import Kind
from introspect_cli.schedule.rule import ALWAYS, NEVER, Moment, Rule, When
from introspect_cli.schedule.rules import Epochs, Last, OnePerReplica, Ranks, Schedule
from introspect_cli.store.batch import l2_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from introspect_cli.capture.black_box import BlackBox
    from introspect_cli.labels import Labels
    from introspect_cli.store.rank_writer import RankWriter
    from introspect_cli.store.writer import StoreWriter

_HISTORY = 100
_FEW = 5
"""Losses that must be known before anything is said of what is usual."""

_LEAST_DROPPED = 16
_SHARE = 2 / 3
"""How full a store may be before it is thinned, and the half of it that is then left: while the rest is written anew,
old and new are there together."""

_TELLING = [kind.value for kind in (Kind.LOSS, Kind.OUTPUT, Kind.PARAM, Kind.BUFFER)]
"""Where a NaN ends a run that was to go on until one. A gradient scaler meets NaN gradients by design."""


class Records(NamedTuple):
    """The records of a step that has ended, as far as rules look at them.

    Attributes:
        kinds: of each, by value.
        columns: counts and statistics, by name.
        numel: how many elements a record is of, by its number.
    """

    kinds: NDArray[np.str_]
    columns: Mapping[str, NDArray[Any]]
    numel: Callable[[int], int]

    def losses(self) -> list[float]:
        """The losses; one that is not finite has no mean, and is infinite."""
        means = self.columns.get("mean")
        if means is None:
            return []
        rows = np.flatnonzero(self.kinds == Kind.LOSS.value)
        infinite = self._not_finite(rows) > 0
        losses = np.where(infinite, math.inf, means[rows])
        return [loss for loss in losses.tolist() if not math.isnan(loss)]

    def grad_norm(self) -> float | None:
        """The L2 norm over all gradients of parameters together; None where it is not known."""
        rows = np.flatnonzero(self.kinds == Kind.GRAD.value)
        if not len(rows) or "mean" not in self.columns or "var" not in self.columns:
            return None
        numbers = np.array([self.numel(row) for row in rows.tolist()], dtype=np.float64)
        means, variances = self.columns["mean"][rows], self.columns["var"][rows]
        norms = l2_norm(np.nan_to_num(means), np.nan_to_num(variances), numbers)
        return math.inf if self._not_finite(rows).any() else float(np.sqrt((norms * norms).sum()))

    def has_nan(self) -> bool:
        """Whether a loss, an output or a parameter holds a NaN."""
        nans = self.columns.get("nans")
        return nans is not None and bool((nans[np.isin(self.kinds, _TELLING)] > 0).any())

    def is_infinite(self) -> bool:
        """Whether a loss or a parameter holds an infinity; masks and gradients of a scaled loss do by design."""
        rows = np.isin(self.kinds, [Kind.LOSS.value, Kind.PARAM.value])
        return any((self.columns[name][rows] > 0).any() for name in ("posinfs", "neginfs") if name in self.columns)

    def total(self, *names: str) -> float | None:
        """How many elements of all records are of some sorts; None where none of them is counted."""
        kept = [self.columns[name] for name in names if name in self.columns]
        return float(sum(np.maximum(column, 0).sum() for column in kept)) if kept else None

    def _not_finite(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        counts = [self.columns[name][rows] for name in ("nans", "posinfs", "neginfs") if name in self.columns]
        return np.maximum(counts, 0).sum(axis=0) if counts else np.zeros(len(rows), np.int64)


class ConditionValues:
    """What conditions may ask for of a step, given the losses of those before."""

    def __init__(self) -> None:
        """No step has ended."""
        self._losses: deque[float] = deque(maxlen=_HISTORY)

    def __call__(self, records: Records) -> dict[str, float]:
        """By name; what is not known is left out."""
        found = {"nans": records.total("nans"), "infs": records.total("posinfs", "neginfs")}
        losses, usual = records.losses(), [loss for loss in self._losses if math.isfinite(loss)]
        if len(usual) >= _FEW:
            found |= {"median": statistics.median(usual), "mean": statistics.fmean(usual)}
        if self._losses:
            found["previous"] = self._losses[-1]
        if losses:
            self._losses.append(statistics.fmean(losses))
            found["loss"] = self._losses[-1]
        found["grad_norm"] = records.grad_norm()
        return {name: value for name, value in found.items() if value is not None}


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


class Keeping:
    """Asks a rule about each step, and drops steps that have expired or for which there is no room.

    Attributes:
        drops: whether it may ever drop one that was written.
        box: holds whole tensors of the last steps; None where nothing does.
    """

    def __init__(
        self,
        rule: Rule,
        rank: RankWriter,
        store: StoreWriter,
        *,
        max_size: int | None = None,
        until_nan: bool = False,
        why: str = "last",
        number: int = 0,
        note: Callable[[str], None] = lambda _sentence: None,
    ) -> None:
        """Start before the first step.

        Args:
            rule: which steps are kept.
            rank: the writer that drops steps.
            store: the store that drops whole tensors.
            max_size: bytes that the rank may take; None for no limit.
            until_nan: whether to look out for a NaN.
            number: of the rank.
            why: what the store says of steps that have expired, a key of `thinned.OPTIONS`.
            note: is told once what cannot be done.
        """
        self.rule = rule
        self.nan_at: int | None = None
        self.epoch: Callable[[], int | None] = lambda: None
        self.copies: Callable[[], list[int]] = list
        self.box: BlackBox | None = None
        self.epoch_seen = False
        self.dropped = 0
        self._rank = rank
        self._store = store
        self._max_size = max_size
        self._until_nan = until_nan
        self._note = note
        self._why = why
        self._number = number
        self._wanted = False
        self._plain = rule if isinstance(rule, Schedule) else None
        self.drops = max_size is not None or any(isinstance(part, Last) for part in rule.parts)
        self._epochs = any(isinstance(part, Epochs) for part in rule.parts)
        self._conditions = any(isinstance(part, When) for part in rule.parts)
        self._memory: dict[object, int] = {}
        self._values = ConditionValues()
        self._kept: dict[int, Kept] = {}
        self._mortal: list[tuple[int, int]] = []  # a heap of expiries, with their steps
        self._expired: dict[int, None] = {}  # in their order
        self._gave_up = False

    @property
    def undecided(self) -> bool:
        """Whether to ask again when a step begins: its epoch may be known only then."""
        return self._epochs

    @property
    def asks_for_copies(self) -> bool:
        """Whether it is asked which ranks are copies of one another."""
        return any(isinstance(part, OnePerReplica) for part in self.rule.parts)

    @property
    def copy(self) -> bool | None:
        """Whether a lower rank holds the same parts of everything; None where nothing says so."""
        copies = self.copies() if self.asks_for_copies else []
        return self._number != min(copies) if copies else None

    @property
    def left_out(self) -> bool:
        """Whether this rank is to record nothing."""
        if self.copy:
            return True
        ranks = [part for part in self.rule.parts if isinstance(part, Ranks)]
        return bool(ranks) and not self._wanted and not any(own.wants(self._number) for own in ranks)

    @property
    def looks(self) -> bool:
        """Whether the records of a step are looked at when it is over."""
        return self._conditions or self._until_nan or (self.box is not None and self.box.open)

    def wants(self, step: int, *, begins: bool = False) -> bool:
        """Whether a step is to be observed.

        Args:
            step: its number.
            begins: whether it begins now; else the step before has just ended, and an epoch may have, too.
        """
        if self._plain is not None:
            return self._plain.wants(step)
        moment = Moment(step, seconds=time.time(), memory=self._memory, rank=self._number, copy=self.copy)
        if self._epochs and begins:
            epoch = self.epoch()
            self.epoch_seen |= epoch is not None
            moment = replace(moment, epoch=epoch)
        wanted = self.rule.bounds(moment)[1] > step
        self._wanted |= wanted
        return wanted

    def unmatched(self, *, launched: bool) -> list[str]:
        """What to say of options that nothing in the run answered to; `launched` says whether there are other ranks."""
        found = []
        if self.undecided and not self.epoch_seen:
            found.append("--epochs keeps no step: only Lightning, transformers and accelerate count epochs")
        if self.asks_for_copies and launched and not self.copies():
            found.append(
                "--ranks one-per-replica: no wrapper (DDP, FSDP) said which ranks are copies of one another, so all "
                "are recorded (name them, as in --ranks 0,4)"
            )
        return found

    def restart(self) -> None:
        """All steps so far are taken back."""
        self._memory.clear()
        self._values = ConditionValues()
        self._kept.clear()
        self._mortal.clear()
        self._expired.clear()
        self.dropped = 0
        self.nan_at = None
        if self.box is not None:
            self.box.clear()

    def expiry(self, step: int, records: Records | None, labels: Labels) -> int:
        """Until which step one that has ended is kept; `NEVER` where it is not to be written at all.

        Args:
            step: its number.
            records: its records; None where nothing `looks` at them.
            labels: what its framework calls it.
        """
        if self._plain is not None and not self._until_nan:
            return ALWAYS
        epoch = labels.get("epoch")
        values = {"step": float(step)} | self._values(records) if records is not None and self._conditions else {}
        moment = Moment(
            step,
            math.floor(epoch) if isinstance(epoch, (int, float)) else None,
            0.0,
            values,
            self._memory,
            self._number,
            self.copy,
        )
        expiry = self.rule.bounds(moment)[1]
        if records is not None and self._until_nan and self.nan_at is None and records.has_nan():
            self.nan_at, expiry = step, ALWAYS
        return expiry if expiry > step else NEVER

    def written(self, step: int, expiry: int, size: int, tensors: frozenset[int]) -> None:
        """Hear of a step that was written, and drop others if it is time.

        Args:
            step: its number.
            expiry: until which step it is kept.
            size: bytes of its records.
            tensors: checksums of what was stored whole in it.
        """
        if not self.drops:
            return
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
        return kept.tensors if self.box is None else kept.tensors | self.box.stored.get(kept.step, frozenset())

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
