"""Vector loops over a block that fits the first-level cache, written as LLVM instructions.

The problem: the compiler decides by its own costs how wide to vectorise a loop, halves the width on some processors
and refuses others (a table that is written where a hash says). The way: the five inner loops are built here out of
16-lane vector instructions, which any target executes in as many registers as it needs: the same lanes, so the same
rounding everywhere. Each is a numba intrinsic called with raw addresses; counts are in vectors of 16 elements, what
is left over is the caller's. No floating-point flag but `contract` (fused multiply-add) is used, none that assumes
away NaN or infinity, and the processor's rounding and denormal modes are never touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from introspect_cli.tensors import checksum, sketch

if TYPE_CHECKING:
    from collections.abc import Callable

LANES: Final = 16

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_FUSED: Final = ("contract",)
_NEXT: Final = 8192
"""Bytes of a block of float32: while one is worked on, the next is fetched into the first-level cache."""
_FAR: Final = 16384
"""Bytes ahead that memory is fetched into the second-level cache."""


def _splat(element: Any, value: Any, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _broadcast(builder: Any, scalar: Any) -> Any:
    """A vector of one runtime value."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), _splat(_I32, 0))


def _address(builder: Any, base: Any, index: Any, stride: int, element: Any) -> Any:
    """Pointer to a vector of 16 elements at `base + index * stride` bytes."""
    place = builder.add(base, builder.mul(index, _I64(stride)))
    return builder.inttoptr(place, ir.PointerType(ir.VectorType(element, LANES)))


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce a vector to a scalar, halving it each time."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        none = ir.Constant(vector.type, ir.Undefined)
        masks = [ir.Constant(ir.VectorType(_I32, lanes), list(range(first, first + lanes))) for first in (0, lanes)]
        low, high = (builder.shuffle_vector(vector, none, mask) for mask in masks)
        vector = combine(low, high)
    return builder.extract_element(vector, _I32(0))


_FLUSH: Final = 32
"""Additions in float32 before a sum is carried over to float64, so that no bias of rounding adds up."""


def _in_parts(builder: Any, count: Any, sums: list[Any], totals: list[Any], body: Callable[[Any], None]) -> None:
    """Run `body(index)` for every vector of a block, and carry its sums over to totals in float64 now and then.

    Args:
        builder: where to write.
        count: vectors in the block.
        sums: variables that the body adds to.
        totals: float64 variables to carry them over to.
        body: writes the instructions for one vector.
    """
    doubles = ir.VectorType(_F64, LANES)
    narrow = sums[0].type.pointee.element == _F32
    part = _I64(_FLUSH if narrow else 1 << 40)
    number = builder.sdiv(builder.add(count, builder.sub(part, _I64(1))), part)
    with cgutils.for_range(builder, number) as outer:
        start = builder.mul(outer.index, part)
        end = builder.add(start, part)
        end = builder.select(builder.icmp_signed("<", end, count), end, count)
        for total in sums:
            builder.store(_splat(total.type.pointee.element, 0.0), total)
        with cgutils.for_range(builder, end, start=start) as inner:
            body(inner.index)
        for some, total in zip(sums, totals, strict=True):
            wide = builder.fpext(builder.load(some), doubles) if narrow else builder.load(some)
            builder.store(builder.fadd(builder.load(total), wide), total)


