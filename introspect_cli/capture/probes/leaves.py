"""Tensors that a script trains without any module: the leaves of what its backward passes run through.

A script of plain tensors calls no module, so nothing would be recorded of it but losses. Its parameters are where the
graph of a loss ends: the tensors whose gradients a backward pass accumulates. They are called what the script calls
them where a variable of its holds them, and numbered where none does. Where an optimizer is, it tells of them after
each of its steps.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.variables import called, script_frames
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.capture.context import Context

_MOST_NODES = 20_000
_FRAMES = 3


class Leaves:
    """Finds and records the leaves of a script that has run no module; another probe says when."""

    def __init__(self, context: Context) -> None:
        """Start without names."""
        self._context = context
        self._recorder = context.recorder
        self._seen: set[str] = set()
        self.names = context.leaf_names

    @property
    def wanted(self) -> bool:
        """Whether the script has run no module so far."""
        return not self._context.names.any_module

    def before(self, roots: Iterable[object]) -> list[tuple[str, torch.Tensor]]:
        """Record the leaves as a backward pass finds them; their names and what they are, the first used first."""
        found = _leaves([root.grad_fn for root in roots if isinstance(root, torch.Tensor)])
        frames = islice(script_frames(), _FRAMES)
        given = called({id(leaf) for leaf in found}, torch.Tensor, frames)
        self.names.clear()
        for leaf in found:
            name = given.get(id(leaf)) or f"leaf{len(self.names)}"
            if name not in self.names.values():
                self.names[id(leaf)] = name
        named = [(self.names[id(leaf)], leaf) for leaf in found if id(leaf) in self.names]
        if Kind.PARAM in self._context.kinds:
            for name, leaf in named:
                if not self._context.has_optimizer or self._recorder.resumed or name not in self._seen:
                    self._record(Phase.START, Kind.PARAM, name, 0, leaf)
                self._seen.add(name)
        return named

    def after(self, leaves: Iterable[tuple[str, torch.Tensor | None]], call: int) -> None:
        """Record the gradients that a backward pass has left, where no optimizer will see them."""
        if Kind.GRAD in self._context.kinds and not self._context.has_optimizer:
            for name, gradient in leaves:
                if gradient is not None:
                    self._record(Phase.BACKWARD, Kind.GRAD, name, call, gradient)

    def _record(self, phase: Phase, kind: Kind, name: str, call: int, value: torch.Tensor) -> None:
        if self._context.names.wanted(name):
            self._recorder.tensor(self._recorder.site(Site(phase, kind, name, call)), value)


def _leaves(nodes: list[Any]) -> list[torch.Tensor]:
    """Tensors that require gradients and that a graph begins with, in the order in which they are met."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the node that accumulates a gradient
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        waiting += [following for following, _ in reversed(node.next_functions) if following is not None]
    return list(found.values())
