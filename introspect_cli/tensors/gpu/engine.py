"""Rows that GPUs compute: where they lie, what is launched for each tensor, and which devices can."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from introspect_cli.tensors import checksum
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.cpu import Engine, real_values
from introspect_cli.tensors.gpu import launch
from introspect_cli.tensors.gpu.launch import (
    ALIGNMENT,
    EDGE,
    ELEMENTS,
    EVEN,
    TABLE_PROGRAMS,
    Element,
    Merging,
    Transposing,
    Variant,
    matrices,
)
from introspect_cli.tensors.kernels import KERNELS, SKETCH, STATS, TABLE
from introspect_cli.tensors.views import cut, in_memory, unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch.multiprocessing.reductions import StorageWeakRef

    from introspect_cli.tensors.gpu.launch import Launcher
    from introspect_cli.tensors.rows import Rows


# ---
# Rows on a device that come to the host while the next step runs.
#
# Reading a value from a device makes the host wait for all that was queued before it, and a script that is waited for
# at each step keeps its device idle. So kernels write rows into a buffer on the device; at the end of the step one
# copy to pinned memory is queued on a stream of our own, behind what the script's streams have queued by then; and
# the copy is waited for when the next step has ended, which is long after it is done. Meanwhile the next step writes
# into another buffer. Blocks are never moved, since launches hold their addresses, and used again, so that a step
# allocates nothing.

BLOCK_ROWS: Final = 1024
"""Rows of a block, 256 kB on the device and as many in pinned memory."""


class Block:
    """Memory for `BLOCK_ROWS` rows on the device and on the host."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        """Allocate memory on both sides, not set to anything; on the host `pinned`, so that copies need not wait."""
        shape = (BLOCK_ROWS, r.WORDS)
        self.device = torch.empty(shape, dtype=torch.int64, device=device)
        self.host = torch.empty(shape, dtype=torch.int64, pin_memory=pinned)


@dataclass(eq=False)
class Pending:
    """Rows of a step on their way to the host.

    Attributes:
        engine: whose rows they are.
        blocks: where they lie.
        slots: the summarizer's slot of each row; a tensor in several parts has a row for each.
        again: pairs of slots that have one checksum, if torch counts all that is written.
    """

    engine: DeviceEngine
    blocks: list[Block]
    slots: list[int]
    again: list[tuple[int, int]]
    _wait: Callable[[], object] | None = None

    def is_ready(self) -> bool:
        """Whether `fill` may be called: not while a CUDA graph is being captured. Else queues the copy, if none is."""
        if self.engine.is_capturing():
            return False
        self._wait = self._wait or self.engine.copy(self.blocks)
        return True

    def fill(self, rows: Rows) -> None:
        """Wait for the rows, put each at its slot of `rows`, shape (n, 32), and give the blocks back.

        Those of one slot are added up, and the engine trusts no count of writes from now on where what came again was
        another. Call it once only, and only after `is_ready` was True.
        """
        assert self._wait is not None
        self._wait()
        found: Rows = np.concatenate([block.host.numpy() for block in self.blocks])[: len(self.slots)].view(np.uint64)
        self.engine.free.extend(self.blocks)
        rows[self.slots] = found
        for slot in {slot for slot, times in Counter(self.slots).items() if times > 1}:
            parts = found[np.array(self.slots) == slot]
            KERNELS.merge(parts.ctypes.data, len(parts), rows[slot].ctypes.data)
        if any(rows[first, r.RAW] != rows[second, r.RAW] for first, second in self.again):
            self.engine.trusts = False


# ---
# Summaries on one GPU: a launch for a tensor, or for all tensors of a table that are read alike.
#
# Hooks hand over tensors one by one, and the launch of a kernel must cost the host less than a microsecond or so
# beyond what the driver takes: what a layout needs is looked up, not worked out; programs write into memory that is
# there already. After an optimizer step hundreds of small tensors come at once; they go in one launch over a table of
# their addresses, which is copied to the device from pinned memory, so that nothing waits. Everything goes to the
# stream that is current, the one that made the tensor, and what it needs beside the tensor (room for the programs'
# rows) belongs to that stream.

ITEM_WORDS: Final = 7
"""Words of an item in a table, as `kernels.summarise` reads them."""
LARGEST_COPY: Final = 1 << 28
"""Bytes that are copied at once of a tensor that is not contiguous."""
SMALLEST_TABLE: Final = 1 << 14
"""Bytes of a table at least, so that one of a size is soon found."""
LEAST_KEYS: Final = 1 << 16
MOST_KEYS: Final = 1 << 22
"""Blocks of a checksum whose keys are kept on the device: for 32 million words (0.5 MB) to 2 billion."""


@dataclass(eq=False)
class Prepared:
    """What is known of a tensor by its type, shape and strides.

    Attributes:
        element: its type.
        count: elements.
        reach: bytes from the first element to behind the last one in memory.
        kernels: for all that is wanted and lean, of each the kernel where something is not a multiple of 16, and where
            address, index and number of elements are.
        lookup: address of the values of all bytes, or of anything.
        matrices: see `launch.matrices`; None for contiguous elements, too.
        number: of the layout, as its owner has it; -1 before.
    """

    element: Element
    count: int
    reach: int
    kernels: tuple[tuple[Variant, Variant], ...]
    lookup: int
    matrices: tuple[int, int, int] | None
    number: int = -1

    def __post_init__(self) -> None:
        """Work out once how the whole is shared out."""
        self._whole = self.element.shared(self.count, 0)

    def shared(self, first: int) -> tuple[int, int]:
        """Programs and blocks (`Element.shared`) where the first element has this index in the whole tensor."""
        return self.element.shared(self.count, first) if first else self._whole


@dataclass
class Item:
    """A run of contiguous elements to summarise: part of a tensor, or all of it.

    Attributes:
        prepared: what is known of it.
        address: of its first element.
        first: index of that element in the whole tensor.
    """

    prepared: Prepared
    address: int
    first: int = 0


class _Lane:
    """Rows of programs that launches on one stream have left.

    Attributes:
        handle: of the stream.
        stream: the stream; None for a device without streams.
        address: of memory for `TABLE_PROGRAMS` rows.
        used: how many there are.
        jobs: of each tensor the address of its row, that of its programs' rows, and how many these are.
    """

    def __init__(self, handle: int, stream: Any, device: torch.device) -> None:
        """Allocate memory, on the current stream, which must be this one."""
        self.handle, self.stream = handle, stream
        self._scratch = torch.empty(TABLE_PROGRAMS * r.WORDS, dtype=torch.int64, device=device)
        self.address, self.used, self.jobs = self._scratch.data_ptr(), 0, array("q")


@dataclass
class _Table:
    """Memory for what a launch reads beside tensors, free once that is done."""

    host: torch.Tensor
    device: torch.Tensor
    done: Any = None


@dataclass(eq=False)
class DeviceEngine:
    """Launches kernels for one device, and has the rows that they write.

    Attributes:
        device: with its index.
        launch: puts kernels on streams.
        stream: gives the handle of the current stream, from a device's index.
        cuda: torch's module for streams and events of the device; None for a device without streams.
        stats: whether to compute statistics.
        sketch: whether to compute sketches.
    """

    device: torch.device
    launch: Launcher
    stream: Callable[[int], int]
    cuda: Any = None
    stats: bool = True
    sketch: bool = True

    def __post_init__(self) -> None:
        """Copy the checksum's tables to the device; kernels are compiled when they are first launched."""
        self._index = self.device.index or 0
        self._side = None if self.cuda is None else self.cuda.Stream(self.device)
        self._pinned = self.cuda is not None and bool(self.cuda.is_available())
        self._prepared: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], Prepared | None] = {}
        self._lookups: dict[torch.dtype, torch.Tensor] = {}
        self._lanes: dict[int, _Lane] = {}
        self._tables: list[_Table] = []
        factors = np.array(checksum.FACTORS, dtype=np.uint32).view(np.int32)
        shifts = np.array(checksum.SHIFTS, dtype=np.uint64).view(np.int64)
        self._constants = [torch.from_numpy(factors).to(self.device), torch.from_numpy(shifts).to(self.device)]
        self._factors, self._shifts = (constant.data_ptr() for constant in self._constants)
        self._keys = self._kept_keys = 0
        self.free: list[Block] = []
        """Blocks whose rows were read, for later steps to write to."""
        self.slots_of: dict[Hashable, tuple[int, StorageWeakRef]] = {}
        """Slots of this step's rows, by what they are of, with what keeps that the only one of its name."""
        self.trusts = True
        """Whether all that is written has been counted by torch, as far as full steps tell."""
        self.is_capturing: Callable[[], bool] = bool if self.cuda is None else self.cuda.is_current_stream_capturing
        """Whether a CUDA graph is being captured on this thread's stream; False without streams."""
        self._begin_step()

    def _begin_step(self) -> None:
        """Begin without rows."""
        self._blocks: list[Block] = []
        self.slots: list[int] = []
        self._next = self._end = 0  # addresses of the next row, and behind the last one there is memory for
        self.slots_of.clear()
        self.again: list[tuple[int, int]] = []

    def hand_over(self) -> Pending:
        """Queue the copy to the host of all rows since the last call, and start again without rows.

        While a CUDA graph is being captured, the copy is left to `Pending.is_ready`.
        """
        pending = Pending(self, self._blocks, self.slots, self.again)
        self._begin_step()
        pending.is_ready()
        return pending

    def copy(self, blocks: list[Block]) -> Callable[[], object]:
        """Queue the copy of blocks to the host, after all that the streams with rows have been given so far.

        Returns:
            What waits until the copy is done; nothing to wait for on a device without streams.
        """
        for lane in self._lanes.values():
            with self._on(lane.stream):
                self._merge(lane)
            if self._side is not None:
                self._side.wait_stream(lane.stream)
        with self._on(self._side):
            for block in blocks:
                block.host.copy_(block.device, non_blocking=True)
            copied = self._event()
        return (lambda: None) if copied is None else copied.synchronize

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context manager in which a stream is the current one; nothing on a device without streams."""
        return contextlib.nullcontext() if stream is None else self.cuda.stream(stream)

    def _event(self) -> Any:
        """An event behind all that the current stream has been given; None on a device without streams."""
        if self.cuda is None:
            return None
        event = self.cuda.Event()
        event.record(self.cuda.current_stream(self.device))
        return event

    def prepare(self, tensor: torch.Tensor) -> Prepared | None:
        """Kernels, number of elements and extent in memory for tensors of this layout; cached by type, shape, strides.

        Returns:
            None for what no kernel reads: complex, empty and vastly expanded tensors, and unknown types.
        """
        key = (tensor.dtype, tensor.shape, tensor.stride())
        try:
            return self._prepared[key]
        except KeyError:
            made = self._prepared[key] = self._prepare(tensor, *key)
            return made

    def _prepare(
        self, tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
    ) -> Prepared | None:
        """`prepare` without the cache, with the same cases of None; `dtype`, `shape` and `strides` are the tensor's."""
        element, count = ELEMENTS.get(str(dtype).removeprefix("torch.")), tensor.numel()
        if element is None or not count or in_memory(shape, strides):
            return None
        lookup = self._factors
        if element.kind == TABLE:
            if dtype not in self._lookups:
                every = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
                self._lookups[dtype] = every.to(self.device)
            lookup = self._lookups[dtype].data_ptr()
        of = partial(element.variant, stats=self.stats, sketch=self.sketch)
        kernels = tuple((of(aligned=False, lean=lean), of(aligned=True, lean=lean)) for lean in (False, True))
        reach = (1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))) * element.size
        lie_so = None if tensor.is_contiguous() else matrices(shape, strides)
        return Prepared(element, count, reach, kernels, lookup, lie_so)

    def add(
        self, slot: int, tensor: torch.Tensor, runs: Sequence[tuple[int, torch.Tensor]] | None = None, **wanted: bool
    ) -> bool:
        """Summarise a tensor of any strides, or the runs of a shard, on the current stream; does not wait for it.

        A tensor that is launched in several parts gets a row for each, a complex one also one for its checksum and
        sketch and one for its statistics; `Pending.fill` adds up the rows of a slot.

        Args:
            slot: the slot of the row.
            tensor: the tensor.
            runs: contiguous runs to summarise in place of it, in one launch, each with the index of its first element
                in the whole tensor; None for all of the tensor.
            wanted: as for `launch_one`.

        Returns:
            False, with nothing launched, where `prepare` returns None for the parts: no elements, or an unknown type;
            and for no runs, or such as need more than `TABLE_PROGRAMS` programs.
        """
        if runs is not None:
            items = [
                Item(prepared, run.data_ptr(), first)
                for first, run in runs
                if (prepared := self.prepare(run)) is not None
            ]
            programs = sum(item.prepared.shared(item.first)[0] for item in items)
            if len(items) != len(runs) or not 0 < programs <= TABLE_PROGRAMS:
                return False
            self.launch_tables([(slot, items)])
            return True
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dtype in (torch.complex64, torch.complex128):
            # A complex number has the words and the sketch of its two parts, and the statistics of its size.
            return self.add(slot, torch.view_as_real(tensor), stats=False) and self.add(
                slot, real_values(tensor), hashed=False, sketch=False
            )
        for first, part in self._contiguous_parts(tensor):
            prepared = self.prepare(part)
            if prepared is None:
                return False
            self.launch_one(slot, prepared, part.data_ptr(), first, **wanted)
        return True

    def _contiguous_parts(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Contiguous copies of a tensor's parts, at most `LARGEST_COPY` bytes each; a contiguous tensor as it is.

        The memory of a copy is the script's own again once the kernel that is launched next has read it.

        Yields:
            The row-major index of a part's first element, and the part.

        Raises:
            RuntimeError: no memory is left.
        """
        if tensor.is_contiguous():
            yield 0, tensor
            return
        for first, view in cut(tensor, LARGEST_COPY // tensor.element_size()):
            copy = self.transposed(view)
            yield first, view.clone(memory_format=torch.contiguous_format) if copy is None else copy

    def transposed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Contiguous copy of a tensor that lies as transposed matrices, by a kernel on the current stream.

        Returns:
            None, and nothing is launched, for any other tensor, which torch copies as fast.
        """
        prepared = self.prepare(tensor)
        if prepared is None or prepared.matrices is None:
            return None
        number, rows, columns = prepared.matrices
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        addresses = tensor.data_ptr(), copy.data_ptr()
        aligned = not (rows % EVEN or columns % EVEN or any(address % ALIGNMENT for address in addresses))
        programs = number * -(-rows // EDGE) * -(-columns // EDGE)
        kernel = Transposing(prepared.element.size, aligned)
        self.launch(kernel, programs, self.stream(self._index), (0, *addresses, rows, columns))
        return copy

    def launch_one(
        self, slot: int, prepared: Prepared, address: int, first: int = 0, *, lean: bool = False, **wanted: bool
    ) -> None:
        """Summarise contiguous elements into a new row for a slot, on the current stream; does not wait for it.

        Args:
            slot: the slot of the row.
            prepared: what is known of the elements' layout.
            address: of the first one.
            first: its index in the whole tensor.
            lean: whether to leave out what costs most.
            wanted: fields of the kernel's variant that are to differ from the prepared ones, by name.
        """
        variant = prepared.kernels[lean][not (address | first | prepared.count) % ALIGNMENT]
        if wanted:
            variant = variant._replace(**wanted)
        handle = self.stream(self._index)
        programs, blocks = prepared.shared(first)
        scratch = self._new_row(slot, self._lanes.get(handle) or self._new_lane(handle), programs)
        keys = self._keys if blocks <= self._kept_keys else self._keys_of(blocks)
        where = (0, 0, 0, address, prepared.count, first)
        self.launch(variant, programs, handle, (*where, scratch, self._factors, self._shifts, keys, prepared.lookup))

    def launch_tables(self, entries: Sequence[tuple[int, Sequence[Item]]], *, lean: bool = False) -> None:
        """Summarise tensors into new rows, those with the same kernel in one launch; does not wait for it.

        Where room for the rows of programs ends, a launch does.

        Args:
            entries: of each tensor the slot of its row, and the contiguous runs that it consists of, at least one; one
                tensor must not need more than `TABLE_PROGRAMS` programs.
            lean: whether to leave out what costs most.
        """
        groups: defaultdict[tuple[Variant, int], list[tuple[int, Sequence[Item]]]] = defaultdict(list)
        for entry in entries:
            places = 0
            for item in entry[1]:
                places |= item.address | item.first | item.prepared.count
            prepared = entry[1][0].prepared
            groups[prepared.kernels[lean][not places % ALIGNMENT], prepared.lookup].append(entry)
        for (variant, lookup), group in groups.items():
            done = 0
            while done < len(group):
                done += self._launch_table(variant._replace(many=True), lookup, group[done:])

    def _launch_table(self, variant: Variant, lookup: int, entries: list[tuple[int, Sequence[Item]]]) -> int:
        """Launch a kernel over a table of tensors, on the current stream; returns how many of them it has taken.

        Args:
            variant: the kernel, one for `many`.
            lookup: as in `Prepared`.
            entries: the tensors, at least one.
        """
        handle = self.stream(self._index)
        lane = self._lanes.get(handle) or self._new_lane(handle)
        items = array("q")
        begun = blocks = taken = scratch = 0
        for slot, runs in entries:
            shares = [item.prepared.shared(item.first) for item in runs]
            together, alike = begun, sum(programs for programs, _ in shares)
            if taken and lane.used + alike > TABLE_PROGRAMS:
                break
            row = self._new_row(slot, lane, alike)
            scratch, taken = scratch or row, taken + 1
            for item, (programs, last) in zip(runs, shares, strict=True):
                items.extend((item.address, item.prepared.count, item.first, begun, programs, together, alike))
                begun, blocks = begun + programs, max(blocks, last)
        number = len(items) // ITEM_WORDS
        owners = np.repeat(np.arange(number, dtype=np.int32), np.array(items[4::ITEM_WORDS]))
        table = self._filled_table(items.tobytes() + owners.tobytes())
        address = table.device.data_ptr()
        where = (0, address, address + 8 * len(items), 0, 0, 0)
        tables = (self._factors, self._shifts, self._keys_of(blocks), lookup)
        self.launch(variant, begun, handle, (*where, scratch, *tables))
        table.done = self._event()
        return taken

    def _keys_of(self, blocks: int) -> int:
        """Address on the device of the checksum's keys for blocks 0 to `blocks` - 1; 0 for more than `MOST_KEYS`.

        Makes a longer table where the last one is too short; those before are kept, since launches may still read them.
        """
        if self._kept_keys < blocks <= MOST_KEYS:
            self._kept_keys = max(LEAST_KEYS, 1 << (blocks - 1).bit_length())
            with np.errstate(over="ignore"):
                keys = checksum.mix(np.arange(1, self._kept_keys + 1, dtype=np.uint64) * np.uint64(checksum.G))
            self._constants.append(torch.from_numpy(keys.view(np.int64)).to(self.device))
            self._keys = self._constants[-1].data_ptr()
        return self._keys if blocks <= MOST_KEYS else 0

    def _new_row(self, slot: int, lane: _Lane, programs: int) -> int:
        """Append a row for a slot, and return the address of room for those of its programs, on the current stream."""
        if lane.used + programs > TABLE_PROGRAMS:
            self._merge(lane)
        if self._next == self._end:
            self._begin_block()
        scratch = lane.address + lane.used * r.ROW_BYTES
        lane.jobs.extend((self._next, scratch, programs))
        lane.used += programs
        self.slots.append(slot)
        self._next += r.ROW_BYTES
        return scratch

    def _begin_block(self) -> None:
        """Go on in a block that is free, or in a new one, which is allocated on the stream of copies.

        Not from the script's pool: memory that was freed on one stream is not for another stream's use yet.
        """
        if not self.free:
            with self._on(self._side):
                self.free.append(Block(self.device, pinned=self._pinned))
        self._blocks.append(self.free.pop())
        self._next = self._blocks[-1].device.data_ptr()
        self._end = self._next + BLOCK_ROWS * r.ROW_BYTES

    def _new_lane(self, handle: int) -> _Lane:
        """Make the lane of the current stream, whose handle is given."""
        stream = None if self.cuda is None else self.cuda.current_stream(self.device)
        lane = self._lanes[handle] = _Lane(handle, stream, self.device)
        return lane

    def _merge(self, lane: _Lane) -> None:
        """Launch what adds up the rows that programs have left in a lane, whose stream is the current one."""
        if lane.jobs:
            table = self._filled_table(lane.jobs.tobytes())
            self.launch(Merging(), len(lane.jobs) // 3, lane.handle, (table.device.data_ptr(),))
            table.done = self._event()
        lane.used, lane.jobs = 0, array("q")

    def _filled_table(self, content: bytes) -> _Table:
        """Bytes on the device, as far as the current stream is concerned, in memory that no launch still reads."""
        size = len(content)
        table = next((each for each in self._tables if len(each.host) >= size and _is_over(each.done)), None)
        if table is None:
            room = max(SMALLEST_TABLE, 1 << (size - 1).bit_length())
            host = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
            table = _Table(host, torch.empty(room, dtype=torch.uint8, device=self.device))
            self._tables.append(table)
        table.host.numpy()[:size] = np.frombuffer(content, np.uint8)
        table.device[:size].copy_(table.host[:size], non_blocking=True)
        return table


def _is_over(event: Any) -> bool:
    """Whether all is done that was queued before an event; True for None."""
    return event is None or event.query()


# ---
# The devices that a run's tensors are on, those of them that have kernels.
#
# A kernel that nobody has run on this device yet is not trusted: the first thing an engine does is to summarise a
# tensor whose row is known, and where it does not come out as the CPU's kernels have it, these do all of the work.

CAPTURING = "a CUDA graph is being captured, and would capture us"
"""Why a tensor is not observed: whatever is launched now becomes part of the script's graph."""


class Devices:
    """Kernels and rows of each device, made at its first use."""

    def __init__(self, *, stats: bool, sketch: bool) -> None:
        """Note what is wanted; a device gets its kernels when it is first asked for."""
        self._wanted = (stats, sketch)
        self._engines: dict[torch.device, DeviceEngine | None] = {}
        self.reasons: dict[torch.device, str] = {}
        """Why a device has no engine."""

    def engine(self, device: torch.device) -> DeviceEngine | None:
        """Kernels of a device, compiled and checked at the first call, then cached; waits for the device in that call.

        Returns:
            None where there are none: without Triton, or where they failed the check (why is in `reasons`), and,
            without being cached, while a CUDA graph is being captured in the first call.
        """
        try:
            return self._engines[device]
        except KeyError:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None  # too early to say
            reason = "no GPU that Triton knows" if device.type != "cuda" else launch.unavailable()
            made = None
            if not reason:
                try:
                    handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001  # what torch's compiled code calls
                    made = DeviceEngine(device, launch.TritonLauncher(device), handle, torch.cuda, *self._wanted)
                    reason = reason_to_distrust(made)
                except Exception as error:  # no compiler, an unknown GPU, a driver too old: the CPU can do it as well
                    reason = f"{type(error).__name__}: {error}"
            self.reasons[device] = reason
            self._engines[device] = made = None if reason else made
            return made

    @property
    def trust(self) -> bool:
        """Whether torch has counted all that is written on each device, as far as full steps tell."""
        return all(engine.trusts for engine in self._engines.values() if engine is not None)

    def hand_over(self) -> list[Pending]:
        """Queue the copy to the host of all rows since the last call; a `Pending` for each device with rows."""
        engines = [engine for engine in self._engines.values() if engine is not None and engine.slots]
        if not engines:
            return []
        with unobserved():
            return [engine.hand_over() for engine in engines]

    def clear(self) -> None:
        """Drop rows and kernels of all devices; they are made and checked again when a device is next asked for."""
        self._engines.clear()


def reason_to_distrust(engine: DeviceEngine) -> str:
    """Reason not to trust an engine: it summarises a tensor whose row is known; "" if all agrees. Waits for the device.

    Checksum and counts must be equal; statistics may differ by 1e-4 of their size or 0.01; a table must give the bits
    that a single launch does. The engine must be without rows, and is again afterwards.
    """
    x = (torch.arange(150_000, dtype=torch.float32) * 0.618).sin_() * 3 + 1
    x[1000], x[2000], x[3000] = float("nan"), float("inf"), 0.0
    wanted = r.empty(1)
    Engine(alone=True).fill(wanted[0], x, STATS * engine.stats | SKETCH * engine.sketch)
    wanted.view(np.float64)[0, [r.MEDIAN, r.MODE]] = np.nan
    lean = wanted.copy()
    lean.view(np.float64)[0, [*((r.M3, r.M4) if engine.stats else ()), *range(r.SKETCH, r.WORDS)]] = np.nan
    there = x.to(engine.device)
    prepared = engine.prepare(there)
    assert prepared is not None
    engine.launch_one(0, prepared, there.data_ptr())
    engine.launch_tables([(slot, [Item(prepared, there.data_ptr())]) for slot in (1, 2)])
    engine.launch_one(3, prepared, there.data_ptr(), lean=True)
    found, right = r.empty(4), np.concatenate([wanted, wanted, wanted, lean])
    engine.hand_over().fill(found)
    if not all(row.tobytes() == found[0].tobytes() for row in found[:3]):
        return "its kernels give a tensor another row in a table than alone"
    if found[:, : r.MIN].tolist() != right[:, : r.MIN].tolist():
        return "its kernels give another checksum or other counts than those of the CPU do"
    a, b = (side[:, r.MIN :].view(np.float64) for side in (found, right))
    near = np.isclose(a, b, rtol=1e-4, atol=1e-2, equal_nan=True)
    return "" if near.all() else "its kernels give other statistics than those of the CPU do"
