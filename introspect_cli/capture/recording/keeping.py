"""Which steps a capture observes, writes and keeps: one policy, asked before a step, after it, and of the store.

Some steps are known to be unwanted before they begin and cost next to nothing; of others it shows when they are over
(the loss jumped), and those are summarised and then not written; of others again much later (only the last hundred
count, or the disk is to hold two gigabytes), and those are dropped from the store. For that the rest is written anew;
so steps are dropped in batches, and each byte is copied about once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import ALWAYS, NEVER, Schedule
from introspect_cli.selection import ALL_RANKS, ONE_PER_REPLICA
from introspect_cli.store.read.step_reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from introspect_cli.capture.options.capture_options import CaptureOptions
    from introspect_cli.capture.recording.black_box import BlackBox
    from introspect_cli.store.write.rank_writer import RankWriter
    from introspect_cli.store.write.run_writer import StoreWriter

_HISTORY = 100
_FEW = 5
"""Losses that must be known before anything is said of what is usual."""

_TELLING = [kind.value for kind in (Kind.LOSS, Kind.OUTPUT, Kind.PARAM, Kind.BUFFER)]
"""Where a NaN ends a run that was to go on until one. A gradient scaler meets NaN gradients by design."""

_LEAST_DROPPED = 16
_SHARE = 2 / 3
"""How full a store may be before it is thinned, and the half of it that is then left: while the rest is written anew,
old and new are there together."""


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
        losses = np.where(self._not_finite(rows) > 0, math.inf, means[rows])
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

    def values(self, before: deque[float]) -> dict[str, float]:
        """What conditions may ask for, by name, as far as it is known; the loss is added to those `before`."""
        values = {
            name: float(sum(np.maximum(self.columns[column], 0).sum() for column in columns))
            for name, columns in (("nans", ("nans",)), ("infs", ("posinfs", "neginfs")))
            if columns[0] in self.columns
        }
        losses, usual = self.losses(), [loss for loss in before if math.isfinite(loss)]
        if len(usual) >= _FEW:
            values |= {"median": statistics.median(usual), "mean": statistics.fmean(usual)}
        if before:
            values["previous"] = before[-1]
        if losses:
            values["loss"] = statistics.fmean(losses)
            before.append(values["loss"])
        norm = self.grad_norm()
        return values if norm is None else values | {"grad_norm": norm}

    def _not_finite(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        counts = [self.columns[name][rows] for name in ("nans", "posinfs", "neginfs") if name in self.columns]
        return np.maximum(counts, 0).sum(axis=0) if counts else np.zeros(len(rows), np.int64)


class Kept(NamedTuple):
    """A step in the store: from which one on it need not be kept, bytes of its records, checksums of its tensors."""

    expiry: int
    size: int
    tensors: frozenset[int]


class Keeping:
    """Decides on steps.

    Attributes:
        box: holds whole tensors of the last steps; None where nothing does.
        copies: the ranks that hold what this one holds, itself among them; none where nothing says so.
        nan_at: the step with the first NaN, in a run that goes on until one.
        dropped: how many steps were dropped from the store.
    """

    def __init__(
        self,
        options: CaptureOptions,
        rank: RankWriter,
        store: StoreWriter,
        note: Callable[[str], None] = lambda _: None,
        box: BlackBox | None = None,
        *,
        number: int = 0,
        ranks: int = 1,
    ) -> None:
        """Start with no step in the store; `note` is told once what cannot be done, `number` is the rank of `ranks`."""
        self.box = box
        self.copies: Callable[[], list[int]] = list
        self.nan_at: int | None = None
        self.dropped = 0
        self._rank, self._store, self._note = rank, store, note
        self._rule, self._until_nan = options.steps, options.until_nan
        self._number, self._one_per_replica = number, options.ranks == ONE_PER_REPLICA
        is_each = options.ranks in (None, ALL_RANKS, ONE_PER_REPLICA)
        self._is_among = is_each or Schedule(str(options.ranks)).wants(number)
        self._max_size = None if options.max_size is None else options.max_size // ranks
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._kept: dict[int, Kept] = {}
        self._mortal: dict[int, int] = {}  # steps that expire, and when
        self._gave_up = False

    @property
    def left_out(self) -> bool:
        """Whether this rank is to record nothing: it is not asked for, or a lower one holds the same parts."""
        copies = self.copies() if self._one_per_replica else []
        return not self._is_among or (bool(copies) and self._number != min(copies))

    @property
    def drops(self) -> bool:
        """Whether steps may be dropped from the store."""
        return self._max_size is not None or self._rule.forgets

    @property
    def looks(self) -> bool:
        """Whether the records of a step are looked at when it is over."""
        return bool(self._rule.names) or self._until_nan or (self.box is not None and self.box.open)

    def wants(self, step: int) -> bool:
        """Whether a step is to be observed, as far as that is known before it."""
        return self._rule.expiry(step, None) > step and not self.left_out

    def keep(self, step: int, records: Records | None) -> int:
        """From which step on one that has ended need not be kept; `NEVER` where it is not to be written at all."""
        values = {"step": float(step)}
        if records is not None and self._rule.names:
            values |= records.values(self._losses)
        expiry = NEVER if self.left_out else self._rule.expiry(step, values)
        if records is not None and self._until_nan and self.nan_at is None and records.has_nan():
            self.nan_at, expiry = step, ALWAYS
        return expiry if expiry > step else NEVER

    def unmatched(self, *, launched: bool) -> list[str]:
        """What to say of options that nothing in the run answered to; `launched` says whether there are other ranks."""
        if not (self._one_per_replica and launched) or self.copies():
            return []
        return ["--ranks one-per-replica: no wrapper (DDP, FSDP) said which ranks are copies, so all are recorded"]

    def restart(self) -> None:
        """All steps so far are taken back."""
        self._losses.clear()
        self._kept.clear()
        self._mortal.clear()
        self.nan_at, self.dropped = None, 0
        if self.box is not None:
            self.box.clear()

    # --- the store

    def written(self, step: int, kept: Kept) -> None:
        """Hear of a step that was written, and drop others if it is time."""
        self._kept[step] = kept
        if kept.expiry < ALWAYS:
            self._mortal[step] = kept.expiry
        expired = self._expired(step)
        if len(expired) >= max(_LEAST_DROPPED, len(self._kept) - len(expired)):
            self._drop(expired, "last")
        if self._max_size is not None and self._size() > _SHARE * self._max_size:
            self._drop(self._crowded(self._max_size), "max_size")

    def finish(self, last: int) -> None:
        """Drop what has expired when the run is over; `last` is its last step."""
        self._drop(self._expired(last), "last")

    def _expired(self, step: int) -> list[int]:
        return [one for one, expiry in self._mortal.items() if expiry <= step]

    def _size(self) -> int:
        return self._rank.bytes_written + self._store.tensor_bytes

    def _crowded(self, room: int) -> list[int]:
        """Steps to drop until half the room is free, every second of the older ones; never the first or the last."""
        spare = self._size() - _SHARE / 2 * room
        rest, dropped = list(self._kept), set[int]()
        while len(rest) > 2 and spare > 0:
            for step in rest[1 : max(len(rest) * 3 // 4, 2) : 2]:
                if spare > 0:
                    dropped.add(step)
                    spare -= self._kept[step].size
            rest = [step for step in rest if step not in dropped]
        if len(rest) <= 2 and spare > 0 and self._size() - sum(self._kept[step].size for step in dropped) > room:
            self._note("two steps and the names take more than --max-size: the run grows beyond it")
        return sorted(dropped)

    def _tensors_of(self, steps: set[int]) -> set[int]:
        """Checksums of what of some steps was stored whole."""
        held = {} if self.box is None else self.box.stored
        return {one for step in steps for one in self._kept[step].tensors | held.get(step, frozenset())}

    def _drop(self, steps: list[int], why: str) -> None:
        gone = set(steps) - {next(reversed(self._kept), None)}
        if not gone or self._gave_up:
            return
        try:
            self._rank.thin(sorted(gone), why)
        except StoreError as error:
            self._gave_up = True
            self._note(f"{error}; no step is dropped from here on")
            return
        lost = self._tensors_of(gone)
        if lost:
            self._store.drop_tensors(lost - self._tensors_of(self._kept.keys() - gone))
        self.dropped += len(gone)
        for step in gone:  # last: an exception before leaves them to the next time
            del self._kept[step]
            self._mortal.pop(step, None)
