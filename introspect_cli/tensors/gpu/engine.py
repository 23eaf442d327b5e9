"""Summaries on one GPU: a launch for a tensor, or for all tensors of a table that are read alike.

Hooks hand over tensors one by one, and the launch of a kernel must cost the host less than a microsecond or so beyond
what the driver takes: layouts are looked up, not worked out; programs write into memory that is there already. After
an optimizer step hundreds of small tensors come at once; they go in one launch over a table of their addresses, which
is copied to the device from pinned memory, so that nothing waits. Everything goes to the stream that is current, the
one that made the tensor, and what it needs beside the tensor (room for the programs' rows) belongs to that stream.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from introspect_cli.tensors import checksum, fallback
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu.launch import (
    ALIGNMENT,
    EDGE,
    ELEMENTS,
    EVEN,
    TABLE_PROGRAMS,
    Element,
    Transposing,
    Variant,
    matrices,
)
from introspect_cli.tensors.kernels import TABLE
from introspect_cli.tensors.views import cut, in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from introspect_cli.tensors.gpu.buffers import DeviceRows
    from introspect_cli.tensors.gpu.launch import Launcher

ITEM_WORDS: Final = 8
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
        aligned: the kernel where all begins at multiples of 16; None where the number of elements is not one.
        unaligned: the kernel otherwise.
        lookup: address of the values of all bytes, or of anything.
        matrices: see `launch.matrices`; None for contiguous elements, too.
        interned: the number its owner gave to the layout; -1 before.
    """

    element: Element
    count: int
    reach: int
    aligned: Variant | None
    unaligned: Variant
    lookup: int
    matrices: tuple[int, int, int] | None
    interned: int = -1

    def __post_init__(self) -> None:
        """Set `programs`: how many programs share a whole tensor of this layout."""
        self.programs = self.element.programs(self.count, 0)


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
        prepared = self.prepared
        return prepared.element.programs(prepared.count, self.first) if self.first else prepared.programs


class _Entry(NamedTuple):
    """One tensor of a table: the address of its row, its runs, and the programs that share it."""

    row: int
    runs: Sequence[Item]
    programs: int


