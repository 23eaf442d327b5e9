"""Full tensors as safetensors files, one tensor a file, named by the tensor's checksum.

A tensor that did not change should be stored once, torch's newest element types are unknown to numpy and some to
safetensors, and a header from a stranger may lie about every length. So this is the format's own layout (8 bytes of
header length, JSON, raw little-endian data), written and read here with every number checked against the size of the
file; element types the format does not know are stored as bytes with their name beside.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from introspect_cli.store.files import DamageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.files import Directory, Source


NAME = "tensor"

_LIMIT_HEADER = 1 << 16
_LIMIT_DATA = 1 << 36
_WIDENED = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_NUMBERS = ("float64", "float32", "float16", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (64, 32, 16, 8)))
CODES = {name: f"{name[0].upper()}{8 * np.dtype(name).itemsize}" for name in _NUMBERS} | _WIDENED | {"bool": "BOOL"}
"""safetensors' name of each element type that it knows, by torch's."""
NUMPY = {
    **{name: np.dtype(name) for name in CODES if name not in _WIDENED},
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
    "complex32": np.dtype([("real", "<f2"), ("imag", "<f2")]),
}
"""What numpy reads each element type as."""


def encode(data: bytes | memoryview, checksum: int, dtype: str, shape: Sequence[int]) -> bytes:
    """The header of a tensor file, padded to 8 bytes, which is written before `data` (raw bytes, row-major).

    A dtype that safetensors lacks is stored as flat U8.

    The format's metadata holds the tensor's checksum, torch's `dtype` name, the `shape`, and a CRC-32 of all these and
    the data.
    """
    crc = crc32(data, crc32(f"{checksum:016x} {dtype} {list(shape)} ".encode()))
    code, length = CODES.get(dtype), len(data)
    entry = {"dtype": code or "U8", "shape": list(shape) if code else [length], "data_offsets": [0, length]}
    about = {"checksum": f"{checksum:016x}", "dtype": dtype, "shape": json.dumps(list(shape)), "crc32": f"{crc:08x}"}
    text = json.dumps({"__metadata__": about, NAME: entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def decode(handle: Source, checksum: int) -> Any:
    """The tensor in an open file, checked; bfloat16, fp8 and complex32 widened exactly, unknown dtypes as flat uint8.

    Raises:
        DamageError: it is not what `encode` and the data would be for the tensor with this checksum.
    """
    size, length = handle.size(), int.from_bytes(handle.read(0, 8), "little")
    if not 2 <= length <= min(_LIMIT_HEADER, size - 8) or size > _LIMIT_DATA:
        raise DamageError(handle.path, "it is no file of a tensor")
    written, read = handle.read(0, 8 + length), handle.read(8 + length, size)
    try:
        about = json.loads(written[8:])["__metadata__"]
        shape, dtype = json.loads(about["shape"]), str(about["dtype"])
        if min(shape, default=0) < 0 or encode(read, checksum, dtype, shape) != written:
            raise ValueError(shape)  # noqa: TRY301 - told as all damage is
        data = np.frombuffer(read, np.uint8)
        return widened(data.view(NUMPY[dtype]).reshape(shape), dtype) if dtype in NUMPY else data
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise DamageError(handle.path, "it is not what this tensor is written as") from None


def widened(array: Any, dtype: str) -> Any:
    """The array with bfloat16 and fp8 as float32 and complex32 as complex64, exactly; of any other dtype itself.

    Args:
        array: what `NUMPY` reads `dtype` as, so of bfloat16 and fp8 the bits.
        dtype: torch's name.
    """
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e4m3fn":
        return _float8_e4m3fn()[array]
    if dtype == "float8_e5m2":
        # The upper byte of a float16.
        return (array.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if dtype == "complex32":
        wide = np.empty(array.shape, np.complex64)
        wide.real, wide.imag = array["real"], array["imag"]
        return wide
    return array


def _float8_e4m3fn() -> np.ndarray[Any, Any]:
    """float32 values of the 256 codes of the fp8 type without infinities (OCP 8-bit floating point, 2023)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes % 8 / 8
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def of_file(folder: Directory, name: str) -> NDArray[Any]:
    """The tensor in a file of a directory of tensors, as `decode` gives it; the name has its checksum."""
    with folder.file(name) as handle:
        tensor: NDArray[Any] = decode(handle, int(name[:16], 16))
    return tensor
