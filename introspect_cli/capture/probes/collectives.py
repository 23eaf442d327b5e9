"""Collectives and messages between ranks: which operators they are, and the probe that records them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.events import FUNCTIONAL, FUNCTIONALS
from introspect_cli.capture.frames import line_of
from introspect_cli.capture.probes.base import GuardedProbe, tensors_in
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.store.run_writer import IN_FLIGHT
from introspect_cli.tensors.views import unobserved
from introspect_cli.texts import group_label

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call


# ---
# What torch's collectives and messages between ranks are called: its operators, its functions, its groups' methods.


class Facts(NamedTuple):
    """One operator: its common name, and the positions of its arguments; -1 for none.

    Attributes:
        word: its name.
        given: position of what goes in.
        gives: position of what comes out.
        group: position of the group.
        reduces: position of the reduction.
        peer: position of the other rank, or of the root.
    """

    word: str
    given: int
    gives: int
    group: int
    reduces: int = -1
    peer: int = -1


_NAMES = {
    "allreduce_ allreduce_coalesced_": Facts("all_reduce", 0, 0, 1, 2),
    "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_": Facts("all_gather", 1, 0, 2),
    "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_": Facts("reduce_scatter", 1, 0, 2, 3),
    "reduce_": Facts("reduce", 0, 0, 1, 2, 3),
    "broadcast_": Facts("broadcast", 0, 0, 1, -1, 2),
    "gather_": Facts("gather", 1, 0, 2, -1, 3),
    "scatter_": Facts("scatter", 1, 0, 2, -1, 3),
    "alltoall_ alltoall_base_": Facts("all_to_all", 1, 0, 2),
    "send": Facts("send", 0, -1, 1, -1, 2),
    "recv_": Facts("recv", -1, 0, 1, -1, 2),
    "barrier": Facts("barrier", -1, -1, 1),
}
FACTS = {name: facts for names, facts in _NAMES.items() for name in names.split()}
"""Operators by name; others (checks of memory, waits) move nothing."""


# ---
# Collectives and messages between ranks: which, over whom, in what order, with what going in and coming out.
#
# DDP's reducer, FSDP, pipelines and a script's own calls all end in torch's operators `c10d::*`; functions of
# `torch.distributed` see only the last of them. So a kernel of introspect's is put before those operators, at the key
# where autograd would be, for as long as a capture that asked for it lasts. It hands all on, and sends nothing.
# Functional collectives, which DTensor uses, come to those operators below that key; so their functions are replaced.
#
# What comes out is what went in elsewhere, so it is not recorded; where it does not arrive, what is computed from it
# differs.
#
# A rank that hangs never ends its step, so nothing of that step is in the store. Each collective that begins is
# therefore noted in a file of its own at once, which is emptied when the step ends.

_MESSAGES = frozenset({"send", "recv"})


class CollectiveProbe(GuardedProbe):
    """Records collectives and messages between ranks."""

    name = "collectives"
    lost = "collectives are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._folder = context.capture.store.path
        self._labels: dict[str, str] = {}
        self._lines: dict[tuple[Phase, str, int, str], dict[str, int]] = {}
        self._notes, self._pid = -1, os.getpid()

    def install(self) -> None:
        """Put kernels before `c10d::*`, watch groups and functional collectives, and make the file of those in flight.

        Nothing where torch was built without `torch.distributed`.
        """
        if not torch.distributed.is_available():
            return
        self._patches.undo_by(self._close_notes)
        self._notes = os.open(self._folder / IN_FLIGHT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        library: Any = torch.library.Library("c10d", "IMPL")
        self._patches.undo_by(functools.partial(private_api.take_out, library))
        for name, facts in FACTS.items():
            operator = getattr(getattr(torch.ops.c10d, name, None), "default", None)
            if operator is not None:
                library.impl(name, self._new_kernel(operator, facts), "Autograd", with_keyset=True)
        super().install()

    def _close_notes(self) -> None:
        """Remove the file of collectives in flight; in a forked child it stays, being the parent's."""
        if self._notes >= 0:
            os.close(self._notes)
            self._notes = -1
            with suppress(OSError):
                if os.getpid() == self._pid:
                    (self._folder / IN_FLIGHT).unlink()

    def on_tick(self) -> None:
        """As a step ends, empty the file of collectives in flight."""
        os.ftruncate(self._notes, 0)

    def _new_kernel(self, operator: Any, facts: Facts) -> Callable[..., Any]:
        """A kernel that records an operator's inputs, and runs it.

        Args:
            operator: the operator, whose own kernels are run.
            facts: which of its arguments are what.
        """

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            """Record the inputs, and run the operator.

            Nothing is recorded in an unrecorded step, or inside a functional collective.
            """
            if self._guarded.on and self._recorder.wanted and FUNCTIONALS not in self._guarded.inside:
                frame = sys._getframe(1)  # noqa: SLF001 - as python documents it
                with self._guarded, unobserved():
                    self._record_begun(facts, args, frame)
            return private_api.handed_on(operator, keys, args, kwargs)

        return run

    def _watch_functional(self, call: Call) -> Callable[[object], None] | None:
        """Record a functional collective's inputs before it runs.

        Returns:
            A function that does nothing; while the collective runs, its presence keeps the operators and collectives
            inside it from being recorded. None in an unrecorded step, and for what is none. Where the group is not
            known, nothing is recorded either way.
        """
        function = getattr(sys.modules["torch.distributed._functional_collectives"], call.name)
        signature, word = inspect.signature(function), next(word for word in FUNCTIONAL if call.name.startswith(word))
        if not self._recorder.wanted or call.name.endswith("_inplace") or "group" not in signature.parameters:
            return None
        with unobserved():
            given = signature.bind(*call.args, **call.kwargs).arguments
            group = torch_distributed.group_named(given["group"])
            reduction = str(given.get("reduceOp", given.get("reduce_op", ""))).lower()
            peer = f" from rank {given['src']}" if "src" in given else ""
            tensors = _tensors((given[next(iter(signature.parameters))],), 0)
            if group is not None:
                self._record_collective(f"{word} {reduction}".rstrip() + peer, group, tensors, tensors, call.frame)
        return lambda _: None

    def _record_begun(self, facts: Facts, args: tuple[Any, ...], frame: Any) -> None:
        """Record an operator and its inputs.

        The root of a broadcast or scatter alone has inputs.

        Args:
            facts: which arguments are what.
            args: the operator's.
            frame: of the caller.
        """
        given, group = _tensors(args, facts.given), torch_distributed.group_of(args[facts.group])
        # What all ranks have: the root of a scatter alone has what goes in.
        shown = _tensors(args, facts.gives) if facts.word in ("scatter", "recv") else given
        what = facts.word
        if facts.reduces >= 0:
            what = f"{what} {torch_distributed.reduction_of(args[facts.reduces])}".rstrip()
        if facts.peer >= 0:
            number, ranks = int(args[facts.peer]), torch_distributed.ranks_of(group)
            whole = ranks[number] if number < len(ranks) else number
            what += f" {'to' if facts.word == 'send' else 'from'} rank {whole}"
            if facts.word in ("broadcast", "scatter") and torch_distributed.rank_in(group) != number:
                given = []
        self._record_collective(what, group, shown, given, frame)

    def _record_collective(
        self, what: str, group: Any, shown: list[torch.Tensor], given: list[torch.Tensor], frame: Any
    ) -> None:
        """Record what a collective is and its inputs, and note it as in flight.

        The FQN is the group's name, for `send` and `recv` after `messages of`, where calls are counted by word and
        peer. An input that is the result of a collective not waited for is a gap. A call from another line of the
        script than the first one in its place (phase, group, number) has `~1`, `~2`, ... in its path.

        Args:
            what: what it does, `all_reduce sum`, with a peer: `send to rank 1`.
            group: its process group.
            shown: tensors whose shapes are told.
            given: the inputs.
            frame: of the caller.
        """
        word, fqn, path = what.partition(" ")[0], self._label(group), ""
        described = f"{what} of {_shapes(shown)}" if shown else what
        call = self._context.count(self, f"{fqn} {what}" if word in _MESSAGES else fqn)
        if word in _MESSAGES:
            fqn, path = f"messages of {fqn}", what
        source = line_of(frame, through=True)
        phase = Phase.BACKWARD if private_api.graph_task() != -1 else Phase.FORWARD
        phase = Phase.OPTIMIZER if self._context.stack.optimizers else phase
        # Another line at the same place is another site, numbered: lines themselves move from commit to commit.
        lines = self._lines.setdefault((phase, fqn, call, path), {})
        number = lines.setdefault(source, len(lines))
        path += f"~{number}" if number else ""
        info = SiteInfo("", word, source)
        note = f"{self._recorder.step}\t{fqn}\t{call}\t{described}\t{source}\n"
        os.write(self._notes, note.encode("utf-8", "replace"))
        self._emit(phase, Kind.COLLECTIVE, fqn, [(path, described)], call, info)
        for number, value in enumerate(given):
            suffix = f"{path}.in[{number}]"
            if torch_distributed.on_its_way(value):
                place = self._recorder.site(Site(phase, Kind.COLLECTIVE, fqn, call, suffix), info)
                self._recorder.gap(place, "it is itself the result of a collective that nobody has waited for")
            else:
                self._emit(phase, Kind.COLLECTIVE, fqn, [(suffix, value)], call, info)

    def _label(self, group: Any) -> str:
        """Name of a group: `ranks 0-3`, or `ranks 0-3 #2` for the second one met of the same ranks; then cached."""
        name = str(group.group_name)
        if name not in self._labels:
            label = group_label(torch_distributed.ranks_of(group))
            taken = sum(other.partition(" #")[0] == label for other in self._labels.values())
            self._labels[name] = f"{label} #{taken + 1}" if taken else label
        return self._labels[name]


def _tensors(args: tuple[Any, ...], position: int) -> list[torch.Tensor]:
    """Tensors of the argument at a position: itself, or those in nested lists and tuples, in order.

    [] for a position below 0 or beyond the arguments.
    """
    return [tensor for _, tensor in tensors_in(args[position])] if 0 <= position < len(args) else []


def _shapes(tensors: list[torch.Tensor]) -> str:
    """Dtype and shape of the first of one or more tensors, `float32 [16, 16]`, then ` and 3 more` for three others."""
    first = tensors[0]
    text = f"{str(first.dtype).removeprefix('torch.')} {list(first.shape)}"
    return text if len(tensors) == 1 else f"{text} and {len(tensors) - 1} more"
