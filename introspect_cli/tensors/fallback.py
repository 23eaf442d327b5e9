"""A tensor's row in torch operations alone, for devices that introspect has no kernels for (MPS, XPU).

Checksum, counts, extrema and means; central moments, what follows from them, and the sketch are not computed. One
result a tensor, on whatever device it is on, without waiting for it: no value is read by the host. int64 multiplication
wraps modulo 2**64, which is what the checksum wants; a logical shift is an arithmetic one and a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from introspect_cli.tensors import checksum
from introspect_cli.tensors.views import pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK: Final = 1 << 19
"""Elements summarised at once: temporaries stay under 64 MB."""

_LOW: Final = 0xFFFFFFFF


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as an unsigned integer from 0 to 2**64 - 1."""
    return value - (1 << 64) if value >= 1 << 63 else value


_FACTORS: Final = torch.tensor([_signed(value) for value in checksum.FACTORS])
_SHIFTS: Final = torch.tensor([_signed(value) for value in checksum.SHIFTS])
_KEYS: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
"""The checksum's tables on each device that was met."""


def _zero_extended_words(flat: torch.Tensor) -> torch.Tensor:
    """The 32-bit words of contiguous elements, zero-extended to int64, shape (n,).

    An element of 1, 2 or 4 bytes gives one word, of 8 bytes two (low first), of 16 four.
    """
    size = flat.element_size()
    if size == 1:
        return flat.view(torch.uint8).to(torch.int64)
    if size == 2:
        return flat.view(torch.int16).to(torch.int64) & 0xFFFF
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    elif flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # torch calls a lone element of stride 2 contiguous
    return flat.view(torch.int32).to(torch.int64) & _LOW


def _shifted_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 to the right, elementwise: zeros come in at the top, 0 < `bits` < 64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """`checksum.mix` of int64 values with the same bits, elementwise."""
    value = (value ^ _shifted_right(value, 30)) * _signed(checksum.MIX_1)
    value = (value ^ _shifted_right(value, 27)) * _signed(checksum.MIX_2)
    return value ^ _shifted_right(value, 31)


def raw_sum(flat: torch.Tensor, offset: int) -> torch.Tensor:
    """Sum of the checksum's terms over contiguous elements: a 0-dim int64 on their device, before `checksum.mix`.

    Args:
        flat: contiguous elements, shape (n,).
        offset: index of the first in the whole tensor, in elements.
    """
    word, device = _zero_extended_words(flat), flat.device
    place = offset * max(1, flat.element_size() // 4) + torch.arange(word.numel(), dtype=torch.int64, device=device)
    if device not in _KEYS:
        _KEYS[device] = _FACTORS.to(device), _SHIFTS.to(device)
    factors, shifts = _KEYS[device]
    lane, block = place % checksum.SPAN, place // checksum.SPAN + 1
    z = word * factors[lane] + shifts[lane] + _mix(block * _signed(checksum.G))
    return (_shifted_right(z, 32) * (z & _LOW)).sum() + z.sum()


def has_values(dtype: torch.dtype) -> bool:
    """Whether elements of a type are numbers, one by one: not for packed (`_x2`), `bits` and quantized types."""
    name = str(dtype)
    return not ("_x2" in name or "bits" in name or name.removeprefix("torch.").startswith("q"))


def real_values(flat: torch.Tensor) -> torch.Tensor:
    """Elements as float64 (float32 on MPS); of complex ones the absolute value, NaN where either part is NaN."""
    wide = torch.float32 if flat.device.type == "mps" else torch.float64
    if not flat.dtype.is_complex:
        return flat.to(wide)
    parts = torch.view_as_real(flat).to(wide)
    return torch.hypot(parts[..., 0], parts[..., 1]).where(~parts.isnan().any(-1), float("nan"))


def median_and_mode(tensor: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Median and mode of the finite elements, shape (2,), on the tensor's device.

    The median is the mean of the two middle elements, the mode the smallest of the most frequent. Both are NaN where
    no element is finite.

    Args:
        tensor: strided, any shape, with at least one element.
        names: `med`, `mode` or both; what is not named is NaN.
    """
    values = real_values(tensor.detach().resolve_conj().resolve_neg().reshape(-1))
    device = values.device
    finite = values.isfinite()
    n = finite.sum()
    ordered = values.where(finite, float("inf")).sort().values
    nan = torch.full((), float("nan"), dtype=values.dtype, device=device)
    median = mode = nan
    if "med" in names:
        last = (n - 1).clamp(min=0)
        middle = torch.stack([last // 2, (last + 1) // 2])
        median = nan.where(n == 0, ordered.gather(0, middle).mean())
    if "mode" in names:
        # how many equal elements end at each place: its distance from where its run began
        place = torch.arange(1, len(ordered) + 1, dtype=torch.int64, device=device)
        began = place.where(torch.nn.functional.pad(ordered[1:] != ordered[:-1], (1, 0), value=True), 0)
        lengths = (place - began.cummax(0).values).where(ordered.isfinite(), -1)
        mode = nan.where(n == 0, ordered.gather(0, lengths.argmax()[None])[0])
    return torch.stack([median, mode])


def row_of(tensor: torch.Tensor, runs: Sequence[tuple[int, torch.Tensor]] | None = None) -> torch.Tensor:
    """Summarise a strided tensor by torch operations on its device, which are queued and not waited for.

    Args:
        tensor: any shape, strides, dtype and device; not quantized.
        runs: contiguous runs, shape (n,), to summarise in place of the tensor, each with the index of its first element
            in the whole tensor; None for all of the tensor.

    Returns:
        The row (see `rows`), int64, shape (32,), on the tensor's device. Float words are float64 bits, or float32 bits
        where the device has no float64; NaN where nothing is computed.
    """
    chunk = CHUNK // max(1, tensor.element_size() // 4)
    raw = torch.zeros((), dtype=torch.int64, device=tensor.device)
    counts = raw.repeat(5)
    low, high, small, total, sizes = real_values(tensor.new_zeros(5)).unbind()
    low, high, small = low + float("inf"), high - float("inf"), small + float("inf")
    for base, run in runs if runs is not None else pieces(tensor, chunk):
        for start in range(0, run.numel(), chunk):
            flat = run[start : start + chunk]
            raw = raw + raw_sum(flat, base + start)
            if has_values(tensor.dtype):
                values = real_values(flat)
                finite = values.isfinite()
                kinds = (finite, values.isnan(), values.isposinf(), values.isneginf(), values == 0)
                counts = counts + torch.stack([kind.sum() for kind in kinds])
                low = torch.minimum(low, values.where(finite, float("inf")).min())
                high = torch.maximum(high, values.where(finite, -float("inf")).max())
                kept = values.where(finite, 0.0)
                small = torch.minimum(small, kept.abs().where(finite, float("inf")).min())
                total, sizes = total + kept.sum(), sizes + kept.abs().sum()
    absent = torch.full((), float("nan"), dtype=total.dtype, device=tensor.device)
    means = [total / counts[0].clamp(min=1), absent, absent, absent, sizes]
    real = torch.stack([low, high, small, *means, *[absent] * 18])
    bits = real.view(torch.int64) if real.dtype == torch.float64 else real.view(torch.int32).to(torch.int64)
    return torch.cat([raw[None], counts, bits])
