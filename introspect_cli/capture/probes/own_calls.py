"""Classes of modules that are called past `nn.Module.__call__`, and what of a model ran without being seen.

A library may give its modules a `__call__` of its own, which runs `forward` itself and returns what it makes of that
(a Gaussian process returns a distribution). So the `__call__` and the `forward` of each such class are replaced for as
long as the capture lasts: the outermost of the two that runs is the call. One that is handed on to the next with the
same tensors is the same call.

A script may also call the `forward` of an ordinary module by its name. It is replaced where the script, or the file
that defines the class, names one; and of other classes as soon as one was found to have run so.

What is left is said: a method that is not `forward` runs the modules of a model one after the other, or a parameter
gets a gradient though neither its module nor one that holds it was called. What such a method makes of what the modules
return is on no record, so that nothing of it differs says nothing.
"""

from __future__ import annotations

import functools
import sys
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from introspect_cli.capture import private_api
from introspect_cli.capture.environment.sources import file_of, has_forward_call
from introspect_cli.capture.frames import is_introspects, outward
from introspect_cli.capture.guard import uncounted
from introspect_cli.capture.naming import has_own_call
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Phase
from introspect_cli.tensors.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from introspect_cli.capture.context import Context

MAX_FRAMES = 40
MAX_UNSEEN = 1000
_IN_MODULES = "torch.distributions."
"""torch package whose classes libraries combine with `nn.Module` in one class."""


