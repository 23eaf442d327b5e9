"""What ranks that train one model are given, samples and settings, and by what their gradients are scaled.

The gradient of a bias adds up to that of its module's output. So what an optimizer takes tells, beside what the
backward passes of all ranks gave, whether they were averaged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.copies import is_data_parallel, share_samples, unlike
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.health.outputs import uneven_ends, used_up
from introspect_cli.health.reduction import passed_back
from introspect_cli.records import SCALER, Kind, Phase
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.health.aligned import Rows

_SETTINGS = ("runtime", "hardware", "packages", "sources", "git")
_RANK_LOCAL = frozenset({"local_rank", "host", "hostname", "pid", "process_id"})
_TORCHS = "torch/nn/modules/"
_PLAIN = re.compile(r"True|False|-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+")


@dataclass
class RankInputs(Gathered):
    """Batches, inputs of models and hyper-parameters, compared between ranks.

    Attributes:
        batches: of two ranks, how often a loader's batches were equal, of how many, and the first step they were.
        inputs: as `batches`, of what goes into outermost modules.
        sizes: the first step in which batches, or else inputs, are of different sizes.
        hyperparameters: the first step at which one differs, by name.
    """

    batches: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    inputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    sizes: Hit | None = None
    hyperparameters: dict[str, Hit] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Compare what the ranks were given in a step."""
        for number in now.of(Kind.BATCH, Phase.DATA):
            self._sizes(now, number)
            self._pairs(self.batches, now, number)
        for number in now.of(Kind.INPUT, Phase.FORWARD):
            if "." not in now.sites[number].fqn:
                self._pairs(self.inputs, now, number)
                if not self.batches:
                    self._sizes(now, number)
        for number in now.in_order(Kind.HYPERPARAMETER):
            site = now.sites[number]
            if site.fqn == SCALER:  # a tensor, without a text
                continue
            values = {rank: now.batches[rank].text[row] for rank, row in now.rows[number].items()}
            name = f"{site.fqn}{site.path}"
            if (hit := unlike(now.step, name, f"{name} differs from rank to rank", values)) is not None:
                self.hyperparameters.setdefault(name, hit)

    def _sizes(self, now: AlignedStep, number: int) -> None:
        kind = now.sites[number].kind
        shapes = {rank: now.layout(rank, row).shape for rank, row in now.rows[number].items()}
        alike = len({shape[1:] for shape in shapes.values()}) == 1
        if self.sizes is None and alike and len(set(shapes.values())) > 1 and all(shapes.values()):
            what = "batches" if kind == Kind.BATCH else "inputs"
            words = ", ".join(f"rank {rank}: {shape[0]}" for rank, shape in list(shapes.items())[:8])
            evidence = (
                f"{what} of step {now.step} are of different sizes ({words}): where each rank takes a mean, and "
                "the mean of those is taken, samples of the smaller batch count for more"
            )
            self.sizes = Hit(now.step, kind, evidence, min(shapes, key=lambda rank: shapes[rank][0]))

    def _pairs(self, pairs: dict[tuple[int, int], list[int]], now: AlignedStep, number: int) -> None:
        rows = now.rows[number]
        for one, two in combinations(sorted(rows), 2):
            counted = pairs.setdefault((one, two), [0, 0, -1])
            counted[1] += 1
            if now.checksum(one, rows[one]) == now.checksum(two, rows[two]):
                counted[0] += 1
                counted[2] = now.step if counted[2] < 0 else counted[2]


@rank_rule(
    "same-samples",
    Level.WARNING,
    "data-parallel ranks are given the same batches",
    "every batch of one is bit for bit that of the other; without a torch DataLoader, every input of their models",
    "a loader without a DistributedSampler, or one that does not know its rank",
)
def same_samples(ranks: Ranks) -> Iterator[Hit]:
    # Without a loader of torch's, what the models are given shows it, where a wrapper says who shares samples.
    given = ranks.of(RankInputs)
    drawn = given.batches or (given.inputs if ranks.groups else {})
    observed(drawn and is_data_parallel(ranks), "data-parallel ranks and their batches")
    # Of one batch, each rank may take its stretch: models that are not given the same.
    taking_shares = {pair for pair, (same, every, _) in given.inputs.items() if same < every}
    site, what, call = ("batch", "batch as", "draw") if given.batches else ("input", "inputs as", "call")
    alike: dict[tuple[int, int, int], list[int]] = {}
    for (one, two), (same, every, first) in sorted(drawn.items()):
        lowest = min(rank for rank in ranks.numbers if rank == two or share_samples(ranks, rank, two))
        if same == every and (one, two) not in taking_shares and share_samples(ranks, one, two) and one == lowest:
            alike.setdefault((one, every, first), []).append(two)
    for (one, every, first), others in alike.items():
        were = "was" if len(others) == 1 else "were"
        evidence = f"{rank_list(others)} {were} given the same {what} rank {one} in {every} of {count(every, call)}"
        yield Hit(first, site, evidence, others[0])


