"""How ranks share the work: by samples, as DDP and FSDP have it, and by the stages of pipelines.

Nothing in a run's numbers tells data parallelism from tensor parallelism, whose ranks must be given the same samples.
The wrappers know their groups, and which ranks hold the same parts of the model.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.naming import ById, modules_in, unwrap

if TYPE_CHECKING:
    from torch import nn

    from introspect_cli.capture.naming import Names


class DataParallel:
    """Data-parallel ranks, from the wrappers of outermost modules.

    Attributes:
        ranks: that share the work by samples, this one among them; empty where no wrapper says so.
        broadcasts: whether buffers are broadcast before each forward pass; None without a wrapper.
    """

    def __init__(self) -> None:
        """Know nothing before `find_ranks`."""
        self.ranks: list[int] = []
        self.broadcasts: bool | None = None
        self._seen: ById[bool] = ById()

    def find_ranks(self, root: nn.Module) -> None:
        """Look for wrappers in an outermost module, once each, and set the attributes; nothing once ranks are known.

        `ranks` are those of the first module, from the outermost on, that shares samples.
        """
        if self.ranks or "torch.distributed.distributed_c10d" not in sys.modules or self._seen.get(root):
            return
        self._seen.set(root, True)
        modules = list(modules_in(root))
        groups = next(filter(None, map(_groups_of, modules)), [])
        self.ranks = sorted({rank for group in groups for rank in torch_distributed.ranks_of(group)})
        if self.ranks:
            self.broadcasts = any(getattr(module, "broadcast_buffers", False) is True for module in modules)


def _groups_of(module: nn.Module) -> list[Any]:
    """Groups over which DDP, FSDP or `fully_shard` shares samples; [] for any other module."""
    name = type(module).__name__
    if name not in ("DistributedDataParallel", "FullyShardedDataParallel"):
        return torch_distributed.fsdp_groups(module) if name.startswith("FSDP") else []
    group = getattr(module, "process_group", None)
    return [] if group is None else [group]


class Pipelines:
    """Stages of pipelines in this process."""

    def __init__(self, names: Names) -> None:
        """Know no stages yet."""
        self._names = names
        self._roots: dict[int, str] = {}
        self.last: tuple[int, int] | None = None
        """Number of the stage that was called last, and how many there are."""

    def note_stage(self, stage: Any, module: nn.Module) -> None:
        """Note a stage as the last one called, and its module's FQN, if it has one: it gets that at its first call."""
        self.last = stage.stage_index, stage.num_stages
        if (state := self._names.find(unwrap(module))) is not None:
            self._roots[stage.stage_index] = state.fqn

    @property
    def manifest(self) -> dict[str, Any] | None:
        """For the manifest: `stage` (called last), `stages` (how many), `roots` (stage by FQN); None without stages."""
        if self.last is None:
            return None
        roots = {fqn: stage for stage, fqn in self._roots.items()}
        return {"stage": self.last[0], "stages": self.last[1], "roots": roots}