class OwnCalls(GuardedProbe):
    """Base of the probe of modules: replaces `__call__` and `forward` of classes that bypass `nn.Module.__call__`."""

    _record_or_pass: Any
    """Stands in for both methods of a class with its own `__call__`: is given the original, the module, its positional
    and its keyword arguments."""
    _record_by_name: Any
    """The same for the `forward` of other classes, which `nn.Module.__call__` calls as well."""

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._looked: set[tuple[int, int, Phase]] = set()

    def subclassing(self, _original: object) -> Any:
        """A replacement of `nn.Module.__init_subclass__` that passes each new class to `_watch`.

        All existing subclasses are passed to it now.
        """
        watch = self._watch

        def __init_subclass__(cls: type[nn.Module], /, **kwargs: Any) -> None:  # noqa: N807 - stands in for Module's
            """Do what a class does without it, then `_watch` the new class."""
            super(nn.Module, cls).__init_subclass__(**kwargs)
            watch(cls)

        waiting, seen = nn.Module.__subclasses__(), set[type]()
        while waiting:
            cls = waiting.pop()
            if cls not in seen:
                seen.add(cls)
                waiting += type.__subclasses__(cls)
                watch(cls)
        return classmethod(__init_subclass__)

    def _watch(self, cls: type[nn.Module]) -> None:
        """Replace `__call__` and `forward` of a class that has its own `__call__`.

        Of another class, `forward` alone, and only if the script's file or the one that defines the class calls any
        `forward` by its name.
        """
        with self._guarded:
            if has_own_call(cls):
                for name in ("__call__", "forward"):
                    self._replace(cls, name, self._record_or_pass)
            elif any(has_forward_call(file_of(sys.modules.get(name))) for name in ("__main__", cls.__module__)):
                self.see_forward(cls)

    def see_forward(self, cls: type[nn.Module]) -> None:
        """Replace `forward` of a class, so that calls of it by name are seen.

        Nothing for a class with its own `__call__`, or whose `forward` is torch's.
        """
        if not has_own_call(cls):
            self._replace(cls, "forward", self._record_by_name)

    def _replace(self, cls: type, name: str, called: Callable[..., Any]) -> None:
        """Replace a method in the class that defines it, so that its other subclasses have the replacement too.

        Nothing for torch's own methods (but `torch.distributions`), what is no python function, and replacements.

        Args:
            cls: has or inherits the method.
            name: `__call__` or `forward`.
            called: `_record_or_pass` or `_record_by_name`.
        """
        home = next((base for base in cls.__mro__ if name in vars(base)), nn.Module)
        original = vars(home)[name]
        if home.__module__.startswith("torch.") and not home.__module__.startswith(_IN_MODULES):
            return
        if type(original) is not FunctionType or is_ours(original):
            return
        is_traced, flags, guarded, kind = (
            torch.compiler.is_dynamo_compiling, private_api.compile_flags, self._guarded, nn.Module,
        )  # fmt: skip

        def standing(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Call `called` with the original, the module and its arguments.

            Only the original while compiling, when the guard is off, or where a subclass calls it by `super()`.
            """
            if (
                is_traced()
                or flags._is_compiling_flag  # noqa: SLF001 - see `private_api`
                or not guarded.on
                or getattr(type(self), name, None) is not own  # a class below it has called it: `super().forward`
                or not isinstance(self, kind)
            ):
                return original(self, *args, **kwargs)
            return called(original, self, args, kwargs)

        # TorchScript looks names of the original's source up among the globals of what stands in for it.
        own = FunctionType(standing.__code__, original.__globals__, closure=standing.__closure__)
        functools.update_wrapper(own, original)
        self._patches.replace(home, name, own)

    @uncounted
    def _note_callers(self, module: nn.Module, phase: Phase) -> None:
        """Note in `unseen` each method on the stack, such as `generate`, of a module that holds this one.

        40 frames at most are looked at; nothing where the same code has called this module in this phase before.

        Args:
            module: whose outermost call has just been recorded.
            phase: of that call.
        """
        names = self._context.names
        if next(names.holders_of(module), None) is None:
            return
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to a frame
        while frame is not None and (is_introspects(frame) or frame.f_globals.get("__name__") == nn.Module.__module__):
            frame = frame.f_back
        if frame is None:
            return
        key = (id(module), id(frame.f_code), phase)
        if key in self._looked:
            return
        self._looked.add(key)
        above = {id(holder): holder for holder in names.holders_of(module)}
        for caller, _ in zip(outward(frame), range(MAX_FRAMES), strict=False):
            is_method = caller.f_code.co_argcount and caller.f_code.co_varnames[0] == "self"
            holder = above.get(id(caller.f_locals.get("self"))) if is_method else None
            if holder is not None:
                self._add_unseen(holder, caller.f_code.co_name, phase)

    def on_after_optimizer(self) -> None:
        """Note in `unseen` modules with a parameter that has a gradient, but neither they nor any holder were called.

        Looks at parameters of optimizers, after 1, 2, 3, 5, 9, ... steps, if that step is recorded.
        """
        names, clock, step = self._context.names, self._context.clock, self._context.recorder.step
        if step & (step - 1) or not self._context.recorder.wanted or not names.any_module:
            return  # after 1, 2, 3, 5, 9... steps
        known: dict[int, bool] = {}
        for optimizer in clock.trained.of_this_thread():
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                name = names.parameters.name_of(parameter)
                module = None if name is None or parameter.grad is None else name.module_of(parameter)
                if module is not None and not known.setdefault(id(module), self._was_called(module)):
                    self._add_unseen(module, "", Phase.FORWARD)

    def _was_called(self, module: nn.Module) -> bool:
        """Whether the module or any that holds it was ever called, or is left out by the options."""
        names = self._context.names
        states = (names.find(one) for one in (module, *names.holders_of(module)))
        return any(state is not None and (state.step >= 0 or not state.watched) for state in states)

    def _add_unseen(self, module: nn.Module, how: str, phase: Phase) -> None:
        """Add a method to a module's entry in `unseen`, and for `forward` or "" have the class's `forward` watched.

        Nothing for a module without a name, and for all once 1000 modules have entries.

        Args:
            module: whose method ran.
            how: the method's name; "" where a gradient alone says that something ran.
            phase: in which.
        """
        state, unseen = self._context.names.find(module), self._context.unseen
        if state is None or len(unseen) >= MAX_UNSEEN:
            return
        methods = unseen.setdefault(state.fqn, {}).setdefault(phase.value, [])
        if how not in methods:
            methods.append(how)
        if how in {"", "forward"}:
            self.see_forward(type(module))


def is_ours(function: FunctionType) -> bool:
    """Whether a function is a replacement by `OwnCalls`."""
    return function.__code__.co_filename == __file__


def tensors_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """`id` of each tensor in a call's arguments, nested ones included."""
    return frozenset(id(leaf) for _, leaf in flatten([args, kwargs]) if isinstance(leaf, torch.Tensor))
