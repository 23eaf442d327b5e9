"""What the jitted kernels and their caller agree on: type codes, calls, flags, jobs.

Apart from the kernels, since those cannot be imported where there is no numba.
"""

from __future__ import annotations

from typing import Final

RUN: Final = 0
WORK: Final = 1
MERGE: Final = 2
COPY: Final = 3

MAX_DIMS: Final = 16
"""Dimensions of a strided copy, at most; torch's own limit for most operations is 64, of which few are used."""

STATS: Final = 1
SKETCH: Final = 2

JOB_WORDS: Final = 6
"""Words in a job: address, elements, index of the first, type code, address of the row, address of the table."""

# Type codes. Up to I16 a block is summarised as float32, up to I64 as float64; then come complex elements, and
# those that have bits and no values.
F32: Final = 0
F16: Final = 1
BF16: Final = 2
TABLE: Final = 3
"""One byte, its float32 value in a table of 256."""
U8: Final = 4
I8: Final = 5
U16: Final = 6
I16: Final = 7
F64: Final = 8
U32: Final = 9
I32: Final = 10
U64: Final = 11
I64: Final = 12
C32: Final = 13
C64: Final = 14
C128: Final = 15
OPAQUE8: Final = 16
OPAQUE16: Final = 17

SIZES: Final = (4, 2, 2, 1, 1, 1, 2, 2, 8, 4, 4, 8, 8, 4, 8, 16, 1, 2)
"""Bytes in an element, by type code."""
