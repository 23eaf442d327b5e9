"""What seeds random generators and what draws from them before the first step: initialisation, mostly.

A run whose initialisation was changed differs from the first number on, and the random state when the first step begins
says no more than that. So until then each seeding is noted with its value and line; each of torch's initialisers that
draws, with the parameter it fills, its line, and the generator's state before it; and, at the moments between (a
parameter is registered, a generator is seeded, the first step begins), that something else has drawn since the last of
them. Nothing is replaced any more when the first step begins.

The files that `torch.load` reads until then are noted too: they tell a run that goes on from a checkpoint.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from introspect_cli.capture.ops.calls import Places
from introspect_cli.capture.probes.base import Patches, drop
from introspect_cli.records import Kind, clean
from introspect_cli.tensors.generators import Generators
from introspect_cli.tensors.views import address_of, unobserved

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from introspect_cli.capture.context import Context

FIRST, LAST = 2000, 200
"""How many events are kept from the beginning, and how many from the end, of a model of many thousand layers."""

_MOST_READ = 100
"""Files that are kept by name: a sharded checkpoint has many."""

_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
)  # fmt: skip


class _Tensor(NamedTuple):
    """What finds a tensor's name later, without keeping it."""

    key: int
    address: int
    shape: tuple[int, ...]


class Event(NamedTuple):
    """One seeding, or one draw.

    Attributes:
        what: `seed` or `draw`.
        by: the function: `torch.manual_seed`, `normal_`; "" for something that was not seen itself.
        of: the value it was seeded with; of a draw, the generator's name.
        state: the generator's state before a draw, 64 bits.
        tensor: what was filled.
        line: in the user's code; of something that was not seen, where it was noticed.
    """

    what: str
    by: str
    of: object
    state: int
    tensor: _Tensor | None
    line: str


class BeginningProbe:
    """Notes what happens to random generators before the first step.

    Attributes:
        changed: whether `found` is complete and has not been written yet.
    """

    name = "beginning"

    def __init__(self, context: Context) -> None:
        """Watch nothing yet."""
        self._context = context
        self._guarded = context.guard.around(self.name, "draws before the first step are", self.remove)
        self._patches = Patches()
        self._places = Places()
        self._handle: RemovableHandle | None = None
        self._generators: Generators | None = None
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=LAST)
        self._left_out = 0
        self._read: dict[str, None] = {}
        self._inside = False
        self.changed = False

    def install(self) -> None:
        """Note what is read; look at the generators, where states of generators are recorded."""
        self._patches.replace(torch, "load", self._reading(torch.load))
        if Kind.RNG in self._context.kinds:
            self._look_at_generators()
        self._context.clock.on_begin.append(self._begins)
        self._context.clock.on_tick.append(self._over)
        self._guarded.on = True

    def _look_at_generators(self) -> None:
        self._generators = Generators()
        self._generators.look(())
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
        self._handle = nn.modules.module.register_module_parameter_registration_hook(self._registered)

    def remove(self) -> None:
        """Put back what was replaced."""
        self._guarded.on = False
        self._put_back()
        drop(self._context.clock.on_begin, self._begins)
        drop(self._context.clock.on_tick, self._over)

    def _put_back(self) -> None:
        self._patches.remove()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def found(self) -> dict[str, object]:
        """The events in their order, a line of words each; names are known once the model has been called."""
        if self._generators is None:  # nobody looked for draws
            return {"read": list(self._read)}
        names = _Names(self._context)
        first, last = ([_line(event, names) for event in kept] for kept in (self._first, self._last))
        return {"events": first, "last": last, "left_out": self._left_out, "read": list(self._read)}

    def _begins(self) -> None:
        """A step begins: before the generators are looked at for what is drawn within it."""
        if self._guarded.on:
            with self._guarded:
                self._put_back()
                self._look(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it
                self.changed = self._generators is not None or bool(self._read)

    def _over(self) -> None:
        """The first step is over; nothing is taken off a list that is being gone through."""
        self._guarded.on = False
        self._put_back()
        self._generators = None

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
                    told = value if isinstance(value, int) else "none" if value is None else type(value).__name__
                    self._note(Event("seed", label, told, 0, None, self._places.line(frame)))

        return seed

    def _filling(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def fill(*args: Any, **kwargs: Any) -> Any:
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
                    drawn = self._take()
                    if drawn:
                        tensor = _tensor(next(iter((*args, *kwargs.values())), None))
                        line = self._places.line(frame)
                        for generator, state in drawn:
                            self._note(Event("draw", name, generator, state, tensor, line))

        return fill

    def _look(self, frame: FrameType | None, *, whole: bool = False) -> None:
        """Note what has been drawn since the last look by something that was not seen itself."""
        drawn = self._take(whole=whole)
        if drawn:
            line = self._places.line(frame)
            for generator, state in drawn:
                self._note(Event("draw", "", generator, state, None, line))

    def _take(self, *, whole: bool = False) -> list[tuple[str, int]]:
        generators = self._generators
        if generators is None or not (whole or generators.moved()):
            return []
        return generators.take(whole=whole)

    def _note(self, event: Event) -> None:
        if len(self._first) < FIRST:
            self._first.append(event)
            return
        self._left_out += len(self._last) == LAST
        self._last.append(event)


def _line(event: Event, names: _Names) -> str:
    """`seed torch.manual_seed 1337 train.py:6`, `draw torch d46858fc895baa5f normal_ GPT.wte.weight model.py:15`."""
    if event.what == "seed":
        return f"seed {event.by} {event.of} {event.line or '-'}"
    name = names.of(event.tensor) or "-"
    return f"draw {event.of} {event.state:016x} {event.by or '-'} {name} {event.line or '-'}"


def _file_name(source: object) -> str:
    """What a checkpoint is called, with the directory it is in: `checkpoint-4/optimizer.pt`; else what holds it."""
    if isinstance(source, (str, os.PathLike)):
        return clean("/".join(Path(os.fsdecode(source)).parts[-2:]), 200)
    named = getattr(source, "name", None)
    return _file_name(named) if isinstance(named, str) else type(source).__name__


def _tensor(value: object) -> _Tensor | None:
    if type(value) not in (torch.Tensor, nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
    with unobserved():
        try:
            address = address_of(value) if value.is_cpu else 0
        except RuntimeError:  # a wrapper that a function transform of torch's left: it has no memory
            address = 0
        return _Tensor(id(value), address, tuple(value.shape))


class _Names:
    """Names of the parameters that modules hold now, by identity and by address."""

    def __init__(self, context: Context) -> None:
        self._by_id: dict[tuple[int, tuple[int, ...]], str] = {}
        self._by_address: dict[tuple[int, tuple[int, ...]], str] = {}
        for state in list(context.names.states.values()):
            module = state.reference()
            parameters = {} if module is None else module._parameters  # noqa: SLF001 - the public view builds strings
            for name, parameter in parameters.items():
                found = _tensor(parameter)
                if found is not None:
                    fqn = f"{state.fqn}.{name}"
                    self._by_id.setdefault((found.key, found.shape), fqn)
                    if found.address:
                        self._by_address.setdefault((found.address, found.shape), fqn)

    def of(self, tensor: _Tensor | None) -> str:
        """The name of a tensor; "" where no module holds it."""
        if tensor is None:
            return ""
        known = self._by_id.get((tensor.key, tensor.shape))
        return known or self._by_address.get((tensor.address, tensor.shape), "")
