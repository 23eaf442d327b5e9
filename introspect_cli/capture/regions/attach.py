"""Make a model keep recording whatever it is turned into: script, trace, FX, export, package, pickle, copy.

What a transformation keeps of a model is its graph of operators; python around it is lost. `attach` puts hooks on
every module that call introspect's operators, before the model is transformed; wherever the result is run under
capture, in this process or another, what passes the hooks is recorded under the sites the model itself would have.

TorchScript wants a hook to be a function with typed arguments whose source `inspect` can find, without a closure;
pickle wants it to be an attribute of a module. So a hook is python text made from its own name, which spells out where
the hook sits and what types go by; the text is put where `inspect` looks for it, and the function is an attribute of
this module that comes into being when it is asked for. Where this package is not installed, a pickle that holds such a
hook fails at `No module named 'introspect_cli'`, a saved script at `Unknown builtin op: introspect::tap`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import linecache
import typing
from binascii import hexlify, unhexlify
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from introspect_cli.capture.regions import tap_op  # noqa: F401 - registers the operators that hooks call
from introspect_cli.capture.regions.taps import text_of
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = (int, float, bool, str)
_PREFIX = "tap_"
_SCOPE: dict[str, Any] = {
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")},
    "Tensor": Tensor,
    "torch": torch,
}


class Spec(NamedTuple):
    """Place of a hook, and the types of the values that it taps.

    Attributes:
        kind: `input` for a hook that runs before the module, `output` for one that runs after.
        fqn: the module's name.
        module_class: its class.
        inputs: types of the forward's positional arguments, as text.
        output: type of what it returns, as text.
    """

    kind: str
    fqn: str
    module_class: str
    inputs: tuple[str, ...]
    output: str


def attach(model: nn.Module, name: str | None = None, *, inputs: bool = True) -> int:
    """Put taps on a model and every module in it, by registering hooks.

    A tap replaces what passes by a copy. Left without taps are modules that write to their input (`inplace=True`),
    scripted ones, and those whose forward has other arguments or results than TorchScript's types.

    Args:
        model: any module that is not yet scripted or traced.
        name: FQN of the model; its class name where None.
        inputs: whether inputs are tapped, too, where a forward takes a Tensor; outputs always are.

    Returns:
        how many modules have taps now.

    Raises:
        UsageError: the model is scripted already, or has taps.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("taps go on a model before it is scripted or traced: call attach first, then transform")
    if _taps_of(model):
        raise UsageError("this model has taps already: detach first")
    root = name or type(model).__name__
    count = 0
    for path, module in model.named_modules():
        if getattr(module, "inplace", False) or isinstance(module, torch.jit.ScriptModule):
            continue
        if (types := _forward_types(module)) is None:
            continue
        taken, given = types
        fqn = f"{root}.{path}" if path else root
        spec = Spec(Kind.OUTPUT.value, fqn, type(module).__name__, taken, given)
        if inputs and "Tensor" in taken:
            module.register_forward_pre_hook(hook(spec._replace(kind=Kind.INPUT.value)))
        module.register_forward_hook(hook(spec))
        count += 1
    return count


def detach(model: nn.Module) -> None:
    """Remove every tap from a model and the modules in it; other hooks stay."""
    for registry, key in _taps_of(model):
        del registry[key]


def _taps_of(model: nn.Module) -> list[tuple[dict[int, Any], int]]:
    """The dictionary and the key of each hook in a model that is a tap."""
    registries = [held for one in model.modules() for held in (one._forward_pre_hooks, one._forward_hooks)]  # noqa: SLF001 - no public way to others' handles
    hooks = [(held, key, hooked) for held in registries for key, hooked in held.items()]
    return [(held, key) for held, key, hooked in hooks if getattr(hooked, "__module__", "") == __name__]


