"""From what a tap says to a record: the same sites that the module would have had, run as python.

A tap knows which module it sits in, by a number or by name, and what it sees of it. Which call of the module it is
follows from the order in which its values come by in this step; a gradient belongs to the last call whose gradient has
not come yet, since the backward pass runs in reverse.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

from introspect_cli.capture import private_api
from introspect_cli.capture.naming import ById
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.regions.taps import GRADIENT, NUMBERED, PLAIN, WANTED, CallCount, Sink, Tapped, parsed
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming import ModuleState

_UNSEEN_GRADIENT = "inside a compiled region gradients are not seen"


class TapProbe(GuardedProbe):
    """Records what taps inside compiled and scripted regions report."""

    name = "taps"
    lost = "what runs inside compiled and scripted regions is"

    def __init__(self, context: Context) -> None:
        """Watch nothing yet."""
        super().__init__(context, then=self.remove)
        self._numbered: list[weakref.ref[nn.Module]] = []
        self._numbers: ById[int] = ById()
        self._calls: defaultdict[tuple[str, Phase], CallCount] = defaultdict(CallCount)
        self._open: defaultdict[str, list[int]] = defaultdict(list)
        """Sites of gradients that are still to come, by the text of the tap that tells them; -1 for one not wanted."""

    def install(self) -> None:
        """Set `Sink.take` until `remove`, so that all taps of the process report here, and start to listen."""
        self._patches.replace(Sink, "take", self._receive)
        super().install()

    def module_number(self, module: nn.Module) -> str:
        """`#0`, `#1`, ...: number of a module, the same at each call, for taps made before its name is known."""
        if (number := self._numbers.get(module)) is None:
            self._numbers.set(module, number := len(self._numbered))
            self._numbered.append(weakref.ref(module))
        return f"{NUMBERED}{number}"

    def on_tick(self) -> None:
        """Count calls from 0 again as a step ends, and drop the sites of gradients that have not come."""
        self._calls.clear()
        self._open.clear()

    def _receive(self, value: torch.Tensor, text: str) -> None:
        """Record what a tap reports: a value, or the gradient of one whose site `_record_tapped` has kept.

        Nothing while the step is not recorded, or while a compiler computes constants.

        Args:
            value: the tensor.
            text: as of `text_of`, after `GRADIENT` for a gradient.
        """
        if not self._recorder.wanted:
            return
        with self._guarded:
            if text.startswith(GRADIENT):
                waiting = self._open[text[len(GRADIENT) :]]
                site = waiting.pop() if waiting else -1
                if site >= 0:
                    self._recorder.emit(site, value)
            elif not private_api.compiling():  # a compiler that computes constants beforehand is no run
                self._record_tapped(value, text, parsed(text))

    def _record_tapped(self, value: torch.Tensor, text: str, tapped: Tapped) -> None:
        """Record a tapped value at its module's site, and keep its gradient's site for the backward pass.

        Nothing where the module is gone, where hooks record the same call, or where a compiler runs its own graph. A
        value outside of every module's call begins the step if it has not begun. A plain value, and a gradient that the
        tap does not report, are recorded as gaps.

        Args:
            value: the tensor; of a plain value, anything.
            text: the tap's.
            tapped: the fields of that text.
        """
        stack, names = self._context.stack, self._context.names
        state: ModuleState | None = None
        if tapped.module.startswith(NUMBERED):
            if (owner := self._numbered[int(tapped.module[1:])]()) is None:
                return
            state = names.find(owner) or names.ensure_named(owner, None)
        if (stack.calls == [None] and not stack.in_graph) or private_api.tracing_state() is not None:
            return  # the outermost call is one that is not recorded; a compiler's own graph is no module call
        outermost, phase = not stack.calls or stack.calls == [None], stack.phase
        if outermost and private_api.graph_task() != -1:
            phase = Phase.RECOMPUTE  # checkpointing inside a region: the compiled backward pass computes it again
        elif outermost:
            phase = Phase.FORWARD
            self._context.clock.begin()
            for root in names.roots():  # inside a compiled function no call of a root is seen
                self._context.clock.tell_root(root)
        fqn, module_class = (tapped.module, tapped.module_class) if state is None else (state.fqn, state.module_class)
        watched = names.wanted(fqn) if state is None else state.watched
        if stack.calls and stack.calls[-1] is not None and stack.calls[-1].fqn == fqn and stack.calls[-1] is not state:
            return  # the module itself is running, with its hooks: its inputs and outputs are recorded as they are
        kind = Kind(tapped.kind)
        step = self._recorder.step
        counted = 0 if state is None else state.calls_in(step).get(phase, 0)
        call = self._calls[fqn, phase].number_of(tapped.kind, tapped.path, counted)
        if state is not None:
            state.calls_in(step)[phase] = max(counted, call + 1)
        is_again = phase is Phase.RECOMPUTE and outermost  # the gradient is that of the first time
        if phase is not Phase.EVAL and not is_again:
            gradient = self._gradient_site(tapped, fqn, module_class, call) if watched else -1
            if tapped.mark != WANTED:
                self._open[text].append(gradient)
            elif gradient >= 0:
                self._recorder.gap(gradient, _UNSEEN_GRADIENT)
        if not watched or kind not in self._context.kinds:
            return
        site = self._recorder.site(Site(phase, kind, fqn, call, tapped.path), SiteInfo(module_class))
        if tapped.mark == PLAIN:
            self._recorder.gap(site, "a plain value inside a compiled region")
        else:
            self._recorder.emit(site, value)

    def _gradient_site(self, tapped: Tapped, fqn: str, module_class: str, call: int) -> int:
        """Register the site of a tapped value's gradient, and return its number; -1 where its kind is not recorded."""
        kind = Kind.GRAD_INPUT if tapped.kind == Kind.INPUT.value else Kind.GRAD_OUTPUT
        if kind not in self._context.kinds:
            return -1
        return self._recorder.site(Site(Phase.BACKWARD, kind, fqn, call, tapped.path), SiteInfo(module_class))