@rank_rule(
    "uneven-batches",
    Level.WARNING,
    "data-parallel ranks are given batches of different sizes, or more of them",
    "in one step, batches differ in their first dimension alone; without a torch DataLoader, inputs of their models; "
    "or ranks that skipped no step end after different numbers of steps",
    "a last batch that is not full, or uneven inputs (join); weigh by samples, or drop it",
)
def uneven_batches(ranks: Ranks) -> Iterator[Hit]:
    why = "every step has its loss, so its data was used up before theirs"
    ends = [replace(hit, evidence=f"{hit.evidence}: {why}") for hit in uneven_ends(ranks)] if used_up(ranks) else []
    yield from ends
    given = ranks.of(RankInputs)
    seen = ends or given.batches or given.inputs
    observed(seen and is_data_parallel(ranks), "data-parallel ranks and their batches")
    if given.sizes is not None:
        yield given.sizes


@rank_rule(
    "rank-settings",
    Level.WARNING,
    "versions, flags, hardware, sources, hyper-parameters or modules' attributes differ between ranks",
    f"any value of {', '.join(_SETTINGS)} differs, or a hyper-parameter in any step; of data-parallel ranks a "
    "flag or a fraction that a module of torch's begins with, or any module's mode",
    "machines that are not set up alike, or a setting that depends on the rank",
)
def rank_settings(ranks: Ranks) -> Iterator[Hit]:
    hits = [*ranks.of(RankInputs).hyperparameters.values(), *_attributes(ranks)]
    observed(hits or ranks.run.manifests, "settings of each rank")
    yield from hits
    numbers = ranks.numbers if ranks.run.manifests else ()
    every = {rank: dict(_flat(ranks.run.settings_of(rank))) for rank in numbers}
    settings = {rank: values for rank, values in every.items() if values}  # others were cut off before they wrote any
    base = min(settings, default=0)
    for rank, held in settings.items():
        for name in sorted(settings[base].keys() | held.keys()):
            one, two = settings[base].get(name), held.get(name)
            if one != two:
                evidence = f"{name} is {two!r} on rank {rank} and {one!r} on rank {base}"
                yield Hit(ranks.steps[0] if ranks.steps else 0, name, evidence, rank)


def _attributes(ranks: Ranks) -> Iterator[Hit]:
    """Flags and fractions of torch's own modules that differ between ranks which train one model.

    A script's modules may know which rank they are on, such as the one that prints.
    """
    if not is_data_parallel(ranks):
        return
    base, *others = ranks.numbers
    held = {rank: _plain_attributes(ranks, rank) for rank in ranks.numbers}
    for rank in others:
        if not share_samples(ranks, base, rank):
            continue
        for place in (each for each in held[base] if each in held[rank]):
            sides = held[base][place], held[rank][place]
            for step in sorted(sides[0].keys() | sides[1].keys()):  # the value that each has then
                one, two = (side[max((at for at in side if at <= step), default=min(side))] for side in sides)
                if one != two:
                    name = f"{place[0]}.{place[2]}"
                    yield Hit(step, name, f"{name} is {two} on rank {rank} and {one} on rank {base}", rank)
                    break


def _plain_attributes(ranks: Ranks, rank: int) -> dict[tuple[str, str, str], dict[int, str]]:
    """Of a module's attributes that are flags and fractions, the values, each by the step from which it holds."""
    attributes: dict[tuple[str, str, str], dict[int, str]] = {}
    for module in ranks.run.rank(rank).module_rows:
        for name, value in module.attributes:
            if _PLAIN.fullmatch(value) and (name == "training" or module.source.startswith(_TORCHS)):
                attributes.setdefault((module.fqn, module.module_class, name), {})[module.step] = value
    return attributes


