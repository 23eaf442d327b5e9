"""Rows that devices compute: where they lie, what is launched for each tensor, and which devices can."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from introspect_cli.tensors import checksum, fallback
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.cpu import Engine
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

    from numpy.typing import NDArray
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
        self.address = self.device.data_ptr()


class Pending:
    """Rows of a step on their way to the host.

    Attributes:
        slots: the summarizer's slot of each row; a tensor in several parts has a row for each.
    """

    def __init__(self, rows: DeviceRows, blocks: list[Block], slots: list[int], streams: list[Any]) -> None:
        """Hold the rows; nothing is copied before `send`."""
        self._rows = rows
        self._blocks = blocks
        self._streams = streams
        self._wait: Callable[[], object] | None = None
        self.slots = slots

    def send(self) -> None:
        """Queue the copy to the host; nothing if that was done, or while a CUDA graph is being captured."""
        if self._wait is None and not self._rows.is_capturing():
            self._wait = self._rows.copy(self._blocks, self._streams)

    def is_ready(self) -> bool:
        """Whether `rows` may be called: the copy is queued, and no CUDA graph is being captured. Calls `send`."""
        self.send()
        return self._wait is not None and not self._rows.is_capturing()

    def rows(self) -> Rows:
        """Wait for the rows and return them, shape (len(slots), 32), with floats as float64; give the blocks back.

        They are in the order of `slots`, in which a slot may come several times. Call it once only, and only after
        `is_ready` was True.
        """
        self.send()
        if self._wait is not None:
            self._wait()
        parts = [block.host.numpy() for block in self._blocks]
        out: Rows = np.concatenate([*parts, np.zeros((0, r.WORDS), np.int64)])[: len(self.slots)].view(np.uint64)
        self._rows.free.extend(self._blocks)
        if self._rows.narrow:
            single = out[:, r.MIN :].astype(np.uint32).view(np.float32)
            out[:, r.MIN :] = single.astype(np.float64).view(np.uint64)
        return out

    def fill(self, rows: Rows) -> None:
        """Wait for the rows, and put each at its slot of `rows`, shape (n, 32); those of one slot are added up.

        Call it once only, as `rows`.
        """
        found = self.rows()
        rows[self.slots] = found
        for slot in {slot for slot, times in Counter(self.slots).items() if times > 1}:
            parts = found[np.array(self.slots) == slot]
            KERNELS.merge(parts.ctypes.data, len(parts), rows[slot].ctypes.data)


class DeviceRows:
    """The rows of one device.

    Args:
        device: where the rows are written.
        cuda: torch's module for streams and events of the device; None for a device without streams.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        """Make a stream for copies, where the device has streams; rows are allocated when they are asked for."""
        self._device = device
        self._cuda = cuda
        self._side: Any = cuda.Stream(device) if cuda is not None else None
        self._blocks: list[Block] = []
        self.free: list[Block] = []
        """Those whose rows were read, for later steps to write to."""
        self.narrow = device.type == "mps"
        """Whether floats of rows have 32 bits, for want of float64."""
        self._streams: dict[int, Any] = {}
        self.slots: list[int] = []
        self.before_copy: Callable[[], None] = lambda: None
        """Is called before rows are copied to the host."""
        self.slots_of: dict[Hashable, tuple[int, StorageWeakRef]] = {}
        """Slots of this step's lean rows, by what they are of, with what keeps that the only one of its name."""

    def new_row(self, slot: int) -> int:
        """Append a row for `slot`, to be written on the current stream, and return its address on the device."""
        number = len(self.slots)
        block, row = divmod(number, BLOCK_ROWS)
        if block == len(self._blocks):
            self._blocks.append(self.free.pop() if self.free else self._allocate())
        self.slots.append(slot)
        return self._blocks[block].address + row * r.ROW_BYTES

    def put(self, slot: int, row: torch.Tensor) -> None:
        """Append a row for `slot`, and queue the copy of its words, int64, shape (32,), on the current stream."""
        self.new_row(slot)
        self._blocks[-1].device[(len(self.slots) - 1) % BLOCK_ROWS].copy_(row)
        if self._cuda is not None:
            stream = self._cuda.current_stream(self._device)
            self.note_stream(stream.cuda_stream, stream)

    def note_stream(self, handle: int, stream: Any = None) -> None:
        """Have the next `hand_over` copy only after all that a stream has been given by then; nothing without streams.

        Args:
            handle: of the stream.
            stream: the stream; None for the current one.
        """
        if self._cuda is not None and handle not in self._streams:
            self._streams[handle] = stream or self._cuda.current_stream(self._device)

    def _allocate(self) -> Block:
        """Allocate a block, on the stream of copies: not from the memory that the script's streams use."""
        if self._cuda is None:
            return Block(self._device, pinned=False)
        # Not from the script's pool: memory that was freed on one stream is not for another stream's use yet.
        with self._cuda.stream(self._side):
            return Block(self._device, pinned=bool(self._cuda.is_available()))

    def hand_over(self) -> Pending:
        """Queue the copy to the host of all rows since the last call, and start again without rows.

        While a CUDA graph is being captured, the copy is left to `Pending.send`.
        """
        pending = Pending(self, self._blocks, self.slots, list(self._streams.values()))
        self._blocks, self.slots = [], []
        self._streams.clear()
        self.slots_of.clear()
        pending.send()
        return pending

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on this thread's stream; False without streams."""
        return self._cuda is not None and bool(self._cuda.is_current_stream_capturing())

    def copy(self, blocks: list[Block], streams: list[Any]) -> Callable[[], object]:
        """Queue the copy of blocks to the host, after all that the streams have been given so far.

        Returns:
            What waits until the copy is done; nothing to wait for on a device without streams.
        """
        self.before_copy()
        if self._cuda is None:
            for block in blocks:
                block.host.copy_(block.device)
            return lambda: None
        for stream in streams:
            self._side.wait_stream(stream)
        with self._cuda.stream(self._side):
            for block in blocks:
                block.host.copy_(block.device, non_blocking=True)
        copied = self._cuda.Event()
        copied.record(self._side)
        return copied.synchronize  # type: ignore[no-any-return]


