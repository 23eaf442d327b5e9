"""Compiled kernels, and launching them for next to nothing.

Triton's own way to call a kernel looks at every argument to find out what to compile: some 20 us each time. Here the
signature is fixed (every argument is a 64-bit integer), the compile-time parameters are a `Variant`, and a launch is
one look into a dictionary and one call of what Triton compiled. What is compiled so without a GPU is what runs on
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from introspect_cli.tensors.gpu.plan import ALIGNMENT

if TYPE_CHECKING:
    from introspect_cli.tensors.gpu.plan import Variant

OLDEST: Final = (3, 3)
"""The first Triton that takes a kernel's arguments and its parameters in the order they are called here."""

WARPS: Final = 4
"""Warps of a program: 128 threads read a row of 512 float32 in vectors of four."""
_POINTERS: Final = ("items", "owners", "layout", "row", "scratch", "counters", "factors", "shifts", "lookup")
"""Arguments that are addresses of ours, which begin at multiples of 16."""
_CHOSEN: Final = ("count", "first")
"""Arguments that are multiples of 16 where the variant says so; the address is one in the kernel, which reads less at
once than it could."""


class Launcher(Protocol):
    """Puts a kernel on a stream."""

    def __call__(self, variant: Variant, programs: int, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch."""


def unavailable() -> str:
    """Why Triton's kernels cannot be had; "" if they can."""
    try:
        import triton
    except Exception as error:  # built for another system, or not at all
        return f"no Triton ({type(error).__name__})"
    version = tuple(int(word) for word in triton.__version__.split(".")[:2])
    return "" if version >= OLDEST else f"Triton {triton.__version__} is too old"


def source(variant: Variant) -> Any:
    """A variant as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    from introspect_cli.tensors.gpu import kernels

    names = kernels.summarise.arg_names
    count = len(names) - len(variant)
    signature = dict.fromkeys(names[:count], "i64") | dict.fromkeys(names[count:], "constexpr")
    aligned = {*_POINTERS, *(_CHOSEN if variant.aligned else ())}
    attributes = {
        (place,): [["tt.divisibility", ALIGNMENT]] for place, name in enumerate(names[:count]) if name in aligned
    }
    constants = dict(zip(names[count:], variant, strict=True))
    return ASTSource(kernels.summarise, signature=signature, constexprs=constants, attrs=attributes)


OPTIONS: Final[dict[str, Any]] = {"num_warps": WARPS, "enable_fp_fusion": True, "maxnreg": 255}
"""What the compiler is told, for every device. With a limit on registers, even the highest there is, NVIDIA's assembler
does not spill any for the sake of more programs at once; AMD's compiler has no such option and passes over it."""


class TritonLauncher:
    """Kernels compiled for one device."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._current: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001  # ten times as quick as the public one
        self._compiled: dict[Variant, tuple[Any, Any, Any]] = {}
        self._kernels: list[Any] = []

    def __call__(self, variant: Variant, programs: int, stream: int, arguments: tuple[int, ...]) -> None:
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

    def _compile(self, variant: Variant) -> tuple[Any, Any, Any]:
        from triton.compiler import compile as compiled
        from triton.runtime import driver

        target = driver.active.get_current_target()
        kernel = compiled(source(variant), target=target, options=OPTIONS)
        self._kernels.append(kernel)  # a kernel that is collected unloads its code
        run = kernel.run  # loads it
        known = self._compiled[variant] = run, kernel.function, kernel.packed_metadata
        return known
