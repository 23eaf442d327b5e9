"""Collectives and messages between ranks: which operators they are, and the probe that records them."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.events import FUNCTIONAL, FUNCTIONALS, RAISED
from introspect_cli.capture.frames import line_of
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.base import tensors as tensors_in
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


FACTS = {
    "allreduce_": Facts("all_reduce", 0, 0, 1, 2),
    "allreduce_coalesced_": Facts("all_reduce", 0, 0, 1, 2),
    "allgather_": Facts("all_gather", 1, 0, 2),
    "_allgather_base_": Facts("all_gather", 1, 0, 2),
    "allgather_coalesced_": Facts("all_gather", 1, 0, 2),
    "allgather_into_tensor_coalesced_": Facts("all_gather", 1, 0, 2),
    "reduce_scatter_": Facts("reduce_scatter", 1, 0, 2, 3),
    "_reduce_scatter_base_": Facts("reduce_scatter", 1, 0, 2, 3),
    "reduce_scatter_tensor_coalesced_": Facts("reduce_scatter", 1, 0, 2, 3),
    "reduce_": Facts("reduce", 0, 0, 1, 2, 3),
    "broadcast_": Facts("broadcast", 0, 0, 1, -1, 2),
    "gather_": Facts("gather", 1, 0, 2, -1, 3),
    "scatter_": Facts("scatter", 1, 0, 2, -1, 3),
    "alltoall_": Facts("all_to_all", 1, 0, 2),
    "alltoall_base_": Facts("all_to_all", 1, 0, 2),
    "send": Facts("send", 0, -1, 1, -1, 2),
    "recv_": Facts("recv", -1, 0, 1, -1, 2),
    "barrier": Facts("barrier", -1, -1, 1),
}
"""Operators by name; others (checks of memory, waits) move nothing."""


# ---
# Collectives and messages between ranks: which, over whom, in what order, with what going in and coming out.
#
# DDP's reducer, FSDP, pipelines and a script's own calls all end in torch's operators `c10d::*`; functions of
# `torch.distributed` see only the last of them. So a kernel of introspect's is put before those operators, at the key
# where autograd would be, for as long as a capture that asked for it lasts. It hands all on, and sends nothing.
# Functional collectives, which DTensor uses, come to those operators below that key; so their functions are replaced.
#
# A result is there only when somebody has waited for it. So it is looked at after the wait for that very handle.
# Where the script waits itself and something had been written there before, the script or the collective may have
# done so, and the result counts as not observed. What nobody waits for in python is not recorded. A handle keeps its
# tensors, and `swap_tensors` refuses one that has a weak reference. So neither is kept: a group's methods, which give
# python its handles, are replaced to learn of them; handles are referred to weakly, and results kept as aliases until
# those go.
#
# A rank that hangs never ends its step, so nothing of that step is in the store. Each collective that begins is
# therefore noted in a file of its own at once, which is emptied when the step ends.

_MESSAGES = frozenset({"send", "recv"})


class _Result(NamedTuple):
    """A tensor that a collective has not filled yet.

    Attributes:
        site: where it will be recorded.
        alias: another tensor of its memory and its count of writes; only with the handle, which keeps that memory too.
        version: how often it had been written to when the collective had begun.
    """

    site: int
    alias: torch.Tensor
    version: int


class _Asked(threading.local):
    """Results of the group method that runs in this thread; None where none runs."""

    results: list[_Result] | None = None


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
        self._asked = _Asked()
        self._pending: dict[int, tuple[weakref.ref[Any], list[_Result]]] = {}
        self._notes = -1

    def install(self) -> None:
        """Put kernels before `c10d::*`, watch groups and functional collectives, and make the file of those in flight.

        Nothing where torch was built without `torch.distributed`.
        """
        if not torch.distributed.is_available():
            return
        self._patches.undo_by(self._pending.clear, self._close_notes)
        self._notes = os.open(self._folder / IN_FLIGHT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        library: Any = torch.library.Library("c10d", "IMPL")
        self._patches.undo_by(functools.partial(private_api.take_out, library))
        for name, facts in FACTS.items():
            operator = getattr(getattr(torch.ops.c10d, name, None), "default", None)
            if operator is not None:
                library.impl(name, self._new_kernel(operator, facts), "Autograd", with_keyset=True)
        importlib.import_module("torch.distributed._functional_collectives")
        super().install()

    def _close_notes(self) -> None:
        """Remove the file of collectives in flight."""
        if self._notes >= 0:
            os.close(self._notes)
            self._notes = -1
            with suppress(OSError):
                (self._folder / IN_FLIGHT).unlink()

    def on_tick(self) -> None:
        """As a step ends, forget results that nobody waited for, and empty the file of collectives in flight."""
        self._pending.clear()
        if self._notes >= 0:
            os.ftruncate(self._notes, 0)

    def _new_kernel(self, operator: Any, facts: Facts) -> Callable[..., Any]:
        """A kernel that records an operator's inputs, runs it, and remembers its outputs until they are waited for.

        Args:
            operator: the operator, whose own kernels are run.
            facts: which of its arguments are what.
        """

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            """Record the inputs, run the operator, and add what it will fill to the results of the method under way.

            Nothing is recorded in an unrecorded step, or inside a functional collective.
            """
            sites: list[int] = []
            outputs: list[torch.Tensor] = []
            if self._guarded.on and self._recorder.wanted and FUNCTIONALS not in self._guarded.inside:
                frame = sys._getframe(1)  # noqa: SLF001 - as python documents it
                with self._guarded, unobserved():
                    sites, outputs = self._record_begun(facts, args, frame)
            result = private_api.handed_on(operator, keys, args, kwargs)
            asked = self._asked.results
            if outputs and asked is not None and self._guarded.on:
                with self._guarded, unobserved():
                    aliases = [tensor.detach() for tensor in outputs]
                    asked += map(_Result, sites, aliases, map(private_api.writes_to, aliases))
            return result

        return run

    def _watch_method(self, _call: Call) -> Callable[[Any], None]:
        """Called before a group's method.

        Returns what ties the results of the operators in it to the handle it returns.
        """
        mine, pending = self._asked, self._pending
        outer, mine.results = mine.results, []

        def asked(work: Any) -> None:
            """Remember the results by the handle until somebody waits for it, it is gone, or the step ends."""
            results, key = mine.results, id(work)
            mine.results = outer
            if results and work is not None and work is not RAISED:

                def forget(_: object) -> None:
                    pending.pop(key, None)

                pending[key] = weakref.ref(work, forget), results

        return asked

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
                self._record_collective(word, reduction, peer, group, (tensors, tensors, []), call.frame)
        return lambda _: None

    def _record_begun(self, facts: Facts, args: tuple[Any, ...], frame: Any) -> tuple[list[int], list[torch.Tensor]]:
        """Record an operator and its inputs.

        Returns numbers of sites and tensors of its outputs, which are recorded after the wait. The root of a broadcast
        or scatter alone has inputs, that of a reduce or gather alone has outputs; that of a broadcast has none.

        Args:
            facts: which arguments are what.
            args: the operator's.
            frame: of the caller.
        """
        given = _tensors(args, facts.given)
        results = _tensors(args, facts.gives)
        group = torch_distributed.group_of(args[facts.group])
        peer = ""
        if facts.peer >= 0:
            number = int(args[facts.peer])
            ranks = torch_distributed.ranks_of(group)
            whole = ranks[number] if number < len(ranks) else number
            peer = f" {'to' if facts.word == 'send' else 'from'} rank {whole}"
            is_root = torch_distributed.rank_in(group) == number
            if facts.word in ("broadcast", "scatter"):
                given = given if is_root else []
                results = [] if is_root and facts.word == "broadcast" else results
            elif facts.word in ("reduce", "gather") and not is_root:
                results = []
        # What all ranks have: the root of a scatter alone has what goes in, that of a gather what comes out.
        place = facts.gives if facts.word in ("scatter", "recv") else facts.given
        shown = _tensors(args, place)
        reduction = torch_distributed.reduction_of(args[facts.reduces]) if facts.reduces >= 0 else ""
        return self._record_collective(facts.word, reduction, peer, group, (shown, given, results), frame), results

    def _record_collective(
        self, word: str, reduction: str, peer: str, group: Any, tensors: tuple[list[torch.Tensor], ...], frame: Any
    ) -> list[int]:
        """Record what a collective is and its inputs, and note it as in flight.

        Returns the number of a site for each of its results, which are recorded once they are there. The FQN is the
        group's name, for `send` and `recv` after `messages of`, where calls are counted by word and peer. An input
        that is the result of a collective not waited for is a gap. A call from another line of the script than the
        first one in its place (phase, group, number) has `~1`, `~2`, ... in its path.

        Args:
            word: what it does.
            reduction: `sum` and so on; "" for none.
            peer: ` to rank 1`, ` from rank 0`; "" for none.
            group: its process group.
            tensors: three lists: those whose shapes are told, the inputs, and the results.
            frame: of the caller.
        """
        shown, given, results = tensors
        label = self._label(group)
        what = f"{word} {reduction}".rstrip() + peer
        described = f"{what} of {_shapes(shown)}" if shown else what
        counted = f"{label} {what}" if word in _MESSAGES else label
        call = self._context.count(self, counted)
        fqn = f"messages of {label}" if word in _MESSAGES else label
        source = line_of(frame, through=True)
        path = what if word in _MESSAGES else ""
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
            place = self._recorder.site(Site(phase, Kind.COLLECTIVE, fqn, call, suffix), info)
            if torch_distributed.on_its_way(value):
                self._recorder.gap(place, "it is itself the result of a collective that nobody has waited for")
            else:
                self._recorder.emit(place, value)
        return [
            self._recorder.site(Site(phase, Kind.COLLECTIVE, fqn, call, f"{path}.out[{number}]"), info)
            for number in range(len(results))
        ]

    def _label(self, group: Any) -> str:
        """Name of a group: `ranks 0-3`, or `ranks 0-3 #2` for the second one met of the same ranks; then cached."""
        name = str(group.group_name)
        existing = self._labels.get(name)
        if existing is None:
            label = group_label(torch_distributed.ranks_of(group))
            taken = sum(other.partition(" #")[0] == label for other in self._labels.values())
            existing = self._labels[name] = f"{label} #{taken + 1}" if taken else label
        return existing

    def _watch_wait(self, call: Call) -> Callable[[object], None] | None:
        """Called before a handle is waited for; returns what records its results afterwards.

        None for a handle that nothing is remembered of, as at a second wait. A result that was written to since the
        collective began is a gap, unless torch's own code waits.
        """
        if id(call.first) not in self._pending:
            return None
        # a call that waits itself lets no code of the script come between
        is_torchs = str(call.frame.f_globals.get("__name__")).startswith("torch.")
        results: list[_Result] = []
        with unobserved():
            for result in self._pending.pop(id(call.first))[1]:
                # asked before the wait, as some backends write then; others write from a thread of theirs
                if is_torchs or private_api.writes_to(result.alias) == result.version:
                    results.append(result)
                else:
                    self._recorder.gap(result.site, "it was written to before the script waited for it")

        def waited(_: object) -> None:
            """Record the results that were not written to before the wait."""
            with unobserved():
                for site, alias, _ in results:
                    self._recorder.emit(site, alias)

        return waited


def _tensors(args: tuple[Any, ...], position: int) -> list[torch.Tensor]:
    """Tensors of the argument at a position: itself, or those in nested lists and tuples, in order.

    [] for a position below 0 or beyond the arguments.
    """
    return [tensor for _, tensor in tensors_in("", args[position])] if 0 <= position < len(args) else []


def _shapes(tensors: list[torch.Tensor]) -> str:
    """Dtype and shape of the first of one or more tensors, `float32 [16, 16]`, then ` and 3 more` for three others."""
    first = tensors[0]
    text = f"{str(first.dtype).removeprefix('torch.')} {list(first.shape)}"
    return text if len(tensors) == 1 else f"{text} and {len(tensors) - 1} more"
