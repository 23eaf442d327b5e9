"""`--perturb`: the initial parameters, moved by one rounding.

How far does rounding alone carry this training? A second run answers, in which each number that is trained begins one
unit in its last place up or down. It moves what an optimizer may step, at the first forward pass with gradients of the
model that holds it: after the model is built, moved to its device and cast, after a checkpoint was loaded, and before
any value is computed from it. The directions come from a generator made here, so the script's random numbers stay as
they are. Zeros, infinities and NaNs stay: rounding does not make one of another number, and what is masked or padded
stays so.

Memory is written without a count of autograd's: a graph that exists already would refuse to run backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from introspect_cli.capture.naming import ById, parameters_in
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.tensors.views import cut, unobserved

if TYPE_CHECKING:
    from torch import nn

    from introspect_cli.capture.context import Context

_MOVED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Types whose numbers are moved."""
_CHUNK = 1 << 24
"""Elements that are moved at once: what is needed beside a tensor stays small."""


class PerturbProbe(GuardedProbe):
    """Moves parameters, each once. The only thing in a capture that writes to the script's values, and on request."""

    name = "perturb"
    lost = "the initial parameters, as far as they are moved by then, are"

    def __init__(self, context: Context) -> None:
        """Move nothing before a model is called; the seed among the options chooses the directions."""
        super().__init__(context)
        self._seed = context.options.perturb or 0
        self._document = context.perturbed = {"seed": self._seed, "parameters": 0, "elements": 0}
        self._met = 0
        self._done: ById[bool] = ById()
        self._places: dict[tuple[int, int, int], StorageWeakRef] = {}

    def on_root(self, root: nn.Module) -> None:
        """Move the parameters that require gradients of a model, before its first forward pass with gradients.

        While any parameter is lazy or on `meta`, later passes look again for those not moved yet.
        """
        if not torch.is_grad_enabled() or self._done.get(root):
            return
        with unobserved():
            whole = True
            for parameter in parameters_in(root):
                if is_lazy(parameter) or parameter.is_meta:
                    whole = False  # it has values later
                elif parameter.requires_grad:
                    self._move_parameter(parameter)
            self._done.set(root, whole)

    on_forward = on_root

    def _move_parameter(self, parameter: torch.Tensor) -> None:
        """Move a parameter's elements in place, of a DTensor those of the shard; nothing where they were moved before.

        Nothing either for one that is empty, expanded, not strided, or of a dtype that is not in `_MOVED`; complex
        numbers are moved by real and imaginary parts. What is moved is counted for the manifest.
        """
        data: Any = parameter.data
        data = getattr(data, "_local_tensor", data)  # of a DTensor the shard
        if type(data) is not torch.Tensor or data.layout is not torch.strided or not data.numel():
            return
        data = torch.view_as_real(data) if data.is_complex() else data
        shared = any(stride == 0 and size > 1 for stride, size in zip(data.stride(), data.shape, strict=True))
        place = data.untyped_storage().data_ptr(), data.storage_offset(), data.numel()
        known = self._places.get(place)  # of memory that was freed and given out again nothing is known
        if data.dtype not in _MOVED or shared or (known is not None and not known.expired()):
            return
        self._places[place] = StorageWeakRef(data.untyped_storage())
        # A number for each tensor, not for each rank: copies of a model have to stay copies.
        directions = np.random.Generator(np.random.Philox(key=[self._seed, self._met]))
        self._met += 1
        self._document["parameters"] += 1
        for _, part in cut(data, _CHUNK):
            self._document["elements"] += _move_elements(part, directions)


def _move_elements(data: torch.Tensor, directions: np.random.Generator) -> int:
    """Move each finite, nonzero element in place to the next number up or down; returns how many were moved.

    An element whose next number would be infinite is moved the other way.

    Args:
        data: of a dtype in `_MOVED`.
        directions: draws one bit for each element, on the CPU.
    """
    drawn = np.frombuffer(directions.bytes(-(-data.numel() // 8)), dtype=np.uint8)
    up = torch.from_numpy(np.unpackbits(drawn, count=data.numel()).view(np.bool_)).to(data.device).view(data.shape)
    end = torch.full_like(data, float("inf")).where(up, -float("inf"))
    there = data.nextafter(end)
    there = there.where(there.isfinite(), data.nextafter(-end))  # the largest number has but one neighbour
    moved = data.isfinite() & (data != 0)
    data.copy_(there.where(moved, data))
    return int(moved.sum())
