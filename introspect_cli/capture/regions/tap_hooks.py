"""Forward hooks written for one module each, that TorchScript, pickle and packages accept.

TorchScript wants a hook to be a function with typed arguments whose source `inspect` can find, without a closure;
pickle wants it to be an attribute of a module. So a hook is python text made from its own name, which spells out where
the hook sits and what types go by; the text is put where `inspect` looks for it, and the function is an attribute of
this module that comes into being when it is asked for. Where this package is not installed, a pickle that holds such a
hook fails at `No module named 'introspect_cli'`, a saved script at `Unknown builtin op: introspect::tap`.
"""

from __future__ import annotations

import json
import linecache
import typing
from binascii import hexlify, unhexlify
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from introspect_cli.capture.regions import tap_op  # noqa: F401 - registers the operators that hooks call
from introspect_cli.capture.regions.tap_sites import text_of
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = "tap_"
_MADE: dict[str, Callable[..., Any]] = {}
_SCOPE: dict[str, Any] = {
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")},
    "Tensor": Tensor,
    "torch": torch,
}


@dataclass(frozen=True)
class Spec:
    """Where a hook sits and what passes by it.

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


def hook(spec: Spec) -> Callable[..., Any]:
    """The hook that a spec describes; always the same object for the same spec."""
    name = _PREFIX + hexlify(json.dumps(asdict(spec)).encode()).decode()
    made = _MADE.get(name)
    if made is None:
        made = _MADE[name] = _make(name, spec)
    return made


def __getattr__(name: str) -> Any:
    if not name.startswith(_PREFIX):
        raise AttributeError(name)
    try:
        fields = json.loads(unhexlify(name[len(_PREFIX) :]))
        spec = Spec(**{**fields, "inputs": tuple(fields["inputs"])})
    except (ValueError, TypeError, KeyError):
        raise AttributeError(name) from None
    return hook(spec)


def parts(annotation: str) -> tuple[str, ...] | None:
    """Types of a tuple's places, None for a type that is no tuple of known length."""
    if not annotation.startswith("Tuple[") or "..." in annotation:
        return None
    inner, depth, places = annotation[len("Tuple[") : -1], 0, [""]
    for character in inner:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            places.append("")
        else:
            places[-1] += character
    return tuple(place.strip() for place in places)


def _tapped(expression: str, annotation: str, spec: Spec, path: str) -> str:
    """Python text for a value with its tensors tapped."""
    if annotation == "Tensor":
        text = text_of(spec.fqn, Kind(spec.kind), path, spec.module_class)
        return f"torch.ops.introspect.tap({expression}, {text!r})"
    places = parts(annotation)
    if places is None:
        return expression
    items = [_tapped(f"{expression}[{i}]", place, spec, f"{path}[{i}]") for i, place in enumerate(places)]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _make(name: str, spec: Spec) -> Callable[..., Any]:
    inputs = f"Tuple[{', '.join(spec.inputs)}]" if spec.inputs else "Tuple[()]"
    if spec.kind == Kind.INPUT.value:
        source = f"def {name}(self, input: {inputs}) -> {inputs}:\n    return {_tapped('input', inputs, spec, '')}\n"
    else:
        source = (
            f"def {name}(self, input: {inputs}, output: {spec.output}) -> {spec.output}:\n"
            f"    return {_tapped('output', spec.output, spec, '')}\n"
        )
    filename = f"<tap of {spec.kind} of {spec.fqn}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # The name is what TorchScript resolves types in; it must be this module for a pickle to find the function again.
    scope = {**_SCOPE, "__name__": __name__}
    exec(compile(source, filename, "exec", dont_inherit=True), scope)  # noqa: S102 - text of our own making, see above
    made: Callable[..., Any] = scope[name]
    return made
