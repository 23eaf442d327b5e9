"""Elements of a tensor on a GPU: where they lie, the integers that are there, and the numbers that these stand for."""

from __future__ import annotations

import triton
import triton.language as tl

from introspect_cli.tensors import checksum
from introspect_cli.tensors import kernels as types

_MIX_1 = tl.constexpr(checksum.MIX_1)
_MIX_2 = tl.constexpr(checksum.MIX_2)

_F32 = tl.constexpr(types.F32)
_F16 = tl.constexpr(types.F16)
_BF16 = tl.constexpr(types.BF16)
_TABLE = tl.constexpr(types.TABLE)
_I8 = tl.constexpr(types.I8)
_I16 = tl.constexpr(types.I16)
F64 = tl.constexpr(types.F64)
_I32 = tl.constexpr(types.I32)
_I64 = tl.constexpr(types.I64)


@triton.jit
def mixed(z):
    """`checksum.mix` of uint64 values, elementwise."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def pointer_to(null, address, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to unsigned integers of SIZE bytes at `address`, a multiple of SIZE; ALIGNED says that it is one of 16.

    The compiler forgets what a number was a multiple of when it is cast to a pointer, and then reads elements one by
    one; what is added to a pointer it remembers, so that the address is added to a null pointer.
    """
    if SIZE == 1:
        pointer = null.to(tl.pointer_type(tl.uint8))
    elif SIZE == 2:
        pointer = null.to(tl.pointer_type(tl.uint16))
    elif SIZE == 4:
        pointer = null.to(tl.pointer_type(tl.uint32))
    else:
        pointer = null.to(tl.pointer_type(tl.uint64))
    offset = address // SIZE
    if ALIGNED:
        # Four elements a thread, of any size: with more, the checksum's factors would not fit into registers.
        offset = tl.multiple_of(offset, 4 if SIZE < 8 else 2)
    return pointer + offset


@triton.jit
def integers(pointer, start, k, ok, FULL: tl.constexpr):
    """Load the integers at the places start + k, counted from `pointer`; 0 where not `ok`. FULL says that all are."""
    if FULL:
        return tl.load(pointer + start + k)
    return tl.load(pointer + start + k, mask=ok, other=0)


@triton.jit
def number_of(bits, lookup, KIND: tl.constexpr):
    """Value of stored bits, as float64 for type codes from F64 on, else as float32; `lookup` is the table of TABLE."""
    if KIND == _F32:
        return bits.to(tl.float32, bitcast=True)
    elif KIND == _F16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == _BF16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == _TABLE:
        return tl.load(lookup + bits.to(tl.int32))
    elif KIND == _I8:
        return bits.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == _I16:
        return bits.to(tl.int16, bitcast=True).to(tl.float32)
    elif KIND < F64:
        return bits.to(tl.float32)
    elif KIND == F64:
        return bits.to(tl.float64, bitcast=True)
    elif KIND == _I32:
        return bits.to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == _I64:
        return bits.to(tl.int64, bitcast=True).to(tl.float64)
    else:
        return bits.to(tl.float64)


@triton.jit
def transpose(null, address, target, rows, columns, SIZE: tl.constexpr, ALIGNED: tl.constexpr, EDGE: tl.constexpr):
    """Copy adjacent matrices transposed, one tile in each program.

    A copy that follows the strides of one side reads or writes elements far apart, each with the memory around it for
    nothing: torch's reaches a sixth of this one, which reads along rows and writes along columns.

    Args:
        null: 0, as a pointer.
        address: of the first element.
        target: address of the first element of the copy.
        rows: of a matrix.
        columns: of a matrix, side by side in memory.
        SIZE: bytes of an element.
        ALIGNED: whether rows and columns are multiples of 4, and addresses of 16.
        EDGE: rows and columns of a tile.
    """
    # The interpreter takes small numbers for 32 bits wide.
    address, target, rows, columns = address.to(tl.int64), target.to(tl.int64), rows.to(tl.int64), columns.to(tl.int64)
    if not null.dtype.is_ptr():
        null = null.to(tl.int64)
    me = tl.program_id(0).to(tl.int64)
    across = (columns + (EDGE - 1)) // EDGE
    down = (rows + (EDGE - 1)) // EDGE
    begin = me // (across * down) * rows * columns
    i = (me // across % down * EDGE + tl.arange(0, EDGE))[:, None]
    j = (me % across * EDGE + tl.arange(0, EDGE))[None, :]
    ok = (i < rows) & (j < columns)
    tile = tl.load(pointer_to(null, address, SIZE, ALIGNED) + begin + i * columns + j, mask=ok)
    tl.store(pointer_to(null, target, SIZE, ALIGNED) + begin + j * rows + i, tile, mask=ok)
