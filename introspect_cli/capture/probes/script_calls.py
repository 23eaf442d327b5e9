"""What a script says itself: the ends of its steps, values of its own, its phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from introspect_cli.capture.probes.guarded import GuardedProbe
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.script import calls
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from introspect_cli.capture.context import Context


class ScriptCallsProbe(GuardedProbe):
    """Hears of `introspect_cli.step`, `record` and `phase`."""

    name = "script calls"
    lost = "values that the script records itself are"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._counts: dict[str, int] = {}
        self._wants_eval = context.evaluation.wanted
        self._phase = ""

    def install(self) -> None:
        """Begin to hear."""
        self.hear(self._context.clock.on_tick, self._counts.clear)
        super().install()
        calls.listen(self)

    def remove(self) -> None:
        """Hear nothing any more."""
        calls.unlisten(self)
        super().remove()

    def stepped(self) -> None:
        """End the step."""
        with self._context.guard.around("clock", "steps that the script ends itself are"):
            self._context.clock.manual_tick()

    def entered(self, name: str) -> None:
        """Name what comes by a phase, and see forward passes without gradients in it."""
        if self._guarded.on:
            with self._guarded:
                self._phase = str(name)
                self._context.evaluation.wanted = self._wants_eval or bool(name)

    def recorded(self, name: str, value: object) -> None:
        """Record a value where it stands among the step's other records."""
        if not (self._guarded.on and self._recorder.wanted) or torch.compiler.is_compiling():
            return
        with self._guarded, unobserved():
            self._context.clock.begin()
            fqn = f"{self._phase}/{name}" if self._phase else str(name)
            call = self._counts[fqn] = self._counts.get(fqn, -1) + 1
            leaves = [(path, leaf) for path, leaf in flatten(value) if leaf is not None]
            sites = [self._recorder.site(Site(Phase.FORWARD, Kind.VALUE, fqn, call, path)) for path, _ in leaves]
            self._recorder.nested(sites, [leaf for _, leaf in leaves])
