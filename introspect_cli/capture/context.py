"""What the probes of one capture share: where records go, the names, the kinds, the clock, and each other's moments."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from introspect_cli.capture.draws import Draws
from introspect_cli.capture.evaluation import Evaluation, Trained
from introspect_cli.capture.labels import StepLabels
from introspect_cli.capture.ranks.flat import FlatParts
from introspect_cli.capture.ranks.sharing import DataParallel, Pipelines
from introspect_cli.capture.step_clock import StepClock
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.named import Named
    from introspect_cli.capture.names import Names
    from introspect_cli.capture.recorder import Recorder


_info = functools.lru_cache(maxsize=1024)(SiteInfo)  # one object for all sites of a class


@functools.lru_cache(maxsize=1024)
def _key(key: tuple[Phase, Kind, str, int]) -> tuple[Phase, Kind, str, int]:
    """One tuple for what thousands of modules have: each is work for the garbage collector."""
    return key


class Running(threading.local):
    """Optimizers (by `id`) inside whose step this thread is, outermost first."""

    def __init__(self) -> None:
        self.optimizers: list[int] = []


class Context:
    """Made once for a capture; what changes while it lasts, its parts hold.

    Attributes:
        recorder: takes the records.
        names: of modules and parameters.
        guard: around the code of probes.
        kinds: those that are recorded.
        clock: ends steps, and says when they begin.
        evaluation: tells evaluation from training.
        trained: the optimizers, and what they train.
        draws: who draws random numbers.
        labels: what the script's framework calls the step.
        parts: pieces of parameters that lie in flat tensors.
        data_parallel: the ranks that share the work by samples.
        pipelines: the stages that this process runs.
        running: optimizers that step now.
        leaf_names: what the script calls the tensors that its last backward pass led to, by identity, where it runs no
            module; good as long as somebody holds them.
        saved_unseen: names of files that were saved in steps that are not recorded.
        on_root: told of outermost modules that are about to run and will be recorded.
        on_after_optimizer: told when an optimizer has stepped and its parameters are on record.
    """

    def __init__(
        self, recorder: Recorder, names: Names, guard: Guard, kinds: frozenset[Kind], *, wants_eval: bool
    ) -> None:
        """Start at step 0; `wants_eval` says whether evaluation is recorded, too."""
        self.recorder = recorder
        self.names = names
        self.guard = guard
        self.kinds = kinds
        self.evaluation = Evaluation(recorder, wanted=wants_eval)
        self.trained = Trained()
        self.draws = Draws(recorder)
        self.labels = StepLabels(guard)
        recorder.labels = self.labels.take
        self.parts = FlatParts(names, guard.note)
        self.data_parallel = DataParallel()
        self.pipelines = Pipelines(names)
        self.running = Running()
        self.leaf_names: dict[int, str] = {}
        self.saved_unseen: dict[str, None] = {}
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_after_optimizer: list[Callable[[], None]] = []
        self.clock = StepClock(recorder, names, self.evaluation, self.trained, self.labels, self.parts)

    def root_called(self, module: nn.Module) -> None:
        """An outermost module is about to run and will be recorded."""
        self.names.any_module = True  # it may have its name from before
        self.data_parallel.look(module)
        for listener in self.on_root:
            listener(module)

    def copies(self) -> list[int]:
        """Ranks that hold the same parts of everything as this one, which is among them; empty where nothing says so.

        With ZeroRedundancyOptimizer each rank has the state of some parameters alone.
        """
        is_cut = any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in self.trained.optimizers())
        return [] if is_cut else self.data_parallel.copies

    def site(self, of: Named, phase: Phase, kind: Kind, path: str = "", call: int = 0) -> int:
        """The site of something about a module or a parameter, looked up once.

        Args:
            of: the module's state or the parameter's name.
            phase: where in the step.
            kind: what of it: an input, a gradient, something the optimizer keeps for it.
            path: which part of that.
            call: the module's call in this phase; how often the parameter was recorded in it before.
        """
        key = (phase, kind, path, call)
        site = of.sites.get(key)
        if site is None:
            site = self.recorder.site(Site(phase, kind, of.fqn, call, path), _info(of.module_class))
            of.sites[_key(key)] = site
        return site
