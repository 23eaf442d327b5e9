"""What all probes share: names, the recorder, the clock, and the stack of calls."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from introspect_cli.capture.frames import line_of, pass_by
from introspect_cli.capture.naming import NameFilter, Names
from introspect_cli.capture.ranks.flat import FlatParts
from introspect_cli.capture.ranks.sharing import DataParallel, Pipelines
from introspect_cli.capture.recording.keeping import BlackBox, StepPolicy
from introspect_cli.capture.recording.recorder import Recorder
from introspect_cli.capture.steps import StepClock
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.tensors.summarizer import Summarizer

if TYPE_CHECKING:
    from introspect_cli.capture.background import Reference
    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.naming import ModuleState, Named

Probe = TypeVar("Probe")


_info = functools.lru_cache(maxsize=4096)(SiteInfo)  # one object for all sites of a class that one line calls
UNCOUNTED_WRITES: Final = (
    "a tensor on a GPU has changed though torch counted no write (`.data`, or a kernel of the script's own): what came "
    "again in lean steps before was not read again; `--full-every 1` reads it in every step"
)
_ELSEWHERE = frozenset({Phase.START, Phase.BACKWARD})
"""Phases in which the line that runs is not the one that a value comes from."""


@dataclass(eq=False, slots=True)
class Stack:
    """What runs in one thread.

    Attributes:
        calls: of modules, None for one of which nothing is recorded.
        phase: of the innermost call.
        outer: of the outermost call.
        in_graph: whether a compiler runs a graph of its own.
        optimizers: those (by `id`) whose step this thread is in, outermost first.
        own: the last call of a module whose class has a `__call__` of its own, and the tensors it was given.
    """

    calls: list[ModuleState | None] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    outer: Phase = Phase.FORWARD
    in_graph: bool = False
    optimizers: list[int] = field(default_factory=list)
    own: tuple[ModuleState | None, frozenset[int]] = (None, frozenset())


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
        draws: the probe that notes who draws random numbers.
        parts: pieces of parameters that lie in flat tensors.
        data_parallel: the ranks that share the work by samples.
        pipelines: the stages that this process runs.
        clock: the step: when it begins and ends, and what it is for.
        probes: all of them, in the order in which they are installed.
        leaf_names: what the script calls the tensors that its last backward pass led to, by identity, where it runs no
            module; good as long as somebody holds them.
        saved_unseen: names of files that were saved in steps that are not recorded.
        started: names of functions that unrecorded processes run, each once.
        complete_steps: number of steps that ended with an optimizer step; known after `finish`.
        perturbed: the seed of `--perturb`, and how many parameters and elements were moved; None without it.
        unseen: by module and phase, the methods that ran unseen; "" where a gradient alone says that something did.
        notes: sentences for the person.
    """

    draws: Any

    def __init__(self, capture: Capture, reference: Reference) -> None:
        """Build what the probes share and a clock at step 0; nothing is watched.

        Args:
            capture: what it is.
            reference: the run that this one is compared with.
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
        steps = options.keep_around
        box = None if steps is None else BlackBox(capture, steps, reference.digests())
        self.policy = StepPolicy(capture, self.rank, box)
        self.recorder = recorder = Recorder(capture, self.summarizer, self.rank, self.policy)
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
        self.clock.listeners["on_tick"] += [self.counts.clear, self._end_step]
        self.complete_steps = 0

    def install(self) -> None:
        """Install every probe in order, and have Dynamo skip the code of introspect."""
        for probe in self.probes:
            probe.install()
        pass_by()

    def _end_step(self) -> None:
        """Write rows for modules named since the last step ended, and free the names of models that are gone.

        Notes, once, that what lean steps left unread has changed in a full one.
        """
        if not self.summarizer.sees_writes:
            self.guard.note(UNCOUNTED_WRITES)
        modules = self.names.new_modules()
        if modules and self.recorder.alive:
            self.rank.modules(modules)
        self.names.free_gone_names()

    def remove(self, *, over: bool = False) -> None:
        """Remove every probe, the last installed first; a failure of one is noted and the others are still removed.

        Args:
            over: whether the script is over; then the probes record once more, before, what models hold now
                (`on_look`).
        """
        if over:
            with self.guard.around("look", "what models hold at the end is"):
                self.clock.tell("on_look")
        for probe in reversed(self.probes):
            with self.guard.around(probe.name, f"{probe.name} may still be watched and are"):
                probe.remove()

    def finish(self) -> None:
        """Write the records after the last step, drop expired steps, and set `complete_steps`; call `remove` before.

        Raises:
            StoreError: the store can no longer be written.
        """
        self.complete_steps = self.recorder.steps_written
        self.clock.finish()
        if not self.clock.has_optimizer:
            self.complete_steps = self.recorder.steps_written
        self.policy.finish(self.recorder.step - 1)

    def close(self) -> None:
        """Stop recording, free the summarizer's memory, and drop the references to the script's modules."""
        self.recorder.stop()
        self.summarizer.close()
        self.names.clear()

    def stop_in_child(self) -> None:
        """Stop recording in a forked child, and remove the patches there; the parent's stay."""
        self.recorder.stop()
        self.remove()

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
        if (site := of.sites.get(key)) is None:
            line = "" if phase in _ELSEWHERE else line_of(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
            site = self.recorder.site(Site(phase, kind, of.fqn, call, path), _info(of.module_class, "", line))
            of.sites[key] = site
        return site
