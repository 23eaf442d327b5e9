"""What seeds random generators and what draws from them before the first step: initialisation, mostly.

A run whose initialisation was changed differs from the first number on, and the random state when the first step begins
says no more than that. So until then each seeding is noted with its value and line; each of torch's initialisers and
methods of tensors that draws, with its arguments, the parameter it fills, its line, and the generator's state before
it; each module that draws when it is called, as in an evaluation, with its mode and the line of the outermost call;
and, at the moments between (a parameter is registered, a generator is seeded, a module is called, the first step
begins), that something else has drawn since the last of them. Nothing is replaced any more when the first step begins.

The files that `torch.load` reads until then are noted too: they tell a run that goes on from a checkpoint.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from introspect_cli.capture import private_api
from introspect_cli.capture.draws import script_generators, state_of
from introspect_cli.capture.environment.sources import is_users
from introspect_cli.capture.guard import Patches, uncounted
from introspect_cli.capture.ops.calls import Places
from introspect_cli.capture.probes.base import drop
from introspect_cli.capture.probes.beginning_events import (
    Event,
    Events,
    ModuleMark,
    arguments_word,
    seed_word,
    tensor_mark,
)
from introspect_cli.records import Kind
from introspect_cli.tensors.generators import Generators
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.probes.modules import Called, ModuleProbe

_MOST_READ = 100
"""Files that are kept by name: a sharded checkpoint has many."""

_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
)  # fmt: skip
_BY_HAND = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
"""Methods of tensors that draw."""


class BeginningProbe:
    """Notes what happens to random generators before the first step.

    Attributes:
        changed: whether `found` is complete and has not been written yet.
    """

    name = "beginning"

    def __init__(self, context: Context, modules: ModuleProbe) -> None:
        """Watch nothing yet; `modules` makes the calls of modules."""
        self._context = context
        self._modules = modules
        self._calls = _EarlyCalls()
        self._guarded = context.guard.around(self.name, "draws before the first step are", self.remove)
        self._patches, self._methods = Patches(), Patches()
        self._places = Places()
        self._handle: RemovableHandle | None = None
        self._generators: Generators | None = None
        self._looks = self._goes_on = False
        self._events = Events()
        self._read: dict[str, None] = {}
        self._held: list[str] = []
        self._inside = False
        self.changed = False

    def install(self) -> None:
        """Note what is read; look at the generators, where states of generators are recorded."""
        self._patches.replace(torch, "load", self._reading(torch.load))
        clock = self._context.clock
        if Kind.RNG in self._context.kinds:
            self._generators = Generators()
            self._generators.look(())
            self._look_at_draws()
            clock.on_restart.append(self._restarted)
        clock.on_begin.append(self._begins)
        clock.on_tick.append(self._over)
        self._guarded.on = True

    def _look_at_draws(self) -> None:
        numpy_random = sys.modules.get("numpy.random")
        for owner, name, label in (
            (torch, "manual_seed", "torch.manual_seed"),
            (torch.random, "manual_seed", "torch.manual_seed"),
            (random, "seed", "random.seed"),
            (numpy_random, "seed", "numpy.random.seed"),
        ):
            if owner is not None:
                self._patches.replace(owner, name, self._seeding(getattr(owner, name), label))
        for name in _INITIALISERS:
            original = getattr(nn.init, name, None)
            if original is not None:
                self._patches.replace(nn.init, name, self._filling(original, name))
        if numpy_random is not None:
            self._patches.replace(numpy_random, "default_rng", self._making(numpy_random.default_rng, 0))
        self._patches.replace(random.Random, "seed", self._making(random.Random.seed, 1))
        for name in _BY_HAND:
            self._methods.replace(torch.Tensor, name, self._filling(getattr(torch.Tensor, name), name))
        self._handle = nn.modules.module.register_module_parameter_registration_hook(self._registered)
        self._looks = True
        self._modules.around = self._around
        self._modules.surround()

    def remove(self) -> None:
        """Put back what was replaced."""
        self._guarded.on = False
        self._put_back()
        clock = self._context.clock
        drop(clock.on_begin, self._begins)
        drop(clock.on_tick, self._over)
        drop(clock.on_restart, self._restarted)

    def _put_back(self) -> None:
        self._methods.remove()
        self._patches.remove()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._looks:
            self._looks, self._modules.around = False, None
            self._modules.surround()

    @property
    def found(self) -> dict[str, object]:
        """The events in their order, a line of words each; names are known once the model has been called."""
        if self._generators is None:  # nobody looked for draws
            return {"read": list(self._read)}
        return {**self._events.lines(self._context.names), "read": list(self._read), "generators": self._held}

    def _begins(self) -> None:
        """A step begins: before the generators are looked at for what is drawn within it."""
        if self._guarded.on:
            with self._guarded:
                self._put_back()
                self._look(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it
                self._held = script_generators() if self._generators is not None else []
                self.changed = self._generators is not None or bool(self._read)

    def _over(self) -> None:
        """The first step is over; nothing is taken off a list that is being gone through."""
        if not self._goes_on:
            self._guarded.on = False
            self._put_back()
        self._goes_on = False

    def _restarted(self, first: int | None) -> None:
        """What ran so far was an evaluation before anything was trained: no step has begun, unless one is `first`."""
        if first is None and self._generators is not None:
            self._guarded.on = self._goes_on = True  # the clock says next that the steps so far are over
            with self._guarded:
                self._put_back()
                self._look_at_draws()
                self._look(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it

    def _around(self, original: Called) -> Called:
        """Calls of modules, each with a look at the generators before and after it."""
        calls = self._calls

        @uncounted
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._guarded.on or not self._looks or private_api.tracing_state() is not None:
                return original(module, args, kwargs)
            depth = len(calls.modules)
            with self._guarded:
                self._methods.remove()  # a compiler that begins now finds torch's
                frame = sys._getframe(1)  # noqa: SLF001 - as python documents it
                calls.line = calls.line if depth else self._places.line(frame)
                self._look(frame)
            try:
                calls.modules.append(module)
                result = original(module, args, kwargs)
                if self._looks:
                    with self._guarded:
                        self._look(None)
                return result
            finally:
                del calls.modules[depth:]

        return called

    def _registered(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        generators = self._generators
        if self._guarded.on and generators is not None and not self._inside and generators.moved():
            with self._guarded:
                self._look(sys._getframe(1))  # noqa: SLF001 - as python documents it

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            if self._guarded.on and len(self._read) < _MOST_READ:
                with self._guarded:
                    self._read[_file_name(next(iter((*args, *kwargs.values())), None))] = None
            return original(*args, **kwargs)

        return load

    def _seeding(self, original: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:
            if not self._guarded.on or self._inside:
                return original(*args, **kwargs)
            frame = sys._getframe(1)  # noqa: SLF001 - as python documents it
            with self._guarded:
                self._look(frame)
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False
                with self._guarded:
                    self._take()
                    value = next(iter((*args, *kwargs.values())), None)
                    self._events.note(Event("seed", label, seed_word(value), 0, None, self._places.line(frame)))

        return seed

    def _making(self, original: Callable[..., Any], place: int) -> Callable[..., Any]:
        """What seeds a generator of the script's, with the place of the seed among its arguments."""

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self._guarded.on and not self._inside:
                frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as python documents it
                with self._guarded:
                    if place and frame is not None and frame.f_code is random.Random.__init__.__code__:
                        frame = frame.f_back
                    if frame is not None and is_users(frame.f_code.co_filename):
                        label = "random.Random" if place else "numpy.random.default_rng"
                        seed = next(iter((*args[place:], *kwargs.values())), None)
                        self._events.note(Event("seed", label, seed_word(seed), 0, None, self._places.line(frame)))
            return made

        return make

    def _filling(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def fill(*args: Any, **kwargs: Any) -> Any:
            if not self._guarded.on or self._inside:
                return original(*args, **kwargs)
            frame = sys._getframe(1)  # noqa: SLF001 - as python documents it
            before = 0
            with self._guarded:
                self._look(frame)
                before = state_of(kwargs.get("generator"))
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False
                with self._guarded:
                    drawn = self._take() + ([("own", before)] if before else [])
                    if drawn:
                        tensor = tensor_mark(next(iter((*args, *kwargs.values())), None))
                        line, by = self._places.line(frame), name + arguments_word(args, kwargs)
                        for generator, state in drawn:
                            self._events.note(Event("draw", by, generator, state, tensor, line))

        return fill

    def _look(self, frame: FrameType | None, *, whole: bool = False) -> None:
        """Note what has been drawn since the last look: by the module that runs, or by something that was not seen."""
        drawn = self._take(whole=whole)
        if drawn:
            by, subject, line = "", None, ""
            if self._calls.modules:
                module = self._calls.modules[-1]
                subject, line = ModuleMark(weakref.ref(module), type(module).__name__), self._calls.line
                by = "train" if getattr(module, "training", False) else "eval"
            else:
                line = self._places.line(frame)
            for generator, state in drawn:
                self._events.note(Event("draw", by, generator, state, subject, line))

    def _take(self, *, whole: bool = False) -> list[tuple[str, int]]:
        generators = self._generators
        if generators is None or not (whole or generators.moved()):
            return []
        return generators.take(whole=whole)


class _EarlyCalls(threading.local):
    """The calls of modules under way in one thread, and where the outermost was made."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.line = ""


def _file_name(source: object) -> str:
    """What a checkpoint is called, with the directory it is in: `checkpoint-4/optimizer.pt`; else what holds it."""
    if isinstance(source, (str, os.PathLike)):
        return clean("/".join(Path(os.fsdecode(source)).parts[-2:]), 200)
    named = getattr(source, "name", None)
    return _file_name(named) if isinstance(named, str) else type(source).__name__
