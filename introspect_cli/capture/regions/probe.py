"""From what a tap says to a record: the same sites that the module would have had, run as python.

A tap knows which module it sits in, by a number of ours or by name, and what it sees of it. Which call of the module
it is follows from how often it has come by in this step; a gradient belongs to the last call whose gradient has not
come yet, since the backward pass runs in reverse.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

from introspect_cli.capture import private_api
from introspect_cli.capture.ops.calls import SCRIPT
from introspect_cli.capture.regions.taps import (
    GRADIENT,
    NUMBER,
    NUMBERED,
    OPERATOR,
    PLAIN,
    WANTED,
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
    from introspect_cli.capture.names import ModuleState
    from introspect_cli.capture.probes.gradients import GradientProbe
    from introspect_cli.capture.probes.modules import ModuleProbe
    from introspect_cli.capture.regions.gradients import Ends

_UNSEEN_GRADIENT = (
    "inside a compiled region no tap sees all uses of a value that is written to, or used by the call that gives it"
)
_SHARE = "a compiled region uses this value inside, too, where no tap sees it"


def _unwanted(calls: list[ModuleState | None], *, in_graph: bool) -> bool:
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
    """Which call of a module it is: a new one begins with an input after an output, or with what has come by before."""

    def __init__(self) -> None:
        """Start with the first call."""
        self.number = 0
        self._seen: set[tuple[Kind, str]] = set()
        self._last = Kind.INPUT

    def at(self, kind: Kind, path: str) -> int:
        """The number of the call that this value belongs to."""
        if (kind is Kind.INPUT and self._last is Kind.OUTPUT) or (kind, path) in self._seen:
            self.number += 1
            self._seen.clear()
        self._seen.add((kind, path))
        self._last = kind
        return self.number


class OperatorLooks(Protocol):
    """What takes looks at single operators."""

    def saw(self, number: int, value: torch.Tensor) -> None:
        """A look has come by."""


class TapProbe:
    """Puts a sink in for as long as a capture lasts."""

    name = "taps"

    def __init__(self, context: Context, modules: ModuleProbe, gradients: GradientProbe) -> None:
        """Take what all probes share, who knows the module that is running, and who watches tensors."""
        self._context = context
        self._recorder = context.recorder
        self._modules = modules
        self._numbered: list[weakref.ref[nn.Module]] = []
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._parsed: dict[str, Tapped] = {}
        self._calls: dict[tuple[str, Phase], _Calls] = {}
        self._gradients = gradients
        self._open: dict[str, list[list[int]]] = {}
        self._operators: OperatorLooks | None = None

    def install(self) -> None:
        """Take what taps see."""
        Sink.take = self._take
        self._context.on_tick.append(self._ticked)

    def remove(self) -> None:
        """Take nothing more."""
        Sink.take = None
        if self._ticked in self._context.on_tick:
            self._context.on_tick.remove(self._ticked)

    def pass_operators(self, taker: OperatorLooks | None) -> None:
        """Have looks at single operators taken by somebody, or by nobody."""
        self._operators = taker

    def number(self, module: nn.Module) -> str:
        """What a tap calls a module whose name is not known before it is first called."""
        found = self._numbers.get(module)
        if found is None:
            found = self._numbers[module] = len(self._numbered)
            self._numbered.append(weakref.ref(module))
        return f"{NUMBERED}{found}"

    def _ticked(self) -> None:
        self._calls.clear()
        self._open.clear()

    def _take(self, value: torch.Tensor, text: str) -> None:
        if not self._recorder.wanted:
            return
        try:
            if text.startswith(GRADIENT):
                self._gradient(value, text[len(GRADIENT) :])
            else:
                self._forward(value, text)
        except Exception as error:
            Sink.take = None
            self._context.guard.failure(self.name, "what runs inside compiled and scripted regions is", error)

    def _parse(self, text: str) -> Tapped:
        known = self._parsed.get(text)
        if known is None:
            known = self._parsed[text] = parsed(text)
        return known

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
        if _unwanted(stack.calls, in_graph=stack.in_graph) or private_api.tracing_state() is not None:
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

    def _forward(self, value: torch.Tensor, text: str) -> None:
        text = text.partition("\n")[0]
        if not text:
            return  # it is there for the gradient
        if text.startswith(OPERATOR):
            if self._operators is not None:
                self._operators.saw(int(text[len(OPERATOR) :]), value)
            return
        tapped = self._parse(text)
        place = self.place(tapped.module, tapped.module_class)
        if place is None:
            return
        fqn, module_class, watched, phase, state = place
        stack = self._modules.stack
        if stack.calls and stack.calls[-1] is not None and stack.calls[-1].fqn == fqn and stack.calls[-1] is not state:
            return  # the module itself is running, with its hooks: its inputs and outputs are recorded as they are
        kind = Kind(tapped.kind)
        call = self._calls.setdefault((fqn, phase), _Calls()).at(kind, tapped.path)
        if state is not None:
            state.seen(self._recorder.step, phase, call)
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

    def _gradient_site(self, tapped: Tapped, fqn: str, module_class: str, call: int) -> int:
        """The site of the gradient of what is tapped; -1 where it is not wanted."""
        kind = Kind.GRAD_INPUT if tapped.kind == Kind.INPUT.value else Kind.GRAD_OUTPUT
        if kind not in self._context.kinds:
            return -1
        return self._recorder.site(Site(Phase.BACKWARD, kind, fqn, call, tapped.path), SiteInfo(module_class))

    def _outermost(self) -> None:
        """A compiled function, no module, was called: the step begins all the same, and so do its roots."""
        self._context.begin()
        if private_api.graph_task() == -1:
            for root in self._context.names.roots():
                self._context.root_called(root)

    def _gradient(self, value: torch.Tensor, text: str) -> None:
        _, several, lines = text.partition("\n")
        sites: list[int] = []
        for line in lines.split("\n") if several else (text,):
            waiting = self._open.get(line)
            if waiting:
                sites += waiting.pop()
        if sites:
            self._recorder.tensor_at(sites, value)

    def ran(self, ends: Ends, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """A compiled graph has run forward: watch what came in, and tell of what went out from inside."""
        if not self._recorder.wanted:
            return
        try:
            for place, text in ends.entering:
                for sites in self._open.pop(text, []):
                    for site in sites:
                        self._gradients.watch(arguments[place], site)
            for place, text in ends.leaving:
                if text:
                    outside: list[int] = []
                    self._open.setdefault(text, []).append(outside)
                    self._gradients.told_elsewhere(results[place], outside)
                else:
                    self._gradients.untold(results[place], _SHARE)
        except Exception as error:
            self._context.guard.failure(self.name, "gradients at the ends of compiled regions are", error)
