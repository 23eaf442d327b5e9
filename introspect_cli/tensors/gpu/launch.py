"""How a tensor is cut into programs, which of the compiled kernels it takes, and launching them for next to nothing.

Kernels read contiguous real elements and nothing else; the engine brings all other tensors into that form. How many
programs a tensor gets depends on nothing but its size, so that its row is the same alone, in a table, and on another
GPU.

Triton's own way to call a kernel looks at every argument to find out what to compile: some 20 us each time. Here the
signature is fixed (every argument is a 64-bit integer), the compile-time parameters are a `Variant`, and a launch is
one look into a dictionary and one call of what Triton compiled. What is compiled so without a GPU is what runs on
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from introspect_cli.tensors import checksum
from introspect_cli.tensors.kernels import CODES, F64, SIZES, TABLE, U8, U16

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PROGRAMS: Final = 512
"""Programs of one tensor: enough for every processor of a large GPU, few enough for one program to merge."""
TABLE_PROGRAMS: Final = 16384
"""Programs of one launch."""
ALIGNMENT: Final = 16
"""Divisor of address, count and first index where elements are read in vectors."""
EDGE: Final = 64
"""Rows and columns of a tile that is transposed."""
EVEN: Final = 4
"""Divisor of a matrix's rows and columns where elements are read and written in vectors."""

NARROW: Final = 16
"""Rows and columns below which a tile would be mostly empty."""


class Variant(NamedTuple):
    """A kernel to be compiled: the values of its compile-time parameters, in their order."""

    kind: int
    size: int
    rows: int
    hashed: bool
    stats: bool
    sketch: bool
    lean: bool
    many: bool
    aligned: bool


class Merging(NamedTuple):
    """The kernel that adds up the rows of programs; it has no parameters."""


class Transposing(NamedTuple):
    """A kernel that writes transposed matrices: the values of its compile-time parameters."""

    size: int
    aligned: bool
    edge: int = EDGE


Kernel = Variant | Transposing | Merging


