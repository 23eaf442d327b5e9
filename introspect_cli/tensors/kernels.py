"""The entry point of the jitted kernels.

Importing this module compiles, which takes seconds; only `library` does, in a process of its own. The entry point
takes raw addresses and writes nowhere but to the rows and the team it is given.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from introspect_cli.tensors import codes, teamwork
from introspect_cli.tensors.strided import copy
from introspect_cli.tensors.summation import merge
from introspect_cli.tensors.vector import exported


@exported("int64(int64,uint64,int64,int64,int64,int64,uint64,uint64,uint64)")  # type: ignore[untyped-decorator]
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