def _flat(settings: object) -> Iterator[tuple[str, object]]:
    """Plain values of the documents that are the same on all ranks of a sound run, by name."""
    for document in _SETTINGS:
        plain = settings.get(document) if hasattr(settings, "get") else None
        stack = [(document, plain)] if plain is not None else []
        while stack:
            name, value = stack.pop()
            if isinstance(value, dict):
                stack += [(f"{name}.{key}", inner) for key, inner in value.items() if str(key) not in _RANK_LOCAL]
            else:
                yield name, value


# --- sums in place of means

_NEAR, _TELLS = 1e-5, 1e-3


@dataclass
class Scaling(Gathered):
    """How gradients are scaled.

    Attributes:
        summed: the first step in which a gradient is the sum of what the ranks' backward passes gave, by FQN.
        averaged: parameters whose gradient is the mean of these.
    """

    summed: dict[str, int] = field(default_factory=dict)
    averaged: set[str] = field(default_factory=set)

    def step(self, now: AlignedStep) -> None:
        """Compare what optimizers take with what backward passes gave."""
        if len(now.batches) < max(self.ranks.run.world_size, 2) or not self._share_samples():
            return
        gradients = {now.sites[number].fqn: now.rows[number] for number in now.of(Kind.GRAD, Phase.OPTIMIZER)}
        for fqn, numbers in self.ranks.adding_up.items():
            if fqn in gradients:
                self._compare(now, fqn, gradients[fqn], [now.rows[n] for n in numbers if n in now.rows])

    def _share_samples(self) -> bool:
        """Whether all ranks train one model, each on other samples."""
        base, *others = self.ranks.numbers
        return is_data_parallel(self.ranks) and all(share_samples(self.ranks, base, rank) for rank in others)

    def _compare(self, now: AlignedStep, fqn: str, rows: Rows, outputs: Sequence[Rows]) -> None:
        taken, passed, ranks = self._taken(now, rows), passed_back(now, outputs, now.batches), len(now.batches)
        if taken is None or passed is None:
            return
        total, size = passed
        if abs(total) * (1 - 1 / ranks) <= _TELLS * size:
            return  # sum and mean are as good as equal
        if abs(taken - total) <= _NEAR * size:
            self.summed.setdefault(fqn, now.step)
        elif abs(taken - total / ranks) <= _NEAR * size:
            self.averaged.add(fqn)

    @staticmethod
    def _taken(now: AlignedStep, rows: Rows) -> float | None:
        """What the elements of a gradient add up to, of which each rank has all or a part; None where that is open."""
        if len(rows) < len(now.batches):
            return None
        parts = {now.layout(rank, row).part: now.value(rank, row) for rank, row in rows.items()}
        if None in parts:
            same = len(parts) == 1 and len({now.checksum(rank, row) for rank, row in rows.items()}) == 1
            return next(iter(parts.values())).total if same else None
        if any(part.owed for part in parts if part is not None):
            return None
        return sum(value.total for value in parts.values() if value.numel)


@rank_rule(
    "summed-gradients",
    Level.WARNING,
    "gradients are summed over data-parallel ranks, not averaged",
    "by the sums of a bias's or an embedding's gradient and of that of its module's output on all ranks, where these "
    "are not near zero, nor clipped or scaled",
    "an all-reduce without the division by the number of ranks; the learning rate is as many times as large",
)
def summed_gradients(ranks: Ranks) -> Iterator[Hit]:
    scaling = ranks.of(Scaling)
    needs = "gradients of biases or embeddings of data-parallel ranks, and of their modules' outputs"
    observed(scaling.summed or scaling.averaged, f"{needs} (capture --record default)")
    size = count(ranks.run.world_size, "rank")
    for fqn, step in scaling.summed.items():
        evidence = (
            f"the gradient of {fqn} that the optimizer takes is the sum of what the backward passes of the {size} "
            "gave, not their mean: right only where each rank divides its loss by the samples of all"
        )
        if scaling.averaged:
            evidence += f"; that of {min(scaling.averaged)} is the mean"
        yield Hit(step, f"grad {fqn}", evidence)
