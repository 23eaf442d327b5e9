"""Tensors that are not a plain array of numbers: what is summarised of each, and what is said about it.

Sparse, nested, quantized, fake, wrapped, distributed and storage-less tensors all pass through `torch.Tensor`-typed
code. One function takes a tensor apart into the plain tensors that carry its bits and its values, or says in words why
nothing can be seen. Stated answers:

- sparse (COO, CSR, CSC, BSR, BSC): values as stored give statistics and sketch; values and indices as stored give
  the checksum. COO is coalesced first, so that what is added up in it, and in which order it is kept, makes no other;
- nested: values and offsets, in the same way;
- quantized: the dequantized values; the checksum has the scheme as well;
- DTensor: the local shard, keyed by its place in the whole, marked partial;
- expanded, or made of windows that overlap, to sixteen times what is in memory and more than 2^26 elements: what is in
  memory, marked partial;
- meta, fake, functorch-wrapped (inside vmap, grad, jvp), uninitialised, and subclasses without storage: nothing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from introspect_cli.records import EXPANDED_TEXT, UNPLACED, Status
from introspect_cli.tensors import places
from introspect_cli.tensors.views import in_memory, memory_of, strides_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.records import Part

PART: Final = 1 << 40
"""Index offset between the parts of a composite tensor, so that one checksum covers them all."""

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes whose instances need no looking into, unless wrapped, sparse, quantized or on another device."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001  # no public one
"""Whether a tensor belongs to a functorch transform's level."""

_OPAQUE_DEVICES: Final = {
    "meta": "a meta tensor has no data",
    "lazy": "a lazy tensor has not been computed yet",
}


@dataclass(frozen=True)
class Parts:
    """A tensor taken apart.

    Attributes:
        shape: sizes to report, of the whole tensor.
        dtype: torch's name without the prefix.
        device: as torch writes it.
        strides: one word, see `views.strides_kind`.
        values: the plain strided tensor that statistics and sketch are of; None where nothing is seen.
        bits: tensors the checksum is of, each with its index offset; empty where that is `values` at 0.
        extra: bytes that are part of the value beside the elements.
        status: how much is seen.
        text: what is not, or what stands for the whole; "" where all is plain.
        part: which part of the whole `values` are, where they are one.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: str
    values: torch.Tensor | None = None
    bits: Sequence[tuple[int, torch.Tensor]] = ()
    extra: bytes = b""
    status: Status = Status.OBSERVED
    text: str = ""
    part: Part | None = None

    def runs(self, values: torch.Tensor) -> Sequence[tuple[int, torch.Tensor]] | None:
        """Contiguous runs of `values`, maybe copied, with their indices in the whole; None where they are all of it."""
        return None if self.part is None else list(places.runs(values, self.shape, self.part))


def unseen_reason(tensor: torch.Tensor) -> str:
    """Reason why a tensor has no data to read (fake, meta, lazy, functorch, uninitialised); "" if it may have some."""
    cls = type(tensor)
    if is_wrapped(tensor):
        return "inside a functorch transform (vmap, grad, jvp)"
    if issubclass(cls, UninitializedTensorMixin):
        return "an uninitialised parameter has no data yet"
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        return "a fake tensor has no data"
    functional = getattr(torch, "_is_functional_tensor", None)
    if functional is not None and functional(tensor):
        return "a functionalised tensor has no data of its own"
    return _OPAQUE_DEVICES.get(tensor.device.type, "")


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes as integers; () where any of them is symbolic or ragged."""
    try:
        return tuple(int(size) for size in tensor.shape)
    except Exception:  # symbolic, ragged and uninitialised sizes raise errors of many classes
        return ()


