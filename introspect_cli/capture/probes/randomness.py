"""States of random generators as steps begin, and what draws from them or sets them before and in between."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import weakref
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from introspect_cli.capture.environment.sources import is_users, relative
from introspect_cli.capture.events import DRAWS, Patches
from introspect_cli.capture.frames import instances_in, line_of, outward, script_frames
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.start import numpy_state, python_spare, python_state
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase
from introspect_cli.sums import hex_digest
from introspect_cli.tensors.generators import NEVER, Generators
from introspect_cli.tensors.views import address_of, unobserved
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.naming import Names


# ---
# States of the random generators at the start of every step, and who draws from which state within.
#
# A generator that nobody seeded starts from the operating system's entropy, so its state differs between any two
# processes without anything depending on it. As long as nothing has been drawn from it, it is recorded as untouched.
#
# The state at the start of a step says nothing of a module in the middle of it: one more draw before it, or two
# modules that run in another order, give it other numbers. So at the moments at which something is recorded anyway (a
# module is called, a module returns, a batch was drawn, a backward pass begins) the generators are looked at. Where
# one has moved, the state before is recorded: under the module, where its own code drew; under what comes next, where
# what ran between two such moments drew.
#
# Nobody can see what draws from generators that a script makes itself without slowing every draw. But what they hold
# when the first step begins tells whether two runs seeded them alike and drew equally often: so that is kept, by
# variable.

UNTOUCHED = "not drawn from nor seeded since the process began"


def _device_generators() -> Iterator[tuple[str, torch.Generator]]:
    """Name and generator of each accelerator in use, such as `cuda:0`; of `mps`, where it is available, the only one.

    No device is initialised.
    """
    for name in ("cuda", "xpu"):
        backend: Any = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            yield from ((f"{name}:{number}", generator) for number, generator in enumerate(backend.default_generators))
    if torch.backends.mps.is_available():  # there is no public way to its generator
        yield "mps", torch.mps._get_default_mps_generator()  # noqa: SLF001 - see above


MAX_GENERATORS = 100


def script_generators() -> dict[str, Any]:
    """At most 100 CPU generators of torch, python and numpy in the script's variables, each once, by its first name.

    Generators one level inside a variable (an item, an attribute) are found, too. Their keys are class and variable:
    `torch.Generator g`. torch's default generator and subclasses of `random.Random` are left out.
    """
    numpy: Any = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    made: dict[str, Any] = {}
    seen = {id(torch.default_generator)}
    for name, value in instances_in(kinds, script_frames()):
        if id(value) not in seen and len(made) < MAX_GENERATORS and state_word(value):
            seen.add(id(value))
            home = type(value).__module__.partition(".")[0]
            package = "numpy.random" if home == "numpy" else home
            made[f"{package}.{type(value).__name__} {clean(name, 80).replace(' ', '_')}"] = value
    return made


def generator_words(name: str, generator: Any) -> str:
    """Line for the document `settings/beginning`: class, seed (`-` for none), state and variable.

    As in `torch.Generator 11 d46858fc895baa5f g`.

    Args:
        name: class and variable, as in `script_generators`.
        generator: of torch, python or numpy, on the CPU.
    """
    with unobserved():
        seed = generator.initial_seed() if isinstance(generator, torch.Generator) else "-"
    return name.replace(" ", f" {seed} {state_word(generator)} ", 1)


def state_word(value: Any) -> str:
    """Digest of a torch, python or numpy generator's state, 16 hex digits.

    "" for any other object, for generators of torch off the CPU, and for subclasses of `random.Random`.
    """
    if isinstance(value, torch.Generator):
        if value.device.type != "cpu":
            return ""
        with unobserved():
            return hex_digest(bytes(value.get_state().tolist()))  # inside a transform of `torch.func` it has no memory
    if type(value) is random.Random:
        _, words, spare = value.getstate()
        return hex_digest(f"{hash(words)} {spare}".encode())  # of numbers, so it is the same in every process
    if type(value).__module__.startswith("numpy."):
        kept = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state(legacy=False)
        words = kept["state"].pop("key", b"")
        return hex_digest(f"{kept}".encode() + bytes(words))
    return ""


# ---
# What draws from random generators before the first step, initialisation mostly, and what seeds or sets them, in any.
#
# A run whose initialisation was changed differs from the first number on, and the random state when the first step
# begins says no more than that. So until then each seeding is noted with its value and line; each of torch's
# initialisers and methods of tensors that draws, with its arguments, the parameter it fills, its line, and the
# generator's state before it; and, at the moments between (a parameter is registered, a generator is seeded, the
# first step begins), that something else has drawn since the last of them: a module that was called, or a loader.
# Of this nothing is replaced any more when the first step begins.
#
# A state that was set looks like one that was drawn from. So each function of a module that sets one is watched for
# as long as a capture lasts. After the first step it is counted, by function and line. What checkpointing keeps and
# gives back is passed over: it leaves no trace.
#
# An event is noted before the model is named, and must keep no tensor alive: what finds its name later is kept. The
# files that `torch.load` reads until then are noted too: they tell a run that goes on from a checkpoint.

MAX_FILES = 100
"""Files that are kept by name: a sharded checkpoint has many."""
MAX_EVENTS = 2200
"""Events that are kept, the first ones; of the others their number."""
MAX_PLACES = 200
_CHECKPOINTING, _BETWEEN = "torch.utils.checkpoint", 4


class TensorKey(NamedTuple):
    """Key by which a tensor's name is found later, without a reference to it.

    Attributes:
        identity: of the tensor; another has it once this one is gone.
        address: of its memory; 0 off the CPU.
        shape: of the tensor.
        memory: its storage: as long as it is there, the address is the tensor's; None without one.
        kind: dtype, device and strides: another memory of the same kind is another tensor's.
    """

    identity: int
    address: int
    shape: tuple[int, ...]
    memory: weakref.ref[torch.UntypedStorage] | None
    kind: tuple[object, ...]


class RandomProbe(GuardedProbe):
    """Records states of generators as steps begin, what moves them within, and what draws before the first step."""

    name = "rng"
    lost = "states of random generators, and what draws from them or sets them, are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`, and look at no generator before a step begins."""
        super().__init__(context)
        context.draws = self
        self._is_recorded = Kind.RNG in context.kinds
        self._early = Patches()
        self._generators = Generators()
        self._made: dict[str, Any] = {}
        """The script's own generators as the first step began; to look for later ones would take long in each step."""
        self._python: tuple[object, bytes] = ((), b"")
        """State of python's generator, and the spare and digest of words that it had."""
        self._untouched: set[str] = set()
        """Generators that are as the process found them: their states mean nothing."""
        self._thread = 0
        self._shared = self._begins_again = False
        self.moved = NEVER
        """Whether any generator has moved since it was last looked at; asked twice for every call of a module."""
        self._first: dict[str, int] = {}
        """States as the first step began."""
        self._events: list[tuple[str, TensorKey | None, str | None]] = []
        """Seedings and draws before the first step: words, and of a draw what was filled and the line."""
        self._left_out = 0
        self._files: dict[str, None] = {}
        self._generators_made: list[str] = []
        self._times: dict[tuple[str, str, str], list[Any]] = {}

    def install(self) -> None:
        """Watch `torch.load`, and, if random states are recorded, what draws from generators or sets them."""
        self._patches.undo_by(self._early.remove, functools.partial(setattr, self, "moved", NEVER))
        self._early.put("beginning", self, self._guarded)
        if self._is_recorded:
            self._generators.watch(())
            self._early.put("early draws", self, self._guarded)
            self._put("seedings")
        super().install()

    @property
    def complete(self) -> bool:
        """Whether so far every draw from a default generator was noticed, each in the thread that began the step.

        False where a generator in use is not watched.
        """
        return self._generators.is_complete and not self._shared

    def on_begin(self) -> None:
        """As the first step begins, watch early draws no more; as any does, record states if they are recorded."""
        if self._early.are_put:
            self._early.remove()
            self._note_draws(sys._getframe(1))  # noqa: SLF001 - as python documents it
            self._first = self._generators.states
            self._made = script_generators() if self._is_recorded else {}
            self._generators_made = [generator_words(name, generator) for name, generator in self._made.items()]
            if self._is_recorded or self._files:
                self._context.facts["beginning"] = self.document
        if self._is_recorded:
            self._record_states()

    def _record_states(self) -> None:
        """Record each generator's state as a step begins: defaults, accelerators' and the script's own.

        From now on `note` records what moves, and this thread is the one in which draws can be assigned to calls
        (`complete`). Of the script's own generators, those that exist at the first call. A default one of python or
        numpy whose state is that in `began` is recorded as untouched. Those of numpy and of accelerators that are not
        in use are skipped.
        """
        began, devices = self._context.capture.began, list(_device_generators())
        self._generators.watch(devices)
        self._untouched.clear()
        self._thread = threading.get_ident()
        self.moved = self._generators.moved
        shown: list[tuple[str, object]] = []
        words = python_spare(), self._generators.states.get("python")
        if words[1] is None or words != self._python[0]:  # else 625 numbers are made and packed in each step
            self._python = words, python_state()
        for name, state in (("python", self._python[1]), ("numpy", numpy_state())):
            if state is not None:  # the library is loaded
                self._untouched |= {name} if state == began.get(name) else set()
                shown.append((name, self._shown(name, state)))
        shown += [(name, each.get_state()) for name, each in (("torch", torch.default_generator), *devices)]
        shown += [(name, state_word(generator)) for name, generator in self._made.items()]
        for name, value in shown:
            self._emit(Phase.START, Kind.RNG, name, [("", value)])

    def note(self, phase: Phase, fqn: str, call: int, *, before: bool = False) -> None:
        """For each default generator that has moved since the last look, record the state it had then.

        The site's path is the generator's name, with `DRAWN_BEFORE` after it if `before`. Of an untouched generator
        the text `UNTOUCHED` is recorded instead, and it is untouched no more. In another thread than the one that began
        the step, `complete` becomes False, even where no generator has moved.

        Args:
            phase: of the call below.
            fqn: name of the module, loader or loss whose call it is.
            call: number of that call in the step.
            before: True if the call begins now, so that what ran before it drew; False if it has ended and drew itself.
        """
        if threading.get_ident() != self._thread:
            self._shared = True  # two threads draw in turns: nobody can say which of them it was
        for name, state in self._generators.take_moved():
            with unobserved():
                value = self._shown(name, state.to_bytes(8, "little"))
                self._untouched.discard(name)
                self._emit(phase, Kind.RNG, fqn, [(name + DRAWN_BEFORE * before, value)], call)

    def _shown(self, name: str, state: bytes) -> object:
        """A generator's state as it is recorded: as a tensor, or that nothing has touched it."""
        return UNTOUCHED if name in self._untouched else torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def document(self) -> dict[str, object]:
        """The document `settings/beginning`: events as lines of words, files read, and the script's own generators.

        Of the events the first 2200, and under `left_out` how many more there were; only the files, under `read`, if
        random states are not recorded. Names are looked up now, so call it once the model has names.
        """
        read = {"read": list(self._files)}
        if not self._is_recorded:  # nobody looked for draws
            return {**read}
        names = _parameter_names(self._context.names)
        lines = [(words, f" {_name_of(key, names)} {line}" if line else "") for words, key, line in self._events]
        events = [words + rest for words, rest in lines]
        return {"events": events, "left_out": self._left_out, **read, "generators": self._generators_made}

    def on_tick(self) -> None:
        """Nothing is early any more as a step ends, unless `on_restart` was told since the last step ended."""
        if not self._begins_again:
            self._early.remove()
        self._begins_again = False

    def on_restart(self, first: int | None) -> None:
        """Watch draws again if all that ran so far was an evaluation.

        Args:
            first: the step that becomes step 0, and then nothing is done; None where no step is kept.
        """
        if first is None and self._is_recorded:
            self._begins_again = True  # the clock says next that the steps so far are over
            self._early.remove()
            self._early.put("early draws", self, self._guarded)
            self._generators.take_moved()
            now, line = self._generators.states, line_of(sys._getframe(1))  # noqa: SLF001 - as python documents it
            for name, state in self._first.items():
                if now[name] != state:  # the evaluation has drawn
                    self._note_draw(name, state, line)
            self.moved = NEVER

    def _note_registration(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Note a draw that nothing else has noted, as a parameter is registered."""
        if DRAWS not in self._guarded.inside:
            self._note_draws(sys._getframe(1))  # noqa: SLF001 - as python documents it

    def _note_read_file(self, call: Call) -> None:
        """Note the name of the file that `torch.load` reads, each once; once there are 100 names, no other."""
        if len(self._files) < MAX_FILES:
            self._files[_file_name(call.first)] = None

    def _note(self, words: str, line: str | None = None, filled: TensorKey | None = None) -> None:
        """Add an event; from the 2201st on only their number is counted.

        Args:
            words: of a seeding all; of a draw what comes before what was filled.
            line: of a draw, in the user's code.
            filled: by a draw.
        """
        has_room = len(self._events) < MAX_EVENTS
        self._events += [(words, filled, line)] * has_room
        self._left_out += not has_room

    def _note_draw(self, generator: str, state: int, line: str, by: str = "-", filled: TensorKey | None = None) -> None:
        """Note a draw.

        Args:
            generator: its name.
            state: before the draw, 64 bits.
            line: in the user's code; of something that was not seen itself, where it was noticed.
            by: the function: `normal_(0.0,0.02)`; `-` for something that was not seen itself.
            filled: the tensor that was filled; None where that is not known.
        """
        self._note(f"draw {generator} {state:016x} {by}", line or "-", filled)

    def _note_new_generator(self, call: Call, _result: object) -> None:
        """Note the seed and the line of a python or numpy generator that code of the user's has made."""
        frame: FrameType | None = call.frame
        is_pythons = isinstance(call.first, random.Random)
        if is_pythons and call.frame.f_code is random.Random.__init__.__code__:
            frame = call.frame.f_back
        if frame is not None and is_users(frame.f_code.co_filename):
            by = "random.Random" if is_pythons else "numpy.random.default_rng"
            seed = next(iter((*call.args[is_pythons:], *call.kwargs.values())), None)
            self._note(f"seed {by} {seed_word(seed)} {relative(frame.f_code.co_filename)}:{frame.f_lineno}")

    def _watch_fill(self, call: Call) -> Callable[[object], None]:
        """Called before a function that fills a tensor: notes draws so far.

        Returns what notes the function's own draws.
        """
        self._note_draws(call.frame)
        own = state_word(call.kwargs.get("generator"))

        def filled(_: object) -> None:
            """Note each default generator that the call drew from, and `own` if it was given a generator."""
            drawn = self._generators.take_moved() + ([("own", int(own, 16))] if own else [])
            if drawn:
                line, by = line_of(call.frame), call.name + arguments_word(call.args, call.kwargs)
                for generator, state in drawn:
                    self._note_draw(generator, state, line, by, tensor_key(call.first))

        return filled

    def _note_draws(self, frame: FrameType | None) -> None:
        """Note draws since the last look, under the line of the frame where they were noticed."""
        for generator, state in self._generators.take_moved():
            self._note_draw(generator, state, line_of(frame))

    def _watch_setting(self, call: Call) -> Callable[[object], None]:
        """Called before a generator is seeded or set: notes draws so far; returns what notes the call afterwards.

        Before the first step the call is an event; later it is counted by place, unless `torch.utils.checkpoint` makes
        it.
        """
        was_early = self._early.are_put
        if was_early:
            self._note_draws(call.frame)

        def was_set(_: object) -> None:
            """Note the call as an early event, or count it; nothing for one of checkpointing in a step."""
            line = line_of(call.frame) or "-"
            if was_early:
                self._generators.take_moved()  # the move that it made is no draw
                self._note(f"seed {call.function} {_seed_or_digest(call)} {line}")
            elif not _is_checkpointing(call.frame):
                self._count(call, line)

        return was_set

    def _count(self, call: Call, line: str) -> None:
        """Count a call at its place, and have the document written where the count is a power of 2.

        Once there are 200 places, calls at others are not counted.

        Args:
            call: of the function that sets a state.
            line: of the script; `-` for none.
        """
        step = self._recorder.step
        where = "in" if self._context.clock.begun else "before", call.function, line
        if where not in self._times and len(self._times) >= MAX_PLACES:
            return
        times = self._times[where] = self._times.get(where) or [step, step, 0, _seed_or_digest(call)]
        times[1:3] = step, times[2] + 1
        # written again where it is new, and where the number has doubled
        if times[2] & (times[2] - 1) == 0:
            self._context.facts["seedings"] = self.seedings

    def seedings(self) -> dict[str, object]:
        """The document `settings/seedings`, a line for each place: `in 3 9 4 torch.manual_seed 17 train.py:12`.

        That is: within or before a step, the first and last such step, number of calls, the function, the seed or a
        digest of the state at the first call, and the line. Places are in the order of their first calls.
        """
        times = self._times.items()
        return {"set": [f"{when} {a} {b} {n} {by} {of} {line}" for (when, by, line), (a, b, n, of) in times]}


def seed_word(seed: object) -> object:
    """The number that a generator was seeded with; `none` for None, and of any other object the name of its class."""
    return seed if isinstance(seed, int) else "none" if seed is None else type(seed).__name__


def arguments_word(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A call's arguments that are numbers or texts, others left out: `(0.0,std=0.02)`.

    Each is cut to 40 characters, with `_` for spaces.
    """
    every = [(f"{name}=" * bool(name), value) for name, value in (*(("", value) for value in args), *kwargs.items())]
    given = [f"{name}{value}" for name, value in every if isinstance(value, (int, float, str))]
    return f"({','.join(clean(one, 40).replace(' ', '_') for one in given)})"


_Names = dict[tuple[int, tuple[int, ...]], tuple[str, tuple[object, ...]]]
"""Name and kind of parameters, by identity and shape, and by address and shape."""


def _name_of(key: TensorKey | None, names: _Names) -> str:
    """Name of what was filled; `-` where that is not known.

    A tensor whose memory is gone is unknown, unless its parameter has been moved since, to another device, dtype or
    memory format.
    """
    if key is None:
        return "-"
    is_there = key.memory is not None and key.memory() is not None
    named = (is_there and names.get((key.address, key.shape))) or names.get((key.identity, key.shape))
    return named[0] if named and (is_there or named[1] != key.kind) else "-"


def tensor_key(value: object) -> TensorKey | None:
    """Key of a plain tensor or parameter, with address 0 where it is not on the CPU; None for anything else."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
        return None
    with unobserved():
        try:
            address, memory = address_of(value) if value.is_cpu else 0, weakref.ref(value.untyped_storage())
        except (RuntimeError, NotImplementedError):  # as of a wrapper that a function transform of torch's left
            address, memory = 0, None
        strides = value.stride() if value.layout is torch.strided else ()
        return TensorKey(id(value), address, tuple(value.shape), memory, (value.dtype, value.device, strides))


def _parameter_names(names: Names) -> _Names:
    """Names of the parameters that named modules hold now; of several for one key, the first."""
    found: _Names = {}
    for reference, state in list(names.states.entries.values()):
        module = reference()
        parameters = {} if module is None else module._parameters  # noqa: SLF001 - the public view builds strings
        for name, parameter in parameters.items():
            if (key := tensor_key(parameter)) is not None:
                for place in {key.identity, key.address} - {0}:
                    found.setdefault((place, key.shape), (f"{state.fqn}.{name}", key.kind))
    return found


def _file_name(source: object) -> str:
    """A checkpoint's file with the directory it is in: `checkpoint-4/optimizer.pt`.

    Of an open file its `name`; the class of a source without one.
    """
    if isinstance(source, (str, os.PathLike)):
        return clean("/".join(Path(os.fsdecode(source)).parts[-2:]), 200)
    named = getattr(source, "name", None)
    return _file_name(named) if isinstance(named, str) else type(source).__name__


def _is_checkpointing(frame: FrameType) -> bool:
    """Whether a frame or any of its 3 nearest callers runs `torch.utils.checkpoint`."""
    # its function, or `fork_rng` and what leaves that
    return any(each.f_globals.get("__name__") == _CHECKPOINTING for each in islice(outward(frame), _BETWEEN))


def _seed_or_digest(call: Call) -> object:
    """`seed_word` of what a function that seeds was given; of one that sets a state, `#` and 16 hex digits of that."""
    value = call.first
    if call.name.endswith(("seed", "seed_all")):
        return seed_word(value)
    if isinstance(value, torch.Tensor):
        with unobserved():
            data = value.cpu().numpy().tobytes()
    else:
        data = repr(value).encode()
    return f"#{hex_digest(data)}"
