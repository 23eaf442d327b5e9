"""What the GPU kernels compile to, on a machine without a GPU: registers, spills, shared memory, what an element takes.

Triton brings the assemblers of both makers. Run: python benchmarks/gpu_offline.py [--target sm_90 ...]
"""

from __future__ import annotations

import argparse
import heapq
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled_by_triton

from introspect_cli.tensors import checksum
from introspect_cli.tensors.gpu.launch import ELEMENTS, WARPS, Merging, Transposing, Variant, options, source

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


VARIANTS: dict[str, Variant | Transposing | Merging] = {
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
    "rows of programs": Merging(),
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


@dataclass(frozen=True)
class UsualPath:
    """What a thread runs for a full tile of usual numbers.

    Attributes:
        instructions: for each element.
        barriers: at which it waits for the program's other threads, in all.
    """

    instructions: float
    barriers: int


def kernel(chosen: Variant | Transposing | Merging, target: str) -> Any:
    """A compiled kernel."""
    return compiled_by_triton(source(chosen), target=TARGETS[target], options=options(chosen))


def assembly(chosen: Variant | Transposing | Merging, target: str) -> str:
    """Its assembly, PTX or AMD's."""
    made = kernel(chosen, target)
    text: str = made.asm["ptx" if "ptx" in made.asm else "amdgcn"]
    return text


def compiled(chosen: Variant | Transposing | Merging, target: str) -> Used:
    """Compile a variant and ask the assembler what it takes."""
    made = kernel(chosen, target)
    if "cubin" not in made.asm:
        text = made.asm["amdgcn"]
        registers, spilled = (
            int(_matched(rf"\.{name}:\s+(\d+)", text)) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return Used(registers, spilled, made.metadata.shared)
    told = _told_of(made, "cuobjdump", "-res-usage")
    registers, stack, local = (int(_matched(rf"{name}:(\d+)", told)) for name in ("REG", "STACK", "LOCAL"))
    return Used(registers, stack + local, made.metadata.shared)


def _told_of(made: Any, tool: str, *flags: str) -> str:
    """What a tool of NVIDIA's that Triton brings says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool, *flags, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of_an_element(chosen: Variant) -> UsualPath:
    """What a thread runs for each element of a full tile, by the machine code for sm_90.

    That is the shortest way round the loop over tiles on which elements are read in vectors: tiles that are not full
    read them one by one, and whatever is asked for besides is on longer ways.
    """
    code, labels = list[str](), dict[str, int]()
    for line in _told_of(kernel(chosen, "sm_90"), "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    jumps = {at: labels[to[1]] for at, text in enumerate(code) if (to := re.search(r"BRA.*`\((\.L_x_\d+)\)", text))}
    end, begin = max(jumps.items(), key=lambda jump: jump[0] - jump[1])
    inner = [range(to, at + 1) for at, to in jumps.items() if begin < to <= at < end]  # over the rows of a tile
    ways, seen = [(0, begin, False, ())], set()
    while True:
        length, at, full, barriers = heapq.heappop(ways)
        if at == begin and length:
            break
        if (at, full) in seen:
            continue
        seen.add((at, full))
        text = code[at]
        full |= bool(re.match(r"LDG\.E\.(128|64)", text))
        barriers += ("BAR" in text,)
        conditional = text.startswith("@") or re.search(r"BRA[^`]*P\d", text)
        after = [jumps[at]] if at in jumps else []
        after += [at + 1] if at not in jumps or conditional else []
        for to in after:
            if begin <= to <= end and (to != begin or full):
                times = chosen.rows if any(at in loop for loop in inner) else 1
                heapq.heappush(ways, (length + times, to, full, barriers))
    elements = chosen.rows * checksum.SPAN // (32 * WARPS)
    return UsualPath(length / elements, sum(barriers))


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
    lines += ["", "| kernel, sm_90 | instructions for each element | barriers for each tile |", "|---|---|---|"]
    for name in ("all three", "lean", "checksum"):
        for dtype in ("float32", "bfloat16"):
            path = of_an_element(VARIANTS[f"{name}, {dtype}"])
            lines.append(f"| {name}, {dtype} | {path.instructions:.0f} | {path.barriers} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="one of the targets; all by default")
    print(f"Triton {triton.__version__}\n\n{table(parser.parse_args().target or list(TARGETS))}")


if __name__ == "__main__":
    main()
