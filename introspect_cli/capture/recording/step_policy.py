"""Which steps a capture observes, writes and keeps: one policy, asked before a step, after it, and of the store.

Some steps are known to be unwanted before they begin and cost next to nothing; of others it shows when they are over
(the loss jumped), and those are summarised and then not written; of others again much later (only the last hundred
count), and those are dropped from the store. For that the rest is written anew; so steps are dropped in batches, and
each byte is copied about once.
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
from introspect_cli.store.reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from introspect_cli.capture.options.capture_options import CaptureOptions
    from introspect_cli.capture.recording.black_box import BlackBox
    from introspect_cli.store.rank_writer import RankWriter
    from introspect_cli.store.run_writer import StoreWriter

HISTORY = 100
MIN_LOSSES = 5
"""Losses that must be known before anything is said of what is usual."""

_TELLING = [kind.value for kind in (Kind.LOSS, Kind.OUTPUT, Kind.PARAM, Kind.BUFFER)]
"""Kinds in which a NaN ends a run with `--until-nan`. A gradient scaler meets NaN gradients by design."""

MIN_DROPPED = 16
"""Steps that are dropped at once, at least: the rest of the store is written anew for it."""


class Records(NamedTuple):
    """Columns of an ended step that rules look at.

    Attributes:
        kinds: of each, by value.
        columns: counts and statistics, by name.
        numel: how many elements a record is of, by its number.
    """

    kinds: NDArray[np.str_]
    columns: Mapping[str, NDArray[Any]]
    numel: Callable[[int], int]

    def losses(self) -> list[float]:
        """Mean of each loss; inf where an element is NaN or infinite. A mean that is NaN otherwise is left out.

        [] where means are not recorded.
        """
        means = self.columns.get("mean")
        if means is None:
            return []
        rows = np.flatnonzero(self.kinds == Kind.LOSS.value)
        losses = np.where(self._not_finite(rows) > 0, math.inf, means[rows])
        return [loss for loss in losses.tolist() if not math.isnan(loss)]

    def grad_norm(self) -> float | None:
        """L2 norm of all parameter gradients together, inf if any element is not finite.

        None where the step has no gradient, or means and variances are not recorded.
        """
        rows = np.flatnonzero(self.kinds == Kind.GRAD.value)
        if not len(rows) or "mean" not in self.columns or "var" not in self.columns:
            return None
        numbers = np.array([self.numel(row) for row in rows.tolist()], dtype=np.float64)
        means, variances = self.columns["mean"][rows], self.columns["var"][rows]
        norms = l2_norm(np.nan_to_num(means), np.nan_to_num(variances), numbers)
        return math.inf if self._not_finite(rows).any() else float(np.sqrt((norms * norms).sum()))

    def has_nan(self) -> bool:
        """Whether any loss, output, parameter or buffer holds a NaN; NaNs of gradients do not count.

        False where NaNs are not counted.
        """
        nans = self.columns.get("nans")
        return nans is not None and bool((nans[np.isin(self.kinds, _TELLING)] > 0).any())

    def is_infinite(self) -> bool:
        """Whether any loss or parameter holds an infinity; False where infinities are not counted."""
        rows = np.isin(self.kinds, [Kind.LOSS.value, Kind.PARAM.value])
        return any((self.columns[name][rows] > 0).any() for name in ("posinfs", "neginfs") if name in self.columns)

    def take_values(self, before: deque[float]) -> dict[str, float]:
        """Values that a condition may name, those that are missing left out; appends the step's loss to `before`.

        `loss` is the mean of the step's losses; `nans` and `infs` count elements in all its records.

        Args:
            before: losses of earlier steps, the last 100, not only finite ones; `median` and `mean` are of the finite
                ones, from five on.
        """
        values = {
            name: float(sum(np.maximum(self.columns[column], 0).sum() for column in columns))
            for name, columns in (("nans", ("nans",)), ("infs", ("posinfs", "neginfs")))
            if columns[0] in self.columns
        }
        losses, usual = self.losses(), [loss for loss in before if math.isfinite(loss)]
        if len(usual) >= MIN_LOSSES:
            values |= {"median": statistics.median(usual), "mean": statistics.fmean(usual)}
        if before:
            values["previous"] = before[-1]
        if losses:
            values["loss"] = statistics.fmean(losses)
            before.append(values["loss"])
        norm = self.grad_norm()
        return values if norm is None else values | {"grad_norm": norm}

    def _not_finite(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Number of NaNs and infinities of each of `rows`; 0 where these are not counted."""
        counts = [self.columns[name][rows] for name in ("nans", "posinfs", "neginfs") if name in self.columns]
        return np.maximum(counts, 0).sum(axis=0) if counts else np.zeros(len(rows), np.int64)


