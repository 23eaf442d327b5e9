"""What all probes share: names, the recorder, the clock, the stack of calls, and what was drawn at random."""

from __future__ import annotations

import functools
import random
import sys
import threading
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from introspect_cli.capture.frames import instances_in, line_of, script_frames
from introspect_cli.capture.naming import NameFilter, Names
from introspect_cli.capture.ranks.flat import FlatParts
from introspect_cli.capture.ranks.sharing import DataParallel, Pipelines
from introspect_cli.capture.recording.keeping import StepPolicy
from introspect_cli.capture.recording.recorder import Recorder
from introspect_cli.capture.steps import StepClock
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site, SiteInfo
from introspect_cli.tensors.generators import NEVER, Generators
from introspect_cli.tensors.summarizer import Summarizer
from introspect_cli.tensors.views import unobserved
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.naming import ModuleState, Named
    from introspect_cli.capture.recording.keeping import BlackBox
    from introspect_cli.errors import StoreError

Probe = TypeVar("Probe")


# ---
# Who draws random numbers, and from which state.
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


class Draws:
    """Records the states of random generators that have moved."""

    def __init__(self, recorder: Recorder) -> None:
        """Start without a look at any generator; `begin` looks at them."""
        self._recorder = recorder
        self._generators = Generators()
        self.untouched: set[str] = set()
        """Generators that are as the process found them: their states mean nothing."""
        self._thread = 0
        self._shared = False
        self.moved = self._generators.moved
        """Whether any generator has moved since it was last looked at; asked twice for every call of a module."""

    @property
    def complete(self) -> bool:
        """Whether so far every draw from a default generator was noticed, each in the thread that began the step.

        False where a generator in use is not watched.
        """
        return self._generators.is_complete and not self._shared

    def begin(self, devices: Sequence[tuple[str, torch.Generator]]) -> None:
        """Note the generators' present states as a step begins: `note` records what moves from now on.

        Also empties `untouched`, and makes this thread the one in which draws can be assigned to calls (`complete`).

        Args:
            devices: name and generator of each accelerator in use.
        """
        self._generators.watch(devices)
        self.untouched.clear()
        self._thread = threading.get_ident()
        self.moved = self._generators.moved

    def note(self, phase: Phase, fqn: str, call: int, *, before: bool = False) -> None:
        """For each default generator that has moved since the last look, record the state it had then.

        The site's path is the generator's name, with `DRAWN_BEFORE` after it if `before`. Of a generator in
        `untouched` the text `UNTOUCHED` is recorded instead, and it is taken out of `untouched`. In another thread than
        the one that began the step, `complete` becomes False, even where no generator has moved.

        Args:
            phase: of the call below.
            fqn: name of the module, loader or loss whose call it is.
            call: number of that call in the step.
            before: True if the call begins now, so that what ran before it drew; False if it has ended and drew itself.
        """
        if threading.get_ident() != self._thread:
            self._shared = True  # two threads draw in turns: nobody can say which of them it was
        for name, state in self._generators.take_moved():
            site = self._recorder.site(Site(phase, Kind.RNG, fqn, call, name + DRAWN_BEFORE * before))
            if name in self.untouched:
                self.untouched.discard(name)
                self._recorder.emit(site, UNTOUCHED)
                continue
            with unobserved():
                words = torch.frombuffer(bytearray(state.to_bytes(8, "little")), dtype=torch.uint8)
                self._recorder.emit(site, words)

    def stop(self) -> None:
        """Look no more: `moved()` is False from here on."""
        self.moved = NEVER


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
    label, _, variable = name.partition(" ")
    with unobserved():
        seed = str(generator.initial_seed()) if isinstance(generator, torch.Generator) else "-"
    return f"{label} {seed} {state_word(generator)} {variable}"


def state_of(generator: object) -> int:
    """State of a CPU `torch.Generator` as a digest of 64 bits; 0 for any other object."""
    return int(state_word(generator) or "0", 16) if isinstance(generator, torch.Generator) else 0


def state_word(value: Any) -> str:
    """Digest of a torch, python or numpy generator's state, 16 hex digits.

    "" for any other object, for generators of torch off the CPU, and for subclasses of `random.Random`.
    """
    if isinstance(value, torch.Generator):
        if value.device.type != "cpu":
            return ""
        with unobserved():
            return _digest(bytes(value.get_state().tolist()))  # inside a transform of `torch.func` it has no memory
    if type(value) is random.Random:
        _, words, spare = value.getstate()
        return _digest(f"{hash(words)} {spare}".encode())  # of numbers, so it is the same in every process
    if type(value).__module__.startswith("numpy."):
        kept = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state(legacy=False)
        words = kept["state"].pop("key", b"")
        return _digest(f"{kept}".encode() + bytes(words))
    return ""


def _digest(data: bytes) -> str:
    """64-bit BLAKE2b digest, 16 hex digits."""
    return blake2b(data, digest_size=8).hexdigest()


# ---
# What the probes of one capture share: what the run is, and the clock of its steps.

_info = functools.lru_cache(maxsize=4096)(SiteInfo)  # one object for all sites of a class that one line calls
_ELSEWHERE = frozenset({Phase.START, Phase.BACKWARD})
"""Phases in which the line that runs is not the one that a value comes from."""


