"""What seeded random generators and drew from them before the first step, as it is kept and written.

An event is noted before the model is named, and must keep neither tensor nor module alive: what finds their names later
is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from introspect_cli.tensors.views import address_of, unobserved
from introspect_cli.texts import clean

if TYPE_CHECKING:
    import weakref

    from introspect_cli.capture.naming.names import Names

MAX_EVENTS = 2200
"""Events that are kept, the first ones; of the others their number."""


class TensorKey(NamedTuple):
    """Key by which a tensor's name is found later, without a reference to it."""

    identity: int
    address: int
    shape: tuple[int, ...]


class ModuleKey(NamedTuple):
    """Key by which a module's name is found later, with its class."""

    reference: weakref.ref[nn.Module]
    class_name: str


class Event(NamedTuple):
    """One seeding, or one draw.

    Attributes:
        what: `seed` or `draw`.
        by: the function: `torch.manual_seed`, `normal_(0.0,0.02)`; of a module that drew, its mode: `train` or `eval`;
            "" for something that was not seen itself.
        of: the value it was seeded with; of a draw, the generator's name.
        state: the generator's state before a draw, 64 bits.
        subject: the tensor that was filled, or the module that drew.
        line: in the user's code; of something that was not seen, where it was noticed; of a module, where the outermost
            one was called.
    """

    what: str
    by: str
    of: object
    state: int
    subject: TensorKey | ModuleKey | None
    line: str


class Events:
    """The first 2200 events, in order."""

    def __init__(self) -> None:
        """Start with no event."""
        self._events: list[Event] = []
        self._left_out = 0

    def note(self, event: Event) -> None:
        """Add an event; from the 2201st on only their number is counted."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._left_out += 1

    def lines(self, names: Names) -> dict[str, object]:
        """The first 2200 events as lines of words, and under `left_out` how many more there were.

        Names are looked up now, so call it once the model has names.
        """
        finder = _NameFinder(names)
        return {"events": [_line(event, finder) for event in self._events], "left_out": self._left_out}


def seed_word(seed: object) -> object:
    """The number that a generator was seeded with; `none` for None, else the class of the object."""
    return seed if isinstance(seed, int) else "none" if seed is None else type(seed).__name__


def arguments_word(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A call's arguments that are numbers or texts, others left out: `(0.0,std=0.02)`."""
    every = [(f"{name}=" * bool(name), value) for name, value in (*(("", value) for value in args), *kwargs.items())]
    given = [f"{name}{value}" for name, value in every if isinstance(value, (int, float, str))]
    return f"({','.join(clean(one, 40).replace(' ', '_') for one in given)})"


def _line(event: Event, finder: _NameFinder) -> str:
    """A line of words for an event; `-` for what is unknown.

    `seed torch.manual_seed 1337 train.py:6`, `draw torch d46858fc895baa5f normal_(std=0.02) GPT.w net.py:9`; of a
    module that drew when called in evaluation mode, `draw torch d46858fc895baa5f eval GPT.drop train.py:20`.
    """
    if event.what == "seed":
        return f"seed {event.by} {event.of} {event.line or '-'}"
    name = finder.name_of(event.subject) or "-"
    return f"draw {event.of} {event.state:016x} {event.by or '-'} {name} {event.line or '-'}"


def tensor_key(value: object) -> TensorKey | None:
    """Key of a plain tensor or parameter; None for anything else."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
    with unobserved():
        try:
            address = address_of(value) if value.is_cpu else 0
        except RuntimeError:  # a wrapper that a function transform of torch's left: it has no memory
            address = 0
        return TensorKey(id(value), address, tuple(value.shape))


class _NameFinder:
    """Names of the parameters that modules hold now, by identity and by address, each with the shape."""

    def __init__(self, names: Names) -> None:
        """Look at all parameters that named modules hold now."""
        self._by_id: dict[tuple[int, tuple[int, ...]], str] = {}
        self._by_address: dict[tuple[int, tuple[int, ...]], str] = {}
        self._named = names
        for state in list(names.states.values()):
            module = state.reference()
            parameters = {} if module is None else module._parameters  # noqa: SLF001 - the public view builds strings
            for name, parameter in parameters.items():
                key = tensor_key(parameter)
                if key is not None:
                    fqn = f"{state.fqn}.{name}"
                    self._by_id.setdefault((key.identity, key.shape), fqn)
                    if key.address:
                        self._by_address.setdefault((key.address, key.shape), fqn)

    def name_of(self, subject: TensorKey | ModuleKey | None) -> str:
        """FQN of the tensor or module that a key is of.

        "" for None and for a tensor that no module holds; the class for a module without a name.
        """
        if subject is None:
            return ""
        if isinstance(subject, ModuleKey):
            module = subject.reference()
            state = None if module is None else self._named.find(module)
            return subject.class_name if state is None else state.fqn
        name = self._by_id.get((subject.identity, subject.shape))
        return name or self._by_address.get((subject.address, subject.shape), "")
