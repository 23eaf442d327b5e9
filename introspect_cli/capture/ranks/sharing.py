"""How ranks share the work: by samples, as DDP and FSDP have it, and by the stages of pipelines.

Nothing in a run's numbers tells data parallelism from tensor parallelism, whose ranks must be given the same samples.
The wrappers know their groups, and which ranks hold the same parts of the model.

Calls of a module are counted, and schedules of pipelines mostly run microbatches in order. One that leaves some out, or
runs them in another order, would have its calls numbered as if it had not: so the schedule's number is asked for, and
where it is not the next one, the count goes on from there.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.naming import ById, modules_in, unwrap
from introspect_cli.records import Phase

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


class _Order:
    """Numbers of the microbatches of a step, which may come several times over."""

    def __init__(self) -> None:
        """Expect microbatch 0; `step` is the one that the numbers are of, -1 for none."""
        self.step = -1
        self.rounds = self.expected = self.done = self.done_before = 0
        self.guessed = False
        """Whether the first step began in the middle, when nobody knew yet how often a microbatch calls a module."""
        self.seen: set[int] = set()

    def next_number(self, step: int, chunk: int, chunks: int) -> tuple[int, bool]:
        """A microbatch's number within the step, and whether it is the last one plus 1 (0 at first); call it for each.

        Args:
            step: the step; another one begins the count again.
            chunk: the schedule's number of the microbatch.
            chunks: how many microbatches the schedule has; one that comes again begins another round of as many.
        """
        if step != self.step:
            self.done_before = self.done
            self.step, self.rounds, self.expected, self.done, self.guessed = step, 0, 0, 0, False
            self.seen.clear()
        if chunk in self.seen:
            self.rounds += 1
            self.seen.clear()
        self.seen.add(chunk)
        number = self.rounds * chunks + chunk
        follows = number == self.expected
        self.expected, self.done = number + 1, self.done + 1
        return number, follows


class Pipelines:
    """Stages of pipelines in this process."""

    def __init__(self, names: Names) -> None:
        """Know no stages yet."""
        self._names = names
        self._roots: dict[int, str] = {}
        self._forwards: ById[_Order] = ById()
        self._losses: ById[_Order] = ById()
        self._each: ById[int] = ById()
        self.last: tuple[int, int] | None = None
        """Number of the stage that was called last, and how many there are."""

    def note_stage(self, stage: Any, module: nn.Module) -> None:
        """Note a stage as the last one called, and its module's FQN, if it has one: it gets that at its first call."""
        self.last = stage.stage_index, stage.num_stages
        state = self._names.find(unwrap(module))
        if state is not None:
            self._roots[stage.stage_index] = state.fqn

    def number_forward(self, stage: Any, chunk: int, module: nn.Module, step: int) -> None:
        """Before a stage's forward: have the calls of its modules counted on from where its microbatch belongs.

        The stage is noted as the last one called (`note_stage`). No call is numbered where the microbatch is the next
        in order: the count is right already. Else a module without a name is named. While it is not known how
        often a microbatch calls each module, only the stage's own module is counted on.

        Args:
            stage: torch's stage.
            chunk: the schedule's number of the microbatch.
            module: the stage's.
            step: the step.
        """
        self.note_stage(stage, module)
        order = self._forwards.made(stage, _Order)
        done, before = (order.done, order.done_before) if order.step == step else (0, order.done)
        number, follows = order.next_number(step, chunk, stage.chunks or 1)
        order.guessed |= not (follows or done or before)
        if follows and not order.guessed:
            return
        if self._names.find(module) is None:
            self._names.ensure_named(module, None)
        for inner in modules_in(module):
            state = self._names.find(inner)
            if state is None or (order.guessed and unwrap(inner) is not unwrap(module)):
                continue
            each = 1 if order.guessed else self._each.get(state)  # how often a microbatch calls it
            if each is None:
                count, of = state.calls.get(Phase.FORWARD, 0), done or before
                each = count // of if of and count % of == 0 else 1
                self._each.set(state, each)
            state.count_from(step, Phase.FORWARD, number * each)

    def loss_number(self, stage: Any, chunk: int, step: int) -> int:
        """Number of a loss within the step, by its microbatch (`chunk`); call it once for each, in order."""
        return self._losses.made(stage, _Order).next_number(step, chunk, stage.chunks or 1)[0]

    @property
    def manifest(self) -> dict[str, Any] | None:
        """For the manifest: `stage` (called last), `stages` (how many), `roots` (stage by FQN); None without stages."""
        if self.last is None:
            return None
        roots = {fqn: stage for stage, fqn in self._roots.items()}
        return {"stage": self.last[0], "stages": self.last[1], "roots": roots}