@dataclass
class _Lane:
    """Memory shared by launches on one stream: rows and counters of programs."""

    scratch: torch.Tensor
    counters: torch.Tensor


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
        wanted = {"stats": self.stats, "sketch": self.sketch}
        aligned = None if count % ALIGNMENT else element.variant(aligned=True, **wanted)
        unaligned = element.variant(aligned=False, **wanted)
        reach = (1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))) * element.size
        lie_so = None if tensor.is_contiguous() else matrices(shape, strides)
        return Prepared(element, count, reach, aligned, unaligned, lookup, lie_so)

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

    def add(self, slot: int, tensor: torch.Tensor, token: tuple[int, ...] | None = None, **wanted: bool) -> bool:
        """Summarise a tensor of any strides on the current stream; does not wait for it.

        A tensor that is launched in several parts gets a row for each, a complex one also one for its checksum and
        sketch and one for its statistics; `Pending.fill` adds up the rows of a slot.

        Args:
            slot: the slot of the row.
            tensor: not conjugated or negated lazily.
            token: as for `launch_one`.
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
            self.launch_one(slot, prepared, part.data_ptr(), first, token, **wanted)
        return True

    def launch_one(
        self,
        slot: int,
        prepared: Prepared,
        address: int,
        first: int = 0,
        token: tuple[int, ...] | None = None,
        **wanted: bool,
    ) -> None:
        """Summarise contiguous elements into a new row for a slot, on the current stream; does not wait for it.

        Args:
            slot: the slot of the row.
            prepared: what is known of the elements' layout.
            address: of the first one.
            first: its index in the whole tensor.
            token: what stays the same as long as nothing is known to have written to the tensor; None for none. If
                elements were summarised with the same token, stream and `first` earlier in the step, only the checksum
                is computed, and the rest only where that differs from the earlier one.
            wanted: fields of the kernel's variant that are to differ from the prepared ones, by name.
        """
        variant = prepared.unaligned if (address | first) % ALIGNMENT else prepared.aligned or prepared.unaligned
        if wanted:
            variant = variant._replace(**wanted)
        programs = prepared.element.programs(prepared.count, first) if first else prepared.programs
        handle = self.stream(self._index)
        lane = self._lanes.get(handle) or self._new_lane(handle)
        self.rows.note_stream(handle)
        row = self.rows.new_row(slot)
        known = row
        if token is not None and (variant.stats or variant.sketch):
            known = self.rows.seen.setdefault((handle, first, *token), row)
        arguments = (
            *(0, 0, 0, address, prepared.count, first, row, known),
            *(lane.scratch.data_ptr(), lane.counters.data_ptr(), self._factors, self._shifts),
            *(self._block_keys(prepared.element.blocks(prepared.count, first)), prepared.lookup),
        )
        if known != row:
            self.launch(variant._replace(stats=False, sketch=False), programs, handle, arguments)
        self.launch(variant, programs, handle, arguments)

    def launch_tables(self, entries: Sequence[tuple[int, Sequence[Item]]]) -> None:
        """Summarise tensors into new rows, those with the same kernel in one launch; does not wait for it.

        Tensors that need more than `TABLE_PROGRAMS` programs together go in several launches.

        Args:
            entries: of each tensor the slot of its row, and the contiguous runs that it consists of, at least one; one
                tensor must not need more than `TABLE_PROGRAMS` programs.
        """
        tables: dict[tuple[Variant, int], list[_Entry]] = {}
        used: Counter[tuple[Variant, int]] = Counter()
        handle = self.stream(self._index)
        self.rows.note_stream(handle)
        for slot, runs in entries:
            first = runs[0].prepared
            aligned = all(item.prepared.aligned and not (item.address | item.first) % ALIGNMENT for item in runs)
            variant = first.aligned if aligned and first.aligned is not None else first.unaligned
            key = (variant._replace(many=True), first.lookup)
            programs = sum(item.programs for item in runs)
            if used[key] + programs > TABLE_PROGRAMS and used[key]:
                self._launch_table(*key, handle, tables.pop(key))
                used[key] = 0
            used[key] += programs
            tables.setdefault(key, []).append(_Entry(self.rows.new_row(slot), runs, programs))
        for key, table in tables.items():
            self._launch_table(*key, handle, table)

    def _launch_table(self, variant: Variant, lookup: int, handle: int, entries: list[_Entry]) -> None:
        """Copy a table of tensors to the device and launch a kernel over it, on the current stream.

        Args:
            variant: the kernel, one for `many`.
            lookup: as in `Prepared`.
            handle: of the current stream.
            entries: the tensors, at least one.
        """
        items: list[tuple[int, ...]] = []
        owners: list[int] = []
        blocks = 0
        for row, runs, alike in entries:
            together = len(owners)
            for item in runs:
                prepared, begun, programs = item.prepared, len(owners), item.programs
                blocks = max(blocks, prepared.element.blocks(prepared.count, item.first))
                owners += [len(items)] * programs
                items.append((item.address, prepared.count, item.first, row, begun, programs, together, alike))
        words = len(items) * ITEM_WORDS
        size = 8 * words + 4 * len(owners)
        table = self._free_table(size)
        memory = table.host.numpy()
        memory[: 8 * words].view(np.int64)[:] = np.array(items, dtype=np.int64).reshape(-1)
        memory[8 * words : size].view(np.int32)[:] = owners
        table.device[:size].copy_(table.host[:size], non_blocking=True)
        lane = self._lanes.get(handle) or self._new_lane(handle)
        address = table.device.data_ptr()
        arguments = (
            *(0, address, address + 8 * words, *(0,) * 5),
            *(lane.scratch.data_ptr(), lane.counters.data_ptr(), self._factors, self._shifts),
            *(self._block_keys(blocks), lookup),
        )
        self.launch(variant, len(owners), handle, arguments)
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

    def _new_lane(self, handle: int) -> _Lane:
        """Allocate and keep the memory that launches on the current stream share; `handle` is that stream's."""
        scratch = torch.empty(TABLE_PROGRAMS * r.WORDS, dtype=torch.int64, device=self.device)
        counters = torch.zeros(TABLE_PROGRAMS, dtype=torch.int32, device=self.device)
        lane = self._lanes[handle] = _Lane(scratch, counters)
        return lane
