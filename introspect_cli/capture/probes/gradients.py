"""Gradients of module inputs and outputs, by hooks on the tensors themselves.

Full backward hooks on modules wrap inputs and outputs in an autograd function, which breaks in-place operations and
can reorder how gradients accumulate. A hook on the tensor changes nothing. One tensor is often the output of one
module and the input of two others; it gets one hook, its gradient is summarised once and recorded at every site.
What is recorded is the tensor's whole gradient, summed over all its uses.

`register_hook` leaves a dictionary on the tensor that the script can see and count. What runs in a backward pass is the
autograd node's reference to it; so the dictionary is given to the node and taken off the tensor again. A leaf has no
node: there, the hook is where the script can see it.

`gradients.cpp` has the hook, the number of a node, and the watching of a tensor that a node made, without a frame of
Python; each stands in for the one thing here that does the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from introspect_cli.capture import private_api
from introspect_cli.capture.naming.identity import ById
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.recording.recorder import Recorder
    from introspect_cli.records import Part


class _Hook:
    """A hook, and by what the tensor that it is on is known without a reference to it.

    One small object for each tensor: thousands live until the end of a step, and every few thousand objects the script
    pays for a round of the garbage collector.
    """

    __slots__ = ("_probe", "number", "sites")
    __torch_unserializable__ = True  # pickling a tensor warns of hooks that get lost, unless they are meant to be

    def __init__(self, probe: GradientProbe, site: int) -> None:
        self._probe = probe
        self.sites = [site]
        self.number: object = None

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self._probe.record(self.sites, gradient)

    def add(self, site: int) -> None:
        self.sites.append(site)


def _is_on_leaf(hook: Any, tensor: torch.Tensor) -> bool:
    """Whether introspect's hook is on a tensor that no node made."""
    hooks: Any = tensor._backward_hooks  # noqa: SLF001 - there is no public way to ask for one's own hook
    return hooks is not None and hooks.get(hook.number) is hook


def _leave_to_python(_tensor: torch.Tensor, _site: int) -> bool:
    """Stands where no extension watches tensors in one call."""
    return False


class GradientProbe:
    """Registers tensor hooks and records what they are given."""

    name = "gradients"

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        """Start without hooks."""
        self._recorder = recorder
        self._guarded = guard.around(self.name, "gradients of module inputs and outputs are")
        self._watched: Any = {}
        self._leaf_handles: list[Any] = []
        self._elsewhere: ById[list[int] | str] = ById()
        self._number_of: Callable[[Any], object] = private_api.node_number
        self._new_hook: Callable[[int], Any] = partial(_Hook, self)
        self._watch_made: Callable[[torch.Tensor, int], bool] = _leave_to_python
        self.compiled: Any = None
        """What `modules.cpp` is given to watch tensors with; None where nothing is compiled."""
        if KERNELS is not None and recorder.intake is not None:
            self._watched = KERNELS.hooks()  # it keeps those of earlier steps, too, for when their graphs are gone
            parts = (self._guarded, recorder, recorder.intake, self._watched, self._elsewhere.entries)
            self.compiled = KERNELS.gradients(self.record, *parts)
            self._number_of, self._new_hook = self.compiled.number, self.compiled.hook
            self._watch_made = self.compiled.watch

    def install(self) -> None:
        """Begin to watch; hooks come with the tensors."""
        self._guarded.on = True

    def remove(self) -> None:
        """Stop. Hooks on tensors that still live stay and do nothing."""
        self._guarded.on = False
        self.clear()
        if self.compiled is not None:
            self._watched.forget()

    def watch(self, tensor: torch.Tensor, site: int, *, recomputed: bool = False) -> None:
        """Record the gradient of `tensor`, when it comes, at `site`.

        A recomputed forward may be given the very tensors of the first one, whose gradients have their sites.
        """
        if not recomputed and self._watch_made(tensor, site):
            return
        elsewhere = self._elsewhere.get(tensor)
        if isinstance(elsewhere, str):
            self._recorder.missing(site, elsewhere)
            return
        if elsewhere is not None:
            elsewhere.append(site)
            return
        key = id(tensor)
        try:
            node = tensor.grad_fn
        except RuntimeError:
            # A view that autograd no longer knows the maker of, since its base was written over, has no gradient.
            return
        known = self._watched.get(key)
        number = None if node is None else self._number_of(node)
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
        """Record the gradient of what `to_local` made, with its place in the whole: the node is called with all of it.

        Args:
            tensor: not a leaf.
            site: where.
            shape: of the whole.
            part: which part of the whole the tensor is, and so its gradient.
        """
        node = tensor.grad_fn
        at = tensor.output_nr
        if node is None:
            return

        def recorded(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = gradients[at]
            if self._guarded.on and self._recorder.wanted and gradient is not None:
                with self._guarded:
                    whole = hasattr(gradient, "placements") or gradient.numel() != part.numel
                    self._recorder.tensor(site, gradient if whole else Placed(gradient, shape, part))

        node.register_prehook(recorded)

    def record(self, sites: list[int], gradient: torch.Tensor | None) -> None:
        """Record a gradient at the sites of its tensor."""
        if self._guarded.on and self._recorder.wanted and gradient is not None:
            with self._guarded:
                self._recorder.tensor_at(sites, gradient)

    def record_elsewhere(self, tensor: torch.Tensor, sites: list[int]) -> None:
        """Watch a tensor no longer: whoever holds the list records the gradient at the sites that come into it."""
        self._elsewhere.set(tensor, sites)

    def leave_out(self, tensor: torch.Tensor, reason: str) -> None:
        """Watch a tensor no longer: its whole gradient cannot be seen."""
        self._elsewhere.set(tensor, reason)

    def clear(self) -> None:
        """Let go of the step's tensors; graphs that are still alive keep their hooks."""
        self._watched.clear()
        self._elsewhere.clear()
        handles, self._leaf_handles = self._leaf_handles, []
        for handle in handles:
            handle.remove()
