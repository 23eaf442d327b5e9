"""Calls of modules that are more than a call, or none: traced for their shapes, compiled, scripted, fused, wrapped.

What runs inside such a call is not seen, or is recorded elsewhere: who records calls has to know them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from introspect_cli.capture import private_api
from introspect_cli.capture.inside import wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_traced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call only traces shapes (export, fake tensors): nothing is computed, nothing can be recorded."""
    fake = private_api.FAKE_TENSOR
    for value in args:  # no generators: this runs for every call of every module
        if issubclass(type(value), fake):
            return True
    return bool(kwargs) and any(issubclass(type(value), fake) for value in kwargs.values())


def hides(module: nn.Module) -> bool:
    """Whether the modules inside one run unseen: it is scripted or compiled."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or module.__dict__.get(private_api.MODULE_WRAPPED_CALL) is not None
    )


def is_unfinished(module: nn.Module) -> bool:
    """Whether torch's own `__init__` was left out: torch will say so when the module is called."""
    return "_forward_hooks" not in module.__dict__


def is_plain_call(module: nn.Module) -> bool:
    """Whether a module's class says that a call of it is nothing but a call: no wrapper, no graph, nothing hidden."""
    special = (torch.jit.ScriptModule, nn.TransformerEncoderLayer, torch.fx.GraphModule, ParametrizationList)
    return not isinstance(module, special) and wrapped(module) is None and not hides(module)


def sequence_code() -> tuple[object, object]:
    """Torch's own functions by which a sequence runs its modules; None for each where the script has put in others."""
    functions = (nn.Sequential.forward, nn.Sequential.__iter__)
    home = nn.modules.container.__file__
    theirs = all(getattr(own, "__code__", None) and own.__code__.co_filename == home for own in functions)
    return functions if theirs else (None, None)


def how_hidden(module: nn.Module) -> str:
    """What a module that hides others is."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return "fused"
    return "scripted" if isinstance(module, torch.jit.ScriptModule) else "compiled"
