"""The compiled kernels: loading them, and what they and their caller agree on.

The `.cpp` files become the extension `_kernels` when the package is installed. Without it, nothing can
be captured. Its functions take integers only, addresses among them:

- `summarise(address, count, first, code, flags, table, row, team)`: `count` contiguous elements at an address, the
  first with index `first` in the whole tensor, into a row. `table`: address of 256 float32 values, for TABLE.
- `merge(rows, count, row)`: rows of disjoint parts, added up in order.
- `summarise_strided(address, count, dims, layout, blocks, code, flags, table, row, team)`: a strided tensor of `count`
  elements into a row. `layout`: address of `dims` sizes and as many strides; `blocks`: of memory for CHUNK elements for
  each thread. 0, and nothing is done, without memory.
- `glance(address, size)`: 64 bits that depend on bytes at places spread over `size` bytes, on all if they are few.
- `columns(blocks, each, slots, headers, seen, status, layouts, count, places, columns)`: what follows from `count`
  records, into columns; how many rows those have then. `blocks`: address of the addresses of blocks of `each` rows.
  `slots`: address of the records' rows, 32 bits each; `headers` to `layouts`: of what is known beside. `places`: gets
  the row in the columns of each record, 32 bits each, equal ones the same; 0 for a row each. `columns`: address of the
  columns' addresses, in the order of `COLUMNS`, 0 for what is not wanted.
- `watch_generator(number, words, position, spare, flag)`: where a Mersenne twister lies (see `generators`).
- `generators_moved()`: a bit for each of them that has moved since `generator_state(number)`, 64 bits of its state.
- `levels()` that this processor can run, the best one last; `use(level)` takes another than the best.

Only one thread at a time may be in a call with a team.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from introspect_cli.errors import IntrospectError
from introspect_cli.machine import load
from introspect_cli.statistics import STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterable

try:
    KERNELS: Any = load("introspect_cli.tensors._kernels")
except ImportError as error:
    raise IntrospectError(str(error)) from None
"""The extension; this module cannot be imported without it."""


CHUNK: Final = 1 << 16
"""Elements in a chunk, whose row is merged with those of the tensor's other chunks."""
WORTHWHILE: Final = 8192
"""Elements from which on a second look is cheaper than a second summary."""
MAX_DIMS: Final = 16
"""Dimensions of a strided copy and two more, at most; torch's own limit is 64, of which few are used."""
LINES: Final = 16
"""Rows that a chunk has at least where the kernels copy: a cache line of a transposed source serves them all."""

COLUMNS: Final = ("layout", "status", "checksum", *STATISTICS, "sketch")
"""Columns that `columns` computes from rows, in the order of columns.h; defined in columns.cpp."""

STATS: Final = 1
SKETCH: Final = 2


def numbers_of(numbers: Iterable[int]) -> Any:
    """A compiled list of 64-bit integers, which compiled code can append to; `clear` keeps its memory."""
    made = KERNELS.numbers()
    made.extend(numbers)
    return made


PARTS, THREADS, PARALLEL, NUMBER, ROOM, TAKING, PACES = range(7, 14)
"""Words of a team, what threads that share a call know of it: the address of room for the chunks' rows; threads that
may take part if that pays, 1 for the caller alone; the addresses of the runtime's functions that run another in several
threads, and that return a thread's number, 0 for the first (0 where there is none); elements that there is room for;
threads that took part in the last call; for each sum of flags, what is known of calls of that kind. Those left out are
the kernels' own."""
PACE_WORDS: Final = 6
TEAM_WORDS: Final = PACES + 4 * PACE_WORDS

F32, F16, BF16, TABLE, U8, I8, U16, I16, F64, U32, I32, U64, I64, C32, C64, C128, OPAQUE8, OPAQUE16 = range(18)
"""Type codes. Up to I16 a block is summarised as float32, up to I64 as float64; then come complex elements, and those
that have bits and no values. Of a TABLE, an element is one byte, and its float32 value in a table of 256."""
_NAMES: Final = (
    *("float32", "float16", "bfloat16", "", "uint8", "int8", "uint16", "int16", "float64", "uint32", "int32"),
    *("uint64", "int64", "complex32", "complex64", "complex128"),
)
CODES: Final = {name: code for code, name in enumerate(_NAMES) if name} | {"bool": U8}
"""Type code by torch's name of the element type; those of one byte beside have a table of values."""
SIZES: Final = (4, 2, 2, 1, 1, 1, 2, 2, 8, 4, 4, 8, 8, 4, 8, 16, 1, 2)
"""Bytes in an element, by type code."""
