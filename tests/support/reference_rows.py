"""The kernels in torch operations alone: the oracle of the compiled ones, and what runs on accelerators.

One result a tensor, on whatever device it is on, without waiting for that device. So they use integer and float64
tensor operations only, no value ever read by the host; the result is one row (see `rows`) as an int64 tensor of shape
(32,) on the tensor's device, to be copied into a preallocated buffer. int64 multiplication wraps modulo 2**64, which is
what the checksum wants; a logical shift is an arithmetic one and a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import formulas as statistics
import torch

from introspect_cli.tensors import checksum, sketch
from introspect_cli.tensors.views import pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK: Final = 1 << 16
"""Elements summarised at once on the CPU; temporaries are some tens of bytes an element."""
DEVICE_CHUNK: Final = 1 << 19
"""The same on an accelerator, where launches cost more than memory: temporaries stay under 64 MB."""

_LOW: Final = 0xFFFFFFFF


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64 takes it."""
    return value - (1 << 64) if value >= 1 << 63 else value


_FACTORS: Final = torch.tensor([_signed(value) for value in checksum.FACTORS])
_SHIFTS: Final = torch.tensor([_signed(value) for value in checksum.SHIFTS])
_KEYS: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
"""The checksum's tables on each device that was met."""
_G = _signed(checksum.G)
_H1, _H2, _H3 = _signed(sketch.HASH_1), _signed(sketch.HASH_2), _signed(sketch.HASH_3)


def words(flat: torch.Tensor) -> torch.Tensor:
    """The 32-bit words of contiguous elements, zero-extended to int64; shape (n * words per element,)."""
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