@dataclass(frozen=True)
class Element:
    """A type of real elements.

    Attributes:
        kind: type code of the kernels.
        size: bytes of an element.
        values: whether elements are numbers one by one; packed and opaque ones have bits only.
    """

    kind: int
    size: int
    values: bool = True

    @property
    def rows(self) -> int:
        """Rows of 512 elements in a tile, by the registers of a program: 2 where it sums in float64, else 4."""
        return 2 if self.kind >= F64 else 4

    def shared(self, count: int, first: int) -> tuple[int, int]:
        """How elements are shared out: programs, and how many of the checksum's blocks keys are read of at most.

        There is a program a tile for up to 64 tiles, else one for four, from 64 to 512. Blocks are counted from 0 in
        the whole tensor.

        Args:
            count: elements.
            first: index of the first one in the whole tensor.
        """
        tiles = max(1, -(-(first % checksum.SPAN + count) // (self.rows * checksum.SPAN)))
        programs = tiles if tiles <= 64 else max(64, min(MAX_PROGRAMS, tiles // 4))
        words = -(-self.size // 4)
        return programs, -(-(first + count) * words // checksum.SPAN) + words * self.rows

    def variant(self, *, aligned: bool, stats: bool = True, sketch: bool = True, lean: bool = False) -> Variant:
        """The kernel for elements of this type.

        Args:
            aligned: whether address, count and index of the first element are multiples of 16.
            stats: whether to compute statistics, where the elements are numbers.
            sketch: whether to compute the sketch, where the elements are numbers.
            lean: whether to leave out the sketch, cubes and fourth powers, which cost most.
        """
        stats, sketch = stats and self.values, sketch and self.values and not lean
        return Variant(self.kind, self.size, self.rows, True, stats, sketch, lean, False, aligned)


_FLOAT8: Final = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_OPAQUE: Final = {"float4_e2m1fn_x2": U8, "bits8": U8, "bits16": U16}
ELEMENTS: Final = {
    **{name: Element(code, SIZES[code]) for name, code in CODES.items() if not name.startswith("complex")},
    **{f"float8_{name}": Element(TABLE, 1) for name in _FLOAT8},
    **{name: Element(code, SIZES[code], values=False) for name, code in _OPAQUE.items()},
}
"""Element types by torch's name without the prefix."""


def matrices(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """How a tensor lies in memory as adjacent matrices that have to be transposed: how many, their rows and columns.

    Images with channels last do, with a row for each pixel.

    Args:
        shape: sizes of the tensor.
        strides: its strides, in elements.

    Returns:
        None for any other layout, and where a matrix has fewer than `NARROW` rows or columns.
    """
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if sizes and steps[-1] == stride * size:  # both dimensions follow from each other
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        elif size != 1:
            sizes.append(size)
            steps.append(stride)
    if len(sizes) < 2:
        return None
    columns, rows = sizes[-2:]
    if min(rows, columns) < NARROW or steps != [columns * rows, 1, columns][-len(sizes) :]:
        return None
    return math.prod(sizes) // (columns * rows), rows, columns


# --- launching


OLDEST: Final = (3, 3)
"""The first Triton that takes a kernel's arguments and its parameters in the order they are called here."""

WARPS: Final = 4
"""Warps of a program: 128 threads read a row of 512 float32 in vectors of four."""
_POINTERS: Final = ("null", "items", "scratch", "factors", "shifts", "keys", "lookup", "jobs")
"""Arguments that are addresses of introspect's buffers, which begin at multiples of 16."""
_CHOSEN: Final = {"count": ALIGNMENT, "first": ALIGNMENT, "rows": EVEN, "columns": EVEN}
"""What arguments are multiples of where the variant is aligned; the address is one in the kernel, which reads less at
once than it could."""


Launcher = Callable[[Kernel, int, int, tuple[int, ...]], None]
"""Puts a kernel on a stream: which, how many programs, the device's handle of the stream, and the arguments up to its
compile-time parameters."""


def unavailable() -> str:
    """Reason why Triton cannot be used, absent or older than `OLDEST`; "" if it can."""
    try:
        import triton
    except Exception as error:  # built for another system, or not at all
        return f"no Triton ({type(error).__name__})"
    version = tuple(int(word) for word in triton.__version__.split(".")[:2])
    return "" if version >= OLDEST else f"Triton {triton.__version__} is too old"


def function_of(variant: Kernel) -> Any:
    """The Triton function that a variant is compiled from."""
    from introspect_cli.tensors.gpu import kernels

    return {Variant: kernels.summarise, Transposing: kernels.transpose, Merging: kernels.merge}[type(variant)]


def source(variant: Kernel) -> Any:
    """What Triton's compiler takes for a variant: function, signature, constants, and divisors of the arguments."""
    from triton.compiler import ASTSource

    function = function_of(variant)
    names = function.arg_names
    count = len(names) - len(variant)
    signature = dict.fromkeys(names[:count], "i64") | dict.fromkeys(names[count:], "constexpr")
    if "null" in signature:
        signature["null"] = "*u8"
    multiples = dict.fromkeys(_POINTERS, ALIGNMENT) | (_CHOSEN if getattr(variant, "aligned", False) else {})
    attributes = {
        (place,): [["tt.divisibility", multiples[name]]]
        for place, name in enumerate(names[:count])
        if name in multiples
    }
    constants = dict(zip(names[count:], variant, strict=True))
    return ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)


def options(variant: Kernel) -> dict[str, Any]:
    """Compiler options of a variant, the same for every device.

    The fewer registers a thread takes, the more programs wait for memory at once; with 128, which spill a few of what
    only tiles with NaN need, an H100 is twice as quick as with 255, and slower again with fewer. Sums in float64 do not
    fit into so few. AMD's compiler has no such option and passes over it.
    """
    large = not isinstance(variant, Variant) or variant.kind >= F64
    return {"num_warps": WARPS, "enable_fp_fusion": True, "maxnreg": 255 if large else 128}


class TritonLauncher:
    """Kernels compiled for one device."""

    def __init__(self, device: torch.device) -> None:
        """Set the device; kernels are compiled when they are first launched."""
        self._index = device.index or 0
        self._current: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001  # ten times as quick as the public one
        self._compiled: dict[Kernel, tuple[Any, Any, Any]] = {}
        self._kernels: list[Any] = []

    def __call__(self, variant: Kernel, programs: int, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch a kernel (see `Launcher`) on this launcher's device, be it the current one or not; does not wait.

        The first call of a variant compiles it, or finds it in Triton's cache.
        """
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                self(variant, programs, stream, arguments)
            return
        known = self._compiled.get(variant)
        if known is None:
            known = self._compile(variant)
        run, function, metadata = known
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *variant)

    def _compile(self, variant: Kernel) -> tuple[Any, Any, Any]:
        """Compile and load a variant, and keep it; returns its run function, handle and metadata."""
        from triton.compiler import compile as compiled
        from triton.runtime import driver

        target = driver.active.get_current_target()
        kernel = compiled(source(variant), target=target, options=options(variant))
        self._kernels.append(kernel)  # a kernel that is collected unloads its code
        run = kernel.run  # loads it
        known = self._compiled[variant] = run, kernel.function, kernel.packed_metadata
        return known
