"""Digests of steps: equal where, and only where, two steps recorded the same values at the same sites.

The problem: most steps of two runs that should be equal are equal, and must be passed over without being read; but
records arrive in another order each time, because backward threads race. The way: two 64-bit sums over mixed
records, so that order does not matter and a repeated record counts twice; and a chain over all steps so far, so
that the first step that differs is a binary search.

Statistics, sketches, texts, devices and strides are left out: they explain a divergence and never are one. So are
the kinds in `SETTING_KINDS`. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_STATUS = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

Words = NDArray[np.uint64]


def _mix(z: Words) -> Words:
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return np.asarray(z ^ (z >> _S31))


def step_digest(keys: Words, checksums: Words, statuses: NDArray[Any], setting: NDArray[np.bool_]) -> bytes:
    """The 16-byte digest of a step.

    Args:
        keys: uint64 (n,), the key of each record's site.
        checksums: uint64 (n,).
        statuses: uint8 (n,).
        setting: bool (n,), True for records that digests leave out.
    """
    mixed = _mix(keys ^ _mix(checksums + (statuses.astype(np.uint64) + np.uint64(1)) * _STATUS))
    again = _mix(mixed + _SECOND)
    if setting.any():
        mixed, again = mixed[~setting], again[~setting]
    low = int(mixed.sum(dtype=np.uint64))
    high = int(again.sum(dtype=np.uint64))
    return struct.pack("<QQ", low, high)


def chained(chain: bytes, step: int, digest: bytes) -> bytes:
    """The 16-byte chain after a step: BLAKE2b of the chain before, the step number and its digest."""
    return hashlib.blake2b(chain + struct.pack("<q", step) + digest, digest_size=16).digest()
