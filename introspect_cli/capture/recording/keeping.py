"""Which steps are recorded and kept, and whole tensors of the last ones."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from introspect_cli.capture.recording.rows import save_tensor
from introspect_cli.derived import l2_norm
from introspect_cli.errors import StoreError, belongs_to_script, scarcity
from introspect_cli.machine import free_memory
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import ALWAYS, NEVER, Schedule
from introspect_cli.selection import ALL_RANKS
from introspect_cli.tensors.special import PLAIN, is_wrapped
from introspect_cli.tensors.views import in_memory
from introspect_cli.texts import count, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.capture.capture import Capture
    from introspect_cli.records import Site
    from introspect_cli.store.rank_writer import RankWriter


# ---
# Which steps a capture observes, writes and keeps: one policy, asked before a step, after it, and of the store.
#
# Some steps are known to be unwanted before they begin and cost next to nothing; of others it shows when they are
# over (the loss jumped), and those are summarised and then not written; of others again much later (only the last
# hundred count), and those are dropped from the store. For that the rest is written anew; so steps are dropped in
# batches, and each byte is copied about once.

HISTORY = 100
MIN_LOSSES = 5
"""Losses that must be known before anything is said of what is usual."""

NANS, INFS = ("nans",), ("posinfs", "neginfs")
_TELLING = (Kind.LOSS, Kind.OUTPUT, Kind.PARAM, Kind.BUFFER)
"""Kinds in which a NaN ends a run with `--until-nan`. A gradient scaler meets NaN gradients by design."""

FULL_FIRST = 10
"""Steps at the start of which all is kept."""
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

    def counted(self, columns: Sequence[str], kinds: Sequence[Kind] = tuple(Kind)) -> float:
        """How many elements the columns count in records of some kinds; 0 where they are not recorded."""
        rows = np.isin(self.kinds, [kind.value for kind in kinds])
        counts = [self.columns[name][rows] for name in columns if name in self.columns]
        return float(sum(np.maximum(one, 0).sum() for one in counts))

    def has_nan(self) -> bool:
        """Whether any loss, output, parameter or buffer holds a NaN; NaNs of gradients do not count."""
        return self.counted(NANS, _TELLING) > 0

    def is_infinite(self) -> bool:
        """Whether any loss or parameter holds an infinity."""
        return self.counted(INFS, (Kind.LOSS, Kind.PARAM)) > 0

    def loss(self) -> float | None:
        """Mean of the step's losses, inf if any element is NaN or infinite; None without a loss that has a mean."""
        if self.counted(NANS + INFS, (Kind.LOSS,)):
            return math.inf
        means = self.columns["mean"][self.kinds == Kind.LOSS.value] if "mean" in self.columns else np.empty(0)
        finite = means[~np.isnan(means)].tolist()
        return statistics.fmean(finite) if finite else None

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
        return math.inf if self.counted(NANS + INFS, (Kind.GRAD,)) else float(np.sqrt((norms * norms).sum()))

    def take_values(self, before: deque[float]) -> dict[str, float]:
        """Values that a condition may name, those that are missing left out; appends the step's loss to `before`.

        `loss` is the mean of the step's losses; `nans` and `infs` count elements in all its records.

        Args:
            before: losses of earlier steps, the last 100, not only finite ones; `median` and `mean` are of the finite
                ones, from five on.
        """
        values: dict[str, float | None] = {"loss": self.loss(), "grad_norm": self.grad_norm()}
        counted = {"nans": NANS, "infs": INFS}
        values |= {name: self.counted(them) for name, them in counted.items() if them[0] in self.columns}
        usual = [loss for loss in before if math.isfinite(loss)]
        if len(usual) >= MIN_LOSSES:
            values |= {"median": statistics.median(usual), "mean": statistics.fmean(usual)}
        if before:
            values["previous"] = before[-1]
        before += [] if values["loss"] is None else [values["loss"]]
        return {name: value for name, value in values.items() if value is not None}


