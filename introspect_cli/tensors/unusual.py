"""Tensors that are no plain ones (wrapped, sparse, quantized), and all else that needs torch itself."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.records import Layout, Status
from introspect_cli.tensors import checksum, fallback, parallel, values
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu.devices import CAPTURING, is_capturing
from introspect_cli.tensors.special import PLAIN, Parts, is_wrapped, one_run, parts_of
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from introspect_cli.tensors.row_notes import Slots


@dataclass
class UnusualTensors:
    """Summarises tensors of any sort by torch; the summarizer's lock is held."""

    slots: Slots

    def add(self, tensor: torch.Tensor) -> None:
        """Summarise a tensor of any sort, or a `Placed` part of one, into a new row at the next free slot.

        Raises:
            Exception: whatever torch raises; the row may be there then, or not.
        """
        with _run_by_torch(tensor):
            self._add(tensor)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A detached copy of a tensor in host memory; waits for its device."""
        with _run_by_torch(tensor):
            return tensor.detach().to("cpu", copy=True)

    def _add(self, tensor: torch.Tensor) -> None:
        """Take a tensor apart, add a row for it, and summarise its parts: on its device, or on the CPU.

        On the CPU go composites and medians; nothing is computed while a CUDA graph is being captured.
        """
        parts = parts_of(tensor)
        if parts.values is None:
            self.add_unseen(parts)
            return
        slot = self.slots.new_row(Layout(parts.shape, parts.dtype, parts.device, parts.strides, parts.part))
        if parts.extra:
            self.slots.notes.header_of[slot] = checksum.header(parts.dtype, parts.shape, parts.extra)
        if parts.text or parts.status is not Status.OBSERVED:
            self.slots.notes.set_status(slot, parts.status, values.shortened(parts.text))
        if not fallback.has_values(parts.values.dtype):
            self.slots.mark_bits_only(slot, parts.values.dtype)
        device = parts.values.device
        if device.type == "cuda" and is_capturing():
            self.slots.notes.set_status(slot, Status.NOT_OBSERVED, CAPTURING)
        elif device.type == "cpu" or parts.bits or self.slots.sorted_stats:
            self._summarise_on_cpu(self.slots.arena.row(slot), parts)
        else:
            self.slots.devices.add(slot, parts.values, parts.runs)

    def _summarise_on_cpu(self, row: r.Rows, parts: Parts) -> None:
        """Summarise parts on the CPU, copied there if need be.

        Args:
            row: the row, shape (32,); overwritten.
            parts: with `values`. Where `bits` are given, the checksum is of these, added up.
        """
        assert parts.values is not None
        self.slots.engine.fill(
            row,
            parts.values.cpu(),
            with_stats=bool(self.slots.flags & k.STATS),
            with_sketch=bool(self.slots.flags & k.SKETCH),
            sorted_stats=self.slots.sorted_stats,
            runs=parts.runs and [(first, run.cpu()) for first, run in parts.runs],
        )
        if parts.bits:
            part = r.empty(1)[0]
            total = 0
            for offset, tensor in parts.bits:
                self.slots.engine.fill(
                    part, tensor.cpu(), with_stats=False, with_sketch=False, runs=one_run(tensor.cpu(), offset)
                )
                total += int(part[r.RAW])
            row[r.RAW] = total & checksum.MASK

    def add_unseen(self, parts: Parts) -> None:
        """Add a row with status and text of parts without data."""
        slot = self.slots.new_row(Layout(parts.shape, parts.dtype, parts.device, parts.strides))
        self.slots.notes.set_status(slot, parts.status, values.shortened(values.masked(parts.text)))


@contextlib.contextmanager
def _run_by_torch(tensor: torch.Tensor) -> Iterator[None]:
    """Run torch operations on a tensor, seen by no mode of the script's.

    Those on an ordinary tensor also start no threads that the script has not started.
    """
    is_plain = type(tensor) in PLAIN and not is_wrapped(tensor)
    with unobserved(), parallel.single_threaded(tensor) if is_plain else contextlib.nullcontext():
        yield
