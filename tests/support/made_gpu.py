"""A made-up GPU: tensors in CPU memory are taken for ones on a GPU, and the CPU's kernels do what is launched.

So all that the host does for a GPU runs, and launches and bytes are counted, on a machine without one.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.cpu import Engine
from introspect_cli.tensors.gpu import engine as engines
from introspect_cli.tensors.gpu.launch import Merging, Transposing
from introspect_cli.tensors.summarizer import Summarizer


def _memory(address, count, kind):
    return np.frombuffer((ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(address), kind)


class Launches:
    """Does what is launched, and counts it.

    Attributes:
        launched: the kernel, programs and arguments of each launch.
        read: address, bytes, kernel and checksum of each run of elements that was read.
    """

    def __init__(self):
        self._engine = Engine(alone=True)
        self.launched, self.read = [], []

    def __call__(self, variant, programs, _stream, arguments):
        self.launched.append((variant, programs, arguments))
        if isinstance(variant, Transposing):
            self._transpose(variant, programs, *arguments[1:])
        elif isinstance(variant, Merging):
            for row, scratch, _ in _memory(arguments[0], 3 * programs, np.int64).reshape(-1, 3).tolist():
                _memory(row, r.WORDS, np.uint64)[:] = _memory(scratch, r.WORDS, np.uint64)
        elif variant.many:
            items = _memory(arguments[1], int(_memory(arguments[2], programs, np.int32)[-1] + 1) * 7, np.int64)
            for address, count, first, _, _, together, _ in items.reshape(-1, 7).tolist():
                self._summarise(variant, address, count, first, arguments[6] + together * r.ROW_BYTES, arguments[-1])
        else:
            self._summarise(variant, *arguments[3:7], arguments[-1])

    def _summarise(self, variant, address, count, first, row, lookup):
        flags = k.STATS * variant.stats | k.SKETCH * variant.sketch
        self._engine.summarise_contiguous(row, address, count, first, variant.kind, lookup, flags)
        self.read.append((address, count * variant.size, variant, int(_memory(row, r.WORDS, np.int64)[r.RAW])))
        words = _memory(row, r.WORDS, np.float64)
        words[[r.MEDIAN, r.MODE]] = np.nan
        if variant.lean:
            words[[r.M3, r.M4, *range(r.SKETCH, r.WORDS)]] = np.nan

    def _transpose(self, variant, programs, address, target, rows, columns):
        matrices = programs // (-(-rows // variant.edge) * -(-columns // variant.edge))
        kind = f"u{variant.size}"
        out = _memory(target, matrices * rows * columns, kind).reshape(matrices, columns, rows)
        out[:] = _memory(address, out.size, kind).reshape(matrices, rows, columns).transpose(0, 2, 1)


@contextmanager
def made_gpu(launches=None):
    """Within the `with`, all plain tensors are on the made-up GPU; gives its launches."""
    launches = launches or Launches()

    def engine(self, device):
        if device not in self._engines:
            self._engines[device] = engines.DeviceEngine(device, launches, lambda _index: 0, None, *self._wanted)
        return self._engines[device]

    def add(self, slot, tensor, lean, batch):
        return -1 if torch._C._len_torch_function_stack() else self._add_on_gpu(slot, tensor, lean, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("introspect_cli.tensors.summarizer.new_intake", lambda *_: None)
        patch.setattr(engines.Devices, "engine", engine)
        patch.setattr(Summarizer, "_add_plain", add)
        yield launches
