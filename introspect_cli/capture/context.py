"""What the probes of one capture share, and the step clock that they drive together.

A step ends when an outermost optimizer step returns (or a gradient scaler skips one). A script that never builds an
optimizer has no such moment; there a step ends where the next outermost forward begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.names import ModuleState, Names, ParameterName
    from introspect_cli.capture.recorder import Recorder


class Context:
    """The recorder, the names, the guard, and the moments at which probes call on each other."""

    def __init__(
        self, recorder: Recorder, names: Names, guard: Guard, kinds: frozenset[Kind], *, wants_eval: bool
    ) -> None:
        """Take what the session has made; probes register for moments with `on_*`."""
        self.recorder = recorder
        self.names = names
        self.guard = guard
        self.kinds = kinds
        self.wants_eval = wants_eval
        self.on_begin: list[Callable[[], None]] = []
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_after_optimizer: list[Callable[[], None]] = []
        self.on_tick: list[Callable[[], None]] = []
        self.has_optimizer = False
        self.ticks = 0
        self.manual = False
        self._trained: set[int] = set()
        self._trained_roots: dict[int, tuple[int, bool]] = {}
        self._begun = -1
        self._forwards = 0

    def begin(self) -> None:
        """Something of the step is about to happen; the first such moment records how the step starts."""
        if self._begun != self.recorder.step:
            self._begun = self.recorder.step
            if self.recorder.wanted:
                for listener in self.on_begin:
                    listener()

    def outermost_forward(self) -> None:
        """An outermost module is about to be called, outside any backward pass."""
        if not self.has_optimizer:
            if self._forwards:
                self.auto_tick()
            self._forwards += 1
        self.begin()

    def root_called(self, module: nn.Module) -> None:
        """An outermost module is about to run and will be recorded."""
        for listener in self.on_root:
            listener(module)

    def auto_tick(self) -> None:
        """End the step, unless the script ends its steps itself."""
        if not self.manual:
            self.tick()

    def manual_tick(self) -> None:
        """End the step because the script says so; from now on nothing else ends steps."""
        just_ticked = not self.manual and self.ticks > 0 and self.recorder.rows == 0
        self.manual = True
        if not just_ticked:
            self.tick()

    def tick(self) -> None:
        """End the step."""
        self.ticks += 1
        self._forwards = 0
        self.recorder.tick()
        for listener in self.on_tick:
            listener()

    def trains(self, parameters: list[torch.Tensor]) -> None:
        """Hear of the parameters of an optimizer."""
        self.has_optimizer = True
        self._trained.update(map(id, parameters))
        self._trained_roots.clear()

    def is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer holds any of a module's parameters.

        It tells a forward pass without gradients that evaluates the model in training from one that is part of
        training (a teacher, a frozen encoder).
        """
        known = self._trained_roots.get(id(module))
        if known is None or known[0] != len(self._trained):
            known = (
                len(self._trained),
                any(id(parameter) in self._trained for parameter in module.parameters()),
            )
            self._trained_roots[id(module)] = known
        return known[1]

    def state_site(self, name: ParameterName, phase: Phase, kind: Kind, path: str = "") -> int:
        """The site of a parameter, of its gradient, or of something the optimizer keeps for it."""
        return self.recorder.site(Site(phase, kind, name.fqn, 0, path), SiteInfo(name.module_class))

    def state_of(self, module: nn.Module) -> ModuleState | None:
        """The module's state, None if it was never called."""
        return self.names.find(module)
