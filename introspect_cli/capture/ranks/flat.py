"""Parameters of which a rank has a stretch of one flat tensor, as FSDP and DeepSpeed's ZeRO keep them.

With `use_orig_params` a parameter of FSDP's first version is, outside a forward pass, a flat piece of itself, or empty,
and looks like any other tensor. The flat parameter knows for each of its parameters which of its elements this rank
holds, so they are recorded as those parameters.

What DeepSpeed's optimizers keep is known to DeepSpeed alone. Its engine steps as one: after that, parameters are
recorded as its model has them; of what steps inside only the hyper-parameters are. ZeRO-3 has cut the parameters too:
outside of the calls that need one, a parameter is empty, and its shard beside it. Nothing here imports DeepSpeed. The
names are its own (seen in 0.19.8). Without `ds_numel`, empty parameters are recorded as such, and without the others of
ZeRO-3 not at all; without `_hp_mapping`, none is recorded after a step.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.naming import modules_in
from introspect_cli.capture.ranks import launchers
from introspect_cli.records import Part
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from introspect_cli.capture.naming import Names

ZERO = (
    "of what a DeepSpeed optimizer keeps (gradients, parameters in full precision, its state) nothing is recorded but "
    "hyper-parameters"
)
_DEEPSPEED = "deepspeed"
_HOME = "torch.distributed.fsdp.fully_sharded_data_parallel"
_FSDP = (
    "parameters that FSDP keeps as one flat tensor are not recorded, nor are their gradients and optimizer state: "
    "give it use_orig_params=True, or use fully_shard"
)


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
    return Placed(shard.detach()[:count], tuple(shape), _stretch(begin, count))


def is_stepped(parameter: torch.Tensor) -> bool:
    """Whether a DeepSpeed optimizer steps a parameter of a model, by a flat tensor on this or any other rank."""
    attributes = vars(parameter)
    return "_hp_mapping" in attributes or ("ds_tensor" in attributes and parameter.requires_grad)


class FlatParts:
    """Places of flat pieces in whole parameters.

    Attributes:
        is_grouped: whether this process is, or was, in a process group.
        is_active: whether any model may have flat parameters, whose places are then known.
    """

    def __init__(self, names: Names, note: Callable[[str], None]) -> None:
        """Look for nothing yet; `note` takes a sentence on what cannot be recorded by parameters."""
        self._names = names
        self._note = note
        self._stretches: dict[int, tuple[tuple[int, ...], Part]] = {}
        self.is_grouped = self.is_active = False

    def look(self) -> None:
        """Look for all places anew, as a step ends and as a model is called first: it may have been wrapped since.

        May note what cannot be recorded.
        """
        self.is_grouped = self.is_grouped or launchers.is_grouped()
        self._stretches.clear()
        # torch itself loads FSDP, in a script with an optimizer: without a group, there can be no such wrapper.
        if self.is_grouped and _HOME in sys.modules:
            self._find_places()
        self.is_active = bool(self._stretches) or _DEEPSPEED in sys.modules

    def placed(self, parameter: torch.Tensor, value: Any) -> Any:
        """`value` with its place in the whole, where this rank holds only a piece of the parameter; else as it is.

        A parameter that ZeRO-3 has emptied becomes this rank's shard in its place. A value that is not one-dimensional
        with the piece's number of elements, such as a count of steps, or has the whole's shape, is returned as it is.

        Args:
            parameter: the parameter.
            value: the parameter itself, its gradient or an optimizer state of it.
        """
        if value is parameter and is_emptied(parameter) and (shard := shard_of(parameter)) is not None:
            return shard
        place = self._stretches.get(id(parameter)) if self.is_active else None
        if place is None or not isinstance(value, sys.modules["torch"].Tensor):
            return value
        shape, part = place
        if value.dim() != 1 or value.numel() != part.numel or tuple(value.shape) == shape:
            return value
        return Placed(value, shape, part)

    def _find_places(self) -> None:
        """Find the places of parameters in FSDP's flat tensors.

        Flat tensors without `use_orig_params` are no longer watched, which is noted. Those of one rank are skipped:
        each parameter is whole there.
        """
        wrapper = sys.modules[_HOME].FullyShardedDataParallel
        for root in self._names.roots():
            for module in (one for one in modules_in(root) if isinstance(one, wrapper)):
                handle = getattr(module, "_handle", None)
                flat = getattr(handle, "flat_param", None)
                pieces = getattr(flat, "_shard_param_infos", None)
                if flat is None or pieces is None or getattr(handle, "world_size", 1) == 1:
                    continue
                if getattr(handle, "_use_orig_params", True):
                    infos, shapes = (getattr(flat, name, ()) for name in ("_param_infos", "_shapes"))
                    for info, shape, piece in zip(infos, shapes, pieces, strict=True):
                        if (parameter := getattr(info.module, info.param_name, None)) is not None:
                            self._stretches[id(parameter)] = tuple(shape), _part(piece)
                elif (name := self._names.parameters.name_of(flat)) is not None:
                    name.watched = False
                    self._note(_FSDP)


def _part(piece: Any) -> Part:
    """Part of a parameter that FSDP's shard info describes; an empty one if none of it is in this rank's shard."""
    places = (piece.intra_param_start_idx, piece.intra_param_end_idx) if piece.in_shard else (0, -1)
    first, last = map(int, places)
    return _stretch(first, last - first + 1)


def _stretch(first: int, count: int) -> Part:
    """The part that is `count` elements of a flattened parameter from index `first` on; 0 for an empty part."""
    return Part((((first, count),) if count else (),), source="flat")
