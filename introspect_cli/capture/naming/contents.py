"""What a module holds, and what kind of module it is, without asking the module.

`modules()`, `parameters()` and their like may be overridden by the script: they may have effects, count calls, or leave
things out. What torch itself keeps in each module is walked instead.

Some calls of modules are more than a call, or none: traced for their shapes, compiled, scripted, fused, wrapped. What
runs inside such a call is not seen, or is recorded elsewhere: who records calls has to know them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from introspect_cli.capture import private_api
from introspect_cli.records import Kind

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterator, Mapping


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
    """A module and all below it, each once: depth first, parents before children."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        children = module._modules  # noqa: SLF001 - the public view may be the script's
        if children:  # most have none, and this is asked of all of them in each step
            pending += [child for child in reversed(list(children.values())) if child is not None]


def holders_in(root: nn.Module) -> list[nn.Module]:
    """Modules of a tree that have parameters or buffers of their own, each once, parents before children."""
    return [module for module in modules_in(root) if module._parameters or module._buffers]  # noqa: SLF001 - the public views build strings


Contents = tuple[list[Kind], list[torch.Tensor], list[object]]
"""Tensors, and the kind of each (no pairs, since every few hundred of those cost a round of the garbage collector); and
what is another where another module holds one of them, or under another name."""


def tensors_in(holders: list[weakref.ref[nn.Module]], kinds: frozenset[Kind]) -> Contents:
    """Modules' own parameters and buffers: the kind of each, the tensors, each once, in the order met, and a key.

    Those of submodules are not among them. The key is another one where a module, a name or a tensor is another, or
    stands elsewhere.

    Args:
        holders: the modules, each looked at by itself (see `holders_in`); one that is gone is passed over.
        kinds: PARAM, BUFFER or both.
    """
    tensors: dict[int, torch.Tensor] = {}
    of: list[Kind] = []
    places: list[object] = []
    for module in (module for reference in holders if (module := reference()) is not None):
        for kind, group in ((Kind.PARAM, module._parameters), (Kind.BUFFER, module._buffers)):  # noqa: SLF001 - as above
            if group and kind in kinds:
                places.append(id(module))
                places += group.keys()  # a scripted module's is no mapping, and cannot be walked
                for tensor in group.values():
                    if tensor is not None and id(tensor) not in tensors:
                        tensors[id(tensor)] = tensor
                        of.append(kind)
    return of, list(tensors.values()), [*places, *tensors]


def parameters_in(root: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a module and all below it; one that several modules share comes several times."""
    for module in modules_in(root):
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)  # noqa: SLF001 - as above


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters of all groups in order; of a single group the optimizer's own list, which must not be changed."""
    groups = optimizer.param_groups
    if len(groups) == 1:  # as it is: a copy is memory that the allocator has to tidy up for
        return list(groups[0]["params"]) if type(groups[0]["params"]) is not list else groups[0]["params"]
    return [parameter for group in groups for parameter in group["params"]]


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper holds; None for a module whose class's name is not in `WRAPPED_BY`."""
    attribute = WRAPPED_BY.get(type(module).__name__)
    inner = module._modules.get(attribute) if attribute else None  # noqa: SLF001 - `__getattr__` may be the wrapper's
    return inner if isinstance(inner, nn.Module) else None


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside all wrappers; the module itself where it is no wrapper."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def is_traced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether any argument itself (not nested) is a fake tensor, so that the call computes nothing (export, shapes)."""
    fake = private_api.FAKE_TENSOR
    for value in args:  # no generators: this runs for every call of every module
        if issubclass(type(value), fake):
            return True
    return bool(kwargs) and any(issubclass(type(value), fake) for value in kwargs.values())


def hides(module: nn.Module) -> bool:
    """Whether what runs inside a module's calls is not seen: it is scripted, or compiled by `torch.compile`."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or module.__dict__.get(private_api.MODULE_WRAPPED_CALL) is not None
    )


def is_unfinished(module: nn.Module) -> bool:
    """Whether `nn.Module.__init__` was not called, which torch reports when the module is called."""
    return "_forward_hooks" not in module.__dict__


def has_own_call(cls: type[nn.Module]) -> bool:
    """Whether a class, or a base of it that comes before `nn.Module`, defines `__call__`."""
    return next(base for base in cls.__mro__ if "__call__" in vars(base)) is not nn.Module


def is_plain_call(module: nn.Module) -> bool:
    """Whether a call of a module is only that: no own `__call__`, wrapper, graph, script or compiled region.

    False for a `TransformerEncoderLayer`, which torch may fuse, and for the list of a parametrization.
    """
    if has_own_call(type(module)):
        return False
    special = (torch.jit.ScriptModule, nn.TransformerEncoderLayer, torch.fx.GraphModule, ParametrizationList)
    return not isinstance(module, special) and wrapped(module) is None and not hides(module)


def how_hidden(module: nn.Module) -> str:
    """How a module hides what runs inside it: `fused` for a `TransformerEncoderLayer`, `scripted`, else `compiled`."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return "fused"
    return "scripted" if isinstance(module, torch.jit.ScriptModule) else "compiled"
