"""Sixteen numbers that tell how far apart two tensors are that are never in one place.

The problem: two runs, two machines, one question: by how much do these tensors differ? Checksums only say that
they do. The way: a count sketch (Charikar, Chen and Farach-Colton, 2002): every element is added, with a sign,
to one of 16 buckets; sign and bucket are hashes of the element's index in the whole tensor. The sketch is linear,
so the sketch of a difference is the difference of the sketches, and its Euclidean norm estimates that of the
difference of the tensors. As sums keyed by index, sketches of shards add up.

An index i belongs to group g = i div 16 and lane l = i mod 16. One hash of the group gives four bits r and sixteen
signs: the element goes to bucket l xor r with sign bit l. Sixteen neighbours so land in sixteen different buckets
(a kernel adds them as one vector), and a column of a matrix, whose elements share a lane when the width is a
multiple of 16, still spreads over all buckets. Complex numbers count as two elements, real part first. Non-finite
elements are left out. Sums are float64, the stored result float32.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from introspect_cli.tensors import rows as r

HASH_1: Final = 0x9FB21C651E98DF25
HASH_2: Final = 0xC4CEB9FE1A85EC53
SHIFT_1: Final = 32
SHIFT_2: Final = 29
ROTATION_SHIFT: Final = 60
"""The four bits `r` are the top four of the group's hash."""
SIGN_SHIFT: Final = 40
"""The sign of lane l is bit 40 + l."""


def group_hash(groups: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The hash that gives a group of sixteen elements its signs and buckets; any shape."""
    value = (groups + np.uint64(1)) * np.uint64(HASH_1)
    value = (value ^ (value >> np.uint64(SHIFT_1))) * np.uint64(HASH_2)
    out: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(SHIFT_2))
    return out


def keys(indices: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Bucket (0 to 15) and sign (1.0 or -1.0) of each element index; any shape."""
    lanes = indices & np.uint64(15)
    hashes = group_hash(indices >> np.uint64(4))
    buckets = (lanes ^ (hashes >> np.uint64(ROTATION_SHIFT))).astype(np.int64)
    bits = (hashes >> (np.uint64(SIGN_SHIFT) + lanes)) & np.uint64(1)
    return buckets, 1.0 - 2.0 * bits.astype(np.float64)


def finalise(rows: r.Rows) -> npt.NDArray[np.float32]:
    """The stored sketches of rows, shape (n, 16)."""
    with np.errstate(all="ignore"):
        return rows.view(np.float64)[:, r.SKETCH :].astype(np.float32)
