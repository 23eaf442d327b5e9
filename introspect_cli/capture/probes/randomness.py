"""States of random generators as steps begin, and what draws from them or sets them before and in between."""

from __future__ import annotations

import functools
import os
import random
import sys
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from introspect_cli.capture.context import UNTOUCHED, generator_words, script_generators, state_of, state_word
from introspect_cli.capture.environment.sources import is_users, relative
from introspect_cli.capture.events import DRAWS
from introspect_cli.capture.frames import Places
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.start import PYTHON, numpy_state, python_state
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.tensors.generators import Generators
from introspect_cli.tensors.views import address_of, unobserved
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable
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

    def __init__(self, context: Context, began: dict[str, bytes | None]) -> None:
        """Look at no generator before a step begins.

        Args:
            context: shared by all probes.
            began: bytes of the states of python's and numpy's generators when the process began, by library.
        """
        super().__init__(context, then=self.remove)
        self._began = began
        self._python: tuple[tuple[int | None, object], bytes] = (None, None), b""
        """What tells python's state when it was last asked for, and the state."""
        self._made: dict[str, Any] | None = None
        self._site = functools.cache(self._new_site)
        self._backends = _backends()

    def remove(self) -> None:
        """Stop listening; draws within steps are not looked for either."""
        super().remove()
        self._context.draws.stop()

    def on_begin(self) -> None:
        """Record each generator's state as a step begins: defaults, accelerators' and the script's own.

        Of the script's own, those that exist at the first call. A default one of python or numpy whose state is that in
        `began` is recorded as untouched. Those of numpy and of accelerators that are not in use are skipped.
        """
        draws, devices = self._context.draws, [pair for pairs in self._backends for pair in pairs()]
        draws.begin(devices)
        for name, state in (("python", self._python_state()), ("numpy", numpy_state())):
            if state is None:  # the library is not loaded
                continue
            if state == self._began.get(name):
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

    def _python_state(self) -> bytes:
        """State of python's generator, which takes long to ask for; the last answer where nothing has changed."""
        draws = self._context.draws
        mark = draws.state("python"), getattr(PYTHON, "gauss_next", None)
        if mark[0] is None or mark != self._python[0]:
            state = python_state()
            # else another thread draws, and nobody knows before or after
            self._python = (mark if not draws.moved() else (None, None)), state
        return self._python[1]

    def _new_site(self, name: str) -> int:
        """Number of the site of a generator's state at the start of a step; `_site` caches it."""
        return self._recorder.site(Site(Phase.START, Kind.RNG, name))


def _backends() -> list[Callable[[], list[tuple[str, torch.Generator]]]]:
    """For each kind of accelerator that torch is built for, a function that lists its generators.

    Neither the list nor the functions initialise a device.
    """
    there = {"cuda": torch.backends.cuda.is_built(), "xpu": hasattr(torch, "xpu"), "mps": torch.backends.mps.is_built()}
    return [functools.partial(_generators_of, name) for name, is_built in there.items() if is_built]


def _generators_of(name: str) -> list[tuple[str, torch.Generator]]:
    """Name and generator of each device of a backend, such as `cuda:0`; [] until the backend is initialised.

    Of `mps` the one generator, named `mps`, wherever it is available.
    """
    if name == "mps":  # there is no public way to its generator
        return [("mps", torch.mps._get_default_mps_generator())] if torch.backends.mps.is_available() else []  # noqa: SLF001 - see above
    backend: Any = getattr(torch, name)
    generators = backend.default_generators if backend.is_initialized() else ()
    return [(f"{name}:{number}", generator) for number, generator in enumerate(generators)]


# ---
# What seeds random generators and what draws from them before the first step: initialisation, mostly.
#
# A run whose initialisation was changed differs from the first number on, and the random state when the first step
# begins says no more than that. So until then each seeding is noted with its value and line; each of torch's
# initialisers and methods of tensors that draws, with its arguments, the parameter it fills, its line, and the
# generator's state before it; and, at the moments between (a parameter is registered, a generator is seeded, the
# first step begins), that something else has drawn since the last of them: a module that was called, or a loader.
# Nothing is replaced any more when the first step begins.
#
# An event is noted before the model is named, and must keep no tensor alive: what finds its name later is kept. The
# files that `torch.load` reads until then are noted too: they tell a run that goes on from a checkpoint.

