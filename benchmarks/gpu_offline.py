"""What the GPU kernels compile to, on a machine without a GPU: registers, spills and shared memory of each variant.

Triton brings the assemblers of both makers. Run: python benchmarks/gpu_offline.py [--target sm_90 ...]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled_by_triton

from introspect_cli.tensors.gpu.launch import ELEMENTS, Transposing, Variant, options, source

if TYPE_CHECKING:
    from collections.abc import Sequence

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def variant(dtype: str, *, aligned: bool = True, **wanted: bool) -> Variant:
    """The kernel for a type; all three unless something else is wanted."""
    return ELEMENTS[dtype].variant(aligned=aligned, **wanted)


VARIANTS: dict[str, Variant | Transposing] = {
    "all three, float32": variant("float32"),
    "lean, float32": variant("float32", lean=True),
    "lean, bfloat16": variant("bfloat16", lean=True),
    "checksum, float32": variant("float32", stats=False, sketch=False),
    "checksum, float32, unaligned": variant("float32", stats=False, sketch=False, aligned=False),
    "checksum and statistics, float32": variant("float32", sketch=False),
    "all three, bfloat16": variant("bfloat16"),
    "checksum, bfloat16": variant("bfloat16", stats=False, sketch=False),
    "all three, float16": variant("float16"),
    "all three, float8": variant("float8_e5m2"),
    "all three, bool": variant("bool"),
    "all three, int64": variant("int64"),
    "all three, float64": variant("float64"),
    "a table of float32": variant("float32")._replace(many=True),
    "a table of bfloat16": variant("bfloat16")._replace(many=True),
    "matrices of bfloat16": Transposing(2, aligned=True),
    "matrices of bfloat16, unaligned": Transposing(2, aligned=False),
}


@dataclass(frozen=True)
class Used:
    """What a kernel takes.

    Attributes:
        registers: of a thread.
        spilled: bytes of memory a thread takes for want of registers.
        shared: bytes of shared memory a program takes.
    """

    registers: int
    spilled: int
    shared: int


def kernel(chosen: Variant | Transposing, target: str) -> Any:
    """A compiled kernel."""
    return compiled_by_triton(source(chosen), target=TARGETS[target], options=options(chosen))


def assembly(chosen: Variant | Transposing, target: str) -> str:
    """Its assembly, PTX or AMD's."""
    made = kernel(chosen, target)
    text: str = made.asm["ptx" if "ptx" in made.asm else "amdgcn"]
    return text


def compiled(chosen: Variant | Transposing, target: str) -> Used:
    """Compile a variant and ask the assembler what it takes."""
    made = kernel(chosen, target)
    if "cubin" not in made.asm:
        text = made.asm["amdgcn"]
        registers, spilled = (
            int(_matched(rf"\.{name}:\s+(\d+)", text)) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return Used(registers, spilled, made.metadata.shared)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (int(_matched(rf"{name}:(\d+)", done.stdout)) for name in ("REG", "STACK", "LOCAL"))
    return Used(registers, stack + local, made.metadata.shared)


def _matched(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def table(targets: Sequence[str]) -> str:
    """All variants, as a table in Markdown: registers, and bytes spilled where there are any."""
    lines = ["| kernel | " + " | ".join(targets) + " | shared memory |", "|---" * (len(targets) + 2) + "|"]
    for name, chosen in VARIANTS.items():
        used = [compiled(chosen, target) for target in targets]
        cells = [f"{use.registers}" + (f", {use.spilled} B spilled" if use.spilled else "") for use in used]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {max(use.shared for use in used)} B |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="one of the targets; all by default")
    print(f"Triton {triton.__version__}\n\n{table(parser.parse_args().target or list(TARGETS))}")


if __name__ == "__main__":
    main()
