"""All probes of a capture, put in together and taken out in reverse order.

This module imports torch; the session imports it only once the script has imported torch itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.capture.context import Context
from introspect_cli.capture.frames import pass_by
from introspect_cli.capture.naming import modules_in, wrapped
from introspect_cli.capture.probes.children import ChildrenProbe
from introspect_cli.capture.probes.data import DataProbe
from introspect_cli.capture.probes.gradients import GradientProbe
from introspect_cli.capture.probes.loss import LossProbe
from introspect_cli.capture.probes.modules import ModuleProbe
from introspect_cli.capture.probes.objects import AttributeProbe, BuiltProbe
from introspect_cli.capture.probes.optimizers import OptimizerProbe
from introspect_cli.capture.probes.perturb import PerturbProbe
from introspect_cli.capture.probes.products import CopiesProbe, ProductProbe, ScriptCallsProbe
from introspect_cli.capture.probes.randomness import RandomProbe
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.capture.regions.probe import TapProbe
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.probes.base import GuardedProbe
    from introspect_cli.capture.recording.keeping import BlackBox
    from introspect_cli.errors import StoreError


class Probes:
    """Builds what records and every probe, and installs and removes them.

    Attributes:
        context: what the probes share.
        complete_steps: number of steps that ended with an optimizer step; known after `finish`.
    """

    def __init__(self, capture: Capture, store_lost: Callable[[StoreError], None], box: BlackBox | None) -> None:
        """Build all probes; nothing is installed before `install`.

        Args:
            capture: what to record, and where to.
            store_lost: called with the error when the store can no longer be written.
            box: holds whole tensors of the last steps; None where that was not asked for.
        """
        self.context = context = Context(capture, store_lost, box)
        self.complete_steps = 0
        context.clock.listeners["on_tick"].append(self._end_step)
        for kind in _wanted(context):
            context.probes.append(kind(context))

    def tap_compiled(self, module: nn.Module) -> None:
        """Have the modules inside a `torch.compile`d module recorded, but not the one that it wraps itself.

        Nothing for another module or with `--compile boundary`.
        """
        inner = wrapped(module)
        if self.context.options.compile != "boundary" and inner is not None:
            from introspect_cli.capture.regions.compile import CompileProbe

            self.context.probe(CompileProbe).tap(child for child in modules_in(inner) if child is not inner)

    def _end_step(self) -> None:
        """Write rows for modules named since the last step ended, and free the names of models that are gone.

        Once recording has stopped, no rows are written.
        """
        context = self.context
        modules = context.names.new_modules()
        if modules and context.recorder.alive:
            context.rank.modules(modules)
        context.names.free_gone_names()

    def install(self) -> None:
        """Install every probe in order, and have Dynamo skip the code of introspect."""
        for probe in self.context.probes:
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
        for probe in reversed(self.context.probes):
            with self.context.guard.around(
                probe.name, f"{probe.name} may still be watched and are"
            ):  # the others must still go
                probe.remove()

    def finish(self) -> None:
        """Write the records after the last step, drop expired steps, and set `complete_steps`; call `remove` before.

        Raises:
            StoreError: the store can no longer be written.
        """
        context, recorder = self.context, self.context.recorder
        self.complete_steps = recorder.steps_written
        context.clock.finish()
        if not context.clock.has_optimizer:
            self.complete_steps = recorder.steps_written
        context.policy.finish(recorder.step - 1)

    def close(self) -> None:
        """Stop recording, free the summarizer's memory, and drop the references to the script's modules."""
        self.context.recorder.stop()
        self.context.summarizer.close()
        self.context.names.clear()

    def stop_in_child(self) -> None:
        """Stop recording in a forked child, and remove the patches there; the parent's stay."""
        self.context.recorder.stop()
        self.remove()


def _wanted(context: Context) -> Iterator[type[GuardedProbe]]:
    """Classes of the probes that a capture's options ask for, in the order in which they are made and installed."""
    options = context.options
    if options.perturb is not None:
        yield PerturbProbe  # before anything is recorded of what it moves
    yield from (
        ChildrenProbe,
        RandomProbe,
        StateProbe,
        GradientProbe,
        BuiltProbe,
        DataProbe,
        LossProbe,
        ProductProbe,
        ScriptCallsProbe,
        OptimizerProbe,
        CopiesProbe,  # after the optimizers: what has been stepped is on record
        ModuleProbe,
        AttributeProbe,
        TapProbe,
    )
    if options.compile != "boundary":
        from introspect_cli.capture.regions.compile import CompileProbe

        yield CompileProbe
    if Kind.COLLECTIVE in options.record and context.has_ranks:
        from introspect_cli.capture.probes.collectives import CollectiveProbe

        yield CollectiveProbe
    if options.vjp or options.jacobian_norm:
        from introspect_cli.capture.probes.vjp import VjpProbe

        yield VjpProbe
    if options.level == "op":
        from introspect_cli.capture.ops import OpProbe

        yield OpProbe