MAX_FILES = 100
"""Files that are kept by name: a sharded checkpoint has many."""
MAX_EVENTS = 2200
"""Events that are kept, the first ones; of the others their number."""


class TensorKey(NamedTuple):
    """Key by which a tensor's name is found later, without a reference to it."""

    identity: int
    address: int
    shape: tuple[int, ...]


class RandomEvent(NamedTuple):
    """One seeding, or one draw.

    Attributes:
        what: `seed` or `draw`.
        by: the function: `torch.manual_seed`, `normal_(0.0,0.02)`; "" for something that was not seen itself.
        of: the value it was seeded with; of a draw, the generator's name.
        state: the generator's state before a draw, 64 bits.
        subject: the tensor that was filled; None where that is not known.
        line: in the user's code; of something that was not seen, where it was noticed.
    """

    what: str
    by: str
    of: object
    state: int
    subject: TensorKey | None
    line: str


class BeginningProbe(GuardedProbe):
    """Records seedings, and draws from generators, before the first step."""

    name = "beginning"
    lost = "draws before the first step are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context, then=self.remove)
        self._places = Places()
        self._generators: Generators | None = None
        self._is_watching = self._watches_on = False
        self._events: list[RandomEvent] = []
        self._left_out = 0
        self._files: dict[str, None] = {}
        self._generators_made: list[str] = []

    def install(self) -> None:
        """Watch `torch.load`, and, if random states are recorded, what draws from generators."""
        if Kind.RNG in self._context.kinds:
            self._generators = Generators()
            self._generators.watch(())
            self._watch_draws()
        super().install()

    def _watch_draws(self) -> None:
        """Watch initialisers, tensor methods that draw, new generators and registrations."""
        self._put("early draws")
        self._is_watching = True

    def _put_back(self) -> None:
        """Put back what was replaced; the guard stays as it is."""
        self._patches.remove()
        self._is_watching = False

    def document(self) -> dict[str, object]:
        """The document `settings/beginning`: events as lines of words, files read, and the script's own generators.

        Of the events the first 2200, and under `left_out` how many more there were; only the files, under `read`, if
        random states are not recorded. Names are looked up now, so call it once the model has names.
        """
        if self._generators is None:  # nobody looked for draws
            return {"read": list(self._files)}
        names = _parameter_names(self._context.names)
        return {
            "events": [_line(event, names) for event in self._events],
            "left_out": self._left_out,
            "read": list(self._files),
            "generators": self._generators_made,
        }

    def on_begin(self) -> None:
        """As a step begins, stop watching draws, note the last ones and the script's generators; have all written."""
        self._put_back()
        self._note_draws(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it
        made = script_generators() if self._generators is not None else {}
        self._generators_made = [generator_words(name, generator) for name, generator in made.items()]
        if self._generators is not None or self._files:
            self._context.facts["beginning"] = self.document

    def on_tick(self) -> None:
        """Switch off as a step ends, unless `on_restart` has switched on since the last step ended."""
        if not self._watches_on:
            self._guarded.on = False
            self._put_back()
        self._watches_on = False

    def on_restart(self, first: int | None) -> None:
        """Watch draws again if all that ran so far was an evaluation.

        Args:
            first: the step that becomes step 0, and then nothing is done; None where no step is kept.
        """
        if first is None and self._generators is not None:
            self._guarded.on = self._watches_on = True  # the clock says next that the steps so far are over
            with self._guarded:
                self._put_back()
                self._watch_draws()
                self._note_draws(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it

    def _note_registration(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Note a draw that nothing else has noted, as a parameter is registered."""
        generators = self._generators
        if generators is not None and DRAWS not in self._guarded.inside and generators.moved():
            self._note_draws(sys._getframe(1))  # noqa: SLF001 - as python documents it

    def _note_read_file(self, call: Call) -> None:
        """Note the name of the file that `torch.load` reads, each once; once there are 100 names, no other."""
        if len(self._files) < MAX_FILES:
            self._files[_file_name(call.first)] = None

    def note_draws_before_seeding(self, frame: FrameType) -> bool:
        """Before a generator is seeded or set, note draws so far; returns whether draws are still watched.

        They are until the first step begins; then nothing is noted.
        """
        if self._guarded.on and self._is_watching:
            self._note_draws(frame)
            return True
        return False

    def note_seeding(self, by: str, seed: object, line: str) -> None:
        """Note a seeding once it is done; the move of the generator that it made counts as no draw.

        Args:
            by: the function.
            seed: what it was given.
            line: of the user's code.
        """
        self._take_moved()
        self._note(RandomEvent("seed", by, seed, 0, None, line))

    def _note(self, event: RandomEvent) -> None:
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
                line = f"{relative(frame.f_code.co_filename)}:{frame.f_lineno}"
                self._note(RandomEvent("seed", by, seed_word(seed), 0, None, line))

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
                line, by = self._places.line(call.frame), call.name + arguments_word(call.args, call.kwargs)
                for generator, state in drawn:
                    self._note(RandomEvent("draw", by, generator, state, tensor, line))

        return filled

    def _note_draws(self, frame: FrameType | None, *, whole: bool = False) -> None:
        """Note draws since the last look, under the line of the frame where they were noticed.

        Args:
            frame: where they were noticed.
            whole: True to compare the generators' states in full.
        """
        for generator, state in self._take_moved(whole=whole):
            self._note(RandomEvent("draw", "", generator, state, None, self._places.line(frame)))

    def _take_moved(self, *, whole: bool = False) -> list[tuple[str, int]]:
        """Name, and state before the draw, of each generator that has moved since the last call; [] without generators.

        Args:
            whole: True to compare all states in full, not only those that seem to have moved.
        """
        generators = self._generators
        if generators is None or not (whole or generators.moved()):
            return []
        return generators.take_moved(whole=whole)


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


def _line(event: RandomEvent, names: dict[tuple[int, tuple[int, ...]], str]) -> str:
    """A line of words for an event; `-` for what is unknown.

    `seed torch.manual_seed 1337 train.py:6`, `draw torch d46858fc895baa5f normal_(std=0.02) GPT.w net.py:9`.
    """
    if event.what == "seed":
        return f"seed {event.by} {event.of} {event.line or '-'}"
    key, name = event.subject, None
    if key is not None:
        name = names.get((key.identity, key.shape)) or names.get((key.address, key.shape))
    return f"draw {event.of} {event.state:016x} {event.by or '-'} {name or '-'} {event.line or '-'}"


def tensor_key(value: object) -> TensorKey | None:
    """Key of a plain tensor or parameter, with address 0 where it is not on the CPU; None for anything else."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return None
    assert isinstance(value, torch.Tensor)
    with unobserved():
        try:
            address = address_of(value) if value.is_cpu else 0
        except RuntimeError:  # a wrapper that a function transform of torch's left: it has no memory
            address = 0
        return TensorKey(id(value), address, tuple(value.shape))


def _parameter_names(names: Names) -> dict[tuple[int, tuple[int, ...]], str]:
    """Names of the parameters that named modules hold now, by identity and shape, and by address and shape.

    Of several for one key, the first.
    """
    found: dict[tuple[int, tuple[int, ...]], str] = {}
    for reference, state in list(names.states.entries.values()):
        module = reference()
        parameters = {} if module is None else module._parameters  # noqa: SLF001 - the public view builds strings
        for name, parameter in parameters.items():
            key = tensor_key(parameter)
            if key is not None:
                for place in {key.identity, key.address} - {0}:
                    found.setdefault((place, key.shape), f"{state.fqn}.{name}")
    return found


def _file_name(source: object) -> str:
    """A checkpoint's file with the directory it is in: `checkpoint-4/optimizer.pt`.

    Of an open file its `name`; the class of a source without one.
    """
    if isinstance(source, (str, os.PathLike)):
        return clean("/".join(Path(os.fsdecode(source)).parts[-2:]), 200)
    named = getattr(source, "name", None)
    return _file_name(named) if isinstance(named, str) else type(source).__name__


# ---
# What sets the state of a default generator, in any step: it is seeded, or gets back a state that was kept.
#
# A state that was set looks like one that was drawn from. So each function of a module that sets one is watched for
# as long as a capture lasts. Until the first step, what happens goes among what seeds and draws there; after that it
# is counted, by function and line. What checkpointing keeps and gives back is passed over: it leaves no trace.

MAX_PLACES = 200
_CHECKPOINTING, _BETWEEN = "torch.utils.checkpoint", 4


class _Where(NamedTuple):
    """Place where a state is set: `in` a step or `before` it, function, line of the script (`-` for none)."""

    stage: str
    by: str
    line: str


class SeedingProbe(GuardedProbe):
    """Records calls that seed a default generator or set its state."""

    name = "seedings"
    lost = "what sets random states is"
    kind = Kind.RNG

    def __init__(self, context: Context, beginning: BeginningProbe) -> None:
        """Watch nothing before `install`; `beginning` takes what happens before the first step."""
        super().__init__(context, then=self.remove)
        self._beginning = beginning
        self._places = Places()
        self._times: dict[_Where, list[Any]] = {}

    def document(self) -> dict[str, object]:
        """The document `settings/seedings`, a line for each place: `in 3 9 4 torch.manual_seed 17 train.py:12`.

        That is: within or before a step, the first and last such step, number of calls, the function, the seed or a
        digest of the state at the first call, and the line. Places are in the order of their first calls.
        """
        return {"set": [f"{w.stage} {a} {b} {n} {w.by} {of} {w.line}" for w, (a, b, n, of) in self._times.items()]}

    def _watch_setting(self, call: Call) -> Callable[[object], None]:
        """Called before a generator is seeded or set: notes draws so far; returns what notes the call afterwards.

        Before the first step the call is an event of `BeginningProbe`; later it is counted by place, unless
        `torch.utils.checkpoint` makes it.
        """
        is_early = self._beginning.note_draws_before_seeding(call.frame)

        def was_set(_: object) -> None:
            """Note the call as an early event, or count it; nothing for one of checkpointing in a step."""
            label, line = call.function, self._places.line(call.frame) or "-"
            if is_early:
                self._beginning.note_seeding(label, _seed_or_digest(label, call.first), line)
            elif not _is_checkpointing(call.frame):
                self._count(label, call.first, line)

        return was_set

    def _count(self, label: str, value: object, line: str) -> None:
        """Count a call at its place, and have the document written where the count is a power of 2.

        Once there are 200 places, calls at others are not counted.

        Args:
            label: the function.
            value: the seed or state that it was given.
            line: of the script; `-` for none.
        """
        step = self._recorder.step
        where = _Where("in" if self._context.clock.begun else "before", label, line)
        times = self._times.get(where)
        if times is not None:
            times[1:3] = step, times[2] + 1
        elif len(self._times) < MAX_PLACES:
            times = self._times[where] = [step, step, 1, _seed_or_digest(label, value)]
        # written again where it is new, and where the number has doubled
        if times is not None and times[2] & (times[2] - 1) == 0:
            self._context.facts["seedings"] = self.document


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


def _seed_or_digest(label: str, value: object) -> object:
    """`seed_word` of a value if `label` ends with `seed` or `seed_all`; else `#` and 16 hex digits of its digest."""
    if label.endswith(("seed", "seed_all")):
        return seed_word(value)
    if isinstance(value, torch.Tensor):
        with unobserved():
            data = value.cpu().numpy().tobytes()
    else:
        data = repr(value).encode()
    return f"#{blake2b(data, digest_size=8).hexdigest()}"
