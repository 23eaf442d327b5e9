"""What the probes of one capture share: what the run is, and the clock of its steps."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.draws import Draws
from introspect_cli.capture.frames import Places
from introspect_cli.capture.ranks.flat import FlatParts
from introspect_cli.capture.ranks.sharing import DataParallel, Pipelines
from introspect_cli.capture.steps import StepClock
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.naming import ModuleState, Named, Names
    from introspect_cli.capture.recording.recorder import Recorder


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

    @property
    def innermost(self) -> Phase | None:
        """Phase of the innermost running call; None outside of calls, or where that call is not recorded."""
        return self.phase if self.calls and self.calls[-1] is not None else None


class Stacks(threading.local):
    """The stack of each thread: `now` is this one's."""

    def __init__(self) -> None:
        """Give a thread, at its first look, a stack of its own."""
        self.now = Stack()


class Context:
    """State that all probes of a capture share.

    Attributes:
        recorder: takes the records.
        names: of modules and parameters.
        guard: around the code of probes.
        kinds: those that are recorded.
        draws: who draws random numbers.
        parts: pieces of parameters that lie in flat tensors.
        data_parallel: the ranks that share the work by samples.
        pipelines: the stages that this process runs.
        leaf_names: what the script calls the tensors that its last backward pass led to, by identity, where it runs no
            module; good as long as somebody holds them.
        saved_unseen: names of files that were saved in steps that are not recorded.
        facts: by name, what gives each document of settings that has changed since it was last written.
        clock: the step: when it begins and ends, and what it is for.
    """

    def __init__(
        self,
        recorder: Recorder,
        names: Names,
        guard: Guard,
        kinds: frozenset[Kind],
        facts: dict[str, Callable[[], Any]],
        *,
        wants_eval: bool,
    ) -> None:
        """Build what the probes share and a clock at step 0; nothing is watched.

        Args:
            recorder: takes the records.
            names: gives names.
            guard: around the code of probes.
            kinds: those that are recorded.
            facts: takes functions that make changed documents of settings, by name.
            wants_eval: whether evaluation is recorded, too.
        """
        self.recorder = recorder
        self.names = names
        self.guard = guard
        self.kinds = kinds
        self.draws = Draws(recorder)
        self.stacks = Stacks()
        self.parts = FlatParts(names, guard.note)
        self.data_parallel = DataParallel()
        self._places = Places()
        self.pipelines = Pipelines(names)
        self.leaf_names: dict[int, str] = {}
        self.saved_unseen: dict[str, None] = {}
        self.facts = facts
        self.clock = StepClock(recorder, names, self.parts, guard, wants_eval=wants_eval)
        self.clock.on_root.append(self.data_parallel.find_ranks)
        names.made_on_the_fly = functools.partial(self.clock.tell, self.clock.on_made)
        self.counts: dict[tuple[Any, ...], int] = {}
        """How often each thing was met in this step; see `count`."""
        self.clock.on_tick.append(self.counts.clear)

    @property
    def stack(self) -> Stack:
        """The module calls under way in this thread."""
        return self.stacks.now

    def count(self, *what: object) -> int:
        """How often this was called with an equal `what` before in this step, from 0; each call counts one more."""
        number = self.counts.get(what, 0)
        self.counts[what] = number + 1
        return number

    def copies(self) -> list[int]:
        """Ranks that hold the same values as this one, itself included; [] where that is unknown.

        Also [] with ZeroRedundancyOptimizer, where each rank has the state of some parameters alone.
        """
        is_cut = any(
            type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in self.clock.trained.optimizers()
        )
        return [] if is_cut else self.data_parallel.copies

    def line(self) -> str:
        """`file:line` of the innermost frame in the user's files, among callers of this.

        "" where none is among the first 200, and in what a backward pass runs.
        """
        return self._places.line(inspect.currentframe())

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
            line = "" if phase in _ELSEWHERE else self.line()
            site = self.recorder.site(Site(phase, kind, of.fqn, call, path), _info(of.module_class, "", line))
            of.sites[key] = site
        return site
