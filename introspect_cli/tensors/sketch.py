"""Sixteen numbers that tell how far apart two tensors are that are never in one place.

Two runs, two machines, one question: by how much do these tensors differ? Checksums only say that they do. This is a
count sketch (Charikar, Chen and Farach-Colton, 2002): every element is added, with a sign, to one of 16 buckets; sign
and bucket are hashes of the element's index in the whole tensor. The sketch is linear, so the sketch of a difference is
the difference of the sketches, and its Euclidean norm estimates that of the difference of the tensors. As sums keyed by
index, sketches of shards add up.

An index i belongs to block b = i div 64 and lane l = i mod 16. A hash of the block gives four bits r, a second one 64
signs: the element goes to bucket l xor r with sign bit i mod 64. Sixteen neighbours so land in sixteen different
buckets (a kernel adds them as one vector), and a column of a matrix, whose elements share a lane when the width is a
multiple of 16, still spreads over all buckets. Complex numbers count as two elements, real part first. Non-finite
elements are left out. At most four float32 elements are added before the sum goes on in float64; the stored result is
float32.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 64
"""Elements that share a rotation."""
HASH_1: Final = 0x9FB21C651E98DF25
HASH_2: Final = 0xC4CEB9FE1A85EC53
HASH_3: Final = 0xD6E8FEB86659FD93
SHIFT: Final = 32
ROTATION_SHIFT: Final = 60
"""The four bits `r` are the top four of the block's first hash."""