# ---
# Summaries on one GPU: a launch for a tensor, or for all tensors of a table that are read alike.
#
# Hooks hand over tensors one by one, and the launch of a kernel must cost the host less than a microsecond or so
# beyond what the driver takes: layouts are looked up, not worked out; programs write into memory that is there
# already. After an optimizer step hundreds of small tensors come at once; they go in one launch over a table of their
# addresses, which is copied to the device from pinned memory, so that nothing waits. Everything goes to the stream
# that is current, the one that made the tensor, and what it needs beside the tensor (room for the programs' rows)
# belongs to that stream.

ITEM_WORDS: Final = 7
"""Words of an item in a table, as `kernels.summarise` reads them."""
LARGEST_COPY: Final = 1 << 28
"""Bytes that are copied at once of a tensor that is not contiguous."""
SMALLEST_TABLE: Final = 1 << 14
"""Bytes of a table at least, so that one of a size is soon found."""
LEAST_KEYS: Final = 1 << 16
MOST_KEYS: Final = 1 << 22
"""Blocks of a checksum whose keys are kept on the device: for 32 million words (0.5 MB) to 2 billion."""


@dataclass
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
        interned: the number its owner gave to the layout; -1 before.
    """

    element: Element
    count: int
    reach: int
    kernels: tuple[tuple[Variant, Variant], ...]
    lookup: int
    matrices: tuple[int, int, int] | None
    interned: int = -1

    def kernel(self, places: int, *, lean: bool) -> Variant:
        """The kernel for elements at a place: `places` is the address, or'ed with the index of the first one."""
        return self.kernels[lean][not (places | self.count) % ALIGNMENT]


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

    @property
    def programs(self) -> int:
        """Number of programs that share this run."""
        return self.prepared.element.programs(self.prepared.count, self.first)


@dataclass
class _Lane:
    """Rows of programs that launches on one stream have left.

    Attributes:
        stream: the stream; None for a device without streams.
        scratch: memory for the rows.
        used: how many there are.
        jobs: of each tensor the address of its row, that of its programs' rows, and how many these are.
    """

    stream: Any
    scratch: torch.Tensor
    used: int = 0
    jobs: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class _Table:
    """Memory for a table of items, free once its launch is done."""

    host: torch.Tensor
    device: torch.Tensor
    done: Any = None


