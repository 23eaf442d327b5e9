"""What each rank did in a step, beside the others: who has no gradient, who took no step, whose outputs differ alone.

`replicas` holds copies of one tensor against one another. Here it is what belongs together otherwise: a
module's outputs and its inputs, a parameter and its gradient, the parts of one whole, tied weights on two stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.apart import Apart, distance_of
from introspect_cli.records import Kind, Part, Phase
from introspect_cli.store.covering import Covering, covering, same_parts, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from introspect_cli.records import Layout
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.whole import WholeReader

    Held = Mapping[int, int]  # position of a rank -> its row
    Place = tuple[str, int]  # FQN and call

_LEAST = 8  # elements of a parameter whose equality on two ranks is no accident


@dataclass
class Outputs:
    """How often a module's outputs differ on ranks where its inputs and parameters are equal.

    Attributes:
        first: the first time; None while they never did.
        drew: whether it then drew from random states that differ.
        times: in how many calls.
        chances: of how many calls with equal inputs and parameters.
    """

    first: Apart | None = None
    drew: bool = False
    times: int = 0
    chances: int = 0


@dataclass
class Peers:
    """What was found.

    Attributes:
        data_parallel: ranks that are to be given different samples; empty where that is not known.
        without: parameters that only some ranks have a gradient of: the step, the ranks with, the ranks without.
        rounds: the first step in which ranks have another number of losses, by rank.
        idle: the first step in which some ranks' parameters did not change: ranks whose did, and those whose did not.
        uneven: the first step in which batches are of different sizes, by rank.
        outputs: modules whose outputs differ although what went in is equal, by FQN.
        draws: modules that draw from one random state on ranks with different inputs: ranks, times, chances, step.
        shards: what is wrong with the parts of a parameter, by FQN.
        tied: parameters that were equal under two names on two ranks, and the step after which they are not.
    """

    data_parallel: frozenset[int] = frozenset()
    without: dict[str, tuple[int, list[int], list[int]]] = field(default_factory=dict)
    rounds: tuple[int, dict[int, int]] | None = None
    idle: tuple[int, list[int], list[int]] | None = None
    uneven: tuple[int, dict[int, int]] | None = None
    outputs: dict[str, Outputs] = field(default_factory=dict)
    draws: dict[str, list[int]] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)
    tied: dict[tuple[tuple[int, str], tuple[int, str]], int | None] = field(default_factory=dict)


class PeerWalk:
    """Takes in steps, one after the other."""

    def __init__(self, whole: WholeReader, ranks: Sequence[int], groups: Sequence[frozenset[int]], world: int) -> None:
        """Start with the ranks' readers as one.

        Args:
            whole: knows sites and layouts.
            ranks: their numbers.
            groups: ranks between which wrappers share out the samples.
            world: how many there are to be.
        """
        self.found, self._groups = Peers(frozenset[int]().union(*groups)), list(groups)
        self._whole, self._ranks, self._world = whole, list(ranks), world
        sites = whole.sites
        self._sites = list(zip(sites.kind, sites.phase, sites.fqn, sites.path, sites.call.tolist(), strict=True))
        self._first = True
        self._values: dict[tuple[int, str], int] = {}  # checksums of parameters, as last seen, by rank's position

    def step(self, step: int, batches: Sequence[StepBatch], rows: Mapping[int, Held], equal: Iterable[str]) -> None:
        """Take in a step of all ranks.

        Args:
            step: its number.
            batches: of each rank.
            rows: of each site, each rank's row.
            equal: parameters whose copies are equal on all ranks that hold them.
        """
        by_kind: dict[tuple[str, str], list[int]] = {}
        for number in rows:
            kind, phase, *_ = self._sites[number]
            by_kind.setdefault((kind, phase), []).append(number)
        own = _Step(step, batches, rows, by_kind)
        if self._first:
            self._first = False
            self._parts(own)
            self._tie(own)
        self._gradients(own)
        self._counts(own)
        self._idle(own)
        self._untie(own)
        self._modules(own, set(equal))

    def _layout(self, own: _Step, at: int, row: int) -> Layout:
        return self._whole.readers[at].layouts[int(own.batches[at].layout[row])]

    def _elements(self, own: _Step, at: int, row: int) -> int:
        """How many elements a rank holds; none of a parameter that lies in another rank's part of a flat one."""
        layout = self._layout(own, at, row)
        return layout.numel if layout.part is None else layout.part.numel

    def _gradients(self, own: _Step) -> None:
        params = {self._sites[n][2]: own.rows[n] for n in own.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER)}
        stepping = {at for n in own.of(Kind.GRAD, Phase.OPTIMIZER) for at in own.rows[n]}
        for number in own.of(Kind.GRAD, Phase.OPTIMIZER):
            fqn, held = self._sites[number][2], own.rows[number]
            holders = params.get(fqn, {})
            lacking = [
                at for at, row in holders.items() if at not in held and at in stepping and self._elements(own, at, row)
            ]
            if not lacking or any(self._layout(own, at, row).part is not None for at, row in held.items()):
                continue
            told = own.step, [self._ranks[at] for at in held], [self._ranks[at] for at in lacking]
            self.found.without.setdefault(fqn, told)

    def _counts(self, own: _Step) -> None:
        every = range(len(own.batches))
        losses = dict.fromkeys(every, 0)
        for number in own.of(Kind.LOSS, Phase.LOSS):
            for at in own.rows[number]:
                losses[at] += 1
        if self.found.rounds is None and all(losses.values()) and len(set(losses.values())) > 1:
            self.found.rounds = own.step, {self._ranks[at]: times for at, times in losses.items()}
        for number in own.of(Kind.BATCH, Phase.DATA):
            shapes = {self._ranks[at]: self._layout(own, at, row).shape for at, row in own.rows[number].items()}
            apart = {shape[1:] for shape in shapes.values()}
            if self.found.uneven is None and len(set(shapes.values())) > 1 and len(apart) == 1 and all(shapes.values()):
                self.found.uneven = own.step, {rank: shape[0] for rank, shape in shapes.items()}

    def _idle(self, own: _Step) -> None:
        """Ranks of which no parameter that has a gradient was changed, while others' were."""
        with_grad = {(at, self._sites[n][2]) for n in own.of(Kind.GRAD, Phase.OPTIMIZER) for at in own.rows[n]}
        before, moved = dict(self._values), dict[int, bool]()
        for phase in (Phase.START, Phase.OPTIMIZER):
            for number in own.of(Kind.PARAM, phase):
                fqn = self._sites[number][2]
                for at, row in own.rows[number].items():
                    mark = int(own.batches[at].checksum[row])
                    if phase is Phase.START:
                        before[at, fqn] = mark
                    elif (at, fqn) in before and (at, fqn) in with_grad:
                        moved[at] = moved.get(at, False) or before[at, fqn] != mark
                    self._values[at, fqn] = mark
        idle = [at for at, changed in moved.items() if not changed]
        if self.found.idle is None and idle and len(idle) < len(moved):
            others = [self._ranks[at] for at, changed in sorted(moved.items()) if changed]
            self.found.idle = own.step, others, [self._ranks[at] for at in sorted(idle)]

    def _parts(self, own: _Step) -> None:
        if len(self._ranks) < self._world:
            return
        for number in own.of(Kind.PARAM, Phase.START):
            fqn, held = self._sites[number][2], own.rows[number]
            parts: dict[object, tuple[int, int, int]] = {}
            for at, row in held.items():
                part = self._layout(own, at, row).part
                if part is not None and part.numel and not part.owed:
                    parts.setdefault(part, (at, row, part.numel))
            if not parts:
                continue
            at, row, _ = next(iter(parts.values()))
            whole = self._layout(own, at, row)
            found = covering([part for part in parts if isinstance(part, Part)])
            if len(held) == self._world and found is not None and found != Covering(whole.numel, 0):
                twice = f", and several parts have {share(found.doubled, whole.numel)}" if found.doubled else ""
                holders = [(self._ranks[at], self._layout(own, at, row).part) for at, row in held.items()]
                same = same_parts(holders) if found.covered < whole.numel else ""
                self.found.shards[fqn] = f"its parts cover {share(found.covered, whole.numel)}{twice}{same}"
                continue
            self._same_values(own, fqn, [(at, row) for at, row, _ in parts.values()])

    def _same_values(self, own: _Step, fqn: str, places: list[tuple[int, int]]) -> None:
        """Two parts of different places with the same extrema and moments, to the last bit: one was written twice."""
        seen: dict[object, int] = {}
        for at, row in places:
            floats = own.batches[at].floats
            part = self._layout(own, at, row).part
            if part is None or part.numel < _LEAST or not {"min", "max", "mean", "var"} <= floats.keys():
                return
            key = (part.numel, *(float(floats[name][row]) for name in ("min", "max", "mean", "var")))
            if not floats["var"][row] > 0:
                return
            other = seen.setdefault(key, at)
            if other != at:
                self.found.shards[fqn] = (
                    f"rank {self._ranks[at]} holds the same values as rank {self._ranks[other]} (extrema, mean and "
                    "variance are equal to the last bit), at another place of the whole"
                )
                return

    def _tie(self, own: _Step) -> None:
        marks: dict[object, list[tuple[int, str]]] = {}
        names: dict[int, set[str]] = {}
        for number in own.of(Kind.PARAM, Phase.START):
            fqn = self._sites[number][2]
            for at, row in own.rows[number].items():
                names.setdefault(at, set()).add(fqn)
                layout, floats = self._layout(own, at, row), own.batches[at].floats
                if layout.part is None and layout.numel >= _LEAST and "var" in floats and floats["var"][row] > 0:
                    marks.setdefault((layout.shape, layout.dtype, int(own.batches[at].checksum[row])), []).append(
                        (at, fqn)
                    )
        for held in marks.values():
            one = held[0]
            for two in held[1:]:
                if one[0] != two[0] and one[1] not in names[two[0]] and two[1] not in names[one[0]]:
                    self.found.tied[one, two] = None

    def _untie(self, own: _Step) -> None:
        if not self.found.tied or all(step is not None for step in self.found.tied.values()):
            return
        after: dict[tuple[int, str], int] = {}
        for number in own.of(Kind.PARAM, Phase.OPTIMIZER):
            for at, row in own.rows[number].items():
                after[at, self._sites[number][2]] = int(own.batches[at].checksum[row])
        for (one, two), step in self.found.tied.items():
            if step is None and one in after and two in after and after[one] != after[two]:
                self.found.tied[one, two] = own.step

    def _modules(self, own: _Step, equal: set[str]) -> None:
        """Modules whose outputs differ on equal inputs, and draws from one state on different ones."""
        inputs, draws = self._by_place(own, Kind.INPUT), self._by_place(own, Kind.RNG)
        unsound = _Prefixes(
            [self._sites[n][2] for n in own.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER) if not self._is_equal(own, n)],
            [self._sites[n][2] for n in own.of(Kind.BUFFER, Phase.START, Phase.FORWARD) if not self._is_equal(own, n)],
            [self._sites[n][2] for n in own.of(Kind.PARAM) if self._sites[n][2] not in equal],
        )
        differs = False
        for number in sorted(own.of(Kind.OUTPUT, Phase.FORWARD), key=own.order):
            _, _, fqn, _, call = self._sites[number]
            place, held = (fqn, call), own.rows[number]
            if len(held) < 2 or place not in inputs:
                continue
            drawn = draws.get(place, ())
            groups = self._alike(own, inputs[place], held)
            if len(groups) > 1 and drawn and all(self._is_equal(own, n) for n in drawn):
                self._drew(own, fqn, held)
            for group in groups:
                same = {at: held[at] for at in group}
                if len(same) < 2 or differs or unsound.touch(fqn) or self._placed(own, same):
                    continue
                if drawn and self._parallel(same):
                    continue
                here = len(self._marks(own, number, group)) > 1
                drew = any(len(self._marks(own, n, group)) > 1 for n in drawn)
                differs |= here
                self._output(own, number, same, drew=drew, differs=here)

    def _alike(self, own: _Step, inputs: Sequence[int], held: Held) -> list[list[int]]:
        """The ranks that have a module's output by what went into it: all of several, or those of each replica."""
        groups: dict[object, list[int]] = {}
        for at in held:
            known = all(at in own.rows[n] for n in inputs)
            given = tuple(frozenset(self._marks(own, n, [at])) for n in inputs) if known else at
            groups.setdefault(given, []).append(at)
        return list(groups.values())

    def _output(self, own: _Step, number: int, held: Held, *, drew: bool, differs: bool) -> None:
        fqn = self._sites[number][2]
        base = min(held)
        marks = {at: int(own.batches[at].checksum[row]) for at, row in held.items()}
        other = next((at for at in sorted(held) if marks[at] != marks[base]), base)
        known = self.found.outputs.setdefault(fqn, Outputs())
        known.chances += 1
        if not differs:
            return
        if known.first is None:
            others = tuple(self._ranks[at] for at in sorted(held) if marks[at] != marks[base])
            far, scale = distance_of(self._whole, own.batches, (base, held[base]), (other, held[other]))
            known.drew = drew
            known.first = Apart(own.step, number, self._ranks[other], others, self._ranks[base], far, scale)
        known.times += 1

    def _drew(self, own: _Step, fqn: str, held: Held) -> None:
        counted = self.found.draws.setdefault(fqn, [self._ranks[min(held)], self._ranks[max(held)], 0, own.step])
        counted[2] += 1

    def _parallel(self, held: Held) -> bool:
        """Whether some of the ranks are to have samples, and so draws, of their own."""
        ranks = {self._ranks[at] for at in held}
        return any(len(ranks & group) > 1 for group in self._groups)

    def _placed(self, own: _Step, held: Held) -> bool:
        return any(self._layout(own, at, row).part is not None for at, row in held.items())

    def _by_place(self, own: _Step, kind: Kind) -> dict[Place, list[int]]:
        found: dict[Place, list[int]] = {}
        for number in own.of(kind, Phase.FORWARD):
            _, _, fqn, _, call = self._sites[number]
            found.setdefault((fqn, call), []).append(number)
        return found

    def _is_equal(self, own: _Step, number: int) -> bool:
        return len(self._marks(own, number, own.rows[number])) == 1

    def _marks(self, own: _Step, number: int, ranks: Iterable[int]) -> set[object]:
        """The different values that some ranks, those of them that have one, recorded at a site."""
        held = own.rows[number]
        return {
            (
                int(own.batches[at].checksum[held[at]]),
                self._layout(own, at, held[at]).part,
                own.batches[at].text[held[at]],
            )
            for at in ranks
            if at in held
        }


class _Prefixes:
    """Names of tensors, asked for whether any is inside a module."""

    def __init__(self, *names: Iterable[str]) -> None:
        self._inside: set[str] = set()
        for fqn in {name for own in names for name in own}:
            while fqn:
                fqn = fqn.rpartition(".")[0]  # noqa: PLW2901 - one name, shortened
                self._inside.add(fqn)

    def touch(self, fqn: str) -> bool:
        return fqn in self._inside


@dataclass
class _Step:
    step: int
    batches: Sequence[StepBatch]
    rows: Mapping[int, Held]
    by_kind: Mapping[tuple[str, str], list[int]]

    def of(self, kind: Kind, *phases: Phase) -> list[int]:
        """Sites of a kind, in some phases; in all where none is named."""
        wanted = phases or tuple(Phase)
        return [number for phase in wanted for number in self.by_kind.get((kind.value, phase.value), ())]

    def order(self, number: int) -> int:
        """Where in the step its first rank recorded it."""
        return min(int(self.batches[at].sequence[row]) for at, row in self.rows[number].items())
