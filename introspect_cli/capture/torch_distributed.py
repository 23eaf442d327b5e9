"""What capture asks of `torch.distributed` by names that are private, or that not every torch has.

Process groups and what collectives are given; what DTensor, the tensor parallel styles, `fully_shard` and the stages of
pipelines know of a rank's share. Each is asked once, here, with what is lost without it, as in `private_api`;
`tests/capture/test_private_distributed.py` notices when one moves.

Tensor and sequence parallel modules pass plain tensors on: a column's output is a rank's columns, and nothing on the
tensor says so. But what `to_local` returned was made by an autograd node that knows the DTensor it is of; a tensor that
was written to since was made by another. And what a module turns into a DTensor before its forward pass, its style
knows beforehand. So nothing is patched, and nothing is remembered of any tensor.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.capture.frames import outward
from introspect_cli.capture.private_api import no_torch_function
from introspect_cli.tensors.places import Placed, is_whole, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks_of(group: Any) -> list[int]:
    """Global ranks of a process group; 0, 1, ... where this process does not know them."""
    try:
        return list(torch.distributed.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return list(range(group.size()))


def rank_in(group: Any) -> int:
    """This process's rank within a group."""
    return int(group.rank())


def group_of(boxed: Any) -> Any:
    """The process group in an operator's boxed argument. Where torch lacks this, collectives are not recorded."""
    return torch.distributed.ProcessGroup.unbox(boxed)


def group_named(group: Any) -> Any:
    """The process group that a functional collective is given as group, name, mesh or (mesh, dim); None for others.

    None for a name, too, where this torch has no lookup by name: the collective is then not recorded.
    """
    if isinstance(group, torch.distributed.ProcessGroup):
        return group
    if isinstance(group, str):
        resolve: Any = getattr(sys.modules["torch.distributed.distributed_c10d"], "_resolve_process_group", None)
        return resolve and resolve(group)
    mesh, *dimension = group if isinstance(group, tuple) else (group,)
    return mesh.get_group(*dimension) if hasattr(mesh, "get_group") else None


def reduction_of(boxed: Any) -> str:
    """The reduction in an operator's boxed argument: `sum`, `avg`, `max` and so on; "" where it cannot be read."""
    try:
        return str(torch.distributed.ReduceOp.RedOpType(boxed.op()).name).lower()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return ""


def on_its_way(value: Any) -> bool:
    """Whether a tensor is a result of a functional collective that nobody has waited for, and so must not be read.

    Reading it would wait. Where torch lacks this, what goes into another collective may be recorded before it is there.
    """
    functions = sys.modules.get("torch.distributed._functional_collectives")
    return isinstance(value, getattr(functions, "AsyncCollectiveTensor", ()))


def local_of(value: Any) -> Any:
    """DTensor spec (mesh, placements, shape) of a tensor that `to_local` returned; None for any other.

    It is read from the autograd node that made the tensor. Where torch lacks this, such tensors are compared by extrema
    and means.
    """
    kind = type(value)
    if not issubclass(kind, torch.Tensor) or not kind.__module__.startswith("torch"):  # the script's own is not asked
        return None
    try:
        with no_torch_function():  # a mode of the script's would see the question
            node = value.grad_fn
    except RuntimeError:  # a view that autograd has given up on
        return None
    return getattr(node, "dtensor_spec", None) if type(node).__name__ == "_ToTorchTensorBackward" else None