def _lower(builder: Any, a: Any, b: Any) -> Any:
    """min(a, b); b where either is NaN, which is what one machine instruction does."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _higher(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _prefetch(builder: Any, place: Any, ahead: int, *, level: int) -> None:
    """Ask for the cache line `ahead` bytes beyond a pointer, in the cache of that level; harmless beyond all memory."""
    text = ir.PointerType(_I8)
    call = ir.FunctionType(ir.VoidType(), [text, _I32, _I32, _I32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (text,), call)
    line = builder.inttoptr(builder.add(builder.ptrtoint(place, _I64), _I64(ahead)), text)
    builder.call(prefetch, [line, _I32(0), _I32(4 - level), _I32(1)])


def _put(builder: Any, out: Any, values: list[Any]) -> None:
    """Write float64 values to consecutive words at address `out`."""
    for number, value in enumerate(values):
        wide = builder.fpext(value, _F64) if value.type == _F32 else value
        place = builder.inttoptr(builder.add(out, _I64(8 * number)), ir.PointerType(_F64))
        builder.store(wide, place)


_WORDS: Final = {1: _I8, 2: _I16, 4: _I32}
_FLOATS: Final = {4: _F32, 8: _F64}


def _keys(builder: Any) -> Any:
    """Address of FACTORS, followed by SHIFTS, as a constant of the module."""
    name = "introspect.checksum.keys"
    if name in builder.module.globals:
        table = builder.module.globals[name]
    else:
        values = [*checksum.FACTORS, *checksum.SHIFTS]
        kind = ir.ArrayType(_I64, len(values))
        table = ir.GlobalVariable(builder.module, kind, name)
        table.initializer = ir.Constant(kind, values)
        table.global_constant = True
        table.linkage = "internal"
        table.align = 64
    return builder.ptrtoint(table, _I64)


def _mixed(builder: Any, value: Any) -> Any:
    """`checksum.mix` of a scalar."""
    for shift, factor in ((30, checksum.MIX_1), (27, checksum.MIX_2)):
        value = builder.mul(builder.xor(value, builder.lshr(value, _I64(shift))), _I64(factor))
    return builder.xor(value, builder.lshr(value, _I64(31)))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def checksum_block(_context: Any, address: Any, spans: Any, vectors: Any, first: Any, size: Any) -> Any:
    """Raw sum of `spans` times `16 * vectors` words of `size` bytes, the first of which has index `first`; uint64.

    None of the spans may cross a multiple of 512 words; of several spans, all must be whole.
    """
    word = _WORDS[size.literal_value]

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, repeats, count, start, _ = args
        wide = ir.VectorType(_I64, LANES)
        total = cgutils.alloca_once_value(builder, _splat(_I64, 0))
        lane = builder.and_(start, _I64(checksum.SPAN - 1))
        factors = builder.add(_keys(builder), builder.mul(lane, _I64(8)))
        shifts = builder.add(factors, _I64(8 * checksum.SPAN))
        block = builder.lshr(start, _I64(checksum.SPAN.bit_length() - 1))
        with cgutils.for_range(builder, repeats) as outer:
            number = builder.add(builder.add(block, outer.index), _I64(1))
            key = _broadcast(builder, _mixed(builder, builder.mul(number, _I64(checksum.G))))
            here = builder.add(base, builder.mul(outer.index, _I64(checksum.SPAN * size.literal_value)))
            with cgutils.for_range(builder, count) as loop:
                place = _address(builder, here, loop.index, LANES * size.literal_value, word)
                _prefetch(builder, place, _FAR, level=2)
                x = builder.zext(builder.load(place, align=size.literal_value), wide)
                factor = builder.load(_address(builder, factors, loop.index, 8 * LANES, _I64), align=8)
                shift = builder.load(_address(builder, shifts, loop.index, 8 * LANES, _I64), align=8)
                # both factors fit in 32 bits: said again, so that the short multiplication is used
                factor = builder.and_(factor, _splat(_I64, 0xFFFFFFFF))
                z = builder.add(builder.mul(x, factor), builder.add(shift, key))
                low = builder.and_(z, _splat(_I64, 0xFFFFFFFF))
                high = builder.lshr(z, _splat(_I64, 32))
                term = builder.add(builder.mul(low, high), z)
                builder.store(builder.add(builder.load(total), term), total)
        return _fold(builder, builder.load(total), builder.add)

    return types.uint64(address, spans, vectors, first, size), generate


@intrinsic  # type: ignore[untyped-decorator]
def checksum_term(_context: Any, word: Any, place: Any) -> Any:
    """The term of one word; uint64."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, index = args
        lane = builder.and_(index, _I64(checksum.SPAN - 1))
        where = builder.add(_keys(builder), builder.mul(lane, _I64(8)))
        factor = builder.load(builder.inttoptr(where, ir.PointerType(_I64)))
        where = builder.add(where, _I64(8 * checksum.SPAN))
        shift = builder.load(builder.inttoptr(where, ir.PointerType(_I64)))
        block = builder.add(builder.lshr(index, _I64(checksum.SPAN.bit_length() - 1)), _I64(1))
        key = _mixed(builder, builder.mul(block, _I64(checksum.G)))
        z = builder.add(builder.mul(x, factor), builder.add(shift, key))
        halves = builder.mul(builder.and_(z, _I64(0xFFFFFFFF)), builder.lshr(z, _I64(32)))
        return builder.add(halves, z)

    return types.uint64(word, place), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def extent_block(_context: Any, address: Any, vectors: Any, out: Any, size: Any) -> Any:
    """Writes minimum, maximum, smallest absolute value, sum and sum of absolute values of `16 * vectors` floats.

    The sum of absolute values is not finite if any element is not finite (or the sum overflows); the others then
    mean nothing.
    """
    element = _FLOATS[size.literal_value]
    integer = _I32 if element == _F32 else _I64
    positive = (1 << (8 * size.literal_value - 1)) - 1

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count, result, _ = args
        floats, ints = ir.VectorType(element, LANES), ir.VectorType(integer, LANES)
        inf = float("inf")
        low, high, small = (cgutils.alloca_once_value(builder, _splat(element, value)) for value in (inf, -inf, inf))
        sums = [cgutils.alloca_once(builder, floats) for _ in range(2)]
        totals = [cgutils.alloca_once_value(builder, _splat(_F64, 0.0)) for _ in range(2)]

        def body(index: Any) -> None:
            place = _address(builder, base, index, LANES * size.literal_value, element)
            x = builder.load(place, align=size.literal_value)
            bits = builder.and_(builder.bitcast(x, ints), _splat(integer, positive))
            absolute = builder.bitcast(bits, floats)
            builder.store(_lower(builder, x, builder.load(low)), low)
            builder.store(_higher(builder, x, builder.load(high)), high)
            builder.store(_lower(builder, absolute, builder.load(small)), small)
            builder.store(builder.fadd(builder.load(sums[0]), x), sums[0])
            builder.store(builder.fadd(builder.load(sums[1]), absolute), sums[1])

        _in_parts(builder, count, sums, totals, body)
        ends = [
            _fold(builder, builder.load(low), lambda a, b: _lower(builder, a, b)),
            _fold(builder, builder.load(high), lambda a, b: _higher(builder, a, b)),
            _fold(builder, builder.load(small), lambda a, b: _lower(builder, a, b)),
        ]
        _put(builder, result, [*ends, *(_fold(builder, builder.load(total), builder.fadd) for total in totals)])
        return _I64(0)

    return types.int64(address, vectors, out, size), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def moments_block(_context: Any, address: Any, vectors: Any, scale: Any, pivot: Any, out: Any, size: Any) -> Any:
    """Writes the sums of d, d**2, d**3, d**4 over `16 * vectors` floats, where d = x * scale - pivot."""
    element = _FLOATS[size.literal_value]

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count, factor, shift, result, _ = args
        if element == _F32:
            factor, shift = builder.fptrunc(factor, _F32), builder.fptrunc(shift, _F32)
        factors, shifts = _broadcast(builder, factor), _broadcast(builder, shift)
        sums = [cgutils.alloca_once(builder, ir.VectorType(element, LANES)) for _ in range(4)]
        totals = [cgutils.alloca_once_value(builder, _splat(_F64, 0.0)) for _ in range(4)]

        def body(index: Any) -> None:
            place = _address(builder, base, index, LANES * size.literal_value, element)
            _prefetch(builder, place, _NEXT, level=1)
            x = builder.load(place, align=size.literal_value)
            d = builder.fsub(builder.fmul(x, factors, flags=_FUSED), shifts, flags=_FUSED)
            square = builder.fmul(d, d)
            terms = [d, square, builder.fmul(square, d, flags=_FUSED), builder.fmul(square, square, flags=_FUSED)]
            for total, term in zip(sums, terms, strict=True):
                builder.store(builder.fadd(builder.load(total), term, flags=_FUSED), total)

        _in_parts(builder, count, sums, totals, body)
        _put(builder, result, [_fold(builder, builder.load(total), builder.fadd) for total in totals])
        return _I64(0)

    return types.int64(address, vectors, scale, pivot, out, size), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def sketch_block(_context: Any, address: Any, blocks: Any, first: Any, table: Any, size: Any) -> Any:
    """Adds `64 * blocks` finite floats, block `first` on, to a table of 16 rows (rotation) by 16 lanes of float64."""
    element = _FLOATS[size.literal_value]
    integer = _I32 if element == _F32 else _I64
    top = 8 * size.literal_value - 1

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count, start, sums, _ = args
        floats, ints = ir.VectorType(element, LANES), ir.VectorType(integer, LANES)
        to_top = ir.Constant(ints, [top - lane for lane in range(LANES)])
        with cgutils.for_range(builder, count) as loop:
            number = builder.add(builder.add(start, loop.index), _I64(1))
            turn, signs = _sketch_hashes(builder, number)
            here = builder.add(base, builder.mul(loop.index, _I64(sketch.BLOCK * size.literal_value)))
            total = None
            for group in range(sketch.BLOCK // LANES):
                some = builder.lshr(signs, _I64(LANES * group))
                some = builder.trunc(some, integer) if integer == _I32 else some
                flips = builder.and_(builder.shl(_broadcast(builder, some), to_top), _splat(integer, 1 << top))
                place = _address(builder, here, _I64(group), LANES * size.literal_value, element)
                x = builder.bitcast(builder.load(place, align=size.literal_value), ints)
                signed = builder.bitcast(builder.xor(x, flips), floats)
                total = signed if total is None else builder.fadd(total, signed)
            wide = builder.fpext(total, ir.VectorType(_F64, LANES)) if element == _F32 else total
            row = _address(builder, sums, turn, 8 * LANES, _F64)
            builder.store(builder.fadd(builder.load(row, align=8), wide), row, align=8)
        return _I64(0)

    return types.int64(address, blocks, first, table, size), generate


def _sketch_hashes(builder: Any, number: Any) -> tuple[Any, Any]:
    """Rotation and signs of the block that is `number` - 1, as `sketch.block_hashes` has them."""
    z = builder.mul(number, _I64(sketch.HASH_1))
    first = builder.mul(builder.xor(z, builder.lshr(z, _I64(sketch.SHIFT))), _I64(sketch.HASH_2))
    second = builder.mul(builder.xor(first, builder.lshr(first, _I64(sketch.SHIFT))), _I64(sketch.HASH_3))
    signs = builder.xor(second, builder.lshr(second, _I64(sketch.SHIFT)))
    return builder.lshr(first, _I64(sketch.ROTATION_SHIFT)), signs


@intrinsic  # type: ignore[untyped-decorator]
def widen_half_block(_context: Any, address: Any, vectors: Any, out: Any) -> Any:
    """Converts `16 * vectors` float16 numbers to float32 at address `out`."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        base, count, result = args
        with cgutils.for_range(builder, count) as loop:
            place = _address(builder, base, loop.index, 2 * LANES, _F16)
            wide = builder.fpext(builder.load(place, align=2), ir.VectorType(_F32, LANES))
            builder.store(wide, _address(builder, result, loop.index, 4 * LANES, _F32), align=4)
        return _I64(0)

    return types.int64(address, vectors, out), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def scratch(_context: Any, words: Any) -> Any:
    """Address of that many eight-byte words on this call's stack, aligned to a cache line; uint64."""
    count = words.literal_value

    def generate(_target: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        area = cgutils.alloca_once(builder, ir.ArrayType(_I64, count))
        area.align = 64
        return builder.ptrtoint(area, _I64)

    return types.uint64(words), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(_context: Any, address: Any) -> Any:
    """Adds one to the int64 at an address, atomically; returns what it was."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.PointerType(_I64))
        return builder.atomic_rmw("add", place, _I64(1), "acq_rel")

    return types.int64(address), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_parallel(_context: Any, runtime: Any, function: Any, data: Any, threads: Any) -> Any:
    """Calls `GOMP_parallel(function, data, threads, 0)`, given the addresses of both functions."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
        call = builder.inttoptr(args[0], ir.PointerType(kind))
        builder.call(call, [args[1], args[2], builder.trunc(args[3], _I32), _I32(0)])
        return _I64(0)

    return types.int64(runtime, function, data, threads), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_number(_context: Any, function: Any) -> Any:
    """Calls a C function without arguments, given its address; its int32 result as int64."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        call = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(_I32, [])))
        return builder.sext(builder.call(call, []), _I64)

    return types.int64(function), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def pointer(_context: Any, address: Any, dtype: Any) -> Any:
    """An address as a typed pointer, indexable in jitted code."""
    result = types.CPointer(dtype.dtype)  # type: ignore[attr-defined]

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], target.get_value_type(result))

    return result(address, dtype), generate


@intrinsic  # type: ignore[untyped-decorator]
def half_at(_context: Any, address: Any) -> Any:
    """The float16 number at an address, as float32."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.PointerType(_F16))
        return builder.fpext(builder.load(place, align=2), _F32)

    return types.float32(address), generate


@intrinsic  # type: ignore[untyped-decorator]
def keep_apart(_context: Any) -> Any:
    """Keeps the function it is called in from being copied into its callers: compile time, not speed."""

    def generate(target: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return target.get_dummy_value()

    return types.none(), generate


_ALONE: Final = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

inner = njit(**_ALONE)
"""Decorator of functions that only jitted code calls: compiled when first called for, together with the caller."""


def exported(signature: str) -> Any:
    """Decorator of a function that is compiled at once, for one signature, without wrappers of numba's own."""
    return njit(signature, **_ALONE)
