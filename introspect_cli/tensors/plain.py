"""Ordinary tensors in CPU memory or on a GPU: the fast path of nearly all that the compiled intake leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.records import Layout
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors.cpu import CODES, TABLE_ADDRESS
from introspect_cli.tensors.gpu.devices import is_capturing
from introspect_cli.tensors.gpu.engine import Item
from introspect_cli.tensors.special import has_memory
from introspect_cli.tensors.views import address_of, in_memory, strides_kind, unobserved

if TYPE_CHECKING:
    from introspect_cli.tensors.gpu.engine import DeviceEngine
    from introspect_cli.tensors.row_notes import Slots

Batch = dict["DeviceEngine", list[tuple[int, list[Item]]]]
"""Tensors on GPUs to be summarised together: of each the slot of its row, and what it consists of."""


@dataclass
class PlainTensors:
    """Summarises ordinary tensors; the summarizer's lock is held."""

    slots: Slots

    def add(self, slot: int, tensor: torch.Tensor, intake: Any, batch: Batch | None = None) -> bool:
        """Summarise an ordinary tensor in CPU memory or on a GPU; False, with nothing done, for any other.

        Others are those with lazy negation or conjugation, nested, sparse, quantized or vastly expanded ones, those
        whose storage was freed, and all while a torch-function mode of the script's is on; `UnusualTensors.add` takes
        them.

        Args:
            slot: the slot that its row gets, which must be the next free one.
            tensor: an instance of `PLAIN`, not wrapped by functorch.
            intake: the compiled intake, which learns the shape, so as to take the next tensor of it; None without one.
            batch: contiguous tensors on a GPU are put into it, for the caller to launch; None to launch them now.
        """
        if torch._C._len_torch_function_stack():  # noqa: SLF001  # reading a property would call the script's mode
            return False
        if not tensor.is_cpu:
            return tensor.is_cuda and self._add_on_gpu(slot, tensor, batch)
        slots, code = self.slots, CODES.get(tensor.dtype)
        if code is None or slots.sorted_stats or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if tensor.is_neg() or tensor.is_conj():
            return False
        address, count = address_of(tensor), tensor.numel()
        if count and (not has_memory(tensor) or address == tensor.storage_offset() * k.SIZES[code]):
            return False  # freed, with the tensor still there, or without memory of its own; the slow path says so
        number = slots.layouts.number_on_cpu(tensor)
        row, table = slots.arena.address(slot), TABLE_ADDRESS.get(tensor.dtype, 0)
        if tensor.is_contiguous():
            if intake is not None:
                intake.learn(tensor, number)
                if intake.add(tensor) >= 0:
                    return True
            slots.engine.summarise_contiguous(row, address, count, 0, code, table, slots.flags)
        elif (
            code >= k.OPAQUE8
            or in_memory(tensor.shape, tensor.stride())
            or not slots.engine.summarise_strided(row, tensor, code, table, slots.flags)
        ):
            return False
        slots.layout_of.append(number)
        if code >= k.OPAQUE8:
            slots.mark_bits_only(slot, tensor.dtype)
        return True

    def _add_on_gpu(self, slot: int, tensor: torch.Tensor, batch: Batch | None) -> bool:
        """`add` for a tensor on a CUDA device, with any strides; False, with nothing done, where it cannot.

        Nothing waits for the device. While a CUDA graph is being captured nothing is done.
        """
        engine = None if self.slots.sorted_stats else self.slots.devices.engine(tensor.device)
        if engine is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return False
        if tensor.is_neg() or tensor.is_conj() or is_capturing():
            return False
        prepared = engine.prepare(tensor)
        if prepared is None:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < tensor.storage_offset() * prepared.element.size + prepared.reach:
            return False
        if prepared.interned < 0:
            name, kind = str(tensor.dtype).removeprefix("torch."), strides_kind(tensor)
            prepared.interned = self.slots.layouts.number_of(
                Layout(tuple(tensor.shape), name, str(tensor.device), kind)
            )
        self.slots.arena.address(slot)
        self.slots.layout_of.append(prepared.interned)
        if not prepared.element.values:
            self.slots.mark_bits_only(slot, tensor.dtype)
        address = address_of(tensor)
        if batch is not None and tensor.is_contiguous():
            batch.setdefault(engine, []).append((slot, [Item(prepared, address)]))
            return True
        token = None
        if not tensor.is_inference():
            token = (address, storage._cdata, tensor._version, prepared.interned)  # noqa: SLF001  # as in `reuse`
        if tensor.is_contiguous():
            engine.launch_one(slot, prepared, address, token=token)
            return True
        with unobserved():
            return engine.add(slot, tensor, token)
