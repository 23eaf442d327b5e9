"""States of random generators as steps begin, and what draws from them or sets them before and in between."""

from __future__ import annotations

import os
import random
import sys
import weakref
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from introspect_cli.capture.context import UNTOUCHED, generator_words, script_generators, state_of, state_word
from introspect_cli.capture.environment.sources import is_users, relative
from introspect_cli.capture.events import DRAWS, Patches
from introspect_cli.capture.frames import line_of
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.start import numpy_state, python_state
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.tensors.generators import Generators
from introspect_cli.tensors.views import address_of, unobserved
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.naming import Names


# ---
# States of the random generators, at the start of every step; `draws` sees to those within.
#
# A generator that nobody seeded starts from the operating system's entropy, so its state differs between any two
# processes without anything depending on it. As long as nothing has been drawn from it, it is recorded as untouched.


class RngProbe(GuardedProbe):
    """Records generator states as a step begins; patches nothing."""

    name = "rng"
    lost = "states of random generators are"
    kind = Kind.RNG

    def __init__(self, context: Context) -> None:
        """Look at no generator before a step begins."""
        super().__init__(context, then=self.remove)
        self._made: dict[str, Any] | None = None

    def remove(self) -> None:
        """Stop listening; draws within steps are not looked for either."""
        super().remove()
        self._context.draws.stop()

    def on_begin(self) -> None:
        """Record each generator's state as a step begins: defaults, accelerators' and the script's own.

        Of the script's own, those that exist at the first call. A default one of python or numpy whose state is that in
        `began` is recorded as untouched. Those of numpy and of accelerators that are not in use are skipped.
        """
        began = self._context.capture.began
        draws, devices = self._context.draws, list(_device_generators())
        draws.begin(devices)
        for name, state in (("python", python_state()), ("numpy", numpy_state())):
            if state is None:  # the library is not loaded
                continue
            if state == began.get(name):
                draws.untouched.add(name)
                self._recorder.emit(self._site(name), UNTOUCHED)
            else:
                self._recorder.emit(self._site(name), torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self._recorder.emit(self._site("torch"), torch.default_generator.get_state())
        for device, generator in devices:
            self._recorder.emit(self._site(device), generator.get_state())
        if self._made is None:  # what the script makes later is not looked for: that would take long in each step
            self._made = script_generators()
        for name, generator in self._made.items():
            self._recorder.emit(self._site(name), state_word(generator))

    def _site(self, name: str) -> int:
        """Number of the site of a generator's state at the start of a step."""
        return self._recorder.site(Site(Phase.START, Kind.RNG, name))


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


class Drawn(NamedTuple):
    """One draw before the first step.

    Attributes:
        generator: the generator's name.
        state: its state before the draw, 64 bits.
        by: the function: `normal_(0.0,0.02)`; `-` for something that was not seen itself.
        subject: the tensor that was filled; None where that is not known.
        line: in the user's code; of something that was not seen, where it was noticed.
    """

    generator: str
    state: int
    by: str
    subject: TensorKey | None
    line: str


class DrawProbe(GuardedProbe):
    """Records seedings and draws from generators before the first step, and what sets states of default ones in any."""

    name = "draws"
    lost = "draws before the first step, and what sets random states, are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context, then=self.remove)
        self._early = Patches()
        self._is_early = self._begins_again = False
        self._generators: Generators | None = None
        self._events: list[Drawn | str] = []
        self._left_out = 0
        self._files: dict[str, None] = {}
        self._generators_made: list[str] = []
        self._times: dict[tuple[str, str, str], list[Any]] = {}

    def install(self) -> None:
        """Watch `torch.load`, and, if random states are recorded, what draws from generators or sets them."""
        self._early.put("beginning", self, self._guarded)
        self._is_early = True
        if Kind.RNG in self._context.kinds:
            self._generators = Generators()
            self._generators.watch(())
            self._early.put("early draws", self, self._guarded)
            self._put("seedings")
        super().install()

    def remove(self) -> None:
        """Stop, and put back all that was replaced."""
        super().remove()
        self._early.remove()

    def document(self) -> dict[str, object]:
        """The document `settings/beginning`: events as lines of words, files read, and the script's own generators.

        Of the events the first 2200, and under `left_out` how many more there were; only the files, under `read`, if
        random states are not recorded. Names are looked up now, so call it once the model has names.
        """
        if self._generators is None:  # nobody looked for draws
            return {"read": list(self._files)}
        names = _parameter_names(self._context.names)
        return {
            "events": [event if isinstance(event, str) else _line(event, names) for event in self._events],
            "left_out": self._left_out,
            "read": list(self._files),
            "generators": self._generators_made,
        }

    def on_begin(self) -> None:
        """As the first step begins, watch draws no more, note the last ones and the script's generators."""
        if not self._is_early:
            return
        self._early.remove()
        self._note_draws(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it
        made = script_generators() if self._generators is not None else {}
        self._generators_made = [generator_words(name, generator) for name, generator in made.items()]
        if self._generators is not None or self._files:
            self._context.facts["beginning"] = self.document

    def on_tick(self) -> None:
        """Nothing is early any more as a step ends, unless `on_restart` was told since the last step ended."""
        if not self._begins_again:
            self._is_early = False
            self._early.remove()
        self._begins_again = False

    def on_restart(self, first: int | None) -> None:
        """Watch draws again if all that ran so far was an evaluation.

        Args:
            first: the step that becomes step 0, and then nothing is done; None where no step is kept.
        """
        if first is None and self._generators is not None:
            self._is_early = self._begins_again = True  # the clock says next that the steps so far are over
            self._early.remove()
            self._early.put("early draws", self, self._guarded)
            self._note_draws(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it

    def _note_registration(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Note a draw that nothing else has noted, as a parameter is registered."""
        if DRAWS not in self._guarded.inside:
            self._note_draws(sys._getframe(1))  # noqa: SLF001 - as python documents it

    def _note_read_file(self, call: Call) -> None:
        """Note the name of the file that `torch.load` reads, each once; once there are 100 names, no other."""
        if len(self._files) < MAX_FILES:
            self._files[_file_name(call.first)] = None

    def _note(self, event: Drawn | str) -> None:
        """Add an event; from the 2201st on only their number is counted."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self._left_out += 1

    def _watch_new_generator(self, call: Call) -> Callable[[object], None]:
        """Called before a python or numpy generator is made; returns what notes its seed, if user code made it."""
        frame: FrameType | None = call.frame
        is_pythons = isinstance(call.args[0] if call.args else None, random.Random)
        if is_pythons and call.frame.f_code is random.Random.__init__.__code__:
            frame = call.frame.f_back

        def made(_: object) -> None:
            """Note the seed and the line, if code of the user's has made the generator."""
            if frame is not None and is_users(frame.f_code.co_filename):
                by = "random.Random" if is_pythons else "numpy.random.default_rng"
                seed = next(iter((*call.args[is_pythons:], *call.kwargs.values())), None)
                self._note(f"seed {by} {seed_word(seed)} {relative(frame.f_code.co_filename)}:{frame.f_lineno}")

        return made

    def _watch_fill(self, call: Call) -> Callable[[object], None]:
        """Called before a function that fills a tensor: notes draws so far.

        Returns what notes the function's own draws.
        """
        self._note_draws(call.frame)
        before = state_of(call.kwargs.get("generator"))

        def filled(_: object) -> None:
            """Note each default generator that the call drew from, and `own` if it was given a generator."""
            drawn = self._take_moved() + ([("own", before)] if before else [])
            if drawn:
                tensor = tensor_key(call.first)
                line, by = line_of(call.frame), call.name + arguments_word(call.args, call.kwargs)
                for generator, state in drawn:
                    self._note(Drawn(generator, state, by, tensor, line))

        return filled

    def _note_draws(self, frame: FrameType | None, *, whole: bool = False) -> None:
        """Note draws since the last look, under the line of the frame where they were noticed.

        Args:
            frame: where they were noticed.
            whole: True to compare the generators' states in full.
        """
        for generator, state in self._take_moved(whole=whole):
            self._note(Drawn(generator, state, "-", None, line_of(frame)))

    def _take_moved(self, *, whole: bool = False) -> list[tuple[str, int]]:
        """Name, and state before the draw, of each generator that has moved since the last call; [] without generators.

        Args:
            whole: True to compare all states in full, not only those that seem to have moved.
        """
        generators = self._generators
        if generators is None or not (whole or generators.moved()):
            return []
        return generators.take_moved(whole=whole)

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
                self._take_moved()  # the move that it made is no draw
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
        times = self._times.get(where)
        if times is not None:
            times[1:3] = step, times[2] + 1
        elif len(self._times) < MAX_PLACES:
            times = self._times[where] = [step, step, 1, _seed_or_digest(call)]
        # written again where it is new, and where the number has doubled
        if times is not None and times[2] & (times[2] - 1) == 0:
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


def _line(draw: Drawn, names: _Names) -> str:
    """A line of words for a draw: `draw torch d46858fc895baa5f normal_(std=0.02) GPT.w net.py:9`; `-` for unknown.

    A tensor whose memory is gone is unknown, unless its parameter has been moved since, to another device, dtype or
    memory format.
    """
    key, name = draw.subject, "-"
    if key is not None:
        is_there = key.memory is not None and key.memory() is not None
        named = (is_there and names.get((key.address, key.shape))) or names.get((key.identity, key.shape))
        if named and (is_there or named[1] != key.kind):
            name = named[0]
    return f"draw {draw.generator} {draw.state:016x} {draw.by} {name} {draw.line or '-'}"


def tensor_key(value: object) -> TensorKey | None:
    """Key of a plain tensor or parameter, with address 0 where it is not on the CPU; None for anything else."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
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
            key = tensor_key(parameter)
            if key is not None:
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
    there: FrameType | None = frame
    for _ in range(_BETWEEN):  # its function, or `fork_rng` and what leaves that
        if there is None:
            return False
        if there.f_globals.get("__name__") == _CHECKPOINTING:
            return True
        there = there.f_back
    return False


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
    return f"#{blake2b(data, digest_size=8).hexdigest()}"
