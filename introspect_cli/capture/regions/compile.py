"""What `torch.compile` compiles: left alone, run as python, or tapped inside.

A compiled region runs no module and no hook. `boundary` records what goes in and comes out of it and changes nothing.
`eager` asks torch to run every region as python. `keep` puts a look at the inputs and outputs of every module before
the first compile, so that it is compiled in. All looks say that they write to one tensor, so that a compiler keeps them
in the order of the program. Their gradients are not seen: how a compiler routes them is not what a hook on the tensor
would see. A look ends a fusion: kernels are split at every module, and results may differ by rounding from those of a
region without.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from introspect_cli.capture.naming import ById, modules_in
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.regions.probe import TapProbe
from introspect_cli.capture.regions.tap_op import NOTHING, ORDER
from introspect_cli.capture.regions.taps import PLAIN, WANTED, text_of
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.capture.context import Context

KEPT = (
    "looks at modules' inputs and outputs are compiled into the regions (--compile keep): kernels are not fused across "
    "them, so results may differ by rounding from a run without them"
)
EAGER = "compiled regions were run as python (--compile eager): results may differ by rounding from compiled ones"


class Look:
    """Forward pre-hook that compiles a look at every input tensor; forward hook that does so at every output tensor."""

    def __init__(self, module: str) -> None:
        """Set the number (`#0`) that looks name the module by; the caller registers the hook."""
        self.module = module

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:  # noqa: ARG002 - torch's signature
        """While a compiler traces the module, compile a look at each argument, or at the output; else do nothing."""
        if torch.compiler.is_compiling():
            if output:
                _compile_looks(output[0], self.module, Kind.OUTPUT, "")
            else:
                _compile_looks(args, self.module, Kind.INPUT, "")
                _compile_looks(kwargs, self.module, Kind.INPUT, "")


def _compile_looks(value: Any, module: str, kind: Kind, path: str) -> None:
    """Compile a look at every tensor in a value, those in tuples, lists and dicts too; and at numbers and texts.

    Of a number or text only the place is recorded, not the value. Values of other types are passed over.

    Args:
        value: what goes in or comes out of the module.
        module: the module's number (`#0`).
        kind: `Kind.INPUT` or `Kind.OUTPUT`.
        path: where the value sits in what the module is given or returns.
    """
    if isinstance(value, torch.Tensor):
        mark = WANTED if value.requires_grad and torch.is_grad_enabled() else ""
        torch.ops.introspect.look(value, ORDER, text_of(module, kind, path, "", mark))
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            _compile_looks(item, module, kind, f"{path}[{position}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _compile_looks(item, module, kind, f"{path}[{key!r}]")
    elif isinstance(value, (bool, int, float, str)):
        # Its value must not become part of the graph, which would be compiled anew for every other one.
        torch.ops.introspect.look(NOTHING, ORDER, text_of(module, kind, path, "", PLAIN))


class CompileProbe(GuardedProbe):
    """Watches `torch.compile`."""

    name = "compile"
    lost = "what is inside compiled regions is"

    def __init__(self, context: Context) -> None:
        """Watch nothing yet."""
        super().__init__(context)
        self._taps = context.probe(TapProbe)
        self._tapped: ById[bool] = ById()

    def stand_in_for_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement of `torch.compile`, which `Module.compile` calls too; with the guard off it is torch's."""

        @functools.wraps(original)
        def compile(model: Any = None, **settings: Any) -> Any:  # noqa: A001 - stands in for torch.compile
            """Prepare for the model to be compiled by `--compile`, then compile it as torch does.

            Without a model it returns the decorator; a compiled function taps the modules it reaches at its first call.
            """
            if not self._guarded.on:
                return original(model, **settings)
            if model is None:
                return functools.partial(compile, **settings)
            with self._guarded:
                self._prepare_compiling(model)
            compiled = original(model, **settings)
            if isinstance(model, nn.Module) or self._context.options.compile == "eager":
                return compiled
            return self._tap_at_first_call(model, compiled)

        return compile

    def _prepare_compiling(self, model: Any) -> None:
        """Before a model is compiled: tap the modules it reaches, or switch torch to eager mode, by `--compile`.

        The switch is for all regions, once.
        """
        if self._context.options.compile != "eager":
            self._context.notes.setdefault(KEPT)
            self.tap(_modules_below(model) if isinstance(model, nn.Module) else _modules_reached(model))
        elif EAGER not in self._context.notes:
            self._context.notes[EAGER] = None
            self._patches.undo_by(functools.partial(torch.compiler.set_stance, "default"))
            torch.compiler.set_stance("force_eager")

    def _tap_at_first_call(self, function: Any, compiled: Any) -> Any:
        """Wrap a compiled function so that its first call taps the modules that it or its arguments reach by then.

        A function is often decorated before the model that it uses is made.

        Args:
            function: the function that was compiled.
            compiled: what `torch.compile` returned; returned itself where the function is no python function.
        """
        if not hasattr(function, "__globals__"):
            return compiled
        looked = False

        @functools.wraps(compiled)
        def first(*args: Any, **kwargs: Any) -> Any:
            """Call the compiled function; before its first call, tap the modules that it reaches."""
            nonlocal looked
            if not torch.compiler.is_compiling() and not looked:
                looked = True
                self.tap([*_modules_reached(function), *_modules_among((*args, *kwargs.values()))])
            return compiled(*args, **kwargs)

        return first

    def tap(self, modules: Iterable[nn.Module]) -> None:
        """Register looks at inputs and outputs of modules, once each, until `remove`.

        Looks in compiled code stay, and do nothing once nothing captures. Nothing for scripted modules, and for all
        after a failure.
        """
        if not self._guarded.on:
            return
        for module in modules:
            if self._tapped.get(module) or isinstance(module, torch.jit.ScriptModule):
                continue
            self._tapped.set(module, True)
            look = Look(self._taps.module_number(module))
            self._patches.undo_by(module.register_forward_pre_hook(look, with_kwargs=True).remove)
            self._patches.undo_by(module.register_forward_hook(look, with_kwargs=True).remove)


def _modules_below(model: nn.Module) -> list[nn.Module]:
    """All modules inside a model, without itself: its own call is the boundary, which hooks see."""
    return [module for module in modules_in(model) if module is not model]


def _modules_reached(function: Any) -> list[nn.Module]:
    """Modules that a function reaches by `self`, its closure and the globals that it names, with all inside them.

    Of a method of a module, only those inside that module, without itself.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return _modules_below(owner)
    code = getattr(function, "__code__", None)
    named = [function.__globals__.get(name) for name in code.co_names] if code is not None else []
    cells = inspect.getclosurevars(function).nonlocals.values() if code is not None else ()
    return list(_modules_among((owner, *named, *cells)))


def _modules_among(values: Iterable[Any]) -> Iterator[nn.Module]:
    """Modules among values, and the first 64 in the attributes of each other value, with all inside them.

    Tensors are passed over, and lists, tuples and dicts are not looked into. A module may come several times.
    """
    for value in values:
        if isinstance(value, nn.Module):
            yield from modules_in(value)
        elif value is not None and not isinstance(value, torch.Tensor) and hasattr(value, "__dict__"):
            held = [item for item in vars(value).values() if isinstance(item, nn.Module)]
            for item in held[:64]:
                yield from modules_in(item)