class StepPolicy:
    """Decides which steps are recorded, written and dropped.

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
    ) -> None:
        """Start without steps.

        Args:
            options: of the capture.
            rank: drops steps.
            store: drops tensors.
            note: is given a sentence where steps cannot be dropped.
            box: holds whole tensors of the last steps; None without one.
            number: this rank's.
        """
        self.box = box
        self.copies: Callable[[], list[int]] = list
        self.nan_at: int | None = None
        self.dropped = 0
        self._rank, self._store, self._note = rank, store, note
        self._rule, self._until_nan = options.steps, options.until_nan
        self._number, self._one_per_replica = number, options.ranks == ONE_PER_REPLICA
        is_each = options.ranks in (None, ALL_RANKS, ONE_PER_REPLICA)
        self._is_among = is_each or Schedule(str(options.ranks)).wants(number)
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._tensors: dict[int, frozenset[int]] = {}
        """Checksums of whole tensors of each step in the store."""
        self._expiry: dict[int, int] = {}
        """Of each step in the store that expires, the step from which on it may be dropped."""
        self._gave_up = False

    @property
    def left_out(self) -> bool:
        """Whether this rank records nothing: it is not among `--ranks`, or a lower rank holds the same."""
        copies = self.copies() if self._one_per_replica else []
        return not self._is_among or (bool(copies) and self._number != min(copies))

    @property
    def wants_values(self) -> bool:
        """Whether a step's values are needed when it ends: by a condition, `--until-nan`, or an open black box."""
        return bool(self._rule.names) or self._until_nan or (self.box is not None and self.box.open)

    def wants(self, step: int) -> bool:
        """Whether a step is to be recorded, asked before it begins; True where only its values can decide."""
        return self._rule.expiry(step, None) > step and not self.left_out

    def keep(self, step: int, records: Records | None) -> int:
        """Step from which on an ended step may be dropped; `NEVER` if it is not to be written, `ALWAYS` if it stays.

        With a condition its loss, if any, is added to those that later steps are compared with, be it written or not.
        Sets `nan_at` at the first step with a NaN, under `--until-nan`; that step always stays.

        Args:
            step: its number.
            records: its values; None where `wants_values` is False.
        """
        values = {"step": float(step)}
        if records is not None and self._rule.names:
            values |= records.take_values(self._losses)
        expiry = NEVER if self.left_out else self._rule.expiry(step, values)
        if records is not None and self._until_nan and self.nan_at is None and records.has_nan():
            self.nan_at, expiry = step, ALWAYS
        return expiry if expiry > step else NEVER

    def unmatched(self, *, launched: bool) -> list[str]:
        """A sentence if a launcher started several processes and `--ranks one-per-replica` had no effect; else [].

        It has none where no wrapper (DDP, FSDP) says which ranks are copies.

        Args:
            launched: whether a launcher started this process among others.
        """
        if not (self._one_per_replica and launched) or self.copies():
            return []
        return ["--ranks one-per-replica: no wrapper (DDP, FSDP) said which ranks are copies, so all are recorded"]

    def restart(self) -> None:
        """Forget all steps so far, those in the black box too, as steps start from 0 again."""
        self._losses.clear()
        self._tensors.clear()
        self._expiry.clear()
        self.nan_at, self.dropped = None, 0
        if self.box is not None:
            self.box.clear()

    # --- the store

    def note_written(self, step: int, expiry: int, tensors: frozenset[int]) -> None:
        """Note a step that was written; drop expired steps once they are at least 16, and as many as those that stay.

        Nothing where no rule drops steps later.

        Args:
            step: its number.
            expiry: step from which on it may be dropped.
            tensors: checksums of its whole tensors.
        """
        if not self._rule.forgets:
            return  # no rule such as `last(50)` drops a step later
        self._tensors[step] = tensors
        if expiry < ALWAYS:
            self._expiry[step] = expiry
        expired = self._expired(step)
        if len(expired) >= max(MIN_DROPPED, len(self._tensors) - len(expired)):
            self._drop(expired)

    def finish(self, last: int) -> None:
        """Drop all expired steps, at the end of a run whose last step was `last`; the newest in the store stays."""
        self._drop(self._expired(last))

    def _expired(self, step: int) -> list[int]:
        """Steps in the store, in the order of writing, that may be dropped when `step` was the last to end."""
        return [one for one, expiry in self._expiry.items() if expiry <= step]

    def _tensors_of(self, steps: set[int]) -> set[int]:
        """Checksums of whole tensors stored for some steps, by `--save-tensors` or the black box."""
        boxed = {} if self.box is None else self.box.stored
        return {one for step in steps for one in self._tensors[step] | boxed.get(step, frozenset())}

    def _drop(self, steps: list[int]) -> None:
        """Drop steps from the store, never the newest one, and tensors that no other step has; `dropped` counts them.

        A failure is noted and ends all dropping.
        """
        gone = set(steps) - {next(reversed(self._tensors), None)}
        if not gone or self._gave_up:
            return
        try:
            self._rank.thin(sorted(gone))
        except StoreError as error:
            self._gave_up = True
            self._note(f"{error}; no step is dropped from here on")
            return
        lost = self._tensors_of(gone)
        if lost:
            self._store.drop_tensors(lost - self._tensors_of(self._tensors.keys() - gone))
        self.dropped += len(gone)
        for step in gone:  # last: an exception before leaves them to the next time
            del self._tensors[step]
            self._expiry.pop(step, None)
