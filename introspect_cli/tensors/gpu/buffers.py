"""Rows on a device that come to the host while the next step runs.

Reading a value from a device makes the host wait for all that was queued before it, and a script that is waited for
at each step keeps its device idle. So kernels write rows into a buffer on the device; at the end of the step one copy
to pinned memory is queued on a stream of our own, behind what the script's streams have queued by then; and the copy
is waited for when the next step has ended, which is long after it is done. Meanwhile the next step writes into
another buffer. Blocks are never moved, since launches hold their addresses, and used again, so that a step allocates
nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from introspect_cli.tensors import rows as r
from introspect_cli.tensors.kernels import KERNELS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from introspect_cli.tensors.rows import Rows

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
        self._copied: Any = None
        self._sent = False
        self.slots = slots

    def send(self) -> None:
        """Queue the copy to the host; nothing if that was done, or while a CUDA graph is being captured."""
        if not self._sent and not self._rows.is_capturing():
            self._copied = self._rows.copy(self._blocks, self._streams)
            self._sent = True

    def is_ready(self) -> bool:
        """Whether `rows` may be called: the copy is queued, and no CUDA graph is being captured. Calls `send`."""
        self.send()
        return self._sent and not self._rows.is_capturing()

    def rows(self) -> Rows:
        """Wait for the rows and return them, shape (len(slots), 32), with floats as float64; give the blocks back.

        They are in the order of `slots`, in which a slot may come several times. Call it once only, and only after
        `is_ready` was True.
        """
        self.send()
        if self._copied is not None:
            self._copied.synchronize()
        parts = [block.host.numpy() for block in self._blocks]
        out: Rows = np.concatenate([*parts, np.zeros((0, r.WORDS), np.int64)])[: len(self.slots)].view(np.uint64)
        self._rows.give_back(self._blocks)
        self._blocks = []
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
        self._free: list[Block] = []
        self.narrow = device.type == "mps"
        """Whether floats of rows have 32 bits, for want of float64."""
        self._streams: dict[int, Any] = {}
        self.slots: list[int] = []
        self.seen: dict[Hashable, int] = {}
        """Addresses of this step's rows, by what they are of."""

    def new_row(self, slot: int) -> int:
        """Append a row for `slot`, to be written on the current stream, and return its address on the device."""
        number = len(self.slots)
        block, row = divmod(number, BLOCK_ROWS)
        if block == len(self._blocks):
            self._blocks.append(self._free.pop() if self._free else self._allocate())
        self.slots.append(slot)
        return self._blocks[block].address + row * r.ROW_BYTES

    def put(self, slot: int, row: torch.Tensor) -> None:
        """Append a row for `slot`, and queue the copy of its words, int64, shape (32,), on the current stream."""
        self.new_row(slot)
        block, number = divmod(len(self.slots) - 1, BLOCK_ROWS)
        self._blocks[block].device[number].copy_(row)
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
        self.seen.clear()
        pending.send()
        return pending

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on this thread's stream; False without streams."""
        return self._cuda is not None and bool(self._cuda.is_current_stream_capturing())

    def copy(self, blocks: list[Block], streams: list[Any]) -> Any:
        """Queue the copy of blocks to the host, after all that the streams have been given so far.

        Returns:
            An event that is done when the copy is; None for a device without streams, where the copy is done already.
        """
        if self._cuda is None:
            for block in blocks:
                block.host.copy_(block.device)
            return None
        for stream in streams:
            self._side.wait_stream(stream)
        with self._cuda.stream(self._side):
            for block in blocks:
                block.host.copy_(block.device, non_blocking=True)
        copied = self._cuda.Event()
        copied.record(self._side)
        return copied

    def give_back(self, blocks: list[Block]) -> None:
        """Keep blocks whose rows were read, for later steps to write to."""
        self._free.extend(blocks)