class StepPolicy:
    """Decides which steps are recorded, written and dropped.

    Attributes:
        box: holds whole tensors of the last steps; None where nothing does.
        full_every: from `FULL_FIRST` on, steps are lean but each of so many.
        nan_at: the step with the first NaN, in a run that goes on until one.
        dropped: how many steps were dropped from the store.
    """

    def __init__(self, capture: Capture, rank: RankWriter, box: BlackBox | None) -> None:
        """Start without steps.

        Args:
            capture: whose options say which steps are wanted.
            rank: drops steps.
            box: holds whole tensors of the last steps; None without one.
        """
        options = capture.options
        self.box = box
        self.nan_at: int | None = None
        self.dropped = 0
        self._rank, self._store, self._note = rank, capture.store, capture.guard.note
        self._rule, self._until_nan, self.full_every = options.steps, options.until_nan, options.full_every
        self.left_out = options.ranks not in (None, ALL_RANKS) and not Schedule(str(options.ranks)).wants(capture.rank)
        """Whether this rank records nothing, not being among `--ranks`."""
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._written: dict[int, tuple[int, frozenset[int]]] = {}
        """Of each step in the store, the step from which on it may be dropped, and checksums of its whole tensors."""
        self._gave_up = False

    @property
    def wants_values(self) -> bool:
        """Whether a step's values are needed when it ends: by a condition, `--until-nan`, or an open black box."""
        return bool(self._rule.names) or self._until_nan or (self.box is not None and self.box.open)

    def is_lean(self, step: int) -> bool:
        """Whether a GPU sums up what passes through the model in this step without sketch, skewness and kurtosis."""
        return step >= FULL_FIRST and step % self.full_every > 0

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
        expiry = self._rule.expiry(step, values)
        if records is not None and self._until_nan and self.nan_at is None and records.has_nan():
            self.nan_at, expiry = step, ALWAYS
        return expiry if expiry > step else NEVER

    def restart(self) -> None:
        """Forget all steps so far, those in the black box too, as steps start from 0 again."""
        self._losses.clear()
        self._written.clear()
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
        if self._rule.forgets:  # a rule such as `last(50)` drops steps later
            self._written[step] = expiry, tensors
            self._drop(step, MIN_DROPPED)

    def finish(self, last: int) -> None:
        """Drop all expired steps, at the end of a run whose last step was `last`; the newest in the store stays."""
        self._drop(last, 0)

    def _tensors_of(self, steps: set[int]) -> set[int]:
        """Checksums of whole tensors stored for some steps, by `--save-tensors` or the black box."""
        boxed = {} if self.box is None else self.box.stored
        return {one for step in steps for one in self._written[step][1] | boxed.get(step, frozenset())}

    def _drop(self, last: int, least: int) -> None:
        """Drop expired steps from the store, never the newest one, and tensors that no other step has.

        `dropped` counts them. A failure is noted and ends all dropping.

        Args:
            last: the step that was the last to end.
            least: how many steps there must be, and as many as those that stay; 0 for any number.
        """
        written = self._written
        expired = {step for step, (expiry, _) in written.items() if expiry <= last}
        gone = expired - {next(reversed(written), None)}
        if not gone or self._gave_up or (least and len(expired) < max(least, len(written) - len(expired))):
            return
        try:
            self._rank.thin(sorted(gone))
        except StoreError as error:
            self._gave_up = True
            self._note(f"{error}; no step is dropped from here on")
            return
        if lost := self._tensors_of(gone):
            self._store.drop_tensors(lost - self._tensors_of(written.keys() - gone))
        self.dropped += len(gone)
        for step in gone:  # last: an exception before leaves them to the next time
            del written[step]


# ---
# Whole tensors of the last steps, held in memory and written only when something happens.
#
# A run of days cannot store every tensor, and nobody repeats it to see the elements of one. So each step's tensors
# are copied as they are recorded, the last steps' copies are held, and a divergence from a reference or a NaN writes
# them beside the records that name them. A comparison may answer some steps late: a step whose digest is not the
# reference's has its tensors, and those of the steps before it, set aside until the answer comes.
#
# What it takes is bounded before training begins. The bound is shared out among the steps that may be there at once,
# so what does not fit is the same in every step.