def _forward_types(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """TorchScript types, as text, of a forward's arguments without `self`, and of its result.

    What has no annotation counts as a Tensor.

    Returns:
        None where any argument is keyword-only or variadic, `_type_text` gives None for any type, or the annotations
        cannot be evaluated.
    """
    forward = type(module).forward
    try:
        signature = inspect.signature(forward)
        hints = typing.get_type_hints(forward)
    except Exception:  # a stranger's annotations may raise anything
        return None
    parameters = list(signature.parameters.values())[1:]
    texts = [_type_text(hints.get(name, Tensor)) for name in (*(one.name for one in parameters), "return")]
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    known = [text for text in texts if text is not None]
    if len(known) < len(texts) or not positional.issuperset(one.kind for one in parameters):
        return None
    return tuple(known[:-1]), known[-1]


def _type_text(annotation: Any) -> str | None:
    """TorchScript's text of a type: Tensor, number, text, Optional, Tuple, List, Dict; None for any other."""
    if annotation is Tensor:
        return "Tensor"
    if annotation in _PLAIN:
        return str(annotation.__name__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if type(None) in arguments and len(arguments) == 2:
        inner = _type_text(next(argument for argument in arguments if argument is not type(None)))
        return None if inner is None else f"Optional[{inner}]"
    texts = [text for text in map(_type_text, arguments) if text is not None]
    name = {tuple: "Tuple", list: "List", dict: "Dict"}.get(origin)
    is_known = name is not None and texts and len(texts) == len(arguments)
    return f"{name}[{', '.join(texts)}]" if is_known else None


@functools.cache
def hook(spec: Spec) -> Callable[..., Any]:
    """The hook function of a spec: it returns the module's inputs, or its output, with each tensor tapped.

    The same object for equal specs. Its text is kept in `linecache`, where `inspect` finds it.
    """
    name = _PREFIX + hexlify(json.dumps(spec).encode()).decode()
    types = {"input": f"Tuple[{', '.join(spec.inputs) or '()'}]", "output": spec.output}
    given = ", ".join(f"{side}: {types[side]}" for side in ("input", "output")[: 1 + (spec.kind == "output")])
    tapped = _tapped_expression(spec.kind, types[spec.kind], spec, "")
    source = f"def {name}(self, {given}) -> {types[spec.kind]}:\n    return {tapped}\n"
    filename = f"<tap of {spec.kind} of {spec.fqn}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # The name is what TorchScript resolves types in; it must be this module for a pickle to find the function again.
    scope = {**_SCOPE, "__name__": __name__}
    exec(compile(source, filename, "exec", dont_inherit=True), scope)  # noqa: S102 - text of our own making, see above
    made: Callable[..., Any] = scope[name]
    return made


def __getattr__(name: str) -> Any:
    """The hook function whose name spells out its spec, as `hook` gives it; `pickle` asks for it to load a model.

    Raises:
        AttributeError: the name is not that of a hook.
    """
    if not name.startswith(_PREFIX):
        raise AttributeError(name)
    try:
        kind, fqn, module_class, inputs, output = json.loads(unhexlify(name[len(_PREFIX) :]))
        return hook(Spec(kind, fqn, module_class, tuple(inputs), output))
    except (ValueError, TypeError):
        raise AttributeError(name) from None


def tuple_items(annotation: str) -> tuple[str, ...] | None:
    """Element types, as text, of `Tuple[...]`, not those inside them; None for another type."""
    node = ast.parse(annotation, mode="eval").body
    if not (isinstance(node, ast.Subscript) and annotation.startswith("Tuple[")):
        return None
    return tuple(map(ast.unparse, node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]))


def _tapped_expression(expression: str, annotation: str, spec: Spec, path: str) -> str:
    """Python expression for a value with each of its tensors tapped, those in nested tuples too.

    Args:
        expression: python text that gives the value.
        annotation: its TorchScript type, as text; a value without tensors or tuples gives `expression` itself.
        spec: the hook's.
        path: where the value sits in what the hook is given: "", `[0]`, `[0][1]`.
    """
    if annotation == "Tensor":
        text = text_of(spec.fqn, Kind(spec.kind), path, spec.module_class)
        return f"torch.ops.introspect.tap({expression}, {text!r})"
    if (places := tuple_items(annotation)) is None:
        return expression
    items = [_tapped_expression(f"{expression}[{i}]", place, spec, f"{path}[{i}]") for i, place in enumerate(places)]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
