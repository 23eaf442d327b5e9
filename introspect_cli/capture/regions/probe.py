"""From what a tap says to a record: the same sites that the module would have had, run as python.

A tap knows which module it sits in, by a number or by name, and what it sees of it. Which call of the module
it is follows from how often it has come by in this step; a gradient belongs to the last call whose gradient has not
come yet, since the backward pass runs in reverse.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from introspect_cli.capture import private_api
from introspect_cli.capture.naming.identity import ById
from introspect_cli.capture.ops.calls import SCRIPT
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.regions.taps import (
    GRADIENT,
    NUMBER,
    NUMBERED,
    OPERATOR,
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


def _is_hidden(calls: list[ModuleState | None], *, in_graph: bool) -> bool:
    """Whether the outermost module call is one that is not recorded; a compiler's own graph is no module call."""
    return calls == [None] and not in_graph


def _is_outermost(calls: list[ModuleState | None]) -> bool:
    """Whether no module call that is recorded is under way."""
    return not calls or calls == [None]


class Place(NamedTuple):
    """Where something inside a region runs.

    Attributes:
        fqn: of the module.
        module_class: its class.
        watched: whether it is to be recorded.
        phase: of the step.
        state: of the module, where it is known by number.
    """

    fqn: str
    module_class: str
    watched: bool
    phase: Phase
    state: ModuleState | None


