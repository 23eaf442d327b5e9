"""What DeepSpeed's ZeRO optimizers keep of a model's parameters: one rank's stretch of all of a group, as one tensor.

The inner optimizer knows these tensors alone. A parameter knows which of its elements lie where in its group's one, as
DeepSpeed's own functions for the whole of a gradient or of a state ask it. Nothing here imports DeepSpeed.

The names are DeepSpeed's own, looked up here alone (seen in 0.19.8). Without `_hp_mapping`, its addresses, or the lists
of groups, what the optimizer keeps is recorded flat, as under ZeRO-3, and that is said.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.capture.inside import instances_in
from introspect_cli.records import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

_HOME = "deepspeed"

_LISTS = (
    ("bit16_groups", "single_partition_of_fp32_groups"),  # of ZeRO-1 and ZeRO-2
    ("bf16_groups", "fp32_groups_flat_partition"),  # of the optimizer for bfloat16
)
"""Where an optimizer keeps the parameters of each group, and the flat tensor of each."""

_CUT = ("", "fp32_partitioned_groups_flat")
"""The same of ZeRO-3, which has cut the parameters themselves."""


class Fragment(NamedTuple):
    """One parameter's stretch of a flat tensor.

    Attributes:
        parameter: it, whole.
        first: where the stretch begins in the flat tensor.
        part: which of the parameter's elements it has.
    """

    parameter: torch.Tensor
    first: int
    part: Part


class Flat(NamedTuple):
    """The flat tensor of one group, which the inner optimizer steps.

    Attributes:
        tensor: it.
        fragments: of all parameters of the group, none of which may have an element here; None where nothing says.
    """

    tensor: torch.Tensor
    fragments: list[Fragment] | None


def is_loaded() -> bool:
    """Whether the script uses DeepSpeed."""
    return _HOME in sys.modules


def is_away(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no values now: ZeRO-3 gathers it when a module needs it."""
    return parameter.numel() == 0 and bool(vars(parameter).get("ds_numel"))


def optimizers_in(root: nn.Module) -> list[list[Flat]]:
    """For each engine in a model that has a ZeRO optimizer, the flat tensors of all its groups."""
    engine = getattr(sys.modules.get(_HOME), "DeepSpeedEngine", None)
    found = [_flats(vars(module).get("optimizer")) for module in instances_in(root, engine)] if engine else []
    return [flats for flats in found if flats]


def _flats(optimizer: Any) -> list[Flat]:
    kept: dict[str, Any] = getattr(optimizer, "__dict__", {})
    for groups, flats in (*_LISTS, _CUT):
        if kept.get(flats):
            every = kept.get(groups) or [None] * len(kept[flats])
            return [Flat(flat, _fragments(group)) for flat, group in zip(kept[flats], every, strict=False)]
    return []


def _fragments(group: Sequence[torch.Tensor] | None) -> list[Fragment] | None:
    found = [_fragment(parameter) for parameter in group or ()]
    every = [own for own in found if own is not None]
    return every if found and len(every) == len(found) else None


def _fragment(parameter: torch.Tensor) -> Fragment | None:
    """A parameter's stretch; an empty one where this rank has none of it; None where it does not say."""
    told = vars(parameter)
    if "_hp_mapping" not in told:
        return None
    if told["_hp_mapping"] is None:
        return Fragment(parameter, 0, Part(((),), source="flat"))
    own = getattr(told["_hp_mapping"], "lp_fragment_address", None)
    kept = getattr(told["_hp_mapping"], "hp_fragment_address", None)
    if own is None or kept is None or own.numel != kept.numel:
        return None
    return Fragment(parameter, int(kept.start), Part((((int(own.start), int(own.numel)),),), source="flat"))
