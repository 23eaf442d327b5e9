"""Which ranks are given different samples: those that DDP or FSDP average gradients over.

Nothing in a run's numbers tells data parallelism from tensor parallelism, whose ranks must be given the same samples.
The wrappers know their group.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from introspect_cli.capture import private_api
from introspect_cli.capture.inside import modules_in

if TYPE_CHECKING:
    from torch import nn


class DataParallel:
    """Looks at each outermost module once.

    Attributes:
        ranks: that share the work by samples, this one among them; empty where no wrapper says so.
    """

    def __init__(self) -> None:
        """Start with nothing known."""
        self.ranks: list[int] = []
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def look(self, root: nn.Module) -> None:
        """An outermost module is about to run."""
        if self.ranks or "torch.distributed.distributed_c10d" not in sys.modules or root in self._seen:
            return
        self._seen.add(root)
        for module in modules_in(root):
            groups = _groups(module)
            if groups:
                self.ranks = sorted({rank for group in groups for rank in private_api.ranks_of(group)})
                return


def _groups(module: nn.Module) -> list[Any]:
    name = type(module).__name__
    if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
        group = getattr(module, "process_group", None)
        return [] if group is None else [group]
    return private_api.fsdp_groups(module) if name.startswith("FSDP") else []
