"""What the GPU kernels need to know of each element type.

Constants alone: torch's types are not looked up before a tensor of that type comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from introspect_cli.tensors.kernels import BF16, F16, F32, F64, I8, I16, I32, I64, TABLE, U8, U16, U32, U64


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
        """Rows of 512 elements in a tile: so many that a program needs no memory for want of registers."""
        return 2 if self.wide else 4


ELEMENTS: Final = {
    "float32": Element(F32, 4),
    "float16": Element(F16, 2),
    "bfloat16": Element(BF16, 2),
    "float8_e4m3fn": Element(TABLE, 1),
    "float8_e4m3fnuz": Element(TABLE, 1),
    "float8_e5m2": Element(TABLE, 1),
    "float8_e5m2fnuz": Element(TABLE, 1),
    "float8_e8m0fnu": Element(TABLE, 1),
    "bool": Element(U8, 1),
    "uint8": Element(U8, 1),
    "int8": Element(I8, 1),
    "uint16": Element(U16, 2),
    "int16": Element(I16, 2),
    "float64": Element(F64, 8),
    "uint32": Element(U32, 4),
    "int32": Element(I32, 4),
    "uint64": Element(U64, 8),
    "int64": Element(I64, 8),
    "complex32": Element(F16, 2, parts=2),
    "complex64": Element(F32, 4, parts=2),
    "complex128": Element(F64, 8, parts=2),
    "float4_e2m1fn_x2": Element(U8, 1, values=False),
    "bits8": Element(U8, 1, values=False),
    "bits16": Element(U16, 2, values=False),
}
"""By torch's name without the prefix."""
