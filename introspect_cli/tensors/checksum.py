"""A 64-bit checksum that adds up over shards.

An ordinary hash reads bytes in order, so it depends on strides, chunking and sharding, and cannot be put together from
the hashes of parts. This one is a sum, modulo 2**64, of one term per 32-bit word, keyed by the word's index w in the
whole tensor, so that any split in any order adds up to the same. With b = w div 512 and j = w mod 512, and all of it
modulo 2**64,

    z = x * FACTORS[j] + SHIFTS[j] + mix((b + 1) * G)
    h = (z mod 2**32) * (z div 2**32) + z
    raw = sum of h,   checksum = mix(raw + header(dtype, shape))

`x` is the word, zero-extended; elements of 1, 2 and 4 bytes are one word, of 8 bytes two (low first), of 16 four; w is
(element index in row-major order) * (words per element) + (word within the element). FACTORS (32 bits, odd) and SHIFTS
(64 bits) are fixed pseudo-random numbers, the first 1024 of splitmix64 seeded with 0.

Why it is not simpler: a key that is linear in w makes the change of h by a change of x linear in w as well, and then
changes at two places look like the same changes at two other places with the same middle. With a key of b alone, or of
b and j added up, the same happens within a block, or between the corners of a rectangle of b and j. Here the change is
a product of what belongs to j with what belongs to b, and a table costs no more than counting.

`mix` is invertible: `unmix` gives the raw sum back, and `combine` adds shards whose terms were keyed globally.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

G: Final = 0x9E3779B97F4A7C15
MASK: Final = 0xFFFFFFFFFFFFFFFF

MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB
_UNMIX_1: Final = pow(MIX_1, -1, 1 << 64)
_UNMIX_2: Final = pow(MIX_2, -1, 1 << 64)

U64 = npt.NDArray[np.uint64]


def mix(raw: int) -> int:
    """Finalise a sum: a bijection of 64-bit integers (the finaliser of splitmix64)."""
    raw &= MASK
    raw = ((raw ^ (raw >> 30)) * MIX_1) & MASK
    raw = ((raw ^ (raw >> 27)) * MIX_2) & MASK
    return raw ^ (raw >> 31)


def unmix(checksum: int) -> int:
    """Undo `mix`."""
    value = checksum & MASK
    value ^= (value >> 31) ^ (value >> 62)
    value = (value * _UNMIX_2) & MASK
    value ^= (value >> 27) ^ (value >> 54)
    value = (value * _UNMIX_1) & MASK
    return value ^ (value >> 30) ^ (value >> 60)


SPAN: Final = 512
"""Words that share one block's key."""
_STREAM: Final = tuple(mix(number * G) for number in range(1, 2 * SPAN + 1))
FACTORS: Final = tuple(value >> 32 | 1 for value in _STREAM[:SPAN])
SHIFTS: Final = _STREAM[SPAN:]


def header(dtype: str, shape: Sequence[int], extra: bytes = b"") -> int:
    """The 64-bit contribution of what a tensor is, apart from its elements.

    Args:
        dtype: torch's name without the prefix.
        shape: sizes of the whole tensor.
        extra: what else makes the value: a quantized tensor's scales and zero points.
    """
    text = f"{dtype}{[int(size) for size in shape]}".encode()
    return int.from_bytes(hashlib.blake2b(text + extra, digest_size=8).digest(), "little")


def combine(shards: Iterable[int], headers: Iterable[int], whole: int) -> int:
    """Checksum of a tensor from the checksums of shards that were keyed by their place in the whole.

    Args:
        shards: finalised checksums.
        headers: the header each was finalised with.
        whole: header of the whole tensor.
    """
    raw = sum(unmix(checksum) - head for checksum, head in zip(shards, headers, strict=True))
    return mix(raw + whole)


def of_text(text: str) -> int:
    """Checksum of a plain value, given as text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def finalise(raw: U64, headers: U64) -> U64:
    """`mix(raw + header)` over arrays of any one shape."""
    value = raw + headers
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_2)
    out: U64 = value ^ (value >> np.uint64(31))
    return out
