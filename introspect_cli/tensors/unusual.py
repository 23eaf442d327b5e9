"""Tensors that are no plain ones (wrapped, sparse, quantized), and all else that needs torch itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from introspect_cli.records import Layout, Status
from introspect_cli.tensors import checksum, fallback, parallel, values
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu.devices import CAPTURING, capturing
from introspect_cli.tensors.special import PLAIN, Parts, is_wrapped, keyed, parts_of
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from introspect_cli.tensors.row_notes import Slots


class UnusualTensors:
    """Summarises tensors of any sort by torch; the summarizer's lock is held."""

    def __init__(self, slots: Slots) -> None:
        """Start without a helper thread."""
        self._slots, self._stand = slots, parallel.Stand()

    def add(self, tensor: torch.Tensor) -> None:
        """Summarise a tensor of any sort, or a part of one."""
        self._by_torch(partial(self._add, tensor), tensor)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory."""
        copies: list[torch.Tensor] = []
        self._by_torch(lambda: copies.append(tensor.detach().to("cpu", copy=True)), tensor)
        return copies[0]

    def _by_torch(self, call: Callable[[], None], tensor: torch.Tensor) -> None:
        """Run torch operations on a tensor, in a helper thread where they would start workers in this one."""

        def unseen_by_script() -> None:
            with unobserved():
                call()

        with unobserved():
            if type(tensor) in PLAIN and not is_wrapped(tensor) and parallel.would_start_workers(tensor):
                self._stand.call(unseen_by_script)
            else:
                call()

    def _add(self, tensor: torch.Tensor) -> None:
        """Take a tensor apart and summarise its parts on the CPU or its device."""
        parts = parts_of(tensor)
        if parts.values is None:
            self.unseen(parts)
            return
        slot = self._slots.new(Layout(parts.shape, parts.dtype, parts.device, parts.strides, parts.part))
        if parts.extra:
            self._slots.notes.header_of[slot] = checksum.header(parts.dtype, parts.shape, parts.extra)
        if parts.text or parts.status is not Status.OBSERVED:
            self._slots.notes.note(slot, parts.status, values.short(parts.text))
        if not fallback.has_values(parts.values.dtype):
            self._slots.bits_only(slot, parts.values.dtype)
        device = parts.values.device
        if device.type == "cuda" and capturing():
            self._slots.notes.note(slot, Status.NOT_OBSERVED, CAPTURING)
        elif device.type == "cpu" or parts.bits or self._slots.sorted_stats:
            self._on_cpu(self._slots.arena.row(slot), parts)
        else:
            self._slots.devices.add(slot, parts.values, parts.runs)

    def _on_cpu(self, row: r.Rows, parts: Parts) -> None:
        """Summarise parts on the CPU: those of composites and sorted statistics too."""
        assert parts.values is not None
        self._slots.engine.fill(
            row,
            parts.values.cpu(),
            with_stats=bool(self._slots.flags & k.STATS),
            with_sketch=bool(self._slots.flags & k.SKETCH),
            sorted_stats=self._slots.sorted_stats,
            runs=parts.runs and [(first, run.cpu()) for first, run in parts.runs],
        )
        if parts.bits:
            part = r.empty(1)[0]
            total = 0
            for offset, tensor in parts.bits:
                self._slots.engine.fill(
                    part, tensor.cpu(), with_stats=False, with_sketch=False, runs=keyed(tensor.cpu(), offset)
                )
                total += int(part[r.RAW])
            row[r.RAW] = total & checksum.MASK

    def unseen(self, parts: Parts) -> None:
        """Add a row for a tensor without data."""
        slot = self._slots.new(Layout(parts.shape, parts.dtype, parts.device, parts.strides))
        self._slots.notes.note(slot, parts.status, values.short(values.masked(parts.text)))

    def abandon(self) -> None:
        """Start with a new helper thread, in a forked child."""
        self._stand = parallel.Stand()

    def close(self) -> None:
        """End the thread."""
        self._stand.close()