def _common_fields(tensor: torch.Tensor) -> dict[str, Any]:
    """The fields of `Parts` that any tensor has, by name: shape, dtype, device, strides."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = "" if is_wrapped(tensor) else strides_kind(tensor)
    return {"shape": _sizes(tensor), "dtype": dtype, "device": str(tensor.device), "strides": kind}


def unseen_parts(tensor: torch.Tensor, reason: str) -> Parts:
    """NOT_OBSERVED parts of a tensor without data, with the reason as text; it never raises.

    Of a tensor that refuses to say, dtype, device and strides are "unknown", "" and "".
    """
    try:
        common = _common_fields(tensor)
    except Exception:  # a subclass may refuse even this
        common = {"shape": _sizes(tensor), "dtype": "unknown", "device": "", "strides": ""}
    return Parts(**common, status=Status.NOT_OBSERVED, text=reason)


def parts_of(tensor: torch.Tensor | places.Placed) -> Parts:
    """Take any tensor, or `Placed` part of one, apart into plain tensors for its checksum and statistics.

    May wait for a collective whose result the tensor is. Parts with `values` None say why nothing is seen.

    Raises:
        Exception: whatever torch raises for a tensor that is none of the known sorts.
    """
    if isinstance(tensor, places.Placed):
        return _placed_parts(tensor.local, tensor.shape, tensor.part, f"{tensor.part.source} shard")
    reason = unseen_reason(tensor)
    if reason:
        return unseen_parts(tensor, reason)
    if hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements"):
        return _distributed_parts(tensor)
    if hasattr(tensor, "trigger_wait") and hasattr(tensor, "elem"):
        return parts_of(tensor.trigger_wait())
    if tensor.is_nested:
        return _nested_parts(tensor)
    if tensor.layout != torch.strided:
        return _sparse_parts(tensor)
    if tensor.is_quantized:
        return _quantized_parts(tensor)
    if type(tensor) not in PLAIN and tensor.numel() and not memory_of(tensor):
        return unseen_parts(tensor, f"a {type(tensor).__name__} has no storage of its own")
    values = tensor.detach()
    if tensor._is_zerotensor():  # noqa: SLF001 - no public one; what jvp makes of a constant
        values = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    elif tensor.numel() and not has_memory(tensor):
        return unseen_parts(tensor, "its storage has been freed or shrunk")
    memory = in_memory(values.shape, values.stride())
    if memory is not None:
        return _expanded_parts(values, *memory)
    return Parts(**_common_fields(tensor), values=values)


def _expanded_parts(tensor: torch.Tensor, sizes: list[int], strides: list[int]) -> Parts:
    """PARTIAL parts of an expanded tensor: what is in memory, once.

    Args:
        tensor: the tensor.
        sizes: sizes of what is in memory, as of `views.in_memory`.
        strides: its strides, in elements.
    """
    how = f"{tuple(sizes)} in memory"
    return Parts(
        **{**_common_fields(tensor), "strides": "expanded"},
        values=tensor.detach().as_strided(sizes, strides, tensor.storage_offset()),
        extra=f"{how}, strides {tensor.stride()}".encode(),
        status=Status.PARTIAL,
        text=f"{EXPANDED_TEXT}, {how}: these are summarised, each once",
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage reaches as far as its last element; not for tensors without elements.

    Sharding frees the storages of tensors that are still there.
    """
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    needed = (tensor.storage_offset() + reach) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


_INDICES: Final = {
    torch.sparse_coo: ("_indices",),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}
"""Methods of a sparse tensor that give its indices, by layout."""


def _sparse_parts(tensor: torch.Tensor) -> Parts:
    """Parts of a sparse tensor: values for statistics, values and indices for the checksum.

    A COO tensor is coalesced first, where torch can. Of a layout outside `_INDICES`, the dense values serve for both.
    """
    common, tensor = _common_fields(tensor), tensor.detach()
    if tensor.layout not in _INDICES:
        return Parts(**common, values=tensor.to_dense(), extra=common["strides"].encode())
    if tensor.layout == torch.sparse_coo:
        with suppress(RuntimeError):  # not implemented for each dtype
            tensor = tensor.coalesce()
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()  # noqa: SLF001  # the public one wants it coalesced
    indices = [getattr(tensor, name)() for name in _INDICES[tensor.layout]]
    text = f"statistics and sketch over the values as stored, at {_digest(indices)}"
    return Parts(
        **common, values=values, bits=_with_offsets(values, indices), extra=common["strides"].encode(), text=text
    )


