"""What the store has compiled: loading it, and what its functions and their callers agree on.

It takes from comparisons of many ranks what numpy and zlib take long for. Where it cannot be had, they compute the
same. Its functions take integers only, addresses among them, and leave python to other threads:

- `read_again(file, offset, length, crc, room, pieces, count)`: read bytes of a file to `room`, which has room for them.
  `UNREAD` where they could not be read or have another CRC; else `ALIKE` where all of `count` pieces are what they must
  be, and `OTHER` where they are not. A piece is four words: where it starts and ends in bytes, what it must be, and the
  address of the bytes that it must be the same as.
- `add(alike, sums, first, last)`: add up rows of several ranks, see `adding.h`; all columns but the variance.
- `spread(alike, sums, first, last)`: add up variances, once the means are known.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.extension import load

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np

UNREAD, OTHER, ALIKE = range(3)

BE_THE_SAME, BE_DOUBLES, BE_FLOATS = range(3)
NEVER_NEGATIVE: Final = 4
"""What a piece must be: the same bytes; or numbers that are not infinite and, if this is added, not negative."""


@cache
def compiled() -> ModuleType | None:
    """The extension; None if it cannot be had."""
    return load("introspect_cli.store._compiled")[0]


def address(array: np.ndarray[Any, Any]) -> int:
    """Where an array's first element lies: four times as fast as its `ctypes`."""
    return int(array.__array_interface__["data"][0])
