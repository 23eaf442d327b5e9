"""Optimizer steps: gradients as the optimizer sees them, parameters and state as it leaves them, and the clock.

Torch's global step hooks run around `step` of every optimizer there is. Only the outermost step counts (an optimizer
that wraps another calls its step inside its own). An optimizer that is given a closure computes its gradients inside
`step`, once or many times; there they are recorded each time that the closure returns.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from introspect_cli.capture.identity import ById, FreeNames
from introspect_cli.capture.names import Holder
from introspect_cli.capture.probes.base import Patches
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.tensors import parallel
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.names import ParameterName
    from introspect_cli.capture.probes.state import StateProbe

_PLAIN = (bool, int, float, str)


class OptimizerProbe:
    """Watches optimizer steps and drives the step clock."""

    name = "optimizers"

    def __init__(self, context: Context, state: StateProbe) -> None:
        """Start without optimizers; `state` records parameters."""
        self._context = context
        self._guarded = context.guard.around(
            self.name, "optimizer steps (and so the ends of steps) are", context.lost_optimizers
        )
        self._recorder = context.recorder
        self._state = state
        self._names = FreeNames()
        self._parameters: ById[list[ParameterName]] = ById()
        self._state_seen: set[str] = set()
        self._known: dict[str, dict[str, Any]] = {}
        self._patches = Patches()
        self._handles: list[RemovableHandle] = []
        self._stepped = 0
        self._closures = 0
        self.settings: list[dict[str, Any]] = []
        self.settings_changed = False

    def install(self) -> None:
        """Register the step hooks; hear of optimizers as they are built, and of steps that a scaler skips."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        built, scaled = Optimizer.__init__, torch.amp.GradScaler.step

        @functools.wraps(built)
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for Optimizer.__init__
            built(self, *args, **kwargs)
            if probe._guarded.on:
                with probe._guarded:
                    probe._context.built(self)

        @functools.wraps(scaled)
        def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            stepped = probe._stepped
            result = scaled(self, optimizer, *args, **kwargs)
            if probe._guarded.on and probe._stepped == stepped:
                with probe._guarded, unobserved():
                    probe._skipped(optimizer)
            return result

        probe = self
        self._patches.replace(Optimizer, "__init__", __init__)
        self._patches.replace(torch.amp.GradScaler, "step", step)
        self._guarded.on = True

    def remove(self) -> None:
        """Take the hooks out."""
        self._guarded.on = False
        self._patches.remove()
        for handle in self._handles:
            handle.remove()

    @property
    def stepping(self) -> bool:
        """Whether this thread is inside an optimizer's step."""
        return bool(self._context.running.optimizers)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling() or not self._guarded.on:
            return None
        context = self._context
        # From the first step on, names stay as they are, and steps need not be guessed at.
        context.stepped = context.names.settled = True
        context.unseen_steps = False
        context.evaluation.trained()
        running = self._context.running.optimizers
        if running and not _inside_step(sys._getframe(1)):  # noqa: SLF001 - the documented way to a frame
            running.clear()  # the last step never returned: a closure raised and the script caught it
        running.append(id(optimizer))
        if len(running) > 1:
            return None
        self._closures = 0
        with self._guarded, unobserved():
            has_closure = _has_closure(args, kwargs)
            if not (has_closure and self._is_ahead(optimizer)):
                self._note(optimizer)
            self._context.begin()
            if self._recorder.wanted:
                self._record_before(optimizer, has_closure=has_closure)
            if has_closure:
                return self._watched_closure(optimizer, args, kwargs)
        return None

    def _watched_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a step, with a closure after which the gradients are recorded, each time it is called."""
        named = kwargs.get("closure") is not None
        closure = kwargs["closure"] if named else args[1]

        @functools.wraps(closure)
        def evaluate() -> Any:
            result = closure()
            if self._guarded.on and self._recorder.wanted:
                with self._guarded, unobserved():
                    self._evaluated(optimizer)
            return result

        if named:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _evaluated(self, optimizer: Optimizer) -> None:
        if self._parameters.get(optimizer) is None:
            self._note(optimizer)
        self._gradients(optimizer, self._parameters.get(optimizer) or [], self._closures)
        self._closures += 1

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._guarded.on:
            return
        running = self._context.running.optimizers
        if id(optimizer) in running:
            del running[running.index(id(optimizer)) :]
        if running:
            return
        self._stepped += 1
        with self._guarded, unobserved():
            if self._parameters.get(optimizer) is None:
                self._note(optimizer)
            if self._recorder.wanted:
                self._record_after(optimizer, has_closure=_has_closure(args, kwargs))
            self._context.auto_tick()

    def _skipped(self, optimizer: Optimizer) -> None:
        """A gradient scaler found infinities and left the optimizer alone: the step ends all the same."""
        self._note(optimizer)
        if self._recorder.wanted:
            self._record_before(optimizer, has_closure=False)
            self._record_after(optimizer, has_closure=True, gradients=False)
        self._context.auto_tick()

    def _is_ahead(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps before any model that holds its parameters was called, as with a closure."""
        names = self._context.names
        return self._parameters.get(optimizer) is None and any(
            names.parameter(parameter) is None for parameter in _parameters(optimizer)
        )

    def _note(self, optimizer: Optimizer) -> None:
        """Learn the optimizer's name and those of its parameters; both may grow while it lives."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._parameters.get(optimizer)
        if known is not None and len(known) == len(parameters):
            return
        self._context.trains(optimizer)
        name = self._names.name(optimizer, type(optimizer).__name__)
        names = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                known_name = self._context.names.parameter(parameter)
                if known_name is None:
                    known_name = self._context.names.name_parameter(
                        parameter, f"{name}.group{number}.{position}", type(optimizer).__name__
                    )
                known_name.held_by(Holder(optimizer, (number, position)))
                names.append(known_name)
        self._parameters.set(optimizer, names)
        self._context.names.forget_with(optimizer, list(map(id, parameters)))
        remaining = iter(names)
        self.settings = [entry for entry in self.settings if entry["name"] != name]
        self.settings.append(
            {
                "name": name,
                "class": type(optimizer).__name__,
                "groups": [
                    {
                        **{key: _setting(value) for key, value in group.items() if key != "params"},
                        "params": [next(remaining).fqn for _ in group["params"]],
                    }
                    for group in optimizer.param_groups
                ],
            }
        )
        self.settings_changed = True

    def _record_before(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        name = self._names.name(optimizer, type(optimizer).__name__)
        names = self._parameters.get(optimizer) or []
        kinds = self._context.kinds
        if Kind.HYPERPARAMETER in kinds:
            self._hyperparameters(optimizer, name)
        if names and Kind.OPTIMIZER_STATE in kinds and (self._recorder.resumed or name not in self._state_seen):
            self._state_seen.add(name)
            self._optimizer_state(optimizer, names, Phase.START)
        if not has_closure:
            self._gradients(optimizer, names)

    def _record_after(self, optimizer: Optimizer, *, has_closure: bool, gradients: bool = True) -> None:
        names = self._parameters.get(optimizer) or []
        if has_closure and gradients and not self._closures:
            self._gradients(optimizer, names)
        if gradients:
            parallel.note_computation(tensor.grad for tensor in _parameters(optimizer) if tensor.grad is not None)
        self._state.parameters_after(_parameters(optimizer))
        if Kind.OPTIMIZER_STATE in self._context.kinds:
            self._optimizer_state(optimizer, names, Phase.OPTIMIZER)
        for listener in self._context.on_after_optimizer:
            listener()

    def _gradients(self, optimizer: Optimizer, names: list[ParameterName], call: int = 0) -> None:
        if Kind.GRAD not in self._context.kinds:
            return
        sites, gradients = [], []
        for name, parameter in zip(names, _parameters(optimizer), strict=True):
            gradient = parameter.grad if name.watched else None
            if gradient is not None:
                sites.append(self._context.state_site(name, Phase.OPTIMIZER, Kind.GRAD, call=call))
                gradients.append(gradient)
        self._recorder.tensors(sites, gradients)

    def _optimizer_state(self, optimizer: Optimizer, names: list[ParameterName], phase: Phase) -> None:
        sites, tensors = [], []
        for name, parameter in zip(names, _parameters(optimizer), strict=True):
            # `state` is a defaultdict: asking it with [] would put an empty entry into the script's optimizer.
            state = optimizer.state.get(parameter) if name.watched else None
            if not state:
                continue
            for key, value in state.items():
                prefix = f"[{key!r}]"
                if isinstance(value, torch.Tensor):
                    sites.append(self._context.state_site(name, phase, Kind.OPTIMIZER_STATE, prefix))
                    tensors.append(value)
                    continue
                for path, leaf in flatten(value):
                    site = self._context.state_site(name, phase, Kind.OPTIMIZER_STATE, prefix + path)
                    if isinstance(leaf, torch.Tensor):
                        sites.append(site)
                        tensors.append(leaf)
                    elif isinstance(leaf, _PLAIN):
                        self._recorder.value(site, leaf)
        self._recorder.tensors(sites, tensors)

    def _hyperparameters(self, optimizer: Optimizer, name: str) -> None:
        """Record the learning rate each step, and everything else where it is new or has changed."""
        known = self._known.setdefault(name, {})
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                path = f"[{number}][{key!r}]"
                plain = _setting(value)
                if key == "lr" or self._recorder.resumed or known.get(path, known) != plain:
                    known[path] = plain
                    site = self._recorder.site(
                        Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, 0, path),
                        SiteInfo(type(optimizer).__name__),
                    )
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        self._recorder.tensor(site, value)
                    else:
                        self._recorder.value(site, plain)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _inside_step(frame: FrameType) -> bool:
    """Whether the frame, torch's around a step, has another such frame below it."""
    code, below = frame.f_code, frame.f_back
    while below is not None:
        if below.f_code is code:
            return True
        below = below.f_back
    return False


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `step` was given a closure; `args` begins with the optimizer itself."""
    return kwargs.get("closure") is not None or (len(args) > 1 and callable(args[1]))


def _setting(value: object) -> Any:
    """A hyper-parameter as plain data."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() <= 16 else f"tensor on {value.device}"
    if isinstance(value, (tuple, list)):
        return [_setting(item) for item in value]
    return type(value).__name__
