"""The ranks of one run held against one another, in one pass over its steps.

Which tensors ought to be equal on all ranks is written nowhere. So what was equal on all of them at
first, or gets one gradient on all of them, is taken for copies; what differs from the start and has gradients of its
own is somebody's own (a local expert). Parts of a whole are compared with copies of the same part alone, and what has
no known place with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.apart import Apart, distance_of
from introspect_cli.health.collectives import Collectives, CollectiveWalk, under_way
from introspect_cli.health.messages import MessageWalk
from introspect_cli.health.own_gradients import outputs_of, unreduced
from introspect_cli.health.peers import Peers, PeerWalk
from introspect_cli.health.reductions import Reductions
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.launched import rank_list
from introspect_cli.store.stages import stages_in
from introspect_cli.store.whole import WholeReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.records import Layout
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import Run

_TENSORS = frozenset({int(Status.OBSERVED), int(Status.PARTIAL)})


@dataclass
class Replicas:
    """What ranks hold against one another.

    Attributes:
        run: the run.
        ranks: those with records.
        steps: the steps that all have.
        names: kind, phase, FQN and path of each site, by number.
        params: the first time that copies of a parameter differ after they were equal, by FQN.
        stale: parameters that differ from the first step on although their gradients are equal, by FQN.
        grads: the first time that gradients of equal copies differ, by FQN.
        graded: parameters of which the gradients of two ranks at least were held against one another.
        unreduced: of parameters in `grads`, what records prove of their reduction; "" where they prove nothing.
        alike: of parameters in `grads`, which ranks have one gradient and which another; "" where each has its own.
        states: the first time that an optimizer's state of equal gradients differs, by site.
        shared: parameters that were equal on all ranks at the first step, and how many there are in all.
        batches: how often a loader's batches were equal on two ranks and in how many steps, by ranks.
        inputs: as `batches`, of what goes into outermost modules.
        settings: of each rank, by name of the document.
        learning: the first step at which a hyper-parameter differs, with the values by rank.
        layouts: shapes and dtypes of parameters that differ from rank to rank.
        dtypes: the first step in which a module's output has another dtype on some ranks, with the dtypes by rank.
        has_parts: whether any rank holds parts of tensors.
        groups: ranks between which wrappers share out the samples, as each rank tells its own.
        peers: what ranks did beside one another.
        collectives: those of the ranks beside one another.
        under_way: where ranks part in a step that never ended: step, rank and sentence.
    """

    run: Run
    ranks: tuple[int, ...]
    steps: list[int]
    names: list[tuple[str, str, str, str]]
    params: dict[str, Apart] = field(default_factory=dict)
    stale: dict[str, Apart] = field(default_factory=dict)
    grads: dict[str, Apart] = field(default_factory=dict)
    graded: set[str] = field(default_factory=set)
    unreduced: dict[str, str] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    everything: set[str] = field(default_factory=set)
    batches: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    inputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    learning: dict[str, tuple[int, dict[int, str]]] = field(default_factory=dict)
    layouts: dict[str, dict[int, str]] = field(default_factory=dict)
    dtypes: dict[str, tuple[int, dict[int, str]]] = field(default_factory=dict)
    has_parts: bool = False
    groups: list[frozenset[int]] = field(default_factory=list)
    peers: Peers = field(default_factory=Peers)
    collectives: Collectives = field(default_factory=Collectives)
    under_way: list[tuple[int, int, str]] = field(default_factory=list)

    def share_samples(self, one: int, two: int) -> bool:
        """Whether two ranks are to be given different samples; peers of tensor parallelism get the same."""
        if self.groups:
            return any(one in group and two in group for group in self.groups)
        return self.is_data_parallel

    @property
    def is_data_parallel(self) -> bool:
        """Whether ranks are to be given different samples: a wrapper says so, or each holds all parameters."""
        if self.peers.data_parallel:
            return set(self.ranks) <= self.peers.data_parallel
        return not self.has_parts and bool(self.shared) and 2 * len(self.shared) >= len(self.everything)

    @property
    def sees_draws(self) -> bool:
        """Whether each rank noticed every draw of random numbers, which takes the compiled kernels."""
        noticed = all(self.run.manifests.get(rank, {}).get("draws") is True for rank in self.ranks)
        return noticed and any(kind == Kind.RNG.value for kind, *_ in self.names)


def read_replicas(run: Run) -> Replicas:
    """Read all steps that all ranks have, once.

    Raises:
        StoreError: the run is damaged.
    """
    ranks = run.recorded
    readers = [run.rank(rank) for rank in ranks]
    whole = WholeReader(str(run.path), readers, stages=stages_in(run.manifests))
    sites = whole.sites
    names = list(zip(sites.kind, sites.phase, sites.fqn, sites.path, strict=True))
    common = sorted(set.intersection(*({int(step) for step in reader.entries["step"]} for reader in readers)))
    found = Replicas(run, ranks, common, names)
    found.has_parts = any(layout.part is not None for reader in readers for layout in reader.layouts)
    told = [run.manifests.get(rank, {}).get("data_parallel") for rank in ranks]
    found.groups = [
        frozenset(rank for rank in own if type(rank) is int) for own in told if own and isinstance(own, list)
    ]
    peers = PeerWalk(whole, ranks, found.groups, run.world_size)
    found.peers = peers.found
    collectives = CollectiveWalk(readers)
    walk = _Walk(found, whole, peers, collectives)
    found.collectives = collectives.found
    messages = MessageWalk(readers)
    for step in common:
        batches = [reader.read(step) for reader in readers]
        walk.step(step, batches)
        collectives.step(step, batches)
        messages.step(step, batches)
    found.collectives.apart |= messages.found()
    found.under_way = under_way(readers)
    return found


class _Walk:
    """What must be remembered from step to step."""

    def __init__(self, found: Replicas, whole: WholeReader, peers: PeerWalk, collectives: CollectiveWalk) -> None:
        self.found, self.whole, self.peers, self.collectives = found, whole, peers, collectives
        self.equal: set[str] = set()  # parameters that were equal on all ranks when last seen
        self.parted: dict[str, Apart] = {}
        classes = {module.fqn: module.module_class for module in whole.modules}
        self.outputs = outputs_of(found.names, classes)

    def step(self, step: int, batches: list[StepBatch]) -> None:
        """Take in a step of all ranks."""
        rows: dict[int, dict[int, int]] = {}
        for at, batch in enumerate(batches):
            for row, number in enumerate(self.whole.numbers[at][np.asarray(batch.site)].tolist()):
                rows.setdefault(number, {})[at] = row
        self.peers.step(step, batches, rows, self.equal)
        new: dict[str, Mapping[int, int]] = {}
        reduced: list[Mapping[int, int]] = []
        for number in sorted(rows, key=lambda own: min(batches[at].sequence[row] for at, row in rows[own].items())):
            held = rows[number]
            if len(held) < 2:
                continue
            kind, phase, fqn, _ = self.found.names[number]
            if kind == Kind.PARAM:
                self._parameter(step, number, fqn, phase, batches, held)
            elif kind == Kind.GRAD and phase == Phase.OPTIMIZER:
                apart = self._apart(step, number, batches, held)
                self.found.graded.add(fqn)
                if apart is not None and fqn in self.equal and fqn not in self.found.grads:
                    self.found.grads[fqn] = apart
                    if np.isnan(apart.scale):
                        new[fqn] = held
                elif apart is None and fqn in self.parted and fqn not in self.found.grads:
                    self.found.stale.setdefault(fqn, self.parted[fqn])
                if apart is None or not np.isnan(apart.scale):
                    reduced.append(held)
            elif kind == Kind.OUTPUT and phase == Phase.FORWARD:
                self._dtype(step, fqn, batches, held)
            elif kind == Kind.BATCH and phase == Phase.DATA:
                self._batch(self.found.batches, step, batches, held)
            elif kind == Kind.INPUT and phase == Phase.FORWARD and "." not in fqn:
                self._batch(self.found.inputs, step, batches, held)
            elif kind == Kind.HYPERPARAMETER:
                values = {self.found.ranks[at]: batches[at].text[row] for at, row in held.items()}
                if len(set(values.values())) > 1:
                    self.found.learning.setdefault(f"{fqn}{self.found.names[number][3]}", (step, values))
        if new:
            self._explain(new, reduced, batches, rows)

    def _explain(
        self,
        new: Mapping[str, Mapping[int, int]],
        reduced: Sequence[Mapping[int, int]],
        batches: list[StepBatch],
        rows: Mapping[int, Mapping[int, int]],
    ) -> None:
        """Find out why gradients differ between ranks, where the step's records prove it."""
        reductions = Reductions(self.whole, batches, self.collectives.calls) if self.collectives.found.seen else None
        for fqn, held in new.items():
            told = "" if reductions is None else reductions.why(held, reduced)
            if not told:
                sites = [own for own in self.outputs.get(fqn, ()) if own in rows]
                alone = [self.found.ranks[at] for at in sorted(unreduced(self.whole, batches, rows, sites, held))]
                where = "any rank" if len(alone) == self.found.run.world_size else rank_list(alone)
                told = f"its gradient was not reduced on {where}" if alone else ""
            self.found.unreduced[fqn] = told
            self.found.alike[fqn] = self._alike(batches, held)

    def _alike(self, batches: list[StepBatch], held: Mapping[int, int]) -> str:
        """Which ranks have one gradient and which another; "" where each has its own."""
        alike: dict[int, list[int]] = {}
        for at, row in held.items():
            if self._layout(at, batches, row).part is not None:
                return ""
            alike.setdefault(int(batches[at].checksum[row]), []).append(self.found.ranks[at])
        if len(alike) == len(held):
            return ""
        told = " and another ".join(f"on {rank_list(sorted(ranks))}" for ranks in alike.values())
        return f"it is one gradient {told}"

    def _parameter(
        self, step: int, number: int, fqn: str, phase: str, batches: list[StepBatch], held: Mapping[int, int]
    ) -> None:
        found = self.found
        told = {found.ranks[at]: _told(self._layout(at, batches, row)) for at, row in held.items()}
        if len(set(told.values())) > 1:
            found.layouts.setdefault(fqn, told)
            return
        apart = self._apart(step, number, batches, held)
        first = fqn not in found.everything
        found.everything.add(fqn)
        if apart is None:
            self.equal.add(fqn)
            self.parted.pop(fqn, None)
            if first:
                found.shared.add(fqn)
            return
        self.parted.setdefault(fqn, apart)
        if fqn in self.equal or (first and phase == Phase.START and fqn in found.shared):
            found.params.setdefault(fqn, apart)
        self.equal.discard(fqn)

    def _dtype(self, step: int, fqn: str, batches: list[StepBatch], held: Mapping[int, int]) -> None:
        """Hold dtypes of what a module gives against one another; its values are each rank's own."""
        if fqn in self.found.dtypes:
            return
        seen = {at: row for at, row in held.items() if batches[at].status[row] in _TENSORS}
        told = {self.found.ranks[at]: self._layout(at, batches, row).dtype for at, row in seen.items()}
        if len(set(told.values())) > 1:
            self.found.dtypes[fqn] = step, told

    def _layout(self, at: int, batches: list[StepBatch], row: int) -> Layout:
        return self.whole.readers[at].layouts[int(batches[at].layout[row])]

    def _apart(self, step: int, number: int, batches: list[StepBatch], held: Mapping[int, int]) -> Apart | None:
        """Ranks whose copy differs; None where all are equal, or hold different parts."""
        by_part: dict[object, list[int]] = {}
        for at, row in held.items():
            layout = self._layout(at, batches, row)
            unplaced = batches[at].status[row] == Status.PARTIAL and (layout.part is None or bool(layout.part.owed))
            if batches[at].status[row] == Status.NOT_OBSERVED or unplaced:
                return None
            by_part.setdefault((layout.shape, layout.part), []).append(at)
        for holders in by_part.values():
            base = holders[0]
            others = [at for at in holders if batches[at].checksum[held[at]] != batches[base].checksum[held[base]]]
            if others:
                first = others[0]
                distance, scale = distance_of(self.whole, batches, (base, held[base]), (first, held[first]))
                ranks = tuple(self.found.ranks[at] for at in others)
                lone = self._layout(base, batches, held[base]).numel < 2
                return Apart(step, number, ranks[0], ranks, self.found.ranks[base], distance, scale, lone)
        return None

    def _batch(
        self, pairs: dict[tuple[int, int], list[int]], step: int, batches: list[StepBatch], held: Mapping[int, int]
    ) -> None:
        order = sorted(held)
        for position, one in enumerate(order):
            for two in order[position + 1 :]:
                pair = self.found.ranks[one], self.found.ranks[two]
                counted = pairs.setdefault(pair, [0, 0, -1])
                same = batches[one].checksum[held[one]] == batches[two].checksum[held[two]]
                counted[0] += bool(same)
                counted[1] += 1
                if same and counted[2] < 0:
                    counted[2] = step


def _told(layout: Layout) -> str:
    return f"{layout.dtype} {list(layout.shape)}"
