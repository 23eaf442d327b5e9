"""Which ranks are given different samples, and which hold the same parts of the model: as DDP and FSDP have it.

Nothing in a run's numbers tells data parallelism from tensor parallelism, whose ranks must be given the same samples.
The wrappers know their groups.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.contents import modules_in
from introspect_cli.capture.identity import ById
from introspect_cli.capture.ranks import torch_distributed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class DataParallel:
    """Looks at each outermost module once.

    Attributes:
        ranks: that share the work by samples, this one among them; empty where no wrapper says so.
        copies: ranks that hold the same parts of everything as this one, which is among them; empty where that is not
            known: without a wrapper, or where some parameters are left to each rank.
    """

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.copies: list[int] = []
        self._seen: ById[bool] = ById()

    def look(self, root: nn.Module) -> None:
        """An outermost module is about to run."""
        if self.ranks or "torch.distributed.distributed_c10d" not in sys.modules or self._seen.get(root):
            return
        self._seen.set(root, True)
        modules = list(modules_in(root))
        groups = next(filter(None, map(_groups, modules)), [])
        self.ranks = sorted({rank for group in groups for rank in torch_distributed.ranks_of(group)})
        if self.ranks:
            self.copies = _copies(modules)


def _copies(modules: Iterable[nn.Module]) -> list[int]:
    """The ranks whose parameters are this one's; empty where wrappers do not agree, or leave some parameters out."""
    replicas: set[tuple[int, ...]] = set()
    for module in modules:
        name = type(module).__name__
        groups: list[Any] = []
        if name == "DistributedDataParallel":
            if getattr(module, "parameters_to_ignore", None):
                return []
            groups = [getattr(module, "process_group", None)]
        elif name == "FullyShardedDataParallel":
            strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
            groups = [getattr(module, "process_group" if strategy == "NO_SHARD" else "_inter_node_pg", None)]
        elif name.startswith("FSDP"):
            groups = torch_distributed.fsdp_replicas(module)
        alone = [torch.distributed.get_rank()]
        replicas |= {tuple(alone if group is None else torch_distributed.ranks_of(group)) for group in groups}
    return list(replicas.pop()) if len(replicas) == 1 else []


def _groups(module: nn.Module) -> list[Any]:
    name = type(module).__name__
    if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
        group = getattr(module, "process_group", None)
        return [] if group is None else [group]
    return torch_distributed.fsdp_groups(module) if name.startswith("FSDP") else []