class _Calls:
    """Calls of one module in a phase of a step, as its taps tell them.

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
        """Which call a tap belongs to; `counted` are those that something else than taps has seen."""
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


class OperatorLooks(Protocol):
    """What takes looks at single operators."""

    def take_look(self, number: int, value: torch.Tensor) -> None:
        """A look has come by."""


class TapProbe(GuardedProbe):
    """Puts a sink in for as long as a capture lasts."""

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
        self._operators: OperatorLooks | None = None
        self._guarded_ends = context.guard.around(self.name, "gradients at the ends of compiled regions are")

    def install(self) -> None:
        """Take what taps see."""
        Sink.take = self._take
        self.hear(self._context.clock.on_tick, self._ticked)
        super().install()

    def remove(self) -> None:
        """Take nothing more."""
        self._take_nothing()
        super().remove()

    def _take_nothing(self) -> None:
        Sink.take = None

    def pass_operators(self, taker: OperatorLooks | None) -> None:
        """Have looks at single operators taken by somebody, or by nobody."""
        self._operators = taker

    def number(self, module: nn.Module) -> str:
        """What a tap calls a module whose name is not known before it is first called."""
        number = self._numbers.made(module, lambda: len(self._numbered))
        if number == len(self._numbered):
            self._numbered.append(weakref.ref(module))
        return f"{NUMBERED}{number}"

    def _ticked(self) -> None:
        self._calls.clear()
        self._places.clear()
        self._open.clear()

    def _take(self, value: torch.Tensor, text: str) -> None:
        if not self._recorder.wanted:
            return
        with self._guarded:
            if text.startswith(GRADIENT):
                self._gradient(value, text[len(GRADIENT) :])
            elif not private_api.compiling():  # a compiler that computes constants beforehand is no run
                before = self._recorder.rows
                place = self._forward(value, text.partition("\n")[0])
                if place >= 0 and private_api.graph_task() == -1:
                    self._places += [(row, place) for row in range(before, self._recorder.rows)]

    def numbers(self) -> dict[int, str]:
        """What taps call each module that has been met and is alive, by its `id`."""
        alive = ((number, ref()) for number, ref in enumerate(self._numbered))
        return {id(module): f"{NUMBERED}{number}" for number, module in alive if module is not None}

    def place(self, module: str, module_class: str = "") -> Place | None:
        """Where a tap is, by what it calls its module; None if nothing there is to be recorded now.

        Args:
            module: number of the module, or its FQN; "" for the module that is running, or the script if none is.
            module_class: its class, where it is known by name.
        """
        stack, names = self._modules.stack, self._context.names
        state: ModuleState | None = None
        if module.startswith(NUMBERED):
            owner = self._numbered[int(module[1:])]()
            if owner is None:
                return None
            state = names.find(owner) or names.state(owner, None)
        if _is_hidden(stack.calls, in_graph=stack.in_graph) or private_api.tracing_state() is not None:
            return None
        running = next((state for state in reversed(stack.calls) if state is not None), None)
        if not module and running is not None:
            return Place(running.fqn, running.module_class, running.watched, stack.phase, running)
        outermost = _is_outermost(stack.calls)
        if outermost and private_api.graph_task() != -1:
            phase = Phase.RECOMPUTE  # checkpointing inside a region: the compiled backward pass computes it again
        elif outermost:
            self._outermost()
            phase = Phase.FORWARD
        else:
            phase = stack.phase
        if state is not None:
            return Place(state.fqn, state.module_class, state.watched, phase, state)
        if not module:
            return Place(SCRIPT, "", names.wanted(SCRIPT), Phase.LOSS, None)
        return Place(module, module_class, names.wanted(module), phase, None)

    def _forward(self, value: torch.Tensor, text: str) -> int:
        """Record what a tap sees; its place in the program of its graph, -1 where that is not known."""
        if not text:
            return -1  # it is there for the gradient
        if text.startswith(OPERATOR):
            number, _, place = text[len(OPERATOR) :].partition(".")
            if self._operators is not None:
                self._operators.take_look(int(number), value)
            return int(place)
        tapped = parsed(text)
        self._tapped(value, text, tapped)
        return tapped.place

    def _tapped(self, value: torch.Tensor, text: str, tapped: Tapped) -> None:
        place = self.place(tapped.module, tapped.module_class)
        if place is None:
            return
        fqn, module_class, watched, phase, state = place
        stack = self._modules.stack
        if stack.calls and stack.calls[-1] is not None and stack.calls[-1].fqn == fqn and stack.calls[-1] is not state:
            return  # the module itself is running, with its hooks: its inputs and outputs are recorded as they are
        kind = Kind(tapped.kind)
        call = self._call(tapped, text, place)
        gradient = self._gradient_site(tapped, fqn, module_class, call) if watched else -1
        in_backward = phase is Phase.RECOMPUTE and _is_outermost(stack.calls)  # the gradient is that of the first time
        if phase is not Phase.EVAL and not in_backward and (kind is Kind.OUTPUT or tapped.gradient.startswith(NUMBER)):
            self._open.setdefault(text, []).append([gradient] if gradient >= 0 else [])
        if not watched or kind not in self._context.kinds:
            return
        site = self._recorder.site(Site(phase, kind, fqn, call, tapped.path), SiteInfo(module_class))
        if tapped.gradient == PLAIN:
            self._recorder.missing(site, "a plain value inside a compiled region")
            return
        self._recorder.tensor(site, value)
        if tapped.gradient == WANTED and gradient >= 0:
            self._recorder.missing(gradient, _UNSEEN_GRADIENT)

    def _call(self, tapped: Tapped, text: str, place: Place) -> int:
        """Which call of its module in this step a tap belongs to."""
        state, step = place.state, self._recorder.step
        counted = 0 if state is None else state.counted(step, place.phase)
        call = self._calls[place.fqn, place.phase].number(tapped, text, counted)
        if state is not None:
            state.seen(step, place.phase, call)
        return call

    def _gradient_site(self, tapped: Tapped, fqn: str, module_class: str, call: int) -> int:
        """The site of the gradient of what is tapped; -1 where it is not wanted."""
        kind = Kind.GRAD_INPUT if tapped.kind == Kind.INPUT.value else Kind.GRAD_OUTPUT
        if kind not in self._context.kinds:
            return -1
        return self._recorder.site(Site(Phase.BACKWARD, kind, fqn, call, tapped.path), SiteInfo(module_class))

    def _outermost(self) -> None:
        """A compiled function, no module, was called: the step begins all the same, and so do its roots."""
        self._context.clock.begin()
        if private_api.graph_task() == -1:
            for root in self._context.names.roots():
                self._context.clock.root_called(root)

    def _gradient(self, value: torch.Tensor, text: str) -> None:
        _, several, lines = text.partition("\n")
        sites: list[int] = []
        for line in lines.split("\n") if several else (text,):
            waiting = self._open.get(line)
            if waiting:
                sites += waiting.pop()
        if sites:
            self._recorder.tensor_at(sites, value)

    def end_region(self, ends: Ends, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """A compiled graph has run forward.

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
                    self._gradients.record_elsewhere(results[place], outside)
                else:
                    self._gradients.leave_out(results[place], _SHARE)
