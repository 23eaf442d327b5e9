"""Make a model keep recording whatever it is turned into: script, trace, FX, export, package, pickle, copy.

What a transformation keeps of a model is its graph of operators; python around it is lost. `attach` puts hooks on
every module that call operators of ours, before the model is transformed; wherever the result is run under capture, in
this process or another, what passes the hooks is recorded under the sites the model itself would have.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from introspect_cli.capture.regions.tap_hooks import Spec, hook
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "introspect_cli.capture.regions.tap_hooks"
_KNOWN = (int, float, bool, str)


def attach(model: nn.Module, name: str | None = None, *, inputs: bool = True) -> int:
    """Put taps on a model and every module in it.

    A tap replaces what passes by a copy. A module that writes to its input (`inplace=True`) is left without taps, and
    so is what is no tensor or tuple of tensors.

    Args:
        model: any module that is not yet scripted or traced.
        name: FQN of the model; its class name where None.
        inputs: whether inputs are tapped, too; outputs always are.

    Returns:
        how many modules have taps now.

    Raises:
        UsageError: the model is scripted already, or has taps.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("taps go on a model before it is scripted or traced: call attach first, then transform")
    if any(_is_ours(found) for module in model.modules() for found in _hooks(module)):
        raise UsageError("this model has taps already: detach first")
    root = name or type(model).__name__
    count = 0
    for path, module in model.named_modules():
        if getattr(module, "inplace", False) or isinstance(module, torch.jit.ScriptModule):
            continue
        types = _types(module)
        if types is None:
            continue
        taken, given = types
        fqn = f"{root}.{path}" if path else root
        spec = Spec(Kind.OUTPUT.value, fqn, type(module).__name__, taken, given)
        if inputs and "Tensor" in taken:
            module.register_forward_pre_hook(hook(replace(spec, kind=Kind.INPUT.value)))
        module.register_forward_hook(hook(spec))
        count += 1
    return count


def detach(model: nn.Module) -> None:
    """Take every tap off a model again."""
    for module in model.modules():
        for registry in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - no public way to others' handles
            for key in [key for key, found in registry.items() if _is_ours(found)]:
                del registry[key]


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]  # noqa: SLF001 - as above


def _is_ours(found: Callable[..., Any]) -> bool:
    return getattr(found, "__module__", "") == _MARK


def _types(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """Types of what a module's forward takes and gives, as text; None for a forward no hook can be written for."""
    forward = type(module).forward
    try:
        signature = inspect.signature(forward)
        hints = typing.get_type_hints(forward)
    except Exception:  # a stranger's annotations may raise anything
        return None
    taken = []
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return None
        text = _text(hints.get(parameter.name, Tensor))
        if text is None:
            return None
        taken.append(text)
    given = _text(hints.get("return", Tensor))
    return None if given is None else (tuple(taken), given)


def _text(annotation: Any) -> str | None:
    """A type as TorchScript writes it; None for one it does not know."""
    if annotation is Tensor:
        return "Tensor"
    if annotation in _KNOWN:
        return str(annotation.__name__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if type(None) in arguments and len(arguments) == 2:
        inner = _text(next(argument for argument in arguments if argument is not type(None)))
        return None if inner is None else f"Optional[{inner}]"
    inside = [_text(argument) for argument in arguments]
    known = [text for text in inside if text is not None]
    if len(known) != len(inside) or not known:
        return None
    name = {tuple: "Tuple", list: "List", dict: "Dict"}.get(origin)
    return None if name is None else f"{name}[{', '.join(known)}]"
