"""How a tensor is cut into programs, which of the compiled kernels it takes, and launching them for next to nothing.

Looked up once a layout (shape, strides, type): what is left to do for a tensor is to add its address. How many programs
a tensor gets depends on nothing but its size, so that its row is the same alone, in a table, and on another GPU.

Triton's own way to call a kernel looks at every argument to find out what to compile: some 20 us each time. Here the
signature is fixed (every argument is a 64-bit integer), the compile-time parameters are a `Variant`, and a launch is
one look into a dictionary and one call of what Triton compiled. What is compiled so without a GPU is what runs on
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from introspect_cli.tensors import checksum
from introspect_cli.tensors.arrays import CODES
from introspect_cli.tensors.kernels import F16, F32, F64, SIZES, TABLE, U8, U16

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PROGRAMS: Final = 512
"""Programs of one tensor: enough for every processor of a large GPU, few enough for one program to merge."""
TABLE_PROGRAMS: Final = 16384
"""Programs of one launch."""
DIMS: Final = (2, 4, 6)
"""Numbers of dimensions that there are kernels for."""
ALIGNMENT: Final = 16
"""Divisor of address, count and first index where elements are read in vectors."""
EDGE: Final = 64
"""Rows and columns of a tile that is transposed."""
EVEN: Final = 4
"""Divisor of a matrix's rows and columns where elements are read and written in vectors."""
NARROW: Final = 16
"""Rows and columns below which a tile would be mostly empty."""
LARGEST_ELEMENT: Final = 8
"""Bytes of an element that is transposed."""


class Variant(NamedTuple):
    """A kernel to be compiled: the values of its compile-time parameters, in their order."""

    kind: int
    size: int
    parts: int
    rows: int
    stats: bool
    sketch: bool
    many: bool
    aligned: bool
    dims: int
    narrow: bool


class Transposing(NamedTuple):
    """A kernel that writes transposed matrices: the values of its compile-time parameters."""

    size: int
    aligned: bool
    edge: int = EDGE


