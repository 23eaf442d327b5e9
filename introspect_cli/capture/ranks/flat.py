"""Parameters that FSDP's first version keeps as stretches of one flat tensor: where each lies in its own whole.

With `use_orig_params` a parameter is, outside a forward pass, a flat piece of itself, or empty, and looks like any
other tensor. The flat parameter knows for each of its parameters which of its elements this rank holds.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.inside import instances_in
from introspect_cli.records import Part
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from introspect_cli.capture.names import Names

_HOME = "torch.distributed.fsdp.fully_sharded_data_parallel"


class FlatParts:
    """Tells which part of a whole a flat piece is."""

    def __init__(self, names: Names) -> None:
        """Start with nothing known.

        Args:
            names: knows the models.
        """
        self._names = names
        self._known: dict[int, tuple[tuple[int, ...], Part]] = {}
        self._looked = False

    def forget(self) -> None:
        """Look again: a step has ended, and a model may have been wrapped since."""
        self._known.clear()
        self._looked = False

    @property
    def active(self) -> bool:
        """Whether any model keeps its parameters so."""
        if _HOME not in sys.modules:
            return False
        if not self._looked:
            self._looked = True
            self._look()
        return bool(self._known)

    def all(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Parameters, each with its place where it is a flat piece."""
        return self.each(parameters, parameters)

    def each(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What belongs to parameters (gradients), each with its place where it is a flat piece."""
        return list(map(self.of, parameters, values)) if self.active else values

    def of(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A parameter's value, gradient or state, with its place where it is a flat piece."""
        found = self._known.get(id(parameter)) if self.active else None
        if found is None:
            return value
        shape, part = found
        if value.dim() != 1 or value.numel() != part.numel or tuple(value.shape) == shape:
            return value
        placed: Any = Placed(value, shape, part)
        return placed  # type: ignore[no-any-return]  # the recorder hands it to the summarizer, which knows it

    def _look(self) -> None:
        wrapper = sys.modules[_HOME].FullyShardedDataParallel
        for root in self._names.roots():
            for module in instances_in(root, wrapper):
                handle = getattr(module, "_handle", None)
                flat = getattr(handle, "flat_param", None)
                pieces = getattr(flat, "_shard_param_infos", None)
                if flat is None or pieces is None or getattr(handle, "world_size", 1) == 1:
                    continue
                for info, shape, piece in zip(
                    getattr(flat, "_param_infos", ()), getattr(flat, "_shapes", ()), pieces, strict=True
                ):
                    parameter = getattr(info.module, info.param_name, None)
                    if parameter is None:
                        continue
                    ranges: tuple[tuple[int, int], ...] = ()
                    if piece.in_shard:
                        first, last = piece.intra_param_start_idx, piece.intra_param_end_idx
                        ranges = ((int(first), int(last) - int(first) + 1),)
                    self._known[id(parameter)] = tuple(shape), Part((ranges,), source="flat")
