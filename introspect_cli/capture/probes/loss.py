"""The loss: the roots from which a backward pass starts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api
from introspect_cli.capture.probes.base import Patches
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context


class LossProbe:
    """Watches `torch.autograd.backward` (which `Tensor.backward` calls) and `torch.autograd.grad`."""

    name = "loss"

    def __init__(self, context: Context) -> None:
        """Start without calls."""
        self._context = context
        self._guarded = context.guard.around(self.name, "losses are")
        self._recorder = context.recorder
        self._calls = 0
        self._patches = Patches()

    def install(self) -> None:
        """Replace the two functions."""
        if Kind.LOSS not in self._context.kinds:
            return
        for name in ("backward", "grad"):
            self._patches.replace(torch.autograd, name, self._watched(getattr(torch.autograd, name)))
        self._context.on_tick.append(self._ticked)
        self._guarded.on = True

    def remove(self) -> None:
        """Put the functions back."""
        self._guarded.on = False
        self._patches.remove()

    def _ticked(self) -> None:
        self._calls = 0

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def entry(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._guarded.on and self._recorder.wanted:
                with self._guarded:
                    self._starting(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
            return original(*args, **kwargs)

        return entry

    def _starting(self, roots: Any) -> None:
        if private_api.graph_task() != -1:
            return  # a backward inside a backward: checkpointing, not the script
        context = self._context
        if context.pipeline is not None and context.pipeline["stage"] < context.pipeline["stages"] - 1:
            return  # what a stage goes back from is what it gave to the next
        if private_api.pipeline_stage() is not None:
            return
        with unobserved():
            self._context.evaluation.trained()
            self._context.look_for_unseen_step()
            call, self._calls = self._calls, self._calls + 1
            self._record(roots, call)

    def _record(self, roots: Any, call: int) -> None:
        if self._context.draws.moved():
            self._context.draws.note(Phase.LOSS, "loss", call, before=True)
        single = isinstance(roots, torch.Tensor)
        if not single and not isinstance(roots, (list, tuple)):
            return  # an iterator would be empty when torch gets it
        for position, root in enumerate([roots] if single else roots):
            if isinstance(root, torch.Tensor):
                path = "" if single or len(roots) == 1 else f"[{position}]"
                self._recorder.tensor(self._recorder.site(Site(Phase.LOSS, Kind.LOSS, "loss", call, path)), root)
