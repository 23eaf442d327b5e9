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

`mix` is invertible: `unmix` gives the raw sum back, so that shards whose terms were keyed globally add up.
"""

from __future__ import annotations

from typing import Final

from introspect_cli.sums import MASK, MIX_1, MIX_2, header, mix, number_of, unmix

__all__ = ["MASK", "MIX_1", "MIX_2", "header", "mix", "unmix"]

G: Final = 0x9E3779B97F4A7C15

SPAN: Final = 512
"""Words that share one block's key."""
_STREAM: Final = tuple(mix(number * G) for number in range(1, 2 * SPAN + 1))
FACTORS: Final = tuple(value >> 32 | 1 for value in _STREAM[:SPAN])
SHIFTS: Final = _STREAM[SPAN:]


def text_checksum(text: str) -> int:
    """64-bit checksum of a plain value: a hash of its text, unlike that of a tensor no sum."""
    return number_of(text.encode("utf-8", "surrogatepass"))
