"""What the jitted kernels and their caller agree on: type codes, calls, flags, what threads share.

Apart from the kernels, which only the process that compiles them imports.
"""

from __future__ import annotations

from typing import Final

ONE: Final = 0
ALIKE: Final = 1
AGAIN: Final = 2
ALL: Final = 3
PREPARE: Final = 4
TAKE: Final = 5
FINISH: Final = 6
MERGE: Final = 7
COPY: Final = 8

CHUNK: Final = 1 << 16
"""Elements in a chunk, whose row is merged with those of the tensor's other chunks."""

MAX_DIMS: Final = 16
"""Dimensions of a strided copy, at most; torch's own limit for most operations is 64, of which few are used."""

STATS: Final = 1
SKETCH: Final = 2

WORTHWHILE: Final = 8192
"""Elements from which on a second look is cheaper than a second summary."""

ITEM_WORDS: Final = 8
"""Words in an item, a tensor to summarise: address, elements, index of the first, type code, address of the row,
address of the table, and, as `teamwork` fills them in, its first chunk's number and the place of its first part."""

# Words of a team: what threads that share a call know of it.
COUNTER: Final = 0
"""Chunks taken so far; then how many of them from the front, and how many from the back."""
CHUNKS: Final = 3
ITEMS: Final = 4
"""Address of the items."""
COUNT: Final = 5
"""How many."""
FLAGS: Final = 6
PARTS: Final = 7
"""Address of room for the chunks' rows."""
THREADS: Final = 8
"""Threads that take part; 1 for the caller alone."""
PARALLEL: Final = 9
"""Address of the runtime's function that runs another in several threads."""
NUMBER: Final = 10
"""Address of the runtime's function that returns a thread's number, 0 for the first; 0 if there is none."""
PART: Final = 11
"""Address of what is run in several threads: takes the address of the team, calls TAKE."""
TEAM_WORDS: Final = 12

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
