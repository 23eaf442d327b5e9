"""What DeepSpeed's ZeRO optimizers keep of a model's parameters: one rank's stretch of all of a group, as one tensor.

The inner optimizer knows these tensors alone. A parameter knows which of its elements lie where in its group's one, as
DeepSpeed's own functions for the whole of a gradient or of a state ask it. Nothing here imports DeepSpeed.

ZeRO-3 has cut the parameters too: outside of the calls that need one, a parameter is empty, and its shard beside it.

The names are DeepSpeed's own, looked up here alone (seen in 0.19.8). Without `_hp_mapping`, its addresses, `ds_tensor`,
or the lists of groups, what the optimizer keeps is recorded flat, and that is said; without `ds_numel`, empty
parameters are recorded as such.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.naming.contents import modules_in
from introspect_cli.records import Part
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

_DEEPSPEED = "deepspeed"

_LISTS = (
    ("bit16_groups", "single_partition_of_fp32_groups", False),  # of ZeRO-1 and ZeRO-2
    ("bf16_groups", "fp32_groups_flat_partition", False),  # of the optimizer for bfloat16
    ("fp16_groups", "fp32_partitioned_groups_flat", True),  # of ZeRO-3
)
"""Where an optimizer keeps the parameters of each group, and the flat tensor of each; whether it has cut the former."""


class Fragment(NamedTuple):
    """One parameter's stretch of a flat tensor.

    Attributes:
        shape: of the whole parameter.
        first: where the stretch begins in the flat tensor, or in what this rank has of it.
        part: which of the parameter's elements it has.
    """

    shape: tuple[int, ...]
    first: int
    part: Part


Fragments = list[tuple["torch.Tensor", Fragment]]
"""Parameters of a model, and the stretch of each."""


class Flat(NamedTuple):
    """The flat tensor of one group, which the inner optimizer steps.

    Attributes:
        tensor: it.
        fragments: of all parameters of the group, none of which may have an element here; None where nothing says.
        alone: whether the inner optimizer is given no other group while it steps this one.
    """

    tensor: torch.Tensor
    fragments: Fragments | None
    alone: bool


def is_loaded() -> bool:
    """Whether DeepSpeed is imported."""
    return _DEEPSPEED in sys.modules


def is_emptied(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has emptied a parameter; its values are gathered when a module needs them."""
    return parameter.numel() == 0 and bool(vars(parameter).get("ds_numel"))


def shard_of(parameter: torch.Tensor) -> Placed | None:
    """This rank's shard of a ZeRO-3 parameter, with its place in the whole parameter.

    Returns:
        None for any other parameter, and for a shard that is on a disk or cut in another way.
    """
    attributes = vars(parameter)
    shard, group, shape = (attributes.get(name) for name in ("ds_tensor", "ds_process_group", "ds_shape"))
    size = getattr(shard, "ds_numel", None)
    if shard is None or group is None or shape is None or size is None:
        return None
    begin = size * torch_distributed.rank_in(group)
    count = max(0, min(size, math.prod(shape) - begin))
    if shard.dim() != 1 or shard.numel() < count or size * group.size() < math.prod(shape):
        return None  # it lies on a disk, or is cut otherwise
    return Placed(shard.detach()[:count], tuple(shape), stretch(begin, count))


def is_stepped(parameter: torch.Tensor) -> bool:
    """Whether a DeepSpeed optimizer steps a parameter of a model, by a flat tensor on this or any other rank."""
    attributes = vars(parameter)
    return "_hp_mapping" in attributes or ("ds_tensor" in attributes and parameter.requires_grad)


def optimizers_in(root: nn.Module) -> list[list[Flat]]:
    """A list for each DeepSpeed engine in a model: the flat tensors of its optimizer's groups, in their order.

    Engines whose optimizer has none are left out.
    """
    engine = getattr(sys.modules.get(_DEEPSPEED), "DeepSpeedEngine", None)
    optimizers = (
        [_flat_tensors(vars(module).get("optimizer")) for module in modules_in(root) if isinstance(module, engine)]
        if engine
        else []
    )
    return [flats for flats in optimizers if flats]


def _flat_tensors(optimizer: Any) -> list[Flat]:
    """Flat tensors of a ZeRO optimizer's groups, by the first of `_LISTS` that it has; empty for any other."""
    kept: dict[str, Any] = getattr(optimizer, "__dict__", {})
    for groups, flats, is_cut in _LISTS:
        if kept.get(flats):
            find = _shards if is_cut else _fragments
            every = kept.get(groups) or [()] * len(kept[flats])
            return [
                Flat(flat, _fragments_within(flat, find(group)), not is_cut)
                for flat, group in zip(kept[flats], every, strict=False)
            ]
    return []


def _fragments_within(flat: torch.Tensor, fragments: Fragments | None) -> Fragments | None:
    """The fragments; None if any ends beyond the flat tensor: its values are elsewhere for a while."""
    needed = max((fragment.first + fragment.part.numel for _, fragment in fragments or ()), default=0)
    return fragments if needed <= flat.numel() else None


def _shards(group: Sequence[torch.Tensor]) -> Fragments | None:
    """Fragments of a ZeRO-3 group, its shards one after the other; None if it is empty, or any shard is not known."""
    fragments: Fragments = []
    first = 0
    for parameter in group:
        shard = shard_of(parameter)
        if shard is None:
            return None
        fragments.append((parameter, Fragment(shard.shape, first, shard.part)))
        first += vars(parameter)["ds_tensor"].ds_numel
    return fragments or None


def _fragments(group: Sequence[torch.Tensor]) -> Fragments | None:
    """Fragments of a ZeRO-1 or ZeRO-2 group; None if it is empty, or any parameter's is not known."""
    every = [(parameter, fragment) for parameter in group if (fragment := _fragment(parameter)) is not None]
    return every if every and len(every) == len(group) else None


def _fragment(parameter: torch.Tensor) -> Fragment | None:
    """A parameter's stretch of its flat tensor, empty if this rank has none.

    None without `_hp_mapping`, or where an address in it is missing or the two differ in length.
    """
    attributes = vars(parameter)
    if "_hp_mapping" not in attributes:
        return None
    shape = tuple(parameter.shape)
    if attributes["_hp_mapping"] is None:
        return Fragment(shape, 0, stretch(0, 0))
    address = getattr(attributes["_hp_mapping"], "lp_fragment_address", None)
    kept = getattr(attributes["_hp_mapping"], "hp_fragment_address", None)
    if address is None or kept is None or address.numel != kept.numel:
        return None
    return Fragment(shape, int(kept.start), stretch(int(address.start), int(address.numel)))


def stretch(first: int, count: int) -> Part:
    """The part that is `count` elements of a flattened parameter from index `first` on; 0 for an empty part."""
    return Part((((first, count),) if count else (),), source="flat")
