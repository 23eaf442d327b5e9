"""Elements of any type as float32 or float64, block by block, in jitted code.

The problem: statistics and sketch want floats; memory holds halves, bytes, integers and complex numbers. The way: one
loop a type into a scratch block, told apart by type code (see `codes`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from introspect_cli.tensors import vector
from introspect_cli.tensors.codes import BF16, C32, C64, C128, F16, I8, I32, TABLE, U8, U16, U32, U64
from introspect_cli.tensors.vector import inner, pointer


@inner  # type: ignore[untyped-decorator]
def to_float32(code: Any, address: Any, count: Any, table: Any, out: Any) -> Any:
    """Widen a block to float32 at `out`."""
    vector.keep_apart()
    y = pointer(out, np.float32)
    if code == F16:
        vector.widen_half_block(address, count // 16, out)
        for i in range(count // 16 * 16, count):
            y[i] = vector.half_at(address + np.uint64(2 * i))
    elif code == BF16:
        bits, brain = pointer(out, np.uint32), pointer(address, np.uint16)
        for i in range(count):
            bits[i] = np.uint32(brain[i]) << np.uint32(16)
    elif code == TABLE:
        known, index = pointer(table, np.float32), pointer(address, np.uint8)
        for i in range(count):
            y[i] = known[index[i]]
    elif code == U8:
        u8 = pointer(address, np.uint8)
        for i in range(count):
            y[i] = np.float32(u8[i])
    elif code == I8:
        i8 = pointer(address, np.int8)
        for i in range(count):
            y[i] = np.float32(i8[i])
    elif code == U16:
        u16 = pointer(address, np.uint16)
        for i in range(count):
            y[i] = np.float32(u16[i])
    else:
        i16 = pointer(address, np.int16)
        for i in range(count):
            y[i] = np.float32(i16[i])


@inner  # type: ignore[untyped-decorator]
def to_float64(code: Any, address: Any, count: Any, out: Any) -> Any:
    """Widen a block to float64 at `out`."""
    vector.keep_apart()
    y = pointer(out, np.float64)
    if code == U32:
        u32 = pointer(address, np.uint32)
        for i in range(count):
            y[i] = np.float64(u32[i])
    elif code == I32:
        i32 = pointer(address, np.int32)
        for i in range(count):
            y[i] = np.float64(i32[i])
    elif code == U64:
        u64 = pointer(address, np.uint64)
        for i in range(count):
            y[i] = np.float64(u64[i])
    else:
        i64 = pointer(address, np.int64)
        for i in range(count):
            y[i] = np.float64(i64[i])


@inner  # type: ignore[untyped-decorator]
def complex_parts(code: Any, address: Any, count: Any, sizes: Any, parts: Any) -> Any:
    """Absolute values of a block of complex numbers to `sizes`, finite components to `parts`; float64."""
    vector.keep_apart()
    size, part = pointer(sizes, np.float64), pointer(parts, np.float64)
    single, double = pointer(address, np.float32), pointer(address, np.float64)
    for i in range(count):
        if code == C32:
            re = np.float64(vector.half_at(address + np.uint64(4 * i)))
            im = np.float64(vector.half_at(address + np.uint64(4 * i + 2)))
        elif code == C64:
            re, im = np.float64(single[2 * i]), np.float64(single[2 * i + 1])
        else:
            re, im = double[2 * i], double[2 * i + 1]
        if math.isnan(re) or math.isnan(im):
            size[i] = np.nan
        else:
            size[i] = math.hypot(re, im) if code == C128 else math.sqrt(re * re + im * im)
        part[2 * i] = re if math.isfinite(re) else 0.0
        part[2 * i + 1] = im if math.isfinite(im) else 0.0
