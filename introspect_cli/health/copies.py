"""Copies of parameters on several ranks, the gradients that move them, parts of one whole, and tied weights.

Which parameters ought to be equal on all ranks is written nowhere. So what was equal on all of them at first, or gets
one gradient on all of them, is taken for copies; what differs from the start and has gradients that differ belongs to
its rank (a local expert). Parts of a whole are compared with copies of the same part alone, and what has no recorded
place with nothing. A parameter that is cut over ranks has each element once. Weights that are tied across the stages of
a pipeline begin equal and get one gradient between them, so they stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import Kind, Part, Phase, Status
from introspect_cli.store.ranks.plan import Covering, covering, same_parts, share
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from introspect_cli.health.aligned import Difference, Rows

_LEAST = 8  # elements of a parameter whose equality on two ranks is no accident


@dataclass
class Parts(Gathered):
    """Parameters as they are at the first step, and whether ties hold after it.

    Attributes:
        wrong: what is wrong with the parts of a parameter, by FQN.
        untied: parameters that begin equal on two ranks under two names that neither has both of, by rank and name of
            both: the step after which they are equal no more, None while they are.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    untied: dict[tuple[tuple[int, str], tuple[int, str]], int | None] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Look at the parts and find the ties in the first step; see in each whether the ties hold."""
        if now.step == self.ranks.steps[0]:
            self._tie(now)
            if len(self.ranks.numbers) >= self.ranks.run.world_size:
                self._look_at_parts(now)
        if None not in self.untied.values():
            return
        after = {
            (rank, now.sites[number].fqn): now.checksum(rank, row)
            for number in now.of(Kind.PARAM, Phase.OPTIMIZER)
            for rank, row in now.rows[number].items()
        }
        for (one, two), step in self.untied.items():
            if step is None and one in after and two in after and after[one] != after[two]:
                self.untied[one, two] = now.step

    def _look_at_parts(self, now: AlignedStep) -> None:
        for number in now.of(Kind.PARAM, Phase.START):
            rows = now.rows[number]
            parts: dict[Part, tuple[int, int]] = {}
            for rank, row in rows.items():
                part = now.layout(rank, row).part
                if part is not None and part.numel and not part.owed:
                    parts.setdefault(part, (rank, row))
            if parts:
                wrong = self._covered(now, number, parts) or self._written_twice(now, parts)
                if wrong:
                    self.wrong[now.sites[number].fqn] = wrong

    def _covered(self, now: AlignedStep, number: int, parts: dict[Part, tuple[int, int]]) -> str:
        """What the parts leave out of the whole, or have twice."""
        rows = now.rows[number]
        covered, whole = covering(list(parts)), now.layout(*next(iter(parts.values()))).numel
        if len(rows) != self.ranks.run.world_size or covered is None or covered == Covering(whole, 0):
            return ""
        twice = f", and several parts have {share(covered.doubled, whole)}" if covered.doubled else ""
        holders = [(rank, now.layout(rank, row).part) for rank, row in rows.items()]
        same = same_parts(holders) if covered.covered < whole else ""
        return f"its parts cover {share(covered.covered, whole)}{twice}{same}"

    def _written_twice(self, now: AlignedStep, parts: dict[Part, tuple[int, int]]) -> str:
        """Two parts of different places with the same extrema and moments, to the last bit."""
        seen: dict[object, int] = {}
        for part, (rank, row) in parts.items():
            floats = now.batches[rank].floats
            if part.numel < _LEAST or not {"min", "max", "mean", "var"} <= floats.keys() or not floats["var"][row] > 0:
                return ""
            key = (part.numel, *(float(floats[name][row]) for name in ("min", "max", "mean", "var")))
            other = seen.setdefault(key, rank)
            if other != rank:
                return (
                    f"rank {rank} holds the same values as rank {other} (extrema, mean and variance are equal to the "
                    "last bit), at another place of the whole"
                )
        return ""

    def _tie(self, now: AlignedStep) -> None:
        holders: dict[object, list[tuple[int, str]]] = {}
        names: dict[int, set[str]] = {}
        for number in now.of(Kind.PARAM, Phase.START):
            fqn = now.sites[number].fqn
            for rank, row in now.rows[number].items():
                names.setdefault(rank, set()).add(fqn)
                layout, floats = now.layout(rank, row), now.batches[rank].floats
                if layout.part is None and layout.numel >= _LEAST and "var" in floats and floats["var"][row] > 0:
                    value = layout.shape, layout.dtype, now.checksum(rank, row)
                    holders.setdefault(value, []).append((rank, fqn))
        for one, *others in holders.values():
            for two in others:
                if one[0] != two[0] and one[1] not in names[two[0]] and two[1] not in names[one[0]]:
                    self.untied[one, two] = None


@rank_rule(
    "shards",
    Level.ERROR,
    "parts of a parameter overlap, leave some of it out, or hold the same values",
    "at the start, the ranges of indices that ranks hold do not have each element once, or two parts have the same "
    "extrema and moments, to the last bit",
    "a checkpoint that was cut with another rank's offset, or ranks that each drew their part from one seed",
)
def shards(ranks: Ranks) -> Iterator[Hit]:
    observed(ranks.has_parts, "parameters that are cut over ranks")
    first = ranks.steps[0] if ranks.steps else 0
    for fqn, wrong in ranks.of(Parts).wrong.items():
        yield Hit(first, f"param {fqn}", f"of {fqn}, {wrong}", ranks.numbers[0])


@rank_rule(
    "tied-weights",
    Level.ERROR,
    "tied weights on two ranks differ",
    "parameters that begin equal on two ranks, under two names, differ after a step",
    "an embedding and a head on two stages whose gradients are not all-reduced",
)
def tied_weights(ranks: Ranks) -> Iterator[Hit]:
    untied = observed(ranks.of(Parts).untied, "parameters that begin equal under different names on two ranks")
    for ((rank, one), (other, two)), step in untied.items():
        if step is not None:
            evidence = (
                f"{one} of rank {rank} and {two} of rank {other} begin equal, as tied weights do, and differ after "
                f"step {step}: their gradients were not added up"
            )
            yield Hit(step, f"param {two}", evidence, other)


_TENSORS = frozenset({int(Status.OBSERVED), int(Status.PARTIAL)})


@dataclass
class Copies(Gathered):
    """Since when copies differ.

    Attributes:
        all: parameters that two ranks or more hold.
        shared: those whose copies were equal when they were first seen.
        equal: those whose copies were equal when they were last seen.
        params: the first difference of copies that had been equal, by FQN.
        grads: the first difference of gradients of equal copies, by FQN.
        graded: parameters of which gradients of two ranks were compared.
        stale: parameters that differ from the first step on although their gradients are equal, by FQN.
        layouts: parameters whose shapes or dtypes differ from rank to rank, by FQN.
        dtypes: the first step in which a module's output has another dtype on some ranks, by FQN.
        unequal: in the latest step, the rows of gradients in `grads` that began to differ and are no multiples.
        rejoined: the first step that begins with equal copies of all that had differed: averaged, as in local SGD.
    """

    all: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    equal: set[str] = field(default_factory=set)
    params: dict[str, Difference] = field(default_factory=dict)
    grads: dict[str, Difference] = field(default_factory=dict)
    graded: set[str] = field(default_factory=set)
    stale: dict[str, Difference] = field(default_factory=dict)
    layouts: dict[str, Hit] = field(default_factory=dict)
    dtypes: dict[str, Hit] = field(default_factory=dict)
    unequal: dict[str, Rows] = field(default_factory=dict)
    rejoined: int | None = None
    _since: dict[str, Difference] = field(default_factory=dict)  # of parameters whose copies are not equal

    def step(self, now: AlignedStep) -> None:
        """Compare the copies of each parameter, of its gradient, and the dtypes of each output."""
        self.unequal = {}
        for number in now.in_order(Kind.PARAM, Kind.GRAD, Kind.OUTPUT):
            site, rows = now.sites[number], now.rows[number]
            if len(rows) < 2:
                continue
            if site.kind == Kind.PARAM:
                self._parameter(now, site.fqn, rows)
            elif site.kind == Kind.GRAD and site.phase == Phase.OPTIMIZER:
                self._gradient(now, site.fqn, rows)
            elif site.kind == Kind.OUTPUT and site.phase == Phase.FORWARD and site.fqn not in self.dtypes:
                seen = {rank: row for rank, row in rows.items() if now.batches[rank].status[row] in _TENSORS}
                dtypes = {rank: now.layout(rank, row).dtype for rank, row in seen.items()}
                said = f"the output of {site.fqn} differs in dtype"
                if (hit := unlike(now.step, f"output {site.fqn}", said, dtypes)) is not None:
                    self.dtypes[site.fqn] = hit

    def _parameter(self, now: AlignedStep, fqn: str, rows: Rows) -> None:
        layouts = [(rank, now.layout(rank, row)) for rank, row in rows.items()]
        described = {rank: f"{layout.dtype} {list(layout.shape)}" for rank, layout in layouts}
        hit = unlike(self.ranks.steps[0], f"param {fqn}", f"{fqn} differs in dtype or shape", described)
        if hit is not None:
            self.layouts.setdefault(fqn, hit)
            return
        difference = _difference(now, rows)
        first = fqn not in self.all
        self.all.add(fqn)
        if difference is None:
            self.equal.add(fqn)
            if self._since.pop(fqn, None) is not None and not self._since and self.rejoined is None:
                self.rejoined = now.step
            if first:
                self.shared.add(fqn)
            return
        self._since.setdefault(fqn, difference)
        if fqn in self.equal:
            self.params.setdefault(fqn, difference)
        self.equal.discard(fqn)

    def _gradient(self, now: AlignedStep, fqn: str, rows: Rows) -> None:
        difference = _difference(now, rows)
        self.graded.add(fqn)
        if fqn not in self.grads:
            if difference is not None and fqn in self.equal:
                self.grads[fqn] = difference
                if not difference.is_multiple:
                    self.unequal[fqn] = rows
            elif difference is None and fqn in self._since:
                self.stale.setdefault(fqn, self._since[fqn])


def _difference(now: AlignedStep, rows: Rows) -> Difference | None:
    """How copies differ; None where all are equal, or hold different parts."""
    by_part: dict[object, dict[int, int]] = {}
    for rank, row in rows.items():
        layout, status = now.layout(rank, row), now.batches[rank].status[row]
        unplaced = status == Status.PARTIAL and (layout.part is None or bool(layout.part.owed))
        if status == Status.NOT_OBSERVED or unplaced:
            return None
        by_part.setdefault((layout.shape, layout.part), {})[rank] = row
    return next((difference for same in by_part.values() if (difference := now.difference(same)) is not None), None)


def is_data_parallel(ranks: Ranks) -> bool:
    """Whether ranks are to be given different samples: a wrapper says so, or each holds all parameters."""
    wrapped = frozenset[int]().union(*ranks.groups)
    if wrapped:
        return set(ranks.numbers) <= wrapped
    copies = ranks.of(Copies)
    return bool(copies.shared) and 2 * len(copies.shared) >= len(copies.all) and not ranks.has_parts


def share_samples(ranks: Ranks, one: int, two: int) -> bool:
    """Whether two ranks are to be given different samples; peers of tensor parallelism get the same."""
    if ranks.groups:
        return any(one in group and two in group for group in ranks.groups)
    return is_data_parallel(ranks)


def copies_of(ranks: Ranks) -> Copies:
    """What is known of copies."""
    copies = ranks.of(Copies)
    observed(copies.all, "two ranks that recorded the same parameter")
    return copies


def since(fqn: str, difference: Difference) -> str:
    """`from step 3 on rank 1's parameter head.bias differs from rank 0's (relative L2 1.4e-03)`."""
    far = f" ({difference.size})" if difference.size else ""
    whose = f"rank {difference.rank}'s parameter {fqn}"
    if len(difference.others) > 1:
        whose = f"the parameter {fqn} of {rank_list(list(difference.others))}"
    return f"from step {difference.step} on {whose} differs from rank {difference.base}'s{far}"


def whose(difference: Difference) -> str:
    """`ranks 1, 2, compared with rank 0`."""
    return f"{rank_list(list(difference.others))}, compared with rank {difference.base}"


@rank_rule(
    "copies-differ",
    Level.ERROR,
    "copies of a parameter differ between ranks",
    "no gradient of it was seen to differ; or it differs from the first step on, although its gradients are equal",
    "a checkpoint that only some ranks loaded, a step that only some took, settings that differ, or experts whose "
    "gradients are averaged over the wrong group",
)
def copies_differ(ranks: Ranks) -> Iterator[Hit]:
    copies = copies_of(ranks)
    for fqn, difference in copies.params.items():
        if fqn in copies.grads and copies.grads[fqn].step <= difference.step:
            continue  # the rule on reductions says so
        why = (
            "although no gradient of it was seen to differ"
            if fqn in copies.graded
            else "and no gradients of it were compared"
        )
        yield Hit(difference.step, f"param {fqn}", f"{since(fqn, difference)}, {why}", difference.rank)
    for fqn, difference in copies.stale.items():
        if fqn not in copies.params and fqn not in ranks.of(Parts).wrong:
            evidence = (
                f"{fqn} differs on {whose(difference)} ({difference.size}) from the first step on record, although its "
                "gradient is equal on all of them: one of them was loaded or written to alone, or these are experts of "
                "their own ranks and their gradients were averaged over them"
            )
            yield Hit(difference.step, f"param {fqn}", evidence, difference.rank)


@rank_rule(
    "rank-layout",
    Level.ERROR,
    "a parameter has another dtype or shape, or a module's output another dtype, on some ranks",
    "it is so in any step that all ranks have",
    "a model that is built or cast differently there, or an autocast that is not entered on all ranks",
)
def rank_layout(ranks: Ranks) -> Iterator[Hit]:
    copies = ranks.of(Copies)
    if not copies.layouts:
        copies_of(ranks)
    yield from (*copies.layouts.values(), *copies.dtypes.values())


def unlike(step: int, site: str, said: str, values: Mapping[int, str]) -> Hit | None:
    """That ranks have different values, and which; None where all have the same."""
    first = next(iter(values.values()), None)
    other = next((rank for rank, value in values.items() if value != first), None)
    if other is None:
        return None
    words = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
    return Hit(step, site, f"{said} ({words})", other)
