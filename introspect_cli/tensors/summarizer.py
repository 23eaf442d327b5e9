"""The summarizer: a tensor in, a row number out, columns once a step.

Hooks hand over thousands of tensors a step, from several threads, on any device, under any mode the script has
switched on, and none of this may be felt. So each tensor is summarised at once into a row of a preallocated arena
(CPU) or of one device buffer (accelerators, nothing waits); `end_step` puts all rows of a step into columns, after one
copy from each device. What fails becomes a row that says so; `add` raises only what is the script's.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from introspect_cli.errors import belongs_to_script
from introspect_cli.records import Layout, Status
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import values
from introspect_cli.tensors.columns import EndedRows
from introspect_cli.tensors.cpu import Engine
from introspect_cli.tensors.gpu.devices import Devices
from introspect_cli.tensors.intake import new_intake
from introspect_cli.tensors.plain import Batch, PlainTensors
from introspect_cli.tensors.reuse import fingerprint, new_memory
from introspect_cli.tensors.row_notes import Slots
from introspect_cli.tensors.special import PLAIN, is_wrapped, unseen_parts
from introspect_cli.tensors.unusual import UnusualTensors
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from introspect_cli.tensors.columns import Columns
    from introspect_cli.tensors.gpu.engine import DeviceEngine, Item

_LIVE: weakref.WeakSet[Summarizer] = weakref.WeakSet()
"""Summarizers whose locks and threads a forked child must not inherit."""


def _after_fork_in_child() -> None:
    """Give all summarizers new locks and take their threads from them; python calls it in a forked child."""
    for summarizer in list(_LIVE):
        summarizer.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Summarizer:
    """Summarises tensors as they come; thread safe.

    Args:
        stats: whether to compute statistics.
        sketch: whether to compute sketches.
        sorted_stats: `med` and `mode`, on request: each costs a sort.
        alone: leave the threads that torch has to it.
    """

    def __init__(
        self,
        *,
        stats: bool = True,
        sketch: bool = True,
        sorted_stats: tuple[str, ...] = (),
        alone: bool = False,
    ) -> None:
        """Allocate rows and find the compiled intake; devices get memory and kernels at their first tensor."""
        wanted = tuple(sorted_stats)
        devices = Devices(stats=stats, sketch=sketch)
        self._slots = slots = Slots(
            Engine(alone=alone), devices, new_memory(), k.STATS * stats | k.SKETCH * sketch, wanted
        )
        self._engine, self._devices, self._memory, self._arena = slots.engine, devices, slots.memory, slots.arena
        self._layout_of, self._layouts, self._notes = slots.layout_of, slots.layouts, slots.notes
        self._lock = k.new_lock()
        shared = (self._layout_of, self._arena.addresses, self._engine.team, self._memory, self._lock)
        self._intake = None if wanted else new_intake(slots.flags, *shared)
        self._plain, self._unusual = PlainTensors(slots), UnusualTensors(slots)
        self._reset()
        _LIVE.add(self)

    def _reset(self) -> None:
        """Start a step: drop all notes, and begin again with slot 0."""
        self._notes.clear()
        # The last: where an interrupt comes before, the next slots are beyond those that anything is still known of.
        self._layout_of.clear()  # the intake has it too

    def add(self, tensor: Any) -> int:
        """Summarise a tensor, or a `Placed` part of one, now; on a GPU the work is queued and not waited for.

        Returns:
            The row's slot in this step. What cannot be summarised gets a row with status NOT_OBSERVED or PARTIAL and a
            text that says why.

        Raises:
            Exception: only an error of the script's own (`errors.belongs_to_script`); it leaves no row.
        """
        with self._lock:
            slot = len(self._layout_of)
            try:
                if self._intake is not None and self._intake.add(tensor) >= 0:
                    return slot
                self._add(slot, tensor)
            except Exception as error:
                self._replace_failed(slot, tensor, error)
            return slot

    def _add(self, slot: int, tensor: Any, batch: Batch | None = None) -> None:
        """Summarise a tensor that the compiled intake did not take, into a new row.

        Args:
            slot: the slot that the row gets, the next free one.
            tensor: any tensor or `Placed` part.
            batch: takes contiguous tensors on GPUs, for the caller to launch together; None to launch them at once.

        Raises:
            Exception: whatever torch raises; the row may be there then, or not.
        """
        is_plain = type(tensor) in PLAIN and not is_wrapped(tensor)
        if not (is_plain and self._plain.add(slot, tensor, self._intake, batch)):
            self._unusual.add(tensor)

    def add_all(self, tensors: Iterable[torch.Tensor], slots: list[int] | None = None) -> list[int]:
        """Summarise tensors now: as `add` for one after the other, but quicker for many, such as all parameters.

        Args:
            tensors: any tensors or `Placed` parts.
            slots: what `record_all` of the intake returned for them: the slot of each, -1 for those still to do; these
                are filled in. None where the intake was not asked.

        Returns:
            The slot of each, in their order.

        Raises:
            Exception: only an error of the script's own, as in `add`.
        """
        batch: Batch = {}
        with self._lock:
            tensors = list(tensors)
            if slots is None:
                slots = [-1] * len(tensors)
                if self._intake is not None:
                    self._arena.reserve(len(self._layout_of) + len(tensors))
                    slots = self._intake.add_all(tensors)
            for place, tensor in enumerate(tensors):
                if slots[place] >= 0:
                    continue
                slots[place] = slot = len(self._layout_of)
                try:
                    self._add(slot, tensor, batch)
                except Exception as error:
                    self._replace_failed(slot, tensor, error)
            for engine, entries in batch.items():
                self._launch_batch(engine, entries)
        return slots

    def marks(self, tensors: list[torch.Tensor]) -> list[Hashable]:
        """Fingerprint of each tensor; one that differs from an earlier one says that it was written to or moved.

        A write past torch that changes none of the sampled bytes leaves it equal. None for a tensor without memory.
        """
        with self._lock:
            found: list[Hashable] = [None] * len(tensors) if self._intake is None else self._intake.marks(tensors)
        if all(found):
            return found
        return [fingerprint(tensor) if known is None else known for known, tensor in zip(found, tensors, strict=True)]

    @property
    def intake(self) -> Any:
        """The compiled intake (`intake.py`); None without one."""
        return self._intake

    def _launch_batch(self, engine: DeviceEngine, entries: list[tuple[int, list[Item]]]) -> None:
        """Launch the kernels for tensors on one GPU; if that raises, their rows become NOT_OBSERVED with the error.

        Args:
            engine: the GPU's.
            entries: of each tensor the slot of its row, and the runs that it consists of.
        """
        try:
            engine.launch_tables(entries)
        except Exception as error:
            for slot, _ in entries:
                self._notes.set_status(slot, Status.NOT_OBSERVED, values.shortened(f"{type(error).__name__}: {error}"))

    def _replace_failed(self, slot: int, tensor: torch.Tensor, error: Exception) -> None:
        """Drop the rows from `slot` on, and add one that says why the tensor was not observed.

        Raises:
            Exception: `error` itself, with no row added, where it is the script's own (`errors.belongs_to_script`).
        """
        del self._layout_of[slot:]
        if belongs_to_script(error):
            raise error
        with unobserved():
            self._unusual.add_unseen(unseen_parts(tensor, f"{type(error).__name__}: {error}"))

    def add_value(self, obj: object) -> int:
        """Add a row for a plain value by its type and repr, and return its slot.

        A numpy array of numbers or booleans with at least one dimension is summarised as a tensor. A value whose
        `__repr__` raises gets a NOT_OBSERVED row; an error of the script's own (`errors.belongs_to_script`) is raised.
        """
        if isinstance(obj, np.ndarray) and obj.ndim and obj.dtype.kind in "fiubc":
            try:
                with unobserved():
                    tensor = torch.from_numpy(np.ascontiguousarray(obj))
            except (TypeError, ValueError):
                pass
            else:
                return self.add(tensor)
        try:
            layout, fixed, text = values.summarised(obj)
        except Exception as error:
            if belongs_to_script(error):
                raise
            return self.add_missing(f"{type(obj).__name__}.__repr__ raised {type(error).__name__}")
        with self._lock:
            slot = self._slots.new_row(layout)
            self._notes.fixed[slot] = fixed
            self._notes.set_status(slot, Status.VALUE, text)
            return slot

    def add_missing(self, reason: str) -> int:
        """Add a NOT_OBSERVED row for a value that could not be seen, with the reason; return its slot."""
        with self._lock:
            slot = self._slots.new_row(Layout((), ""))
            self._notes.set_status(slot, Status.NOT_OBSERVED, values.shortened(values.masked(reason)))
            return slot

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A detached copy of a tensor in host memory; waits for its device, and is seen by no mode of the script."""
        with self._lock:
            return self._unusual.copy_to_host(tensor)

    def end_step(self, *wanted: tuple[Columns, list[int]]) -> EndedRows:
        """Put the step's rows into columns, and start the next step with slot 0; nothing is waited for.

        Args:
            *wanted: columns, each with the slots of its records, in their order.

        Returns:
            What fills the columns. It has done so already, but where devices compute some rows: then its `finish` does.
        """
        with self._lock:
            pending = self._devices.hand_over()
            if self._memory is not None:
                self._memory.turn()
            notes = self._notes
            arena = self._arena.copy(len(self._layout_of)) if pending else self._arena
            facts = notes.facts(self._layout_of, self._layouts)
            ended = EndedRows(wanted, arena, facts, (notes.fixed, notes.texts), pending)
            self._reset()
            return ended

    @property
    def layouts(self) -> list[Layout]:
        """All layouts so far, by number; the same list is appended to as new ones come."""
        return self._layouts.layouts

    def abandon(self) -> None:
        """In a forked child: replace the lock, which the parent may hold, and stop using threads."""
        self._lock = k.new_lock()
        self._engine.abandon()

    def close(self) -> None:
        """Free all memory, on devices too; the summarizer must not be used afterwards."""
        with self._lock:
            if self._memory is not None:
                self._memory.clear()
            self._arena.clear()
            self._devices.clear()
            self._reset()
        _LIVE.discard(self)
