"""The summarizer: a tensor in, a row number out, columns once a step.

Hooks hand over thousands of tensors a step, from several threads, on any device, under any mode the script has
switched on, and none of this may be felt. So each tensor is summarised at once into a row of a preallocated arena
(CPU) or of one device buffer (accelerators, nothing waits); `end_step` puts all rows of a step into columns, after one
copy from each device. What fails becomes a row that says so; `add` raises only what is the script's.

One module's output is the next one's input, frozen parameters and untouched buffers come by every step, and the full
summary costs three times its checksum. Version counters do not tell whether memory changed: `.data`, numpy and shared
storage write past them. So the compiled intake remembers what was summarised by its address; when the address comes
again with the same type, size and a few equal bytes, the checksum alone is computed, and the old row taken only if it
agrees. Every answer is of the contents as they are now, but for what comes again in a lean step on a GPU. Rows used in
one step are kept for the next, and no tensor is referred to.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from introspect_cli.errors import belongs_to_script
from introspect_cli.records import Layout, Status
from introspect_cli.tensors import checksum, parallel, values
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.columns import EndedRows, LayoutNumbers, RowNotes
from introspect_cli.tensors.cpu import CODES, TABLE_ADDRESS, Engine
from introspect_cli.tensors.gpu.engine import CAPTURING, Devices, Item
from introspect_cli.tensors.intake import new_intake
from introspect_cli.tensors.special import PLAIN, Parts, has_memory, is_wrapped, one_run, parts_of, unseen_parts
from introspect_cli.tensors.views import STORAGE_BEGIN, address_of, in_memory, strides_kind, unobserved

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from introspect_cli.tensors.columns import Columns
    from introspect_cli.tensors.gpu.engine import DeviceEngine

Batch = dict["DeviceEngine", list[tuple[int, list[Item]]]]
"""Tensors on GPUs to be summarised together: of each the slot of its row, and what it consists of."""
LIMIT: Final = 8192
"""Rows kept from one step to the next, at most: 2 MB."""

_LIVE: weakref.WeakSet[Summarizer] = weakref.WeakSet()
"""Summarizers whose locks and threads a forked child must not inherit."""


def _after_fork_in_child() -> None:
    """Give all summarizers new locks and have them start no threads; python calls it in a forked child."""
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
        self._sorted_stats = tuple(sorted_stats)
        self._flags = k.STATS * stats | k.SKETCH * sketch
        self._engine, self._devices = Engine(alone=alone), Devices(stats=stats, sketch=sketch)
        self._arena, self._layouts, self._notes = r.Arena(), LayoutNumbers(), RowNotes()
        self.layouts = self._layouts.layouts
        """All layouts so far, by number; new ones are appended."""
        self._memory = k.KERNELS.memory(LIMIT)
        self._layout_of = k.numbers_of(())  # of each row; the compiled intake appends to it, too
        self._lock = k.KERNELS.lock()
        shared = (self._layout_of, self._arena.addresses, self._engine.team, self._memory, self._lock)
        self.intake = None if sorted_stats else new_intake(self._flags, *shared)
        """The compiled intake (`intake.py`); None without one."""
        self._reset()
        _LIVE.add(self)

    @property
    def sees_writes(self) -> bool:
        """False from when a GPU's tensor was found changed though torch had counted no write: none is trusted then."""
        return self._devices.trust

    def _reset(self) -> None:
        """Start a step: drop all notes, and begin again with slot 0."""
        self._notes.clear()
        # The last: where an interrupt comes before, the next slots are beyond those that anything is still known of.
        self._layout_of.clear()  # the intake has it too

    def add(self, tensor: Any, *, lean: bool = False) -> int:
        """Summarise a tensor, or a `Placed` part of one, now; on a GPU the work is queued and not waited for.

        Args:
            tensor: any tensor or `Placed` part.
            lean: whether a GPU may leave out what costs most: sketch, skewness, kurtosis, and to read once more what
                came before in this step and was not written to since, as far as torch counts writes; what is read again
                in full steps tells whether it counts all.

        Returns:
            The row's slot in this step. What cannot be summarised gets a row with status NOT_OBSERVED or PARTIAL and a
            text that says why.

        Raises:
            Exception: only an error of the script's own (`errors.belongs_to_script`); it leaves no row.
        """
        with self._lock:
            slot = len(self._layout_of)
            try:
                if self.intake is not None and self.intake.add(tensor) >= 0:
                    return slot
                return self._add(slot, tensor, lean)
            except Exception as error:
                self._replace_failed(slot, tensor, error)
            return slot

    def _add(self, slot: int, tensor: Any, lean: bool, batch: Batch | None = None) -> int:
        """Summarise a tensor that the compiled intake did not take, into a new row.

        Args:
            slot: the slot that the row gets, the next free one.
            tensor: any tensor or `Placed` part.
            lean: as for `add`.
            batch: takes contiguous tensors on GPUs, for the caller to launch together; None to launch them at once.

        Returns:
            The slot; an earlier one, and there is no new row, for what is known from earlier in the step.

        Raises:
            Exception: whatever torch raises; the row may be there then, or not.
        """
        is_plain = type(tensor) in PLAIN and not is_wrapped(tensor)
        known = self._add_plain(slot, tensor, lean, batch) if is_plain else -1
        if known < 0:
            with _run_by_torch(tensor):
                self._add_unusual(tensor)
        return known if known >= 0 else slot

    def _add_plain(self, slot: int, tensor: torch.Tensor, lean: bool, batch: Batch | None) -> int:
        """Summarise an ordinary tensor in CPU memory or on a GPU; its slot, or -1, with nothing done, for any other.

        Others are those with lazy negation or conjugation, nested, sparse, quantized or vastly expanded ones, those
        whose storage was freed or whose type the kernels do not know, and all where medians or modes are wanted or a
        torch-function mode of the script's is on; `_add_unusual` takes them.

        Args:
            slot: the slot that its row gets, which must be the next free one.
            tensor: an instance of `PLAIN`, not wrapped by functorch.
            lean: as for `add`.
            batch: contiguous tensors on a GPU are put into it, for the caller to launch; None to launch them now.
        """
        if torch._C._len_torch_function_stack():  # noqa: SLF001  # reading a property would call the script's mode
            return -1
        if not tensor.is_cpu:
            return self._add_on_gpu(slot, tensor, lean, batch) if tensor.is_cuda else -1
        code = CODES.get(tensor.dtype)
        if code is None or self._sorted_stats or tensor.layout is not torch.strided or tensor.is_nested:
            return -1
        if tensor.is_neg() or tensor.is_conj():
            return -1
        address, count = address_of(tensor), tensor.numel()
        if count and (not has_memory(tensor) or address == tensor.storage_offset() * k.SIZES[code]):
            return -1  # freed, with the tensor still there, or without memory of its own; the slow path says so
        number = self._layouts.number_on_cpu(tensor)
        row, table = self._arena.address(slot), TABLE_ADDRESS.get(tensor.dtype, 0)
        if tensor.is_contiguous():
            if self.intake is not None:  # it learns the shape, so as to take the next tensor of it
                self.intake.learn(tensor, number)
                if self.intake.add(tensor) >= 0:
                    return slot
            self._engine.summarise_contiguous(row, address, count, 0, code, table, self._flags)
        elif (
            code >= k.OPAQUE8
            or in_memory(tensor.shape, tensor.stride())
            or not self._engine.summarise_strided(row, tensor, code, table, self._flags)
        ):
            return -1
        self._layout_of.append(number)
        if code >= k.OPAQUE8:
            self._mark_bits_only(slot, tensor.dtype)
        return slot

    def _add_on_gpu(self, slot: int, tensor: torch.Tensor, lean: bool, batch: Batch | None) -> int:
        """`_add_plain` for a tensor on a CUDA device, with any strides; -1, with nothing done, where it cannot.

        That is so, beside the cases there, without kernels for the device and while a CUDA graph is being captured.
        Nothing waits for the device.
        """
        engine = None if self._sorted_stats else self._devices.engine(tensor.device)
        if engine is None or tensor.layout is not torch.strided or tensor.is_nested or engine.is_capturing():
            return -1
        if tensor.is_neg() or tensor.is_conj():
            return -1
        prepared = engine.prepare(tensor)
        if prepared is None:
            return -1
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset()) * prepared.element.size
        if storage.nbytes() < offset + prepared.reach:
            return -1
        if prepared.number < 0:
            name, kind = str(tensor.dtype).removeprefix("torch."), strides_kind(tensor)
            prepared.number = self._layouts.number_of(Layout(tuple(tensor.shape), name, str(tensor.device), kind))
        address, token = STORAGE_BEGIN(tensor) + offset, None
        if (lean or batch is None) and not tensor.is_inference():
            token = (address, storage._cdata, tensor._version, prepared.number)  # noqa: SLF001  # as in `_mark`
            if token in engine.slots_of:
                known, _ = engine.slots_of[token]
                if lean and engine.trusts:
                    return known
                engine.again.append((known, slot))
        self._layout_of.append(prepared.number)
        if not prepared.element.values:
            self._mark_bits_only(slot, tensor.dtype)
        if not tensor.is_contiguous():
            with unobserved():
                engine.add(slot, tensor, lean=lean)
        elif batch is None:
            engine.launch_one(slot, prepared, address, lean=lean)
        else:
            batch.setdefault(engine, []).append((slot, [Item(prepared, address)]))
        if token is not None:
            # Held weakly, a storage that is freed leaves its name to no other within the step.
            engine.slots_of.setdefault(token, (slot, StorageWeakRef(storage)))
        return slot

    def _add_unusual(self, tensor: Any) -> None:
        """Take a tensor of any sort, or a `Placed` part of one, apart, and summarise it into the next row.

        On its device where that has kernels, but composites and medians on the CPU; nothing is computed while a CUDA
        graph is being captured.

        Raises:
            Exception: whatever torch raises; the row may be there then, or not.
        """
        parts = parts_of(tensor)
        if parts.values is None:
            self._add_unseen(parts)
            return
        slot = self._new_row(Layout(parts.shape, parts.dtype, parts.device, parts.strides, parts.part))
        if parts.extra:
            self._notes.header_of[slot] = checksum.header(parts.dtype, parts.shape, parts.extra)
        if parts.text or parts.status is not Status.OBSERVED:
            self._notes.set_status(slot, parts.status, values.shortened(parts.text))
        if CODES[parts.values.dtype] >= k.OPAQUE8:
            self._mark_bits_only(slot, parts.values.dtype)
        device = parts.values.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._notes.set_status(slot, Status.NOT_OBSERVED, CAPTURING)
            return
        engine = None if parts.bits or self._sorted_stats else self._devices.engine(device)
        if engine is None or not engine.add(slot, parts.values, parts.runs(parts.values)):
            self._summarise_on_cpu(self._arena.row(slot), parts)

    def _summarise_on_cpu(self, row: r.Rows, parts: Parts) -> None:
        """Summarise parts on the CPU, copied there if need be.

        Args:
            row: the row, shape (32,); overwritten.
            parts: with `values`. Where `bits` are given, the checksum is of these, added up.
        """
        assert parts.values is not None
        values = parts.values.cpu()
        runs = parts.runs(values)
        self._engine.fill(row, values, self._flags, sorted_stats=self._sorted_stats, runs=runs)
        if parts.bits:
            part = r.empty(1)[0]
            total = 0
            for offset, tensor in parts.bits:
                self._engine.fill(part, tensor.cpu(), 0, runs=one_run(tensor.cpu(), offset))
                total += int(part[r.RAW])
            row[r.RAW] = total & checksum.MASK

    def _add_unseen(self, parts: Parts) -> None:
        """Add a NOT_OBSERVED row for parts without data, with their text, addresses masked."""
        slot = self._new_row(Layout(parts.shape, parts.dtype, parts.device, parts.strides))
        self._notes.set_status(slot, parts.status, values.shortened(values.masked(parts.text)))

    def _new_row(self, layout: Layout) -> int:
        """Append a row with this layout and return its slot.

        The row's memory is allocated if need be, but nothing is written to it.
        """
        slot = len(self._layout_of)
        index = self._layouts.number_of(layout)
        self._arena.address(slot)
        self._layout_of.append(index)
        return slot

    def _mark_bits_only(self, slot: int, dtype: torch.dtype) -> None:
        """Mark a row as having a checksum only, since its bits are no numbers.

        Where statistics or sketches are wanted the row also becomes PARTIAL, with a text that names `dtype`.
        """
        self._notes.unmeasured.append(slot)
        if self._flags:
            self._notes.set_status(slot, Status.PARTIAL, f"no values of {dtype}, only bits")

    def add_all(
        self, tensors: Iterable[torch.Tensor], slots: list[int] | None = None, *, lean: bool = False
    ) -> list[int]:
        """Summarise tensors now: as `add` for one after the other, but quicker for many, such as all parameters.

        Args:
            tensors: any tensors or `Placed` parts.
            slots: what `record_all` of the intake returned for them: the slot of each, -1 for those still to do; these
                are filled in. None where the intake was not asked.
            lean: as for `add`.

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
                if self.intake is not None:
                    self._arena.reserve(len(self._layout_of) + len(tensors))
                    slots = self.intake.add_all(tensors)
            for place, tensor in enumerate(tensors):
                if slots[place] >= 0:
                    continue
                slots[place] = slot = len(self._layout_of)
                try:
                    slots[place] = self._add(slot, tensor, lean, batch)
                except Exception as error:
                    self._replace_failed(slot, tensor, error)
            for engine, entries in batch.items():
                try:
                    engine.launch_tables(entries, lean=lean)
                except Exception as error:  # noqa: PERF203 - the other devices still compute
                    why = values.shortened(f"{type(error).__name__}: {error}")
                    for slot, _ in entries:
                        self._notes.set_status(slot, Status.NOT_OBSERVED, why)
        return slots

    def keep_marks(self, tensors: list[torch.Tensor], marks: dict[int, Hashable]) -> None:
        """Keep what shows whether each tensor is written to or moved from now on, by `id`.

        It is another value where a tensor's count of writes, address or memory at some places is another; None where
        torch does not say.

        Args:
            tensors: of any sort.
            marks: where it is kept; None for a tensor of which nothing is known.
        """
        with self._lock:
            others = tensors if self.intake is None else self.intake.keep_marks(tensors, marks)
        marks.update(zip(map(id, others), map(_mark, others), strict=True))

    def unlike(self, tensors: list[torch.Tensor], marks: dict[int, Hashable]) -> list[torch.Tensor]:
        """Those tensors that were written to or moved since `keep_marks`, or that it was not given."""
        with self._lock:
            others = tensors if self.intake is None else self.intake.unlike(tensors, marks)
        return [tensor for tensor in others if marks.get(id(tensor)) != _mark(tensor)]

    def _replace_failed(self, slot: int, tensor: torch.Tensor, error: Exception) -> None:
        """Drop the rows from `slot` on, and add one that says why the tensor was not observed.

        Raises:
            Exception: `error` itself, with no row added, where it is the script's own (`errors.belongs_to_script`).
        """
        self._layout_of.cut(slot)
        if belongs_to_script(error):
            raise error
        with unobserved():
            self._add_unseen(unseen_parts(tensor, f"{type(error).__name__}: {error}"))

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
            slot = self._new_row(layout)
            self._notes.fixed[slot] = fixed
            self._notes.set_status(slot, Status.VALUE, text)
            return slot

    def add_missing(self, reason: str) -> int:
        """Add a NOT_OBSERVED row for a value that could not be seen, and return its slot.

        The reason becomes its text: memory addresses masked, at most 200 characters.
        """
        with self._lock:
            slot = self._new_row(Layout((), ""))
            self._notes.set_status(slot, Status.NOT_OBSERVED, values.shortened(values.masked(reason)))
            return slot

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A detached copy of a tensor in host memory; waits for its device, and is seen by no mode of the script."""
        with self._lock, _run_by_torch(tensor):
            return tensor.detach().to("cpu", copy=True)

    def end_step(self, *wanted: tuple[Columns, list[int]]) -> EndedRows:
        """Put the step's rows into columns, and start the next step with slot 0; nothing is waited for.

        Args:
            *wanted: columns, each with the slots of its records, in their order.

        Returns:
            What fills the columns. It has done so already, but where devices compute some rows: then its `finish` does.
        """
        with self._lock:
            pending = self._devices.hand_over()
            self._memory.turn()
            notes = self._notes
            self._arena.reserve(len(self._layout_of))
            arena = self._arena.copy(len(self._layout_of)) if pending else self._arena
            facts = notes.facts(self._layout_of, self._layouts)
            ended = EndedRows(wanted, arena, facts, (notes.fixed, notes.texts), pending)
            self._reset()
            return ended

    def abandon(self) -> None:
        """In a forked child: replace the lock, which the parent may hold, and stop using threads."""
        self._lock = k.KERNELS.lock()
        self._engine.abandon()

    def close(self) -> None:
        """Free all memory, on devices too; the summarizer must not be used afterwards."""
        with self._lock:
            self._memory.clear()
            self._arena.clear()
            self._devices.clear()
            self._reset()
        _LIVE.discard(self)


def _mark(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Version counter and address of a tensor; where either differs later, it was written to or moved.

    None where torch refuses to give one of them, as for inference tensors and subclasses without storage.
    """
    try:
        return tensor._version, address_of(tensor)  # noqa: SLF001 - documented by use; there is no public counter
    except (RuntimeError, NotImplementedError):
        return None


@contextlib.contextmanager
def _run_by_torch(tensor: torch.Tensor) -> Iterator[None]:
    """Run torch operations on a tensor, seen by no mode of the script's.

    Those on an ordinary tensor also start no threads that the script has not started.
    """
    is_plain = type(tensor) in PLAIN and not is_wrapped(tensor)
    with unobserved(), parallel.single_threaded(tensor) if is_plain else contextlib.nullcontext():
        yield
