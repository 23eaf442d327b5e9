"""Gradients of module inputs and outputs, by hooks on the tensors themselves.

Full backward hooks on modules wrap inputs and outputs in an autograd function, which breaks in-place operations and
can reorder how gradients accumulate. A hook on the tensor changes nothing. One tensor is often the output of one
module and the input of two others; it gets one hook, its gradient is summarised once and recorded at every site.
What is recorded is the tensor's whole gradient, summed over all its uses.

`register_hook` leaves a dictionary on the tensor that the script can see and count. What runs in a backward pass is the
autograd node's reference to it; so the dictionary is given to the node and taken off the tensor again. A leaf has no
node: there, the hook is where the script can see it.

`gradients.cpp` has the hook, so that no frame of Python runs in a backward pass for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Phase
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context


class GradientProbe(GuardedProbe):
    """Records gradients by hooks on tensors."""

    name = "gradients"
    lost = "gradients of module inputs and outputs are"

    def __init__(self, context: Context) -> None:
        """Start without hooks."""
        super().__init__(context)
        self._watched: dict[int, Any] = {}
        self._leaf_handles: list[Any] = []
        self._patches.undo_by(self.on_tick)
        recorder = context.recorder
        compiled: Any = KERNELS.gradients(
            *(self.record, self._guarded, recorder, recorder.intake, self._watched, self._watch_leaf),
            *(torch.is_grad_enabled, Phase.BACKWARD, Phase.RECOMPUTE),
        )
        self._new_hook = compiled.hook
        self.watch: Callable[[torch.Tensor, int, bool], None] = compiled.watch
        """Have the gradient of a tensor that requires one recorded at a site when it comes.

        Several sites share one hook and one summary. In a recomputed forward, which the last argument tells, a tensor
        of the first one has its sites already. One whose graph autograd has given up gets no hook.
        """
        self.take: Callable[..., int] = compiled.take
        """Record plain tensors, and watch their gradients, at known sites; how many, up to the first other value.

        Given are tensors, as many paths or more, the module's sites, the phase, the kinds of tensor and gradient (None:
        not recorded), and the call.
        """

    def _watch_leaf(self, tensor: torch.Tensor, site: int, recomputed: bool) -> None:
        """`watch` for a tensor without an autograd node: the hook is on the tensor until the step ends."""
        known = self._watched.get(id(tensor))
        hooks: Any = tensor._backward_hooks or {}  # noqa: SLF001 - there is no public way to ask for one's own hook
        if known is not None and hooks.get(known.number) is known:
            if not recomputed:
                known.add(site)
            return
        self._watched[id(tensor)] = hook = self._new_hook(site)
        handle = tensor.register_hook(hook)
        hook.number = handle.id
        # A leaf outlives its graph: without this, a parameter used as an input would gather hooks for ever.
        self._leaf_handles.append(handle)

    def watch_share(self, tensor: torch.Tensor, site: int, placed: Placed, is_recomputed: bool) -> None:
        """Have the gradient of a tensor from `to_local` recorded as the part of the whole that it is.

        A gradient that is a DTensor, or not of that part's size, is recorded as it is; so is that of a share that is
        known otherwise, is summed up elsewhere, or is recomputed.

        Args:
            tensor: from `to_local`.
            site: where.
            placed: which part of the whole the tensor is, and so its gradient.
            is_recomputed: in a recomputed forward.
        """
        shape, part = placed.shape, placed.part
        node, at = tensor.grad_fn, tensor.output_nr
        if part.source != "tag" or part.reduction or is_recomputed or node is None:
            self.watch(tensor, site, is_recomputed)
            return

        def recorded(gradients: tuple[torch.Tensor | None, ...]) -> None:
            """Record the gradient as the part; as it is if it is a DTensor or has another size than the part.

            Nothing for None, in an unrecorded step, or after a failure.
            """
            gradient = gradients[at]
            if self._guarded.on and self._recorder.wanted and gradient is not None:
                with self._guarded:
                    whole = hasattr(gradient, "placements") or gradient.numel() != part.numel
                    self._recorder.emit(site, gradient if whole else Placed(gradient, shape, part))

        node.register_prehook(recorded)

    def record(self, sites: list[int], gradient: torch.Tensor | None) -> None:
        """Record one gradient at several sites; nothing for None, in an unrecorded step, or after a failure."""
        if self._guarded.on and self._recorder.wanted and gradient is not None:
            with self._guarded:
                self._recorder.emit_at(sites, gradient)

    def on_tick(self) -> None:
        """As a step ends, or the probe is removed, forget tensors and remove the hooks on leaves.

        Graphs that are still alive keep their hooks, which do nothing once it is removed.
        """
        self._watched.clear()
        handles, self._leaf_handles = self._leaf_handles, []
        for handle in handles:
            handle.remove()
