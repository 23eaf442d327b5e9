"""The entry points of the jitted kernels.

Importing this module compiles, or loads from numba's cache; `jit` does that, when asked. The entry points take raw
addresses, release the interpreter lock and write nowhere but to the rows and the team they are given.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import config, njit

from introspect_cli.tensors import codes, teamwork, vector
from introspect_cli.tensors.strided import copy
from introspect_cli.tensors.summation import merge
from introspect_cli.tensors.vector import pointer

_CACHE: Final = bool(config.CACHE_DIR)
"""`jit` names the directory to cache in while it imports this module."""


@njit(  # type: ignore[untyped-decorator]
    "int64(int64,uint64,int64,int64,int64,int64,uint64,uint64,uint64)", nogil=True, error_model="numpy", cache=_CACHE
)
def enter(what: Any, address: Any, count: Any, first: Any, code: Any, flags: Any, lut: Any, row: Any, team: Any) -> Any:
    """The one entry point, so that everything is compiled once.

    Args:
        what: ONE tensor; whether one is ALIKE or, by its checksum, AGAIN what `first` is the row of; ALL items of the
            team, or the steps of that, PREPARE, TAKE and FINISH; MERGE `count` rows at `address`; COPY.
        address: of the elements.
        count: how many.
        first: index of the first in the whole tensor.
        code: type code.
        flags: STATS, SKETCH.
        lut: address of 256 float32 values, for type code TABLE.
        row: address of the row, overwritten.
        team: address of the team's words; only one thread may be in a call with them, apart from TAKE.
    """
    if what == codes.ONE:
        return teamwork.one(address, count, first, code, flags, lut, row, team)
    if what == codes.ALIKE:
        return teamwork.alike(address, count, np.uint64(first), code)
    if what == codes.AGAIN:
        return teamwork.again(address, count, np.uint64(first), code, row, team)
    if what == codes.ALL:
        return teamwork.everything(team)
    if what == codes.PREPARE:
        return teamwork.prepare(team)
    if what == codes.TAKE:
        return teamwork.take(team)
    if what == codes.FINISH:
        return teamwork.finish(team)
    if what == codes.COPY:
        return copy(address, count, first, lut, row)
    return merge(address, count, row)


@njit("int64(uint64)", nogil=True, error_model="numpy", cache=_CACHE)  # type: ignore[untyped-decorator]
def take_part(team: Any) -> Any:
    """What each thread of a team runs: `enter` by its C address, with arguments that the team's words hold."""
    words = team + np.uint64(8 * codes.ENTRY)
    return vector.call_entry(pointer(words, np.uint64)[0], words + np.uint64(8))
