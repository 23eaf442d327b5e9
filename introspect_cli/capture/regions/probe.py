"""From what a tap says to a record: the same sites that the module would have had, run as python.

A tap knows which module it sits in, by a number or by name, and what it sees of it. Which call of the module
it is follows from how often it has come by in this step; a gradient belongs to the last call whose gradient has not
come yet, since the backward pass runs in reverse.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

from introspect_cli.capture import private_api
from introspect_cli.capture.naming.identity import ById
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.regions.taps import (
    GRADIENT,
    NUMBER,
    NUMBERED,
    PLAIN,
    WANTED,
    CallCount,
    Sink,
    Tapped,
    parsed,
)
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming.states import ModuleState
    from introspect_cli.capture.probes.gradients import GradientProbe
    from introspect_cli.capture.probes.modules import ModuleProbe
    from introspect_cli.capture.regions.gradients import Ends

_UNSEEN_GRADIENT = (
    "inside a compiled region no tap sees all uses of a value that is written to, or used by the call that gives it"
)
_SHARE = "a compiled region uses this value inside, too, where no tap sees it"


class _Calls:
    """Call numbers of one module in a phase of a step.

    Attributes:
        seen: texts of taps that have come by in the graph that runs; None where none does. One that comes again begins
            another run, of which nobody told: a compiled backward pass that computes the forward pass anew.
    """

    def __init__(self) -> None:
        self.seen: set[str] | None = None
        self._count = CallCount()  # of taps that are in no graph
        self._before = self._next = 0
        self._given: set[str] | None = None  # paths of what the latest call has given

    def number(self, tapped: Tapped, text: str, counted: int) -> int:
        """Number of the call that a tap belongs to; `counted` calls were seen by other means."""
        if tapped.call < 0:
            return self._count.at(tapped.kind, tapped.path)
        gives = tapped.kind == Kind.OUTPUT.value
        if self.seen is None or text in self.seen:
            # After a graph break the call goes on in another graph: what it gives comes by alone.
            goes_on = gives and self._given is not None and tapped.path not in self._given
            self._before, self.seen = max(counted, self._next) - goes_on, set()
        self.seen.add(text)
        call = self._before + tapped.call
        if call >= self._next or self._given is None:
            self._given = set()
        if gives:
            self._given.add(tapped.path)
        self._next = max(call + 1, self._next)
        return call


class TapProbe(GuardedProbe):
    """Records what taps inside compiled and scripted regions report."""

    name = "taps"
    lost = "what runs inside compiled and scripted regions is"

    def __init__(self, context: Context, modules: ModuleProbe, gradients: GradientProbe) -> None:
        super().__init__(context, then=self._take_nothing)
        self._modules = modules
        self._numbered: list[weakref.ref[nn.Module]] = []
        self._numbers: ById[int] = ById()
        self._calls: defaultdict[tuple[str, Phase], _Calls] = defaultdict(_Calls)
        self._places: list[tuple[int, int]] = []
        self._gradients = gradients
        self._open: dict[str, list[list[int]]] = {}
        self._guarded_ends = context.guard.around(self.name, "gradients at the ends of compiled regions are")

    def install(self) -> None:
        """Receive what taps report."""
        Sink.take = self._take
        super().install()

    def remove(self) -> None:
        """Stop receiving."""
        self._take_nothing()
        super().remove()

    def _take_nothing(self) -> None:
        Sink.take = None

    def number(self, module: nn.Module) -> str:
        """`#0`, `#1`, ...: number of a module whose name is not known before its first call."""
        number = self._numbers.made(module, lambda: len(self._numbered))
        if number == len(self._numbered):
            self._numbered.append(weakref.ref(module))
        return f"{NUMBERED}{number}"

    def on_tick(self) -> None:
        """Reset calls, order and open gradients."""
        self._calls.clear()
        self._places.clear()
        self._open.clear()

    def _take(self, value: torch.Tensor, text: str) -> None:
        """Record the value or gradient that a tap reports; not while a compiler computes constants."""
        if not self._recorder.wanted:
            return
        with self._guarded:
            if text.startswith(GRADIENT):
                self._gradient(value, text[len(GRADIENT) :])
            elif not private_api.compiling():  # a compiler that computes constants beforehand is no run
                before, text = self._recorder.rows, text.partition("\n")[0]
                if not text:
                    return  # it is there for the gradient
                tapped = parsed(text)
                self._tapped(value, text, tapped)
                if tapped.place >= 0 and private_api.graph_task() == -1:
                    self._places += [(row, tapped.place) for row in range(before, self._recorder.rows)]

    def _tapped(self, value: torch.Tensor, text: str, tapped: Tapped) -> None:
        """Record a tapped value at its module's site, and keep its gradient's site for the backward pass."""
        stack, names = self._modules.stack, self._context.names
        state: ModuleState | None = None
        if tapped.module.startswith(NUMBERED):
            owner = self._numbered[int(tapped.module[1:])]()
            if owner is None:
                return
            state = names.find(owner) or names.state(owner, None)
        if (stack.calls == [None] and not stack.in_graph) or private_api.tracing_state() is not None:
            return  # the outermost call is one that is not recorded; a compiler's own graph is no module call
        outermost, phase = not stack.calls or stack.calls == [None], stack.phase
        if outermost and private_api.graph_task() != -1:
            phase = Phase.RECOMPUTE  # checkpointing inside a region: the compiled backward pass computes it again
        elif outermost:
            self._outermost()
            phase = Phase.FORWARD
        fqn, module_class = (tapped.module, tapped.module_class) if state is None else (state.fqn, state.module_class)
        watched = names.wanted(fqn) if state is None else state.watched
        if stack.calls and stack.calls[-1] is not None and stack.calls[-1].fqn == fqn and stack.calls[-1] is not state:
            return  # the module itself is running, with its hooks: its inputs and outputs are recorded as they are
        kind = Kind(tapped.kind)
        step = self._recorder.step
        counted = 0 if state is None else state.counted(step, phase)
        call = self._calls[fqn, phase].number(tapped, text, counted)
        if state is not None:
            state.seen(step, phase, call)
        gradient = self._gradient_site(tapped, fqn, module_class, call) if watched else -1
        in_backward = phase is Phase.RECOMPUTE and outermost  # the gradient is that of the first time
        if phase is not Phase.EVAL and not in_backward and (kind is Kind.OUTPUT or tapped.gradient.startswith(NUMBER)):
            self._open.setdefault(text, []).append([gradient] if gradient >= 0 else [])
        if not watched or kind not in self._context.kinds:
            return
        site = self._recorder.site(Site(phase, kind, fqn, call, tapped.path), SiteInfo(module_class))
        if tapped.gradient == PLAIN:
            self._recorder.gap(site, "a plain value inside a compiled region")
            return
        self._recorder.emit(site, value)
        if tapped.gradient == WANTED and gradient >= 0:
            self._recorder.gap(gradient, _UNSEEN_GRADIENT)

    def _gradient_site(self, tapped: Tapped, fqn: str, module_class: str, call: int) -> int:
        """Site of a tapped value's gradient; -1 where its kind is not recorded."""
        kind = Kind.GRAD_INPUT if tapped.kind == Kind.INPUT.value else Kind.GRAD_OUTPUT
        if kind not in self._context.kinds:
            return -1
        return self._recorder.site(Site(Phase.BACKWARD, kind, fqn, call, tapped.path), SiteInfo(module_class))

    def _outermost(self) -> None:
        """Begin the step and its roots, as a compiled function without a module is called."""
        self._context.clock.begin()
        if private_api.graph_task() == -1:
            for root in self._context.names.roots():
                self._context.clock.root_called(root)

    def _gradient(self, value: torch.Tensor, text: str) -> None:
        """Record a gradient at the sites of the last call with that tap's text."""
        _, several, lines = text.partition("\n")
        sites: list[int] = []
        for line in lines.split("\n") if several else (text,):
            waiting = self._open.get(line)
            if waiting:
                sites += waiting.pop()
        if sites:
            self._recorder.emit_at(sites, value)

    def end_region(self, ends: Ends, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Finish a forward run of a compiled graph: order its records, watch gradients of its inputs and outputs.

        What it recorded is put in the order of the program, whatever order the compiler made of it; what came in is
        watched, and of what went out is told from inside.
        """
        if not self._recorder.wanted:
            return
        with self._guarded_ends:
            for calls in self._calls.values():
                calls.seen = None
            places, self._places = self._places, []
            self._recorder.step_rows.rearrange(places)
            for place, text in ends.entering:
                for sites in self._open.pop(text, []):
                    for site in sites:
                        self._gradients.watch(arguments[place], site)
            for place, text in ends.leaving:
                if text:
                    outside: list[int] = []
                    self._open.setdefault(text, []).append(outside)
                    self._gradients.leave(results[place], outside)
                else:
                    self._gradients.leave(results[place], _SHARE)