@dataclass(frozen=True)
class Plan:
    """How to read a tensor, before its address is known.

    Attributes:
        element: its type.
        count: elements.
        dims: dimensions of its layout; 0 where it is contiguous.
        layout: `dims` sizes and as many strides, in elements.
        reach: bytes from the first element to behind the last one in memory.
        matrices: where elements lie in memory as matrices that have to be transposed, how many, their rows and columns:
            images with channels last, a row for each pixel. None for any other layout.
    """

    element: Element
    count: int
    reach: int
    dims: int = 0
    layout: tuple[int, ...] = ()
    matrices: tuple[int, int, int] | None = None

    def blocks(self, first: int = 0) -> int:
        """Upper bound of the checksum's blocks that are read."""
        words = -(-self.element.size * self.element.parts // 4)
        return -(-(first + self.count) * words // checksum.SPAN) + words * self.element.rows

    def programs(self, first: int = 0) -> int:
        """Number of programs for the tensor's tiles, when its first element has index `first`."""
        tile = self.element.rows * checksum.SPAN
        tiles = max(1, -(-(first % checksum.SPAN + self.count) // tile))
        return tiles if tiles <= 64 else max(64, min(MAX_PROGRAMS, tiles // 4))

    def variant(self, address: int, first: int, *, stats: bool, sketch: bool, many: bool = False) -> Variant:
        """Kernel for this layout at an address."""
        element = self.element
        return Variant(
            element.kind,
            element.size,
            element.parts,
            element.rows,
            stats and element.values,
            sketch and element.values,
            many,
            (address | first | self.count) % ALIGNMENT == 0,
            self.dims,
            not self.dims or self.count < 1 << 31,
        )


def collapsed(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Sizes and strides with adjacent dimensions merged and those of size 1 dropped."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == stride * size:
            sizes[-1] *= size
            steps[-1] = stride
        else:
            sizes.append(size)
            steps.append(stride)
    return sizes, steps


def plan(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Plan | None:
    """How to read a strided tensor without a copy.

    Returns:
        None where there is no kernel for it: an unknown type, no element, or more dimensions than `DIMS` that do not
        follow from each other.
    """
    element = ELEMENTS.get(dtype)
    sizes, steps = collapsed(shape, strides)
    count = 1
    for size in sizes:
        count *= size
    if element is None or not count:
        return None
    behind = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    reach = behind * element.size * element.parts
    if not sizes or (len(sizes) == 1 and steps[0] == 1):
        return Plan(element, count, reach)
    dims = next((known for known in DIMS if known >= len(sizes)), None)
    if dims is None:
        return None
    ones = dims - len(sizes)
    columns, rows = (1, *sizes)[-2:]
    lie_so = tuple(steps) == (columns * rows, 1, columns)[-len(sizes) :]
    matrices = (count // (columns * rows), rows, columns) if lie_so and columns > 1 else None
    return Plan(element, count, reach, dims, (*(1,) * ones, *sizes, *(0,) * ones, *steps), matrices)


@dataclass(frozen=True)
class Element:
    """An element type.

    Attributes:
        kind: of its components.
        size: bytes of a component.
        parts: components: 2 for complex numbers, else 1.
        values: whether elements are numbers one by one; packed and opaque ones have bits only.
    """

    kind: int
    size: int
    parts: int = 1
    values: bool = True

    @property
    def wide(self) -> bool:
        """Whether tiles are summed in float64: from F64 on."""
        return self.kind >= F64 or self.parts == 2

    @property
    def rows(self) -> int:
        """Rows of 512 elements in a tile: 2 if wide, else 4, by the registers of a program."""
        return 2 if self.wide else 4


_FLOAT8: Final = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_PARTS: Final = {"complex32": F16, "complex64": F32, "complex128": F64}
_OPAQUE: Final = {"float4_e2m1fn_x2": U8, "bits8": U8, "bits16": U16}
ELEMENTS: Final = {
    **{name: Element(code, SIZES[code]) for name, code in CODES.items() if name not in _PARTS},
    **{f"float8_{name}": Element(TABLE, 1) for name in _FLOAT8},
    **{name: Element(code, SIZES[code], parts=2) for name, code in _PARTS.items()},
    **{name: Element(code, SIZES[code], values=False) for name, code in _OPAQUE.items()},
}
"""Element types by torch's name without the prefix."""


# --- launching


OLDEST: Final = (3, 3)
"""The first Triton that takes a kernel's arguments and its parameters in the order they are called here."""

WARPS: Final = 4
"""Warps of a program: 128 threads read a row of 512 float32 in vectors of four."""
_POINTERS: Final = (
    *("null", "items", "owners", "layout", "row", "known", "scratch", "counters"),
    *("factors", "shifts", "keys", "lookup"),
)
"""Arguments that are addresses of introspect's buffers, which begin at multiples of 16."""
_CHOSEN: Final = {"count": ALIGNMENT, "first": ALIGNMENT, "rows": EVEN, "columns": EVEN}
"""What arguments are multiples of where the variant is aligned; the address is one in the kernel, which reads less at
once than it could."""


Launcher = Callable[[Variant | Transposing, int, int, tuple[int, ...]], None]
"""Puts a kernel on a stream: which, how many programs, the device's handle of the stream, and the arguments up to its
compile-time parameters."""


def unavailable() -> str:
    """Reason why Triton cannot be used; "" if it can."""
    try:
        import triton
    except Exception as error:  # built for another system, or not at all
        return f"no Triton ({type(error).__name__})"
    version = tuple(int(word) for word in triton.__version__.split(".")[:2])
    return "" if version >= OLDEST else f"Triton {triton.__version__} is too old"


def function_of(variant: Variant | Transposing) -> Any:
    """Triton function of a variant."""
    from introspect_cli.tensors.gpu import elements, kernels

    return elements.transpose if isinstance(variant, Transposing) else kernels.summarise


def source(variant: Variant | Transposing) -> Any:
    """Source of a variant for Triton's compiler."""
    from triton.compiler import ASTSource

    function = function_of(variant)
    names = function.arg_names
    count = len(names) - len(variant)
    signature = {"null": "*u8"} | dict.fromkeys(names[1:count], "i64") | dict.fromkeys(names[count:], "constexpr")
    multiples = dict.fromkeys(_POINTERS, ALIGNMENT) | (_CHOSEN if variant.aligned else {})
    attributes = {
        (place,): [["tt.divisibility", multiples[name]]]
        for place, name in enumerate(names[:count])
        if name in multiples
    }
    constants = dict(zip(names[count:], variant, strict=True))
    return ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)


def options(variant: Variant | Transposing) -> dict[str, Any]:
    """Compiler options of a variant, the same for every device.

    The fewer registers a thread takes, the more programs wait for memory at once; with 128, which spill a few of what
    only tiles with NaN need, an H100 is twice as quick as with 255, and slower again with fewer. Sums in float64 and
    places worked out from strides do not fit into so few. AMD's compiler has no such option and passes over it.
    """
    large = isinstance(variant, Transposing) or variant.kind >= F64 or variant.parts == 2 or variant.dims
    return {"num_warps": WARPS, "enable_fp_fusion": True, "maxnreg": 255 if large else 128}


class TritonLauncher:
    """Kernels compiled for one device."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._current: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001  # ten times as quick as the public one
        self._compiled: dict[Variant | Transposing, tuple[Any, Any, Any]] = {}
        self._kernels: list[Any] = []

    def __call__(self, variant: Variant | Transposing, programs: int, stream: int, arguments: tuple[int, ...]) -> None:
        """See `Launcher`; the first call of a variant compiles it, or finds it in Triton's cache."""
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                self(variant, programs, stream, arguments)
            return
        known = self._compiled.get(variant)
        if known is None:
            known = self._compile(variant)
        run, function, metadata = known
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *variant)

    def _compile(self, variant: Variant | Transposing) -> tuple[Any, Any, Any]:
        """Compile and load a variant; its run function, handle and metadata."""
        from triton.compiler import compile as compiled
        from triton.runtime import driver

        target = driver.active.get_current_target()
        kernel = compiled(source(variant), target=target, options=options(variant))
        self._kernels.append(kernel)  # a kernel that is collected unloads its code
        run = kernel.run  # loads it
        known = self._compiled[variant] = run, kernel.function, kernel.packed_metadata
        return known
