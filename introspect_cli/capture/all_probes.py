"""All probes of a capture, put in together and taken out in reverse order.

This module imports torch; the session imports it only once the script has imported torch itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.capture.context import Context
from introspect_cli.capture.frames import pass_by
from introspect_cli.capture.naming import NameFilter, Names, modules_in, wrapped
from introspect_cli.capture.options import parse_pairs
from introspect_cli.capture.probes.children import ChildrenProbe
from introspect_cli.capture.probes.data import DataProbe
from introspect_cli.capture.probes.gradients import GradientProbe
from introspect_cli.capture.probes.loss import LossProbe
from introspect_cli.capture.probes.modules import ModuleProbe
from introspect_cli.capture.probes.objects import AttributeProbe, BuiltProbe
from introspect_cli.capture.probes.optimizers import OptimizerProbe
from introspect_cli.capture.probes.perturb import PerturbProbe
from introspect_cli.capture.probes.products import CopiesProbe, ProductProbe, ScriptCallsProbe
from introspect_cli.capture.probes.randomness import BeginningProbe, RngProbe, SeedingProbe
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.capture.recording.keeping import StepPolicy
from introspect_cli.capture.recording.recorder import Recorder
from introspect_cli.capture.regions.probe import TapProbe
from introspect_cli.records import Kind
from introspect_cli.tensors.summarizer import Summarizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.probes.base import GuardedProbe
    from introspect_cli.capture.recording.keeping import BlackBox
    from introspect_cli.capture.regions.compile import CompileProbe
    from introspect_cli.errors import StoreError
    from introspect_cli.store.run_writer import Launch, StoreWriter


class Probes:
    """Builds the recorder and every probe, and installs and removes them."""

    def __init__(
        self,
        options: CaptureOptions,
        store: StoreWriter,
        guard: Guard,
        store_lost: Callable[[StoreError], None],
        began: dict[str, bytes | None],
        launch: Launch | None,
        box: BlackBox | None,
        facts: dict[str, Callable[[], Any]],
    ) -> None:
        """Build the recorder and all probes; nothing is installed before `install`.

        Args:
            options: what to record.
            store: where to.
            guard: what catches failures of probes.
            store_lost: called with the error when the store can no longer be written.
            began: bytes of the states of python's and numpy's generators when the process began, by library; None for
                one that was not loaded.
            launch: this process's part in a distributed run; None for a run of one process.
            box: holds whole tensors of the last steps; None where that was not asked for.
            facts: probes put a function here under the name of a document of `settings/` that has changed; whoever
                writes the documents calls it and takes it out.
        """
        rank, ranks = (0, 1) if launch is None else (launch.rank, launch.world_size)
        kept: dict[str, Any] = {
            "stats": options.measures,
            "sketch": options.sketch,
            "sorted_stats": options.sorted_stats,
        }
        self.summarizer = Summarizer(**kept)
        self.rank = store.rank(rank, **kept)
        self._guard = guard
        self.names = Names(NameFilter(options.modules, options.exclude, options.max_depth))
        self.policy = StepPolicy(options, self.rank, store, guard.note, box, number=rank)
        self.recorder = Recorder(self.summarizer, self.rank, store, self.policy, options.save_tensors, store_lost)
        self.context = Context(self.recorder, self.names, guard, options.record, facts, wants_eval=bool(options.eval))
        self.policy.copies = self.context.copies
        gradients = GradientProbe(self.context)
        state = StateProbe(self.context)
        self.context.clock.listeners["on_tick"].append(self._end_step)
        self.modules = modules = ModuleProbe(self.context, gradients)
        self._built = BuiltProbe(self.context)
        self.children = ChildrenProbe(self.context, followed=options.children == "all")
        beginning = BeginningProbe(self.context)
        self.perturbed = None if options.perturb is None else PerturbProbe(self.context, options.perturb)
        self._probes: list[GuardedProbe] = [
            *([self.perturbed] if self.perturbed is not None else []),  # before anything is recorded of what it moves
            self.children,
            beginning,  # before random states: it looks at the generators first when a step begins
            SeedingProbe(self.context, beginning),
            RngProbe(self.context, began),
            state,
            gradients,
            self._built,
            DataProbe(self.context, self._built),
            LossProbe(self.context),
            ProductProbe(self.context),
            ScriptCallsProbe(self.context),
            OptimizerProbe(self.context, state),
            CopiesProbe(self.context),  # after the optimizers: what has been stepped is on record
            modules,
            AttributeProbe(self.context, self.rank, options.redact),
        ]
        taps = TapProbe(self.context)
        self._probes.append(taps)
        self.complete_steps = 0
        """Number of steps that ended with an optimizer step; known after `finish`."""
        self.notes: dict[str, None] = {}
        self._compile: CompileProbe | None = None
        if options.compile != "boundary":
            from introspect_cli.capture.regions.compile import CompileProbe

            self._compile = CompileProbe(self.context, taps, options.compile, self.notes.setdefault)
            self._probes.append(self._compile)
        self.has_ranks = ranks > 1
        if Kind.COLLECTIVE in options.record and self.has_ranks:
            from introspect_cli.capture.probes.collectives import CollectiveProbe

            self._probes.append(CollectiveProbe(self.context, store.path))
        if options.vjp or options.jacobian_norm:
            from introspect_cli.capture.probes.vjp import VjpProbe

            pairs = parse_pairs(options.vjp, options.jacobian_norm)
            self._probes.append(VjpProbe(self.context, modules, pairs, options.probes))
        if options.level == "op":
            from introspect_cli.capture.ops import OpProbe

            ops = OpProbe(
                self.context,
                globs=options.ops,
                views=options.views,
                into_compiled=self._compile is not None and self._compile.runs_as_python,
            )
            self._probes.append(ops)

    def tap_compiled(self, module: nn.Module) -> None:
        """Have the modules inside a `torch.compile`d module recorded, but not the one that it wraps itself.

        Nothing for another module or with `--compile boundary`.
        """
        inner = wrapped(module)
        if self._compile is not None and inner is not None:
            self._compile.tap(child for child in modules_in(inner) if child is not inner)

    def _end_step(self) -> None:
        """Write rows for modules named since the last step ended, and free the names of models that are gone.

        Once recording has stopped, no rows are written.
        """
        modules = self.names.new_modules()
        if modules and self.recorder.alive:
            self.rank.modules(modules)
        self.names.free_gone_names()

    def install(self) -> None:
        """Install every probe in order, and have Dynamo skip the code of introspect."""
        for probe in self._probes:
            probe.install()
        pass_by()

    def remove(self, *, over: bool = False) -> None:
        """Remove every probe, the last installed first; a failure of one is noted and the others are still removed.

        Args:
            over: whether the script is over; then the probes record once more, before, what models hold now
                (`on_look`).
        """
        if over:
            self.context.clock.tell("on_look")
        for probe in reversed(self._probes):
            with self._guard.around(
                probe.name, f"{probe.name} may still be watched and are"
            ):  # the others must still go
                probe.remove()

    def finish(self, *, launched: bool) -> None:
        """Write the records after the last step, drop expired steps, and set `complete_steps`; call `remove` before.

        If `--ranks one-per-replica` had no effect, that is noted.

        Args:
            launched: whether a launcher started this process among others.

        Raises:
            StoreError: the store can no longer be written.
        """
        clock, recorder = self.context.clock, self.recorder
        self.complete_steps = recorder.steps_written
        clock.finish()
        if not clock.has_optimizer:
            self.complete_steps = recorder.steps_written
        self.policy.finish(recorder.step - 1)
        for sentence in self.policy.unmatched(launched=launched):
            self._guard.note(sentence)

    def close(self) -> None:
        """Stop recording, free the summarizer's memory, and drop the references to the script's modules."""
        self.recorder.stop()
        self.summarizer.close()
        self.names.clear()

    def stop_in_child(self) -> None:
        """Stop recording in a forked child, and remove the patches there; the parent's stay."""
        self.recorder.stop()
        self.remove()