def raw_sum(flat: torch.Tensor, offset: int) -> torch.Tensor:
    """The position-keyed sum over contiguous elements, a 0-dim int64."""
    word = words(flat)
    first = offset * max(1, flat.element_size() // 4)
    device = flat.device
    tables = _KEYS.get(device)
    if tables is None:
        tables = _KEYS[device] = (_FACTORS.to(device), _SHIFTS.to(device))
    total = torch.zeros((), dtype=torch.int64, device=device)
    # words up to the next whole span, whole spans as a matrix, and the rest
    head = min(word.numel(), -first % checksum.SPAN)
    body = (word.numel() - head) // checksum.SPAN * checksum.SPAN
    for start, count in ((0, head), (head, body), (head + body, word.numel() - head - body)):
        if count:
            lane = (first + start) % checksum.SPAN
            width = min(count, checksum.SPAN)
            block = (first + start) // checksum.SPAN + 1
            number = torch.arange(block, block + count // width, dtype=torch.int64, device=device)[:, None]
            z = word[start : start + count].view(-1, width) * tables[0][lane : lane + width]
            z += tables[1][lane : lane + width] + _mix(number * _G)
            high = (z >> 32) & _LOW
            total = total + high.mul_(z & _LOW).sum() + z.sum()
    return total


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """`checksum.mix`, elementwise."""
    value = (value ^ _shifted(value, 30)) * _signed(checksum.MIX_1)
    value = (value ^ _shifted(value, 27)) * _signed(checksum.MIX_2)
    return value ^ _shifted(value, 31)


def _wide(device: torch.device) -> torch.dtype:
    """The float type to accumulate in: float64 wherever the device has one."""
    return torch.float32 if device.type == "mps" else torch.float64


def components(flat: torch.Tensor) -> torch.Tensor:
    """Elements as real numbers, in a type that holds them all: a complex element gives two, real part first."""
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return _exact(flat)


def has_values(dtype: torch.dtype) -> bool:
    """Whether elements of this type are numbers one by one (packed and opaque types are not)."""
    name = str(dtype)
    return not ("_x2" in name or "bits" in name or name.removeprefix("torch.").startswith("q"))


def _sketch_sums(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Signed bucket sums of finite components, shape (16,)."""
    lead = offset % sketch.BLOCK
    tail = -(lead + values.numel()) % sketch.BLOCK
    grid = torch.nn.functional.pad(values, (lead, tail)).view(-1, sketch.BLOCK)
    first = offset // sketch.BLOCK
    z = torch.arange(first + 1, first + 1 + grid.shape[0], dtype=torch.int64, device=values.device) * _H1
    z = (z ^ _shifted(z, sketch.SHIFT)) * _H2
    signs = (z ^ _shifted(z, sketch.SHIFT)) * _H3
    signs = signs ^ _shifted(signs, sketch.SHIFT)
    places = torch.arange(sketch.BLOCK, dtype=torch.int64, device=values.device)
    minus = (signs[:, None] >> places) & 1
    signed = (grid * (1 - 2 * minus)).view(-1, sketch.BLOCK // 16, 16).sum(1, dtype=_wide(values.device))
    turn = (z >> sketch.ROTATION_SHIFT) & 15
    return signed.gather(1, places[:16] ^ turn[:, None]).sum(0)


def _measured(flat: torch.Tensor) -> torch.Tensor:
    """Elements as the numbers that statistics are of: complex ones by their absolute values; float64."""
    if not flat.dtype.is_complex:
        return flat.to(_wide(flat.device))
    parts = torch.view_as_real(flat).to(_wide(flat.device))
    sizes = torch.hypot(parts[..., 0], parts[..., 1])
    return sizes.where(~parts.isnan().any(-1), float("nan"))


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _exact(flat: torch.Tensor) -> torch.Tensor:
    """Elements as numbers for what is not added up: in float32 where that holds them all, in `_wide` otherwise."""
    narrow = flat.dtype.is_floating_point and flat.element_size() <= 4
    return flat.to(torch.float32) if narrow else _measured(flat)


def _stat_words(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts (finite, nans, posinfs, neginfs, zeros; int64) and floats (min to abs-sum, in row order)."""
    values, wide = _exact(flat), _wide(flat.device)
    finite = values.isfinite()
    n = finite.sum()
    counts = torch.stack(
        [n, values.isnan().sum(), values.isposinf().sum(), values.isneginf().sum(), (values == 0).sum()]
    )
    kept = values.where(finite, 0.0)
    inf = _number(float("inf"), values)
    low = values.where(finite, inf).min().to(wide)
    high = values.where(finite, -inf).max().to(wide)
    absolute = kept.abs()
    small = absolute.where(finite, inf).min().to(wide)
    sizes = absolute.sum(dtype=wide)
    count = n.to(wide)
    mean = kept.sum(dtype=wide) / (count + (count == 0))
    mean = low.where((low == high) & (n > 0), mean)
    deviation = (kept - mean[None]).masked_fill_(finite.logical_not(), 0.0)
    # the mean is rounded: what is left of the sum of deviations corrects it
    rest = deviation.sum() / (count + (count == 0))
    square = deviation * deviation
    moments = [square.sum(), deviation.mul_(square).sum(), square.mul_(square).sum()]
    return counts, torch.stack([low, high, small, mean + rest, *moments, sizes])


def median_and_mode(tensor: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Median and mode of the finite elements, shape (2,), NaN where not asked for or absent.

    The median is the mean of the two middle elements; the mode is the smallest of the most frequent.
    """
    values = _measured(tensor.detach().resolve_conj().resolve_neg().reshape(-1))
    device = values.device
    finite = values.isfinite()
    n = finite.sum()
    ordered = values.where(finite, float("inf")).sort().values
    nan = _number(float("nan"), values)
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


def _merge(a: torch.Tensor, b: torch.Tensor, count_a: torch.Tensor, count_b: torch.Tensor) -> torch.Tensor:
    """Float words (min to abs-sum, shape (8,)) of two pieces added up; counts are n, 0-dim."""
    n_a, n_b = count_a.to(a.dtype), count_b.to(b.dtype)
    merged: statistics.Moments[torch.Tensor] = statistics.merge_moments((n_a, *a[3:7]), (n_b, *b[3:7]))
    ends = [torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1]), torch.minimum(a[2], b[2])]
    return torch.stack([*ends, *merged[1:], a[7] + b[7]])


def row(
    tensor: torch.Tensor,
    *,
    with_stats: bool = True,
    with_sketch: bool = True,
    sorted_stats: Sequence[str] = (),
    runs: Sequence[tuple[int, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Summarise a strided tensor.

    Args:
        tensor: any shape, strides, dtype and device; not quantized.
        with_stats: whether to fill the statistics words.
        with_sketch: whether to fill the sketch words.
        sorted_stats: `med`, `mode`.
        runs: the contiguous runs to summarise instead of the whole, each with the index of its first element in
            the whole tensor: how a shard is keyed.

    Returns:
        The row, int64, shape (32,), on the tensor's device. Float words are float64 bits, or float32 bits where
        the device has no float64.
    """
    device = tensor.device
    wide = _wide(device)
    chunk = CHUNK if device.type == "cpu" else DEVICE_CHUNK // max(1, tensor.element_size() // 8)
    values = has_values(tensor.dtype)
    raw = torch.zeros((), dtype=torch.int64, device=device)
    counts = torch.zeros(5, dtype=torch.int64, device=device)
    floats = torch.zeros(8, dtype=wide, device=device)
    floats[0] = floats[2] = float("inf")
    floats[1] = -float("inf")
    sums = torch.zeros(16, dtype=wide, device=device)
    width = 2 if tensor.dtype.is_complex else 1
    for base, run in runs if runs is not None else pieces(tensor, chunk):
        for start in range(0, run.numel(), chunk):
            flat, offset = run[start : start + chunk], base + start
            raw = raw + raw_sum(flat, offset)
            if with_stats and values:
                more_counts, more_floats = _stat_words(flat)
                floats = _merge(floats, more_floats, counts[0], more_counts[0])
                counts = counts + more_counts
            if with_sketch and values:
                parts = components(flat)
                sums = sums + _sketch_sums(parts.where(parts.isfinite(), 0.0), offset * width)
    if sorted_stats and values and tensor.numel():
        order = median_and_mode(tensor, sorted_stats)
    else:
        order = torch.full((2,), float("nan"), dtype=wide, device=device)
    real = torch.cat([floats, order, sums])
    bits = real.view(torch.int64) if wide == torch.float64 else real.view(torch.int32).to(torch.int64)
    return torch.cat([raw[None], counts, bits])
