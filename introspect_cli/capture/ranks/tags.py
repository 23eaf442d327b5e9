"""Plain tensors that are one rank's share of a DTensor: what `to_local` gave, and what a module's style makes one of.

Tensor and sequence parallel modules pass plain tensors on: a column's output is a rank's columns, and nothing on the
tensor says so. But what `to_local` returned was made by an autograd node that knows the DTensor it is of; a tensor that
was written to since was made by another. And what a module turns into a DTensor before its forward pass, its style
knows beforehand, as it knows what it gives where no gradients are wanted and no node is made, in an evaluation.
So nothing is patched, and nothing is remembered of any tensor.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.ranks import torch_distributed
from introspect_cli.tensors.places import Placed, is_whole, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


Style = tuple[str, Any, tuple[Any, ...]]
"""What a module takes an input for, or gives: its path, a mesh, and a placement for each dimension of the mesh."""


def share(value: torch.Tensor, path: str, styles: Sequence[Style]) -> Placed | None:
    """What goes into or comes out of a module as one rank's share of a DTensor; None where it is no such thing.

    Args:
        value: it.
        path: where among the inputs or outputs it is, `[0]`.
        styles: what the module takes its inputs for, or makes its outputs, see `torch_distributed.styles_of`.
    """
    return from_call(value) or next((_styled(value, *style[1:]) for style in styles if path == style[0]), None)


def from_call(value: Any) -> Placed | None:
    """A tensor that `to_local` returned, with its place in the whole; None for all else, or one that is the whole."""
    spec = torch_distributed.local_of(value)
    if spec is None or spec.tensor_meta is None:
        return None
    return _placed(value, tuple(spec.tensor_meta.shape), spec.mesh, spec.placements, "tag")


def _styled(value: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> Placed | None:
    """An input or output that a module's style takes for a rank's share; None where it is taken for the whole."""
    if hasattr(value, "placements"):
        return None
    shape = list(value.shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            shape[placement.dim] *= size
    return _placed(value, tuple(shape), mesh, placements, "style")


def _placed(
    value: torch.Tensor, shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], source: str
) -> Placed | None:
    part = part_of(SimpleNamespace(device_mesh=mesh, shape=shape, placements=placements))
    if part is None or is_whole(part, shape):
        return None
    return Placed(value, shape, replace(part, source=source)) if part.numel == value.numel() else None