@dataclass(eq=False)
class DeviceEngine:
    """Launches kernels for one device.

    Attributes:
        device: with its index.
        rows: where results go.
        launch: puts kernels on streams.
        stream: gives the handle of the current stream, from a device's index.
        cuda: torch's module for streams and events of the device; None for a device without streams.
        stats: whether to compute statistics.
        sketch: whether to compute sketches.
    """

    device: torch.device
    rows: DeviceRows
    launch: Launcher
    stream: Callable[[int], int]
    cuda: Any = None
    stats: bool = True
    sketch: bool = True

    def __post_init__(self) -> None:
        """Copy the checksum's tables to the device; kernels are compiled when they are first launched."""
        self._index = self.device.index or 0
        self._prepared: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], Prepared | None] = {}
        self._lookups: dict[torch.dtype, torch.Tensor] = {}
        self._lanes: dict[int, _Lane] = {}
        self._tables: list[_Table] = []
        factors = np.array(checksum.FACTORS, dtype=np.uint32).view(np.int32)
        shifts = np.array(checksum.SHIFTS, dtype=np.uint64).view(np.int64)
        self._constants = [torch.from_numpy(factors).to(self.device), torch.from_numpy(shifts).to(self.device)]
        self._factors, self._shifts = (constant.data_ptr() for constant in self._constants)
        self._kept_keys = 0
        self.rows.before_copy = self.merge

    def _block_keys(self, blocks: int) -> int:
        """Address on the device of the checksum's keys for blocks 0 to `blocks` - 1; 0 for more than `MOST_KEYS`.

        Makes a longer table where the last one is too short; those before are kept, since launches may still read them.
        """
        if self._kept_keys < blocks <= MOST_KEYS:
            self._kept_keys = max(LEAST_KEYS, 1 << (blocks - 1).bit_length())
            with np.errstate(over="ignore"):
                keys = checksum.mix(np.arange(1, self._kept_keys + 1, dtype=np.uint64) * np.uint64(checksum.G))
            self._constants.append(torch.from_numpy(keys.view(np.int64)).to(self.device))
        return self._constants[-1].data_ptr() if blocks <= MOST_KEYS else 0

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

    def add(self, slot: int, tensor: torch.Tensor, **wanted: bool) -> bool:
        """Summarise a tensor of any strides on the current stream; does not wait for it.

        A tensor that is launched in several parts gets a row for each, a complex one also one for its checksum and
        sketch and one for its statistics; `Pending.fill` adds up the rows of a slot.

        Args:
            slot: the slot of the row.
            tensor: not conjugated or negated lazily.
            wanted: as for `launch_one`.

        Returns:
            False, with nothing launched, where `prepare` returns None for the parts: no elements, or an unknown type.
        """
        if tensor.dtype in (torch.complex64, torch.complex128):
            # A complex number has the words and the sketch of its two parts, and the statistics of its size.
            return self.add(slot, torch.view_as_real(tensor), stats=False) and self.add(
                slot, fallback.real_values(tensor), hashed=False, sketch=False
            )
        for first, part in self._contiguous_parts(tensor):
            prepared = self.prepare(part)
            if prepared is None:
                return False
            self.launch_one(slot, prepared, part.data_ptr(), first, **wanted)
        return True

    def launch_one(
        self,
        slot: int,
        prepared: Prepared,
        address: int,
        first: int = 0,
        *,
        lean: bool = False,
        **wanted: bool,
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
        variant = prepared.kernel(address | first, lean=lean)
        if wanted:
            variant = variant._replace(**wanted)
        programs = prepared.element.programs(prepared.count, first)
        handle = self.stream(self._index)
        lane = self._lane(handle, programs)
        scratch = lane.scratch.data_ptr() + lane.used * r.ROW_BYTES
        lane.jobs.append((self.rows.new_row(slot), scratch, programs))
        lane.used += programs
        keys = self._block_keys(prepared.element.blocks(prepared.count, first))
        where = (0, 0, 0, address, prepared.count, first)
        self.launch(variant, programs, handle, (*where, scratch, self._factors, self._shifts, keys, prepared.lookup))

    def launch_tables(self, entries: Sequence[tuple[int, Sequence[Item]]], *, lean: bool = False) -> None:
        """Summarise tensors into new rows, those with the same kernel in one launch; does not wait for it.

        Tensors that need more than `TABLE_PROGRAMS` programs together go in several launches.

        Args:
            entries: of each tensor the slot of its row, and the contiguous runs that it consists of, at least one; one
                tensor must not need more than `TABLE_PROGRAMS` programs.
            lean: whether to leave out what costs most.
        """
        groups: defaultdict[tuple[Variant, int], list[tuple[int, Sequence[Item]]]] = defaultdict(list)
        for slot, runs in entries:
            first = runs[0].prepared
            places = reduce(or_, (item.address | item.first | item.prepared.count for item in runs))
            groups[first.kernel(places, lean=lean)._replace(many=True), first.lookup].append((slot, runs))
        for key, group in groups.items():
            done = 0
            while done < len(group):
                done += self._launch_table(*key, group[done:])

    def _launch_table(self, variant: Variant, lookup: int, entries: list[tuple[int, Sequence[Item]]]) -> int:
        """Launch a kernel over a table of tensors, on the current stream; returns how many of them it has taken.

        Args:
            variant: the kernel, one for `many`.
            lookup: as in `Prepared`.
            entries: the tensors, at least one.
        """
        handle = self.stream(self._index)
        items: list[tuple[int, ...]] = []
        begun = blocks = 0
        programs = [sum(item.programs for item in runs) for _, runs in entries]
        lane = self._lane(handle, min(sum(programs), TABLE_PROGRAMS))
        scratch = lane.scratch.data_ptr() + lane.used * r.ROW_BYTES
        for (slot, runs), alike in zip(entries, programs, strict=True):
            if begun and begun + alike > TABLE_PROGRAMS:
                break
            lane.jobs.append((self.rows.new_row(slot), scratch + begun * r.ROW_BYTES, alike))
            together = begun
            for item in runs:
                count, first = item.prepared.count, item.first
                blocks = max(blocks, item.prepared.element.blocks(count, first))
                items.append((item.address, count, first, begun, item.programs, together, alike))
                begun += item.programs
        lane.used += begun
        owners = np.repeat(np.arange(len(items), dtype=np.int32), [item[4] for item in items])
        with self._table(np.array(items, np.int64), owners) as address:
            where = (0, address, address + 8 * ITEM_WORDS * len(items), 0, 0, 0)
            keys = self._block_keys(blocks)
            self.launch(variant, begun, handle, (*where, scratch, self._factors, self._shifts, keys, lookup))
        return len({item[5] for item in items})

    def _lane(self, handle: int, programs: int) -> _Lane:
        """The lane of the current stream, whose handle is given, with room for the rows of so many programs."""
        self.rows.note_stream(handle)
        lane = self._lanes.get(handle)
        if lane is None:
            scratch = torch.empty(TABLE_PROGRAMS * r.WORDS, dtype=torch.int64, device=self.device)
            stream = None if self.cuda is None else self.cuda.current_stream(self.device)
            lane = self._lanes[handle] = _Lane(stream, scratch)
        if lane.used and lane.used + programs > TABLE_PROGRAMS:
            self._merge(handle, lane)
        return lane

    def merge(self) -> None:
        """Launch what adds up the rows that programs have left, on the streams that these were launched on."""
        for handle, lane in self._lanes.items():
            if lane.jobs:
                with contextlib.nullcontext() if self.cuda is None else self.cuda.stream(lane.stream):
                    self._merge(handle, lane)

    def _merge(self, handle: int, lane: _Lane) -> None:
        """`merge` for one lane, whose stream is the current one; there must be jobs."""
        with self._table(np.array(lane.jobs, np.int64)) as address:
            self.launch(Merging(), len(lane.jobs), handle, (address,))
        lane.used = 0
        lane.jobs.clear()

    @contextlib.contextmanager
    def _table(self, *arrays: NDArray[Any]) -> Iterator[int]:
        """Arrays one after the other on the device, for what is launched inside the `with`; gives their address."""
        content = b"".join(array.tobytes() for array in arrays)
        table = self._free_table(len(content))
        table.host.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        table.device[: len(content)].copy_(table.host[: len(content)], non_blocking=True)
        yield table.device.data_ptr()
        if self.cuda is not None:
            table.done = self.cuda.Event()
            table.done.record(self.cuda.current_stream(self.device))

    def _free_table(self, size: int) -> _Table:
        """Find or allocate memory of at least `size` bytes, on host and device, that no launch still reads."""
        for table in self._tables:
            if len(table.host) >= size and (table.done is None or table.done.query()):
                return table
        room = max(SMALLEST_TABLE, 1 << (size - 1).bit_length())
        host = torch.empty(room, dtype=torch.uint8, pin_memory=self.cuda is not None and self.cuda.is_available())
        table = _Table(host, torch.empty(room, dtype=torch.uint8, device=self.device))
        self._tables.append(table)
        return table


# ---
# The devices that a run's tensors are on: kernels where there is Triton, torch operations elsewhere, rows of both.
#
# A kernel that nobody has run on this device yet is not trusted: the first thing an engine does is to summarise a
# tensor whose row is known, and where it does not come out as the torch operations have it, they do all of the work.

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
    lean = wanted.copy()
    lean.view(np.float64)[0, [*((r.M3, r.M4) if engine.stats else ()), *range(r.SKETCH, r.WORDS)]] = np.nan
    there = x.to(device)
    prepared = engine.prepare(there)
    assert prepared is not None
    engine.launch_one(0, prepared, there.data_ptr())
    engine.launch_tables([(slot, [Item(prepared, there.data_ptr())]) for slot in (1, 2)])
    engine.launch_one(3, prepared, there.data_ptr(), lean=True)
    *made, made_lean = rows.hand_over().rows()
    if not all(row.tobytes() == made[0].tobytes() for row in made):
        return "its kernels give a tensor another row in a table than alone"
    found, right = np.stack([made[0], made_lean]), np.concatenate([wanted, lean])
    if found[:, : r.MIN].tolist() != right[:, : r.MIN].tolist():
        return "its kernels give another checksum or other counts than those of the CPU do"
    pairs = zip(*(side[:, r.MIN :].ravel().view(np.float64) for side in (found, right)), strict=True)
    far = [a for a, b in pairs if not (math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-2) or (a != a and b != b))]  # noqa: PLR0124  # NaN
    return "its kernels give other statistics than those of the CPU do" if far else ""
