"""The end of a checksum, and how checksums of parts become that of the whole.

A tensor's checksum is a sum over its elements, made final by a bijection of 64-bit integers. So whoever has the final
checksums of all parts can take that back, add the sums up, and have the checksum of the whole, without any tensor.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

Number = TypeVar("Number", bound=Any)
"""An integer, or a numpy array of uint64."""

MASK: Final = 0xFFFFFFFFFFFFFFFF

MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
_UNMIX_1: Final = pow(MIX_1, -1, 1 << 64)
_UNMIX_2: Final = pow(MIX_2, -1, 1 << 64)


def _wrapped(value: Number) -> Number:
    """An integer modulo 2**64; a numpy array as it is (the same object), since uint64 wraps by itself."""
    return cast("Number", value & MASK) if isinstance(value, int) else value


def mix(raw: Number) -> Number:
    """The checksum of a sum, or of each of a new array: the finaliser of splitmix64, a bijection of 64-bit integers."""
    value = _wrapped(raw)
    value = value ^ (value >> 30)
    for factor, shift in ((MIX_1, 27), (MIX_2, 31)):  # in place: of an array, each other one is memory to be asked for
        value *= factor
        value = _wrapped(value)
        value ^= value >> shift
    return value


def unmix(checksum: Number) -> Number:
    """The sum from which `mix` made a checksum, for an integer or each of a new array."""
    value = _wrapped(checksum)
    value = _wrapped((value ^ (value >> 31) ^ (value >> 62)) * _UNMIX_2)
    value = _wrapped((value ^ (value >> 27) ^ (value >> 54)) * _UNMIX_1)
    return cast("Number", value ^ (value >> 30) ^ (value >> 60))


def header(dtype: str, shape: Sequence[int], extra: bytes = b"") -> int:
    """64-bit digest of dtype and shape, which is added to the sum over a tensor's elements before `mix`.

    Args:
        dtype: torch's name without the prefix.
        shape: sizes of the whole tensor.
        extra: what else makes the value: a quantized tensor's scheme.
    """
    text = f"{dtype}{[int(size) for size in shape]}".encode()
    return number_of(text + extra)


def number_of(data: bytes) -> int:
    """Unsigned 64-bit digest of bytes (blake2b of 8 bytes, little-endian)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hex_digest(data: bytes) -> str:
    """Digest of bytes, as of a source file (blake2b of 8 bytes): 16 hex digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def content_digest(data: bytes) -> bytes:
    """Digest of a table of names (blake2b of 16 bytes)."""
    return hashlib.blake2b(data, digest_size=16).digest()
