"""The loss: the roots from which a backward pass starts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api
from introspect_cli.capture.probes.base import Patches
from introspect_cli.capture.probes.leaves import Leaves
from introspect_cli.capture.ranks import torch_distributed
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        self._leaves = Leaves(context)

    def install(self) -> None:
        """Replace the two functions; also where no loss is recorded, since a backward pass tells training."""
        for name in ("backward", "grad"):
            self._patches.replace(torch.autograd, name, self._watched(name, getattr(torch.autograd, name)))
        self._context.on_tick.append(self._ticked)
        self._guarded.on = True

    def remove(self) -> None:
        """Put the functions back."""
        self._guarded.on = False
        self._patches.remove()

    def _ticked(self) -> None:
        self._calls = 0

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def entry(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._guarded.on:
                return original(*args, **kwargs)
            after: Callable[[Any], None] | None = None
            with self._guarded:
                after = self._starting(name, args, kwargs)
            result = original(*args, **kwargs)
            if after is not None and self._guarded.on:
                with self._guarded, unobserved():
                    after(result)
            return result

        return entry

    def _starting(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """Record what a backward pass starts from; what is to be done with its result."""
        if private_api.graph_task() != -1:
            return None  # a backward inside a backward: checkpointing, not the script
        if private_api.compiling():
            return None  # a compiler that traces one
        stage = torch_distributed.in_stage()
        if stage is not None and (stage.what != "backward" or stage.stage.stage_index < stage.stage.num_stages - 1):
            return None  # what a stage goes back from is what it gave to the next
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        with unobserved():
            self._context.backward_begins()
            if not self._recorder.wanted:
                return None
            call, self._calls = self._calls, self._calls + 1
            if stage is not None and stage.chunk >= 0:
                call = self._context.pipelines.loss(stage.stage, stage.chunk, self._recorder.step)
            roots = [roots] if isinstance(roots, torch.Tensor) else roots
            if not isinstance(roots, (list, tuple)):
                return None  # an iterator would be empty when torch gets it
            leaves = self._leaves.before(roots) if self._leaves.wanted else []
            self._record(roots, call)
            if not leaves:
                return None
            if name == "backward":
                return lambda _: self._leaves.after([(leaf, tensor.grad) for leaf, tensor in leaves], call)
            inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
            return lambda result: self._given(inputs, result, call)

    def _given(self, inputs: Any, result: Any, call: int) -> None:
        """Record the gradients that `torch.autograd.grad` has returned, of those inputs that have a name."""
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        if isinstance(inputs, (list, tuple)) and isinstance(result, tuple):
            pairs = zip(inputs, result, strict=False)
            named = [(self._leaves.names.get(id(tensor)), gradient) for tensor, gradient in pairs]
            self._leaves.after([(name, gradient) for name, gradient in named if name is not None], call)

    def _record(self, roots: Sequence[Any], call: int) -> None:
        if self._context.draws.moved():
            self._context.draws.note(Phase.LOSS, "loss", call, before=True)
        if Kind.LOSS not in self._context.kinds:
            return
        for position, root in enumerate(roots):
            if isinstance(root, torch.Tensor):
                path = "" if len(roots) == 1 else f"[{position}]"
                self._recorder.tensor(self._recorder.site(Site(Phase.LOSS, Kind.LOSS, "loss", call, path)), root)


PROBE = LossProbe
