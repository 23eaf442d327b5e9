"""The devices that a run's tensors are on: kernels where there is Triton, torch operations elsewhere, rows of both.

A kernel that nobody has run on this device yet is not trusted: the first thing an engine does is to summarise a
tensor whose row is known, and where it does not come out as the torch operations have it, they do all of the work.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from introspect_cli.tensors import fallback
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.cpu import Engine
from introspect_cli.tensors.gpu import launch
from introspect_cli.tensors.gpu.buffers import DeviceRows, Pending
from introspect_cli.tensors.gpu.engine import DeviceEngine, Item
from introspect_cli.tensors.gpu.launch import TABLE_PROGRAMS
from introspect_cli.tensors.kernels import SKETCH, STATS
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Sequence


CAPTURING = "a CUDA graph is being captured, and would capture us"
"""Why a tensor is not observed: whatever is launched now becomes part of the script's graph."""


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream; what is launched then becomes part of it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Devices:
    """Rows and kernels of each device, made at its first use."""

    def __init__(self, *, stats: bool, sketch: bool) -> None:
        """Note what is wanted; a device gets its rows and kernels when it is first asked for."""
        self._stats = stats
        self._sketch = sketch
        self._rows: dict[torch.device, DeviceRows] = {}
        self._engines: dict[torch.device, DeviceEngine | None] = {}
        self.reasons: dict[torch.device, str] = {}
        """Why a device has no engine."""

    def rows(self, device: torch.device) -> DeviceRows:
        """Row buffer of a device, made at the first call."""
        known = self._rows.get(device)
        if known is None:
            known = self._rows[device] = DeviceRows(device, torch.cuda if device.type == "cuda" else None)
        return known

    def engine(self, device: torch.device) -> DeviceEngine | None:
        """Kernels of a device, compiled and checked at the first call, then cached; waits for the device in that call.

        Returns:
            None where there are none: without Triton, or where they failed the check (why is in `reasons`), and,
            without being cached, while a CUDA graph is being captured in the first call.
        """
        try:
            return self._engines[device]
        except KeyError:
            if device.type == "cuda" and is_capturing():
                return None  # too early to say
            reason = "no GPU that Triton knows" if device.type != "cuda" else launch.unavailable()
            made = None
            if not reason:
                try:
                    handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001  # what torch's compiled code calls
                    launcher, wanted = launch.TritonLauncher(device), (self._stats, self._sketch)
                    made = DeviceEngine(device, self.rows(device), launcher, handle, torch.cuda, *wanted)
                    reason = reason_to_distrust(made, self.rows(device), device)
                except Exception as error:  # no compiler, an unknown GPU, a driver too old: torch can do it as well
                    reason = f"{type(error).__name__}: {error}"
            self.reasons[device] = reason
            self._engines[device] = made = None if reason else made
            return made

    def add(self, slot: int, values: torch.Tensor, runs: Sequence[tuple[int, torch.Tensor]] | None) -> None:
        """Summarise a strided tensor, or the runs of a shard, on its device: by kernels, or by torch where none can.

        Args:
            slot: the slot of the row.
            values: the tensor, on a device that is not the CPU.
            runs: contiguous runs to summarise in place of it, each with the index of its first element in the whole
                tensor; None for all of the tensor.
        """
        if runs is None:
            values = values.resolve_conj().resolve_neg()
        engine = None if values.is_conj() or values.is_neg() else self.engine(values.device)
        if engine is None or not (engine.add(slot, values) if runs is None else _add_runs(engine, slot, runs)):
            self.rows(values.device).put(slot, fallback.row_of(values, runs))

    def hand_over(self) -> list[Pending]:
        """Queue the copy to the host of all rows since the last call.

        One `Pending` for each device with rows; [] for none.
        """
        if not self._rows:
            return []
        with unobserved():
            return [rows.hand_over() for rows in self._rows.values() if rows.slots]

    def clear(self) -> None:
        """Drop the rows and kernels of all devices, with rows that were not handed over.

        Each is made anew, and kernels are checked again, when it is next asked for.
        """
        self._rows.clear()
        self._engines.clear()


def _add_runs(engine: DeviceEngine, slot: int, runs: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """Summarise a shard's runs by one launch, into one row.

    Returns:
        False, and nothing is launched, if there are none, no kernel reads any one of them, or they need more than
        `TABLE_PROGRAMS` programs.
    """
    items = [
        Item(prepared, run.data_ptr(), first) for first, run in runs if (prepared := engine.prepare(run)) is not None
    ]
    if len(items) != len(runs) or not items or sum(item.programs for item in items) > TABLE_PROGRAMS:
        return False
    engine.launch_tables([(slot, items)])
    return True


def reason_to_distrust(engine: DeviceEngine, rows: DeviceRows, device: torch.device) -> str:
    """Reason not to trust an engine: it summarises a tensor whose row is known; "" if all agrees. Waits for the device.

    Checksum and counts must be equal; statistics may differ by 1e-4 of their size or 0.01; a table must give the bits
    that a single launch does.

    Args:
        engine: the engine to try.
        rows: where it writes; they must be empty, and are again afterwards.
        device: the engine's.
    """
    x = (torch.arange(150_000, dtype=torch.float32) * 0.618).sin_() * 3 + 1
    x[1000], x[2000], x[3000] = float("nan"), float("inf"), 0.0
    wanted = r.empty(1)
    Engine(alone=True).fill(wanted[0], x, STATS * engine.stats | SKETCH * engine.sketch)
    wanted.view(np.float64)[0, [r.MEDIAN, r.MODE]] = np.nan
    there = x.to(device)
    prepared = engine.prepare(there)
    assert prepared is not None
    engine.launch_one(0, prepared, there.data_ptr())
    engine.launch_tables([(slot, [Item(prepared, there.data_ptr())]) for slot in (1, 2)])
    rows_of_device = rows.hand_over().rows().view(np.int64)
    if not all(row.tobytes() == rows_of_device[0].tobytes() for row in rows_of_device):
        return "its kernels give a tensor another row in a table than alone"
    if rows_of_device[0][: r.MIN].tolist() != wanted.view(np.int64)[0, : r.MIN].tolist():
        return "its kernels give another checksum or other counts than those of the CPU do"
    pairs = zip(rows_of_device[0].view(np.float64)[r.MIN :], wanted.view(np.float64)[0, r.MIN :], strict=True)
    far = [a for a, b in pairs if not (math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-2) or (a != a and b != b))]  # noqa: PLR0124  # NaN
    return "its kernels give other statistics than those of the CPU do" if far else ""
