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

from introspect_cli.capture import private_api
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    import torch

    from introspect_cli.capture.context import Context
    from introspect_cli.records import Part


def _is_on_leaf(hook: Any, tensor: torch.Tensor) -> bool:
    """Whether a leaf tensor still has this very hook under the number it was registered with."""
    hooks: Any = tensor._backward_hooks  # noqa: SLF001 - there is no public way to ask for one's own hook
    return hooks is not None and hooks.get(hook.number) is hook


class GradientProbe(GuardedProbe):
    """Records gradients by hooks on tensors."""

    name = "gradients"
    lost = "gradients of module inputs and outputs are"

    def __init__(self, context: Context) -> None:
        """Start without hooks."""
        super().__init__(context)
        self._watched: dict[int, Any] = {}
        self._leaf_handles: list[Any] = []
        recorder = context.recorder
        self._new_hook: Any = KERNELS.gradients(self.record, self._guarded, recorder, recorder.intake).hook

    def remove(self) -> None:
        """Stop, forget this step's tensors and remove the hooks on leaves; other hooks that are left do nothing."""
        super().remove()
        self.on_tick()

    def watch(self, tensor: torch.Tensor, site: int, *, recomputed: bool = False) -> None:
        """Have a tensor's gradient recorded at `site` when it comes; several sites share one hook and one summary.

        Args:
            tensor: requires a gradient; one whose graph autograd has given up gets no hook.
            site: where.
            recomputed: True in a recomputed forward, which may be given the first one's tensors; these have their
                sites.
        """
        key = id(tensor)
        try:
            node = tensor.grad_fn
        except RuntimeError:
            # A view that autograd no longer knows the maker of, since its base was written over, has no gradient.
            return
        known = self._watched.get(key)
        number = None if node is None else private_api.node_number(node)
        if known is not None:
            same = _is_on_leaf(known, tensor) if node is None else number is not None and known.number == number
            if same:
                if not recomputed:
                    known.add(site)
                return
        hook = self._new_hook(site)
        self._watched[key] = hook
        if node is not None:
            private_api.add_hook(tensor, node, hook)
            hook.number = number
            return
        handle = tensor.register_hook(hook)
        hook.number = handle.id
        # A leaf outlives its graph: without this, a parameter used as an input would gather hooks for ever.
        self._leaf_handles.append(handle)

    def watch_share(self, tensor: torch.Tensor, site: int, shape: tuple[int, ...], part: Part) -> None:
        """Have the gradient of a tensor from `to_local` recorded as the part of the whole that it is.

        A gradient that is a DTensor, or not of that part's size, is recorded as it is.

        Args:
            tensor: not a leaf; a leaf gets no hook.
            site: where.
            shape: of the whole.
            part: which part of the whole the tensor is, and so its gradient.
        """
        node = tensor.grad_fn
        at = tensor.output_nr
        if node is None:
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
        """As a step ends, forget its tensors and remove the hooks on leaves.

        Graphs that are still alive keep their hooks.
        """
        self._watched.clear()
        handles, self._leaf_handles = self._leaf_handles, []
        for handle in handles:
            handle.remove()
