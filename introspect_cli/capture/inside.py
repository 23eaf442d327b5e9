"""What is inside a module, or a wrapper of one, without asking the module.

`modules()`, `parameters()` and their like may be overridden by the script: they may have effects, count calls, or leave
things out. What torch itself keeps in each module is walked instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from introspect_cli.tensors.kernels import KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterator

WRAPPED_BY = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Classes that only wrap another module, and the attribute that holds it."""


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """A module and all inside it, each once, those that hold others first."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        pending.extend(child for child in reversed(list(module._modules.values())) if child is not None)  # noqa: SLF001 - the public view may be the script's


def instances_in(root: nn.Module, cls: type) -> list[nn.Module]:
    """The modules of a class in a module, each once, those that hold others first: quick where there are none."""
    found: list[nn.Module] | None = None if KERNELS is None else KERNELS.instances(root, cls)
    return [module for module in modules_in(root) if isinstance(module, cls)] if found is None else found


def parameters_in(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of all inside it; one that is shared comes again."""
    for module in modules_in(root):
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)  # noqa: SLF001 - as above


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper, None for a module that wraps nothing."""
    attribute = WRAPPED_BY.get(type(module).__name__)
    inner = module._modules.get(attribute) if attribute else None  # noqa: SLF001 - `__getattr__` may be the wrapper's
    return inner if isinstance(inner, nn.Module) else None


def unwrap(module: nn.Module) -> nn.Module:
    """The innermost module under any wrappers."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module
