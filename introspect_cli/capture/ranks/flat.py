"""Parameters of which a rank has a stretch of one flat tensor, as FSDP and DeepSpeed's ZeRO keep them."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.naming import modules_in
from introspect_cli.capture.ranks import launchers
from introspect_cli.records import Part
from introspect_cli.tensors.places import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from introspect_cli.capture.naming import Names, ParameterName


# ---
# What DeepSpeed's ZeRO optimizers keep of a model's parameters: one rank's stretch of all of a group, as one tensor.
#
# The inner optimizer knows these tensors alone. A parameter knows which of its elements lie where in its group's one,
# as DeepSpeed's own functions for the whole of a gradient or of a state ask it. Nothing here imports DeepSpeed.
#
# ZeRO-3 has cut the parameters too: outside of the calls that need one, a parameter is empty, and its shard beside
# it.
#
# The names are DeepSpeed's own, looked up here alone (seen in 0.19.8). Without `_hp_mapping`, its addresses,
# `ds_tensor`, or the lists of groups, what the optimizer keeps is recorded flat, and that is said; without
# `ds_numel`, empty parameters are recorded as such.

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
            pairs = zip(kept[flats], kept.get(groups) or [()] * len(kept[flats]), strict=False)
            return [Flat(flat, _fragments(flat, group, is_cut=is_cut), not is_cut) for flat, group in pairs]
    return []


def _fragments(flat: torch.Tensor, group: Sequence[torch.Tensor], *, is_cut: bool) -> Fragments | None:
    """Fragments of a group; None if it is empty, or any parameter's is not known or ends beyond the flat tensor.

    Then its values are elsewhere for a while.

    Args:
        flat: the flat tensor.
        group: the parameters.
        is_cut: whether these are cut, and the shards lie one after the other, as of ZeRO-3.
    """
    fragments: Fragments = []
    first = 0
    for parameter in group:
        shard = shard_of(parameter) if is_cut else None
        piece = _fragment(parameter) if shard is None else Fragment(shard.shape, first, shard.part)
        if piece is None or piece.first + piece.part.numel > flat.numel():
            return None
        fragments.append((parameter, piece))
        first += 0 if shard is None else vars(parameter)["ds_tensor"].ds_numel
    return fragments or None


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


# ---
# Parameters that FSDP's first version or DeepSpeed keeps as stretches of a flat tensor: where each lies in its whole.
#
# With `use_orig_params` a parameter is, outside a forward pass, a flat piece of itself, or empty, and looks like any
# other tensor. The flat parameter knows for each of its parameters which of its elements this rank holds, so they are
# recorded as those parameters. So is what DeepSpeed's optimizers step, whose model keeps whole parameters beside it.

_HOME = "torch.distributed.fsdp.fully_sharded_data_parallel"

_FLAT = (
    "what a DeepSpeed optimizer keeps (gradients, parameters in full precision, its state) is recorded flat: which "
    "parameters it belongs to is not known; parameters without values outside of calls are not recorded"
)
_FSDP = (
    "parameters that FSDP keeps as one flat tensor are not recorded, nor are their gradients and optimizer state: "
    "give it use_orig_params=True, or use fully_shard"
)


class Turn(NamedTuple):
    """Groups that an optimizer steps now, where another optimizer steps its groups one after the other.

    Attributes:
        first: the number of the first of them, where it is given no others meanwhile.
        is_last: whether no group comes after them.
    """

    first: int
    is_last: bool


ALL = Turn(0, is_last=True)
"""Turn of an optimizer that steps all of its groups at once."""


class FlatParts:
    """Places of flat pieces in whole parameters, looked for once a step."""

    def __init__(self, names: Names, note: Callable[[str], None]) -> None:
        """Look for nothing yet; `note` takes a sentence on what cannot be recorded by parameters."""
        self._names = names
        self._note = note
        self._stretches: dict[int, tuple[tuple[int, ...], Part]] = {}
        self._pieces: dict[int, list[tuple[ParameterName, Fragment]]] = {}
        self._turns: dict[int, Turn] = {}
        self._rounded: set[int] = set()
        self._was_grouped = False
        self._is_active: bool | None = None
        self._is_grouped: bool | None = None

    def clear(self) -> None:
        """Forget all places as a step ends, so that `is_active` looks again: a model may have been wrapped since."""
        self._stretches.clear()
        self._pieces.clear()
        self._turns.clear()
        self._rounded.clear()
        self._is_active = None
        self.ask_again()

    def ask_again(self) -> None:
        """Have `is_grouped`, and `is_active` where it was False, look again at their next call."""
        self._is_active, self._is_grouped = self._is_active or None, None

    @property
    def is_grouped(self) -> bool:
        """Whether this process is in a process group; cached until `ask_again`."""
        if self._is_grouped is None:
            self._is_grouped = launchers.is_grouped()
        return self._is_grouped

    @property
    def is_active(self) -> bool:
        """Whether any model or optimizer has flat parameters, whose places are then known.

        The first call in a step looks for them, and may note what cannot be recorded.
        """
        if self._is_active is None:
            self._is_active = False
            # torch itself loads FSDP, in a script with an optimizer: without a group, there can be no such wrapper.
            self._was_grouped = self._was_grouped or (_HOME in sys.modules and self.is_grouped)
            if self._was_grouped and _HOME in sys.modules:
                self._find_fsdp_places()
            if is_loaded():
                self._find_zero_places()
            self._is_active = bool(self._stretches or self._pieces or self._turns)
        return self._is_active

    def turn_of(self, parameters: Sequence[torch.Tensor]) -> Turn:
        """Which groups of DeepSpeed's optimizer an inner one steps now, as `is_active` found them last.

        Args:
            parameters: all that the inner optimizer is given at the moment.

        Returns:
            `first` of the turn of the first flat tensor among them, `is_last` of that of the last one; `ALL` where none
            of the parameters is a flat tensor of DeepSpeed's.
        """
        turns = [self._turns[id(parameter)] for parameter in parameters if id(parameter) in self._turns]
        return Turn(turns[0].first, turns[-1].is_last) if turns else ALL

    def names_inside(self, parameter: torch.Tensor) -> list[ParameterName] | None:
        """Names of all parameters in a flat tensor of DeepSpeed's, in their order; [] where they are not known.

        Those that this rank has no element of are among them.

        Returns:
            None for any other parameter, pieces of FSDP's flat tensors among them.
        """
        if not self.is_active or not (id(parameter) in self._pieces or id(parameter) in self._turns):
            return None
        return [name for name, _ in self._pieces.get(id(parameter), ())]

    def placed_values(
        self,
        sites: Sequence[int],
        parameters: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        site_of: Callable[[ParameterName], int],
    ) -> tuple[Sequence[int], Sequence[torch.Tensor]]:
        """Sites and values to record, with those of flat parameters placed in the parameters that they consist of.

        A value of a flat parameter becomes one `Placed` for each watched parameter in it, at the site that `site_of`
        gives, so that the lists may grow or shrink; a piece of a parameter becomes a `Placed` at the same site. All
        others stay, in the same order. Without flat parameters the lists themselves are returned.

        Args:
            sites: the number of each value's site.
            parameters: the parameter that each value belongs to.
            values: parameters themselves, their gradients or a state of theirs.
            site_of: gives the number of the site of a parameter, from its name.
        """
        if not self.is_active:
            return sites, values
        placed_sites: list[int] = []
        placed: list[torch.Tensor] = []
        for site, parameter, value in zip(sites, parameters, values, strict=True):
            pieces = self._pieces.get(id(parameter))
            if pieces is None:
                placed_sites.append(site)
                placed.append(self.placed(parameter, value))
                continue
            watched = [(name, piece) for name, piece in pieces if name.watched]
            placed_sites += [site_of(name) for name, _ in watched]
            placed += [_stretch(parameter, value, piece) for _, piece in watched]
        return placed_sites, placed

    def split_state(
        self, parameter: torch.Tensor, state: dict[str, Any]
    ) -> list[tuple[ParameterName, dict[str, Any]]] | None:
        """An optimizer's state of a flat tensor of DeepSpeed's, split among the watched parameters in it.

        Values of other shapes than the parameter's, such as a count of steps, are given to each.

        Returns:
            None for any other parameter, pieces of FSDP's flat tensors among them, and where those in it are not known.
        """
        pieces = self._pieces.get(id(parameter))
        if pieces is None:
            return None
        return [
            (name, {key: _stretch(parameter, value, piece) for key, value in state.items()})
            for name, piece in pieces
            if name.watched
        ]

    def placed(self, parameter: torch.Tensor, value: Any) -> Any:
        """`value` with its place in the whole, where this rank holds only a piece of the parameter; else as it is.

        A parameter that ZeRO-3 has emptied becomes this rank's shard in its place. A value that is not one-dimensional
        with the piece's number of elements, such as a count of steps, or has the whole's shape, is returned as it is.

        Args:
            parameter: the parameter.
            value: the parameter itself, its gradient or an optimizer state of it.
        """
        if value is parameter and (shard := self.shard_of(parameter)) is not None:
            return shard
        place = self._stretches.get(id(parameter)) if self.is_active else None
        if place is None or not isinstance(value, sys.modules["torch"].Tensor):
            return value
        shape, part = place
        if value.dim() != 1 or value.numel() != part.numel or tuple(value.shape) == shape:
            return value
        return Placed(value, shape, part)

    def is_rounded(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is a copy, in another dtype, of what DeepSpeed's optimizer steps, set after each step."""
        return self.is_active and id(parameter) in self._rounded

    def shard_of(self, parameter: torch.Tensor) -> Placed | None:
        """This rank's shard of a parameter that ZeRO-3 has emptied, with its place; None for any other.

        None also where `shard_of` gives none, and before a DeepSpeed optimizer was found.
        """
        return shard_of(parameter) if self._turns and is_emptied(parameter) else None

    def _find_fsdp_places(self) -> None:
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
                        parameter = getattr(info.module, info.param_name, None)
                        if parameter is not None:
                            self._stretches[id(parameter)] = tuple(shape), _part(piece)
                elif (name := self._names.parameters.name_of(flat)) is not None:
                    name.watched = False
                    self._note(_FSDP)

    def _find_zero_places(self) -> None:
        """Find the places of parameters in the flat tensors of DeepSpeed's optimizers, and the turn of each tensor.

        A flat tensor of which any parameter is unnamed or not known gets no places, which is noted. Parameters of
        another dtype than their flat tensor count as rounded.
        """
        for root in self._names.roots():
            for flats in optimizers_in(root):
                for number, (flat, fragments, alone) in enumerate(flats):
                    self._turns[id(flat)] = Turn(number if alone else 0, number == len(flats) - 1)
                    named = [(self._names.parameters.name_of(whole), piece) for whole, piece in fragments or ()]
                    pieces = [(name, piece) for name, piece in named if name is not None]
                    if pieces and len(pieces) == len(named):
                        self._pieces[id(flat)] = pieces
                        self._rounded |= {id(whole) for whole, _ in fragments or () if whole.dtype is not flat.dtype}
                    else:
                        self._note(_FLAT)


def _stretch(parameter: torch.Tensor, value: Any, piece: Fragment) -> Any:
    """One parameter's stretch of a flat value, as `Placed`; a value of another shape than the flat parameter as it is.

    Args:
        parameter: the flat one.
        value: itself, its gradient or a state of it.
        piece: where the one parameter lies in it.
    """
    if getattr(value, "shape", None) != parameter.shape:
        return value
    return Placed(value.detach()[piece.first : piece.first + piece.part.numel], piece.shape, piece.part)


def _part(piece: Any) -> Part:
    """Part of a parameter that FSDP's shard info describes; an empty one if none of it is in this rank's shard."""
    if not piece.in_shard:
        return stretch(0, 0)
    first, last = int(piece.intra_param_start_idx), int(piece.intra_param_end_idx)
    return stretch(first, last - first + 1)
