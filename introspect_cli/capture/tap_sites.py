"""From what a tap says to a record: the same sites that the module would have had, run as python.

A tap knows which module it sits in, by a number of ours or by name, and what it sees of it. Which call of the module
it is follows from how often it has come by in this step; a gradient belongs to the last call whose gradient has not
come yet, since the backward pass runs in reverse.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.capture import private_api
from introspect_cli.capture.tap_sink import GRADIENT, Sink
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.modules import ModuleProbe
    from introspect_cli.capture.names import ModuleState

SEPARATOR = "|"
NUMBERED = "#"
PLAIN = "plain"
_UNSEEN_GRADIENT = "inside a compiled region only gradients of fresh outputs are recorded"


@dataclass(frozen=True)
class Tapped:
    """What a tap's text says.

    Attributes:
        module: number of the module, or its FQN.
        kind: `input`, `output`; `parameter` for a module's own parameter.
        path: where in the nested value.
        module_class: class of the module, where the text says so.
        gradient: `gradient` where one will pass that no tap can see; `plain` for a value that is no tensor.
    """

    module: str
    kind: str
    path: str
    module_class: str
    gradient: str


def text_of(module: str, kind: Kind, path: str = "", module_class: str = "", gradient: str = "") -> str:
    """The text a tap carries."""
    return SEPARATOR.join((module, kind.value, module_class, gradient, path))


def _parsed(text: str) -> Tapped:
    module, kind, module_class, gradient, path = text.split(SEPARATOR, 4)
    return Tapped(module, kind, path, module_class, gradient)


def _unwanted(calls: list[ModuleState | None], *, in_graph: bool) -> bool:
    """Whether the outermost module call is one that is not recorded; a compiler's own graph is no module call."""
    return calls == [None] and not in_graph


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


class TapProbe:
    """Puts a sink in for as long as a capture lasts."""

    name = "taps"

    def __init__(self, context: Context, modules: ModuleProbe) -> None:
        """Take what all probes share, and who knows the module that is running."""
        self._context = context
        self._recorder = context.recorder
        self._modules = modules
        self._numbered: list[weakref.ref[nn.Module]] = []
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._parsed: dict[str, Tapped] = {}
        self._calls: dict[tuple[str, Phase], _Calls] = {}
        self._open: dict[str, list[int]] = {}

    def install(self) -> None:
        """Take what taps see."""
        Sink.take = self._take
        self._context.on_tick.append(self._ticked)

    def remove(self) -> None:
        """Take nothing more."""
        Sink.take = None
        if self._ticked in self._context.on_tick:
            self._context.on_tick.remove(self._ticked)

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
        parsed = self._parsed.get(text)
        if parsed is None:
            parsed = self._parsed[text] = _parsed(text)
        return parsed

    def _named(self, tapped: Tapped) -> tuple[str, str, bool, ModuleState | None] | None:
        """FQN, class, whether it is wanted, and state of the module a tap sits in; None if it is gone."""
        if not tapped.module.startswith(NUMBERED):
            return tapped.module, tapped.module_class, self._context.names.wanted(tapped.module), None
        module = self._numbered[int(tapped.module[1:])]()
        if module is None:
            return None
        names = self._context.names
        state = names.find(module)
        if state is None:
            state = names.state(module, None)
        return state.fqn, state.module_class, state.watched, state

    def _forward(self, value: torch.Tensor, text: str) -> None:
        tapped = self._parse(text)
        named = self._named(tapped)
        if named is None:
            return
        fqn, module_class, watched, state = named
        stack = self._modules.stack
        if stack.calls and stack.calls[-1] is not None and stack.calls[-1].fqn == fqn and stack.calls[-1] is not state:
            return  # the module itself is running, with its hooks: its inputs and outputs are recorded as they are
        if _unwanted(stack.calls, in_graph=stack.in_graph) or private_api.tracing_state() is not None:
            return
        outermost = not stack.calls or stack.calls == [None]
        phase = Phase.FORWARD if outermost else stack.phase
        if outermost:
            self._outermost()
        kind = Kind(tapped.kind)
        call = self._calls.setdefault((fqn, phase), _Calls()).at(kind, tapped.path)
        if state is not None:
            state.seen(self._recorder.step, phase, call)
        if kind is Kind.OUTPUT and phase is not Phase.EVAL:
            self._open.setdefault(text, []).append(call)
        if not watched or kind not in self._context.kinds:
            return
        site = self._recorder.site(Site(phase, kind, fqn, call, tapped.path), SiteInfo(module_class))
        if tapped.gradient == PLAIN:
            self._recorder.missing(site, "a plain value inside a compiled region")
            return
        self._recorder.tensor(site, value)
        unseen = Kind.GRAD_INPUT if kind is Kind.INPUT else Kind.GRAD_OUTPUT
        if tapped.gradient and unseen in self._context.kinds:
            gradient = Site(Phase.BACKWARD, unseen, fqn, call, tapped.path)
            self._recorder.missing(self._recorder.site(gradient, SiteInfo(module_class)), _UNSEEN_GRADIENT)

    def _outermost(self) -> None:
        """A compiled function, no module, was called: the step begins all the same, and so do its roots."""
        self._context.begin()
        if private_api.graph_task() == -1:
            for root in self._context.names.roots():
                self._context.root_called(root)

    def _gradient(self, value: torch.Tensor, text: str) -> None:
        tapped = self._parse(text)
        named = self._named(tapped)
        calls = self._open.get(text)
        if named is None or not calls:
            return
        call = calls.pop()
        fqn, module_class, watched, _ = named
        kind = Kind.GRAD_OUTPUT if tapped.kind == Kind.OUTPUT.value else Kind.GRAD_INPUT
        if watched and kind in self._context.kinds:
            site = Site(Phase.BACKWARD, kind, fqn, call, tapped.path)
            self._recorder.tensor(self._recorder.site(site, SiteInfo(module_class)), value)
