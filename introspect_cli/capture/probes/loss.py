"""Backward passes: the losses they start from, and the tensors they lead to where a script runs no module.

A script of plain tensors calls no module, so nothing would be recorded of it but losses. Its parameters are where the
graph of a loss ends: the tensors whose gradients a backward pass accumulates. They are called what the script calls
them where a variable of its holds them, and numbered where none does. Where an optimizer is, it tells of them after
each of its steps.
"""

from __future__ import annotations

import sys
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.frames import line_of, script_frames, variable_names
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Kind, Phase, SiteInfo
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call


MAX_NODES = 20_000
MAX_FRAMES = 3


class LossProbe(GuardedProbe):
    """Records losses: roots of `torch.autograd.backward` (also `Tensor.backward`) and `torch.autograd.grad`."""

    name = "loss"
    lost = "losses are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._seen: set[str] = set()
        self._last: tuple[int, list[tuple[str, weakref.ref[torch.Tensor]]]] = -1, []

    def on_look(self) -> None:
        """Record the values of the last backward pass's leaves once more, see `_record_leaves_again`."""
        with unobserved():
            self._record_leaves_again()

    def _watch_backward(self, begun: Call) -> Callable[[Any], None] | None:
        """Called before `backward` or `autograd.grad`: tells the clock, and records the losses that it starts from.

        In a script in which no module has been seen, also the values of the graph's leaves (`_record_leaves`). In an
        unrecorded step only the clock is told. Nothing at all is done for passes inside another backward pass, of
        compilers, and of pipeline stages before the last. Losses that are given as an iterator are not recorded.

        Returns:
            what to call with the pass's result to record the leaves' gradients; None where no leaf was named.
        """
        if private_api.graph_task() != -1 or private_api.compiling():
            return None  # a backward inside a backward (checkpointing, not the script), or a compiler that traces one
        stage = torch_distributed.in_stage()
        if stage is not None and (stage.what != "backward" or stage.stage.stage_index < stage.stage.num_stages - 1):
            return None  # what a stage goes back from is what it gave to the next
        with unobserved():
            self._context.clock.note_backward()
            if not self._recorder.wanted:
                return None
            call = self._context.count(self)
            roots = _listed(begun.given(0, "tensors" if begun.name == "backward" else "outputs"))
            leaves = self._record_leaves(roots) if not self._context.names.any_module else []
            self._record(roots, call)
            # where an optimizer is, its probe records gradients
            if not leaves or Kind.GRAD not in self._context.kinds or self._context.clock.has_optimizer:
                return None

            def after(result: object) -> None:
                """Record the leaves' `.grad` after `backward`, the returned gradients after `grad`."""
                with unobserved():
                    pairs = [(tensor, tensor.grad) for _, tensor in leaves]
                    if begun.name == "grad":
                        pairs = list(zip(_listed(begun.given(1, "inputs")), _listed(result), strict=False))
                    for tensor, gradient in pairs:
                        name = self._context.leaf_names.get(id(tensor))
                        if name is not None and gradient is not None:
                            self._record_leaf(Phase.BACKWARD, Kind.GRAD, name, call, gradient)

            return after

    def _record(self, roots: Sequence[Any], call: int) -> None:
        """Record random draws so far, then each root tensor as a loss: path "" for a single one, else `[0]`, `[1]`.

        Losses only if their kind is recorded.
        """
        if self._context.draws.moved():
            self._context.draws.note(Phase.LOSS, "loss", call, before=True)
        if Kind.LOSS not in self._context.kinds:
            return
        info = SiteInfo(source=line_of(sys._getframe(1)))  # noqa: SLF001 - the documented way to a frame
        paths = [f"[{at}]" * (len(roots) > 1) for at in range(len(roots))]
        losses = [pair for pair in zip(paths, roots, strict=True) if isinstance(pair[1], torch.Tensor)]
        self._emit(Phase.LOSS, Kind.LOSS, "loss", losses, call, info)

    def _record_leaves(self, roots: Iterable[object]) -> list[tuple[str, torch.Tensor]]:
        """Name the leaves of a graph before its backward pass in place of the last one's, and record their values.

        A leaf is named by the script's variable, else `leafN`; a further leaf of the same name is left out. Values are
        recorded, if parameters are, at each backward pass of a script without optimizer; else when a name is first met,
        and in the first recorded step after unrecorded ones.

        Args:
            roots: what the backward pass starts from.

        Returns:
            pairs of name and leaf in the order met, one leaf for each name; [] where modules hold all leaves that no
            variable of the script's holds.
        """
        leaves = _leaves([root.grad_fn for root in roots if isinstance(root, torch.Tensor)])
        frames = islice(script_frames(), MAX_FRAMES)
        given = variable_names({id(leaf) for leaf in leaves}, torch.Tensor, frames)
        names, leaf_names = self._context.names, self._context.leaf_names
        leaf_names.clear()
        if unnamed := [leaf for leaf in leaves if id(leaf) not in given]:
            # where modules hold them all, a model ran unseen, and these are its parameters
            names.name_holders_of(unnamed)
            names.any_module = all(names.parameters.name_of(leaf) is not None for leaf in unnamed)
        if names.any_module:
            return []
        for leaf in leaves:
            name = given.get(id(leaf)) or f"leaf{len(leaf_names)}"
            if name not in leaf_names.values():
                leaf_names[id(leaf)] = name
        named = [(leaf_names[id(leaf)], leaf) for leaf in leaves if id(leaf) in leaf_names]
        if Kind.PARAM in self._context.kinds:
            without = not self._context.clock.has_optimizer
            for name, leaf in named:
                if without or self._recorder.resumed or name not in self._seen:
                    self._record_leaf(Phase.START, Kind.PARAM, name, 0, leaf)
                self._seen.add(name)
            if without:
                self._last = self._recorder.step, [(name, weakref.ref(leaf)) for name, leaf in named]
        return named

    def _record_leaves_again(self) -> None:
        """Record the values of the last backward pass's leaves as call 1 of phase `start`, and forget these leaves.

        Only in a script without optimizer in which no module has been seen, and if the current step is recorded and is
        that of the pass.
        """
        step, named = self._last
        self._last = -1, []
        if step == self._recorder.step and self._recorder.wanted and not self._context.names.any_module:
            for name, reference in named:
                if (leaf := reference()) is not None:
                    self._record_leaf(Phase.START, Kind.PARAM, name, 1, leaf)

    def _record_leaf(self, phase: Phase, kind: Kind, name: str, call: int, value: torch.Tensor) -> None:
        """Record a leaf or its gradient under its name, unless the options leave that name out."""
        if self._context.names.wanted(name):
            self._emit(phase, kind, name, [("", value)], call)


def _listed(value: Any) -> Sequence[Any]:
    """A tensor, list or tuple as a sequence; of anything else none: an iterator would be empty when torch gets it."""
    return value if isinstance(value, (list, tuple)) else [value] if isinstance(value, torch.Tensor) else ()


def _leaves(nodes: list[Any]) -> list[torch.Tensor]:
    """Leaf tensors that a graph ends at, in the order met; at most 20,000 nodes are visited."""
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node that accumulates a gradient
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
        waiting += [following for following, _ in reversed(node.next_functions) if following is not None]
    return list(leaves.values())