def styles_of(module: torch.nn.Module) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Path, mesh and placements of each input that a module's tensor parallel style describes; [] without a style.

    Inputs that are given by keyword, and meshes of several dimensions, are left out. Styles are found in the closures
    of the module's own forward pre-hooks, which `parallelize_module` leaves. Where torch lacks this, such inputs are
    compared by extrema and means.
    """
    styles: list[tuple[str, Any, tuple[Any, ...]]] = []
    for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - there is no public way to ask for them
        if (held := _style_in(hook)) is None:
            continue
        mesh, prepare = held["device_mesh"], held.get("input_fn")
        called = getattr(getattr(prepare, "func", None), "__name__", "")
        if prepare is not None and called == "_prepare_input_fn":
            styles.append(("[0]", mesh, tuple(prepare.args[0])))
        layouts = getattr(held.get("self"), "input_layouts", None) or ()
        styles += [(f"[{at}]", mesh, (layout,)) for at, layout in enumerate(layouts) if layout is not None]
    return styles


def _style_in(hook: Any) -> dict[str, Any] | None:
    """Closure variables of a tensor parallel hook by name.

    None for other hooks and for a mesh of several dimensions.
    """
    code = getattr(hook, "__code__", None)
    if code is None or "device_mesh" not in code.co_freevars:
        return None
    held = dict(zip(code.co_freevars, [cell.cell_contents for cell in hook.__closure__], strict=True))
    return held if held["device_mesh"].ndim == 1 else None


def is_cut(module: Any) -> bool:
    """Whether `fully_shard` was called on a module.

    Where torch lacks this, False: then the other functions here find no shards either.
    """
    return hasattr(type(module), "_get_fsdp_state")


def _cut_together(module: Any) -> list[Any]:
    """Torch's groups (`FSDPParamGroup`) of a module that `fully_shard` was called on, one for each mesh; else [].

    Older torch keeps one at most, newer torch a list; its attribute for the one raises where there are more, so the
    list is read first.
    """
    state = module._get_fsdp_state() if is_cut(module) else None  # noqa: SLF001 - told in the docstring
    if (many := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(many)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


def fsdp_groups(module: Any) -> list[Any]:
    """Process groups over which `fully_shard` shards and replicates a module; [] where it was not called."""
    meshes = [getattr(together, "mesh_info", None) for together in _cut_together(module)]
    names = ("shard_process_group", "replicate_process_group")
    groups = (getattr(mesh, name, None) for mesh in meshes for name in names)
    return [group for group in groups if group is not None]


class Unsharded(NamedTuple):
    """A parameter that `fully_shard` has gathered, as for a forward pass.

    Attributes:
        holder: the module that has the whole of it now.
        name: under which name.
        whole: what is there now; nobody's optimizer knows it.
        keeper: keeps this rank's shard, as `sharded_param`.
    """

    holder: torch.nn.Module
    name: str
    whole: torch.Tensor
    keeper: Any


def unsharded_of(module: Any) -> list[Unsharded]:
    """Parameters that `fully_shard`, called on this module, has cut and has gathered now.

    Those of inner modules that it cut together with this one's are among them; each comes once for each module that
    shares it. [] where `fully_shard` was not called. Where torch lacks this, parameters that a script gathers before a
    step are taken for others than its optimizer's.
    """
    gathered = []
    for keeper in chain.from_iterable(getattr(together, "fsdp_params", ()) for together in _cut_together(module)):
        info, shard = getattr(keeper, "_module_info", None), getattr(keeper, "sharded_param", None)
        if info is None or shard is None:
            continue
        places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        for holder, name in places:
            whole = holder._parameters.get(name)  # noqa: SLF001 - the public views build strings
            if whole is not None and whole is not shard:
                gathered.append(Unsharded(holder, name, whole, keeper))
    return gathered


_PIPELINES = "torch.distributed.pipelining."
_STAGE, _SCHEDULES = f"{_PIPELINES}stage", f"{_PIPELINES}schedules"
_IN_STAGE = {
    "_forward_metadata_inference": ("inference", _STAGE, "self"),
    "_backward_metadata_inference": ("inference", _STAGE, "self"),
    "_shape_inference": ("inference", _STAGE, "self"),
    "forward_one_chunk": ("forward", _STAGE, "self"),
    "backward_one_chunk": ("backward", _STAGE, "self"),
    "backward_weight_one_chunk": ("weight", _STAGE, "self"),
    "_maybe_compute_loss": ("loss", _SCHEDULES, "stage"),
}
"""torch's functions: activity, module, and the variable that holds the stage."""


class InStage(NamedTuple):
    """Activity of a pipeline stage in this thread.

    Attributes:
        what: `inference` of the shapes of what it passes on, on memory without values; `forward`, `backward`, or
            `weight`, the part of a backward pass that is left for later; `loss`.
        stage: the stage.
    """

    what: str
    stage: Any


def in_stage() -> InStage | None:
    """What a pipeline stage is doing in this thread, by the innermost of its frames under way; None outside of stages.

    Where torch lacks this, two equal runs of a pipeline differ in step 0.
    """
    if _STAGE not in sys.modules:
        return None
    for frame in outward(sys._getframe(1)):  # noqa: SLF001 - the documented way to a frame
        what, home, stage = _IN_STAGE.get(frame.f_code.co_name, ("", "", ""))
        if what and frame.f_code.co_filename == getattr(sys.modules.get(home), "__file__", None):
            held = frame.f_locals.get(stage)
            if held is not None:
                return InStage(what, held)
    return None


Style = tuple[str, Any, tuple[Any, ...]]
"""Style of an input: path, mesh, and a placement for each dimension of the mesh."""


def share(value: torch.Tensor, path: str, styles: Sequence[Style]) -> Placed | None:
    """An input or output with its place in the DTensor that it is one rank's share of.

    A tensor that `to_local` returned says that itself; for other inputs the first style with this path does. None where
    neither does, for a whole tensor, and where the size does not fit.

    Args:
        value: the tensor that goes in or comes out.
        path: where it is among the inputs or outputs, `[0]`.
        styles: what the module takes its inputs for, see `styles_of`; none for an output.
    """
    return from_call(value) or next((_placed_by_style(value, *style[1:]) for style in styles if path == style[0]), None)


def from_call(value: Any) -> Placed | None:
    """A tensor from `to_local` with its place in the DTensor.

    None for others, for one that is the whole of it, and where its size is not that of the place.
    """
    spec = local_of(value)
    if spec is None or spec.tensor_meta is None:
        return None
    return _placed_in_whole(value, tuple(spec.tensor_meta.shape), spec.mesh, spec.placements, "tag")


def _placed_by_style(value: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> Placed | None:
    """A tensor with its place in the whole, worked out from the style of the module that takes it.

    None for a DTensor, which knows its own place; where the share is the whole; and where its size is not the one that
    the placements give this rank.

    Args:
        value: this rank's share; the whole is taken to be larger by the mesh's size in each dimension that is sharded.
        mesh: over which.
        placements: one for each dimension of the mesh.
    """
    if hasattr(value, "placements"):
        return None
    shape = list(value.shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            shape[placement.dim] *= size
    return _placed_in_whole(value, tuple(shape), mesh, placements, "style")


def _placed_in_whole(
    value: torch.Tensor, shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], source: str
) -> Placed | None:
    """A tensor with its place in a DTensor of `shape`; None where it is the whole, or has not that place's size.

    Args:
        value: this rank's share.
        shape: of the whole.
        mesh: over which.
        placements: one for each dimension of the mesh.
        source: how it is known: `tag` (from `to_local`) or `style`.
    """
    part = part_of(SimpleNamespace(device_mesh=mesh, shape=shape, placements=placements))
    if part is None or is_whole(part, shape):
        return None
    return Placed(value, shape, replace(part, source=source)) if part.numel == value.numel() else None
