"""Which steps a capture observes, writes and keeps.

Some steps are known to be unwanted before they begin and cost next to nothing; of others it shows when they are over
(the loss jumped), and those are summarised and then not written; of others again much later (only the last hundred
count, or the disk is to hold two gigabytes), and those are dropped from the store (`thinning`). Rules say which
(`schedule`); this asks them at the right moments.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.records import Kind
from introspect_cli.schedule.rule import ALWAYS, NEVER, Moment, Rule, When
from introspect_cli.schedule.rules import Epochs, OnePerReplica, Ranks, Schedule
from introspect_cli.store.read.step_reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from introspect_cli.capture.recording.black_box import BlackBox
    from introspect_cli.capture.recording.thinning import Thinning
    from introspect_cli.labels import Labels

_HISTORY = 100
_FEW = 5
"""Losses that must be known before anything is said of what is usual."""

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
        self._losses: deque[float] = deque(maxlen=_HISTORY)

    def __call__(self, records: Records) -> dict[str, float]:
        """By name; what is not known is left out."""
        values = {"nans": records.total("nans"), "infs": records.total("posinfs", "neginfs")}
        losses, usual = records.losses(), [loss for loss in self._losses if math.isfinite(loss)]
        if len(usual) >= _FEW:
            values |= {"median": statistics.median(usual), "mean": statistics.fmean(usual)}
        if self._losses:
            values["previous"] = self._losses[-1]
        if losses:
            self._losses.append(statistics.fmean(losses))
            values["loss"] = self._losses[-1]
        values["grad_norm"] = records.grad_norm()
        return {name: value for name, value in values.items() if value is not None}


class Retention:
    """Asks a rule about each step.

    Attributes:
        thinning: drops steps that were written; None where that never happens.
        box: holds whole tensors of the last steps; None where nothing does.
        epoch: tells the epoch at this moment.
        copies: tells the ranks that are copies of this one.
        nan_at: the step that made a NaN, where that is looked for; None so far.
    """

    def __init__(
        self,
        rule: Rule,
        thinning: Thinning | None = None,
        box: BlackBox | None = None,
        *,
        number: int = 0,
        until_nan: bool = False,
    ) -> None:
        self.rule = rule
        self.thinning = thinning
        self.box = box
        self.epoch: Callable[[], int | None] = lambda: None
        self.copies: Callable[[], list[int]] = list
        self.nan_at: int | None = None
        self._number = number
        self._until_nan = until_nan
        self._wanted = self._epoch_seen = False
        self._plain = rule if isinstance(rule, Schedule) else None
        self._conditions = any(isinstance(part, When) for part in rule.parts)
        self.undecided = any(isinstance(part, Epochs) for part in rule.parts)
        """Whether to ask again when a step begins: its epoch may be known only then."""
        self.asks_for_copies = any(isinstance(part, OnePerReplica) for part in rule.parts)
        """Whether it is asked which ranks are copies of one another."""
        self._memory: dict[object, int] = {}
        self._values = ConditionValues()

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
        return bool(ranks) and not self._wanted and not any(rule.wants(self._number) for rule in ranks)

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
        if self.undecided and begins:
            epoch = self.epoch()
            self._epoch_seen |= epoch is not None
            moment = replace(moment, epoch=epoch)
        wanted = self.rule.bounds(moment)[1] > step
        self._wanted |= wanted
        return wanted

    def unmatched(self, *, launched: bool) -> list[str]:
        """What to say of options that nothing in the run answered to; `launched` says whether there are other ranks."""
        sentences = []
        if self.undecided and not self._epoch_seen:
            sentences.append("--epochs keeps no step: only Lightning, transformers and accelerate count epochs")
        if self.asks_for_copies and launched and not self.copies():
            sentences.append(
                "--ranks one-per-replica: no wrapper (DDP, FSDP) said which ranks are copies of one another, so all "
                "are recorded (name them, as in --ranks 0,4)"
            )
        return sentences

    def restart(self) -> None:
        """All steps so far are taken back."""
        self._memory.clear()
        self._values = ConditionValues()
        self.nan_at = None
        if self.thinning is not None:
            self.thinning.restart()
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