def _nested_parts(tensor: Any) -> Parts:
    """Parts of a nested tensor: values, end to end, for statistics, and values and offsets for the checksum."""
    kind = "jagged" if tensor.layout == torch.jagged else "nested"
    if kind == "jagged":
        values = tensor._values.detach()  # noqa: SLF001  # values() would go through the subclass, which is switched off here
        shape = [held for held in (tensor._offsets, tensor._lengths) if held is not None]  # noqa: SLF001  # as above
    else:
        values = tensor.detach().values()
        shape = [tensor._nested_tensor_size()]  # noqa: SLF001  # the old layout has no public way
    text = f"shape, statistics and sketch are of the values, end to end, cut at {_digest(shape)}"
    common = {**_common_fields(values), "strides": kind}
    return Parts(**common, values=values, bits=_with_offsets(values, shape), extra=b"nested", text=text)


def _with_offsets(values: torch.Tensor, indices: Sequence[torch.Tensor]) -> Sequence[tuple[int, torch.Tensor]]:
    """Values, then index tensors, each with the index of its first element in one checksum: 0, `PART`, 2 `PART`."""
    return [(number * PART, tensor) for number, tensor in enumerate((values, *indices))]


def _digest(indices: Sequence[torch.Tensor]) -> str:
    """BLAKE2b digest, 16 hex digits, of the index tensors of a sparse or nested tensor; they are copied to the host."""
    stands = blake2b(digest_size=8)
    for index in indices:
        stands.update(index.detach().cpu().contiguous().numpy().tobytes())
    return stands.hexdigest()


def _quantized_parts(tensor: torch.Tensor) -> Parts:
    """Parts of a quantized tensor: its dequantized values, and the name of its scheme for the checksum."""
    return Parts(**_common_fields(tensor), values=tensor.detach().dequantize(), extra=str(tensor.qscheme()).encode())


def _distributed_parts(tensor: Any) -> Parts:
    """Parts of a DTensor: this rank's shard, with its place in the whole where `places.part_of` knows it."""
    part = places.part_of(tensor)
    described = ", ".join(str(placement) for placement in tensor.placements)
    return _placed_parts(tensor._local_tensor, _sizes(tensor), part, f"local shard of {described}")  # noqa: SLF001  # to_local() would record an autograd node


def _placed_parts(local: torch.Tensor, shape: tuple[int, ...], part: Part | None, described: str) -> Parts:
    """Parts of one rank's shard of a tensor, its checksum and sketch keyed by the place in the whole.

    A shard that is all of the tensor is OBSERVED, one without data NOT_OBSERVED. Others are PARTIAL; one whose place is
    not known, or has another number of elements than the shard, has `UNPLACED` strides, too.

    Args:
        local: the shard.
        shape: sizes of the whole tensor.
        part: which part of it the shard is; None where that is not known.
        described: what the shard is called in the text.
    """
    inner = parts_of(local)
    common = (shape, inner.dtype, inner.device, inner.strides)
    if inner.values is None:
        return Parts(*common, status=inner.status, text=f"{described}: {inner.text}")
    text = f"{described}, shape {tuple(inner.values.shape)}"
    if part is None or inner.bits or part.numel != inner.values.numel():
        text += "; its place in the whole is not known"
        common = (shape, inner.dtype, inner.device, UNPLACED)
        return Parts(*common, inner.values, inner.bits, extra=inner.extra, status=Status.PARTIAL, text=text)
    if places.is_whole(part, shape):
        return Parts(*common, inner.values)
    return Parts(*common, inner.values, status=Status.PARTIAL, text=text, part=part)


def one_run(tensor: torch.Tensor, offset: int) -> Sequence[tuple[int, torch.Tensor]]:
    """A tensor's elements as one contiguous run, as if its first one had index `offset` in a whole; maybe copied."""
    return [(offset, tensor.detach().contiguous().view(-1))]
