"""Summaries on one GPU: a launch for a tensor, or for all tensors of a table that are read alike.

Hooks hand over tensors one by one, and the launch of a kernel must cost the host less than a microsecond or so beyond
what the driver takes: layouts are looked up, not worked out; programs write into memory that is there already. After
an optimizer step hundreds of small tensors come at once; they go in one launch over a table of their addresses, which
is copied to the device from pinned memory, so that nothing waits. Everything goes to the stream that is current, the
one that made the tensor, and what it needs beside the tensor (room for the programs' rows) belongs to that stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from introspect_cli.tensors import checksum
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu.launch import (
    ALIGNMENT,
    EDGE,
    EVEN,
    LARGEST_ELEMENT,
    NARROW,
    TABLE_PROGRAMS,
    Plan,
    Transposing,
    Variant,
    plan,
)
from introspect_cli.tensors.kernels import TABLE
from introspect_cli.tensors.views import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.tensors.gpu.buffers import DeviceRows
    from introspect_cli.tensors.gpu.launch import Launcher

ITEM_WORDS: Final = 9
"""Words of an item in a table, as `kernels.summarise` reads them."""
SMALLEST_TABLE: Final = 1 << 14
"""Bytes of a table at least, so that one of a size is soon found."""
LEAST_KEYS: Final = 1 << 16
MOST_KEYS: Final = 1 << 22
"""Blocks of a checksum whose keys are kept on the device: for 32 million words (0.5 MB) to 2 billion."""


@dataclass
class Prepared:
    """Launch parameters of a layout.

    Attributes:
        plan: how the elements are read.
        aligned: the kernel where all begins at multiples of 16; None where the number of elements is not one.
        unaligned: the kernel otherwise.
        programs: how many.
        layout: address of sizes and strides on the device; 0 where elements are contiguous.
        lookup: address of the values of all bytes, or of anything.
        kept: what these addresses are of.
        interned: the number its owner gave to the layout; -1 before.
    """

    plan: Plan
    aligned: Variant | None
    unaligned: Variant
    programs: int
    layout: int
    lookup: int
    kept: list[torch.Tensor]
    interned: int = -1


@dataclass
class Item:
    """A run of elements to summarise: part of a tensor, or all of it.

    Attributes:
        prepared: its layout.
        address: of its first element.
        first: index of that element in the whole tensor.
    """

    prepared: Prepared
    address: int
    first: int = 0

    @property
    def programs(self) -> int:
        """Programs that share it."""
        return self.prepared.plan.programs(self.first) if self.first else self.prepared.programs


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


@dataclass
class _Group:
    """Tensors of one launch."""

    items: list[tuple[int, ...]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    programs: int = 0
    blocks: int = 0


class DeviceEngine:
    """Launches kernels for one device.

    Args:
        device: with its index.
        rows: where results go.
        launcher: puts kernels on streams.
        stream: gives the handle of the current stream, from a device's index.
        cuda: torch's module for streams and events of the device; None for a device without streams.
        stats: whether to compute statistics.
        sketch: whether to compute sketches.
    """

    def __init__(
        self,
        device: torch.device,
        rows: DeviceRows,
        launcher: Launcher,
        *,
        stream: Callable[[int], int],
        cuda: Any = None,
        stats: bool = True,
        sketch: bool = True,
    ) -> None:
        self._device = device
        self._index = device.index or 0
        self._rows = rows
        self._launch = launcher
        self._stream = stream
        self._cuda = cuda
        self.stats = stats
        self.sketch = sketch
        self._prepared: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], Prepared | None] = {}
        self._lookups: dict[torch.dtype, torch.Tensor] = {}
        self._lanes: dict[int, _Lane] = {}
        self._tables: list[_Table] = []
        factors = np.array(checksum.FACTORS, dtype=np.uint32).view(np.int32)
        shifts = np.array(checksum.SHIFTS, dtype=np.uint64).view(np.int64)
        self._constants = [torch.from_numpy(factors).to(device), torch.from_numpy(shifts).to(device)]
        self._factors, self._shifts = (constant.data_ptr() for constant in self._constants)
        self._kept_keys = 0

    def _keys(self, blocks: int) -> int:
        """Address of the checksum's keys for `blocks` blocks; 0 above `MOST_KEYS`.

        Launches under way go on with those they have.
        """
        if self._kept_keys < blocks <= MOST_KEYS:
            self._kept_keys = max(LEAST_KEYS, 1 << (blocks - 1).bit_length())
            with np.errstate(over="ignore"):
                keys = checksum.mix(np.arange(1, self._kept_keys + 1, dtype=np.uint64) * np.uint64(checksum.G))
            self._constants.append(torch.from_numpy(keys.view(np.int64)).to(self._device))
        return self._constants[-1].data_ptr() if blocks <= MOST_KEYS else 0

    def prepare(self, tensor: torch.Tensor) -> Prepared | None:
        """Launch parameters of a tensor's layout, cached; None if no kernel reads it."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        try:
            return self._prepared[key]
        except KeyError:
            made = self._prepared[key] = self._prepare(*key)
            return made

    def _prepare(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Prepared | None:
        """Launch parameters of dtype, shape and strides; None for expanded tensors and unknown types."""
        made = None if in_memory(shape, strides) else plan(str(dtype).removeprefix("torch."), shape, strides)
        if made is None:
            return None
        kept = []
        layout = lookup = 0
        if made.layout:
            kept.append(torch.tensor(made.layout, dtype=torch.int64).to(self._device))
            layout = kept[-1].data_ptr()
        if made.element.kind == TABLE:
            known = self._lookups.get(dtype)
            if known is None:
                every = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
                known = self._lookups[dtype] = every.to(self._device)
            lookup = known.data_ptr()
        wanted = {"stats": self.stats, "sketch": self.sketch}
        aligned = None if made.count % ALIGNMENT else made.variant(0, 0, **wanted)
        unaligned = made.variant(1, 0, **wanted)
        return Prepared(made, aligned, unaligned, made.programs(), layout, lookup or self._factors, kept)

    def transposed(self, tensor: torch.Tensor, prepared: Prepared) -> torch.Tensor | None:
        """Contiguous copy of a tensor stored as transposed matrices; None where torch copies as fast.

        Raises:
            RuntimeError: no memory is left.
        """
        size = prepared.plan.element.size * prepared.plan.element.parts
        number, rows, columns = prepared.plan.matrices or (0, 0, 0)
        if min(rows, columns) < NARROW or size > LARGEST_ELEMENT:
            return None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        addresses = tensor.data_ptr(), copy.data_ptr()
        aligned = not (rows % EVEN or columns % EVEN or any(address % ALIGNMENT for address in addresses))
        programs = number * -(-rows // EDGE) * -(-columns // EDGE)
        self._launch(Transposing(size, aligned), programs, self._stream(self._index), (0, *addresses, rows, columns))
        return copy

    def one(
        self, slot: int, prepared: Prepared, address: int, first: int = 0, token: tuple[int, ...] | None = None
    ) -> None:
        """Summarise one tensor into a slot's row, on the current stream.

        Args:
            slot: of the row.
            prepared: the tensor's layout.
            address: of its first element.
            first: index of that element in the whole tensor.
            token: what stays as it is while nothing is known to have written to the tensor. If it was summarised with
                this one in the step, the checksum is computed, and the rest only if that is another one now.
        """
        variant = prepared.unaligned if (address | first) % ALIGNMENT else prepared.aligned or prepared.unaligned
        programs = prepared.plan.programs(first) if first else prepared.programs
        handle = self._stream(self._index)
        lane = self._lanes.get(handle) or self._lane(handle)
        self._rows.written_on(handle)
        row = self._rows.place(slot)
        known = row
        if token is not None and (variant.stats or variant.sketch):
            known = self._rows.seen.setdefault((handle, *token), row)
        arguments = (
            *(0, 0, 0, address, prepared.plan.count, first, prepared.layout, row, known),
            *(lane.scratch.data_ptr(), lane.counters.data_ptr()),
            *(self._factors, self._shifts, self._keys(prepared.plan.blocks(first)), prepared.lookup),
        )
        if known != row:
            self._launch(variant._replace(stats=False, sketch=False), programs, handle, arguments)
        self._launch(variant, programs, handle, arguments)

    def many(self, entries: Sequence[tuple[int, Sequence[Item]]]) -> None:
        """Summarise tensors into rows, those with the same kernel in one launch.

        Args:
            entries: a slot, and the runs of elements that are its tensor; at most `TABLE_PROGRAMS` of them.
        """
        groups: dict[tuple[Variant, int], _Group] = {}
        handle = self._stream(self._index)
        self._rows.written_on(handle)
        for slot, runs in entries:
            self._join(groups, handle, self._rows.place(slot), runs)
        for (variant, lookup), group in groups.items():
            self._send(variant, lookup, handle, group)

    def _join(self, groups: dict[tuple[Variant, int], _Group], handle: int, row: int, runs: Sequence[Item]) -> None:
        """Add a tensor to the group of its kernel; a full group is launched first."""
        first = runs[0].prepared
        aligned = all(
            item.prepared.aligned is not None and not (item.address | item.first) % ALIGNMENT for item in runs
        )
        variant = first.aligned if aligned and first.aligned is not None else first.unaligned
        key = (variant._replace(many=True), first.lookup)
        counts = [item.programs for item in runs]
        alike = sum(counts)
        group = groups.setdefault(key, _Group())
        if group.programs + alike > TABLE_PROGRAMS and group.items:
            self._send(*key, handle, group)
            group = groups[key] = _Group()
        begun = together = group.programs
        for item, programs in zip(runs, counts, strict=True):
            prepared = item.prepared
            group.blocks = max(group.blocks, prepared.plan.blocks(item.first))
            group.owners.extend([len(group.items)] * programs)
            group.items.append(
                (
                    *(item.address, prepared.plan.count, item.first, prepared.layout, row),
                    *(begun, programs, together, alike),
                )
            )
            begun += programs
        group.programs = begun

    def _send(self, variant: Variant, lookup: int, handle: int, group: _Group) -> None:
        """Launch a group."""
        words = len(group.items) * ITEM_WORDS
        table = self._table(8 * words + 4 * group.programs)
        memory = table.host.numpy()
        memory[: 8 * words].view(np.int64)[:] = np.array(group.items, dtype=np.int64).reshape(-1)
        size = 8 * words + 4 * group.programs
        memory[8 * words : size].view(np.int32)[:] = group.owners
        table.device[:size].copy_(table.host[:size], non_blocking=True)
        lane = self._lanes.get(handle) or self._lane(handle)
        items = table.device.data_ptr()
        arguments = (
            *(0, items, items + 8 * words, *(0,) * 6),
            *(lane.scratch.data_ptr(), lane.counters.data_ptr()),
            *(self._factors, self._shifts, self._keys(group.blocks), lookup),
        )
        self._launch(variant, group.programs, handle, arguments)
        if self._cuda is not None:
            table.done = self._cuda.Event()
            table.done.record(self._cuda.current_stream(self._device))

    def _table(self, size: int) -> _Table:
        """Memory of at least `size` bytes for a table that no launch still reads."""
        for table in self._tables:
            if len(table.host) >= size and (table.done is None or table.done.query()):
                return table
        room = max(SMALLEST_TABLE, 1 << (size - 1).bit_length())
        host = torch.empty(room, dtype=torch.uint8, pin_memory=self._cuda is not None and self._cuda.is_available())
        table = _Table(host, torch.empty(room, dtype=torch.uint8, device=self._device))
        self._tables.append(table)
        return table

    def _lane(self, handle: int) -> _Lane:
        """Memory for a stream's launches, allocated on that stream."""
        scratch = torch.empty(TABLE_PROGRAMS * r.WORDS, dtype=torch.int64, device=self._device)
        counters = torch.zeros(TABLE_PROGRAMS, dtype=torch.int32, device=self._device)
        lane = self._lanes[handle] = _Lane(scratch, counters)
        return lane