class BlackBox:
    """Holds whole tensors of the last steps until it has written them; the recorder's lock is held around every call.

    Attributes:
        open: whether it still holds what comes.
        written: what it wrote, for the manifest.
        stored: checksums of that, by step.
    """

    def __init__(self, capture: Capture, steps: int, digests: Mapping[int, bytes]) -> None:
        """Start with no tensor held; rank 0 says how much memory it may take.

        The ranks of a machine share a quarter of its free memory.

        Args:
            capture: what it is.
            steps: how many steps are held.
            digests: of the reference's steps; {} where there is none, or it cannot be read.
        """
        launch = capture.launch
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdecimal() and int(local) else 1 if launch is None else launch.world_size
        room = free_memory() // 4 // ranks
        if not capture.rank:
            held = f"whole tensors of the last {count(steps, 'step')} are held"
            capture.say(f"{held}, in {human_size(room)} of memory at most (a quarter of what is free)")
        self.open = True
        self.written: list[dict[str, object]] = []
        self.stored: dict[int, frozenset[int]] = {}
        self._steps: deque[tuple[int, Mapping[int, torch.Tensor]]] = deque(maxlen=steps)
        """Number and whole tensors, by checksum, of each step."""
        self._aside: list[tuple[int, Mapping[int, torch.Tensor]]] = []
        # Held, set aside, under way, and ended while a device computes.
        self._share = room // (2 * steps + 2 if digests else steps + 2)
        self._store, self._digests = capture.store, digests
        self._say, self._note = capture.say, capture.guard.note
        self._taken = 0
        self._left: Site | None = None

    def reserve(self, site: Site, value: torch.Tensor) -> bool:
        """Whether a value is to be copied; if so its size is taken from the step's share of memory.

        False once closed and for tensors that are not plain and strided; also where the share is too small for it or
        the tensor vastly expanded: of these two cases the first site in the run is noted.
        """
        is_plain = type(value) in PLAIN and not is_wrapped(value) and value.layout is torch.strided
        if not self.open or not is_plain or value.is_quantized or value.is_meta:
            return False
        if in_memory(value.shape, value.stride()) is None and self._taken + value.nbytes <= self._share:
            self._taken += value.nbytes
            return True
        if self._left is None:
            self._left = site
            self._note(
                f"{site.kind.value} of {site.fqn}, and maybe more, is not held whole: there are "
                f"{human_size(self._share)} for a step"
            )
        return False

    def give_up(self, error: Exception) -> None:
        """Drop all that is held and hold nothing more, with a note, after an error in a copy or a write.

        Raises:
            Exception: `error` itself, with nothing dropped, where it is the script's own.
        """
        if belongs_to_script(error):
            raise error
        self.open = False
        self.clear()
        self._note(f"whole tensors are no longer held (--keep-around): {scarcity(error) or error}")

    def begin_step(self) -> None:
        """Give the next step its full share of memory."""
        self._taken = 0

    def clear(self) -> None:
        """Drop all tensors that are held or set aside."""
        self._steps.clear()
        self._aside = []
        self._taken = 0

    def add(self, step: int, tensors: Mapping[int, torch.Tensor], digest: bytes, *, not_finite: bool) -> None:
        """Hold the copies of a step that was written, and drop the oldest step's if there are more than `keep_around`.

        The first step that is not finite has all held steps written. A step whose digest is not the reference's has all
        held steps set aside, unless some are already, until the comparison answers. Nothing once closed.

        Args:
            step: its number.
            tensors: copies by checksum.
            digest: of the step's records.
            not_finite: whether it has a NaN, or a loss or parameter with an infinity.
        """
        if not self.open:
            return
        before = {checksum: tensor for _, held in self._steps for checksum, tensor in held.items()}
        tensors = {checksum: before.get(checksum, tensor) for checksum, tensor in tensors.items()}
        self._steps.append((step, tensors))  # what did not change since the step before is held once
        if self._digests.get(step, digest) != digest and not self._aside:
            self._aside = list(self._steps)
        if not_finite:
            self._write("nan", "a NaN or an infinity", step, list(self._steps))

    def tell_comparison(self, agreed: int, diverged: tuple[int | None] | None) -> None:
        """Drop the steps set aside if the runs agree up to the last of these; write held tensors once they diverge.

        The steps set aside are written if they diverge at one of these, else all steps held now. Nothing once closed.

        Args:
            agreed: the last step up to which the runs agree.
            diverged: a tuple of the step at which they diverge, (None,) where it is not one step's; None while they do
                not.
        """
        if self._aside and diverged is None and self._aside[-1][0] <= agreed:
            self._aside = []
        if diverged is not None and self.open:
            is_aside = any(step == diverged[0] for step, _ in self._aside)
            self._write("divergence", "a divergence", diverged[0], self._aside if is_aside else list(self._steps))

    def _write(self, why: str, words: str, at: int | None, steps: list[tuple[int, Mapping[int, torch.Tensor]]]) -> None:
        """Write steps' tensors, each once, note them in `written` and `stored`, and say so, unless there are none.

        Then nothing is held any more; an error ends it too, with a note.

        Args:
            why: `nan` or `divergence`.
            words: that in words.
            at: the step at which it happened; None for no step.
            steps: whose tensors.
        """
        tensors = {checksum: tensor for _, held in steps for checksum, tensor in held.items()}
        try:
            for checksum, tensor in tensors.items():
                save_tensor(self._store, checksum, tensor)
        except Exception as error:  # a disk that is full costs the tensors, and not the run
            self.give_up(error)
            return
        self.stored |= {step: frozenset(held) for step, held in steps}
        numbers, size = [step for step, _ in steps], sum(tensor.nbytes for tensor in tensors.values())
        if tensors:
            self.written.append({"why": why, "steps": numbers, "tensors": len(tensors), "bytes": size})
            self._say(
                f"{words}{'' if at is None else f' at step {at}'}: {count(len(tensors), 'whole tensor')} of "
                f"step{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))} written ({human_size(size)})"
            )
        self.open = False
        self.clear()