class Stack:
    """What runs in one thread: calls of modules, None for one of which nothing is recorded, and steps of optimizers."""

    __slots__ = ("calls", "in_graph", "optimizers", "outer", "own", "phase")

    def __init__(self) -> None:
        """Start outside every module."""
        self.calls: list[ModuleState | None] = []
        self.phase = Phase.FORWARD
        self.outer = Phase.FORWARD
        self.in_graph = False
        self.optimizers: list[int] = []
        """Optimizers (by `id`) whose step this thread is in, outermost first."""
        self.own: tuple[ModuleState | None, frozenset[int]] = (None, frozenset())
        """The last call of a module whose class has a `__call__` of its own, and the tensors it was given."""


class Stacks(threading.local):
    """The stack of each thread: `now` is this one's."""

    def __init__(self) -> None:
        """Give a thread, at its first look, a stack of its own."""
        self.now = Stack()


class Context:
    """State that all probes of a capture share.

    Attributes:
        capture: what it is.
        options: what is recorded.
        guard: around the code of probes.
        kinds: those that are recorded.
        facts: by name, what gives each document of settings that has changed since it was last written.
        summarizer: makes rows of values.
        rank: the writer of this rank's log.
        names: of modules and parameters.
        policy: which steps are wanted, and kept.
        recorder: takes the records.
        draws: who draws random numbers.
        parts: pieces of parameters that lie in flat tensors.
        data_parallel: the ranks that share the work by samples.
        pipelines: the stages that this process runs.
        clock: the step: when it begins and ends, and what it is for.
        probes: all of them, in the order in which they are installed.
        leaf_names: what the script calls the tensors that its last backward pass led to, by identity, where it runs no
            module; good as long as somebody holds them.
        saved_unseen: names of files that were saved in steps that are not recorded.
        started: names of functions that unrecorded processes run, each once.
        perturbed: the seed of `--perturb`, and how many parameters and elements were moved; None without it.
        unseen: by module and phase, the methods that ran unseen; "" where a gradient alone says that something did.
        notes: sentences for the person.
    """

    def __init__(self, capture: Capture, store_lost: Callable[[StoreError], None], box: BlackBox | None) -> None:
        """Build what the probes share and a clock at step 0; nothing is watched.

        Args:
            capture: what it is.
            store_lost: called with the error when the store can no longer be written.
            box: holds whole tensors of the last steps; None where that was not asked for.
        """
        self.capture, self.guard, self.facts = capture, capture.guard, capture.facts
        options = self.options = capture.options
        self.kinds = options.record
        self.has_ranks = capture.launch is not None and capture.launch.world_size > 1
        kept: dict[str, Any] = {
            "stats": options.measures,
            "sketch": options.sketch,
            "sorted_stats": options.sorted_stats,
        }
        self.summarizer = Summarizer(**kept)
        self.rank = capture.store.rank(capture.rank, **kept)
        self.names = names = Names(NameFilter(options))
        self.policy = StepPolicy(capture, self.rank, box)
        self.recorder = recorder = Recorder(capture, self.summarizer, self.rank, self.policy, store_lost)
        self.draws = Draws(recorder)
        self.stacks = Stacks()
        self.parts = FlatParts(names, self.guard.note)
        self.data_parallel = DataParallel()
        self.pipelines = Pipelines(names)
        self.probes: list[Any] = []
        self.leaf_names: dict[int, str] = {}
        self.saved_unseen: dict[str, None] = {}
        self.started: list[str] = []
        self.perturbed: dict[str, int] | None = None
        self.unseen: dict[str, dict[str, list[str]]] = {}
        self.notes: dict[str, None] = {}
        self.clock = StepClock(recorder, names, self.parts, self.guard, wants_eval=bool(options.eval))
        self.clock.listeners["on_root"].append(self.data_parallel.find_ranks)
        names.made_on_the_fly = functools.partial(self.clock.tell, "on_made")
        self.counts: dict[tuple[Any, ...], int] = {}
        """How often each thing was met in this step; see `count`."""
        self.clock.listeners["on_tick"].append(self.counts.clear)

    def probe(self, kind: type[Probe]) -> Probe:
        """The probe of a class, which was made before."""
        found: Probe = next(each for each in self.probes if type(each) is kind)
        return found

    @property
    def stack(self) -> Stack:
        """The module calls under way in this thread."""
        return self.stacks.now

    def count(self, *what: object) -> int:
        """How often this was called with an equal `what` before in this step, from 0; each call counts one more."""
        number = self.counts.get(what, 0)
        self.counts[what] = number + 1
        return number

    def site(self, of: Named, phase: Phase, kind: Kind, path: str = "", call: int = 0) -> int:
        """Number of the site of a value of a module or parameter; registered at the first call.

        It is registered with the script's line, but in the phases `start` and `backward` without one.

        Args:
            of: the module's state or the parameter's name; caches the number.
            phase: where in the step.
            kind: what of it: an input, a gradient, something the optimizer keeps for it.
            path: where inside a nested value; "" for the value itself.
            call: for a module the number of its call in this phase, for a parameter how often it was recorded before.
        """
        key = (phase, kind, path, call)
        site = of.sites.get(key)
        if site is None:
            line = "" if phase in _ELSEWHERE else line_of(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
            site = self.recorder.site(Site(phase, kind, of.fqn, call, path), _info(of.module_class, "", line))
            of.sites[key] = site
        return site
