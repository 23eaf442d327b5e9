"""What each rank is given: samples, which data-parallel ranks are to have different ones of, and settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.copies import is_data_parallel, share_samples, unlike
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import SCALER, Kind, Phase, count

if TYPE_CHECKING:
    from collections.abc import Iterator


_SETTINGS = ("runtime", "hardware", "packages", "sources", "git")
_RANK_LOCAL = frozenset({"local_rank", "host", "hostname", "pid", "process_id"})
_TORCHS = "torch/nn/modules/"
_PLAIN = re.compile(r"True|False|-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+")


@dataclass
class Given(Gathered):
    """Batches, inputs of models and hyper-parameters, compared between ranks.

    Attributes:
        batches: of two ranks, how often a loader's batches were equal, of how many, and the first step they were.
        inputs: as `batches`, of what goes into outermost modules.
        sizes: the first step in which batches are of different sizes.
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
        for number in now.in_order(Kind.HYPERPARAMETER):
            site = now.sites[number]
            if site.fqn == SCALER:  # a tensor, without a text
                continue
            values = {rank: now.batches[rank].text[row] for rank, row in now.rows[number].items()}
            if len(set(values.values())) > 1:
                name, (rank, words) = f"{site.fqn}{site.path}", unlike(values)
                evidence = f"{name} differs from rank to rank ({words})"
                self.hyperparameters.setdefault(name, Hit(now.step, name, evidence, rank))

    def _sizes(self, now: AlignedStep, number: int) -> None:
        shapes = {rank: now.layout(rank, row).shape for rank, row in now.rows[number].items()}
        alike = len({shape[1:] for shape in shapes.values()}) == 1
        if self.sizes is None and alike and len(set(shapes.values())) > 1 and all(shapes.values()):
            words = ", ".join(f"rank {rank}: {shape[0]}" for rank, shape in list(shapes.items())[:8])
            evidence = (
                f"batches of step {now.step} are of different sizes ({words}): where each rank takes a mean, and the "
                "mean of those is taken, samples of the smaller batch count for more"
            )
            self.sizes = Hit(now.step, "batch", evidence, min(shapes, key=lambda rank: shapes[rank][0]))

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
    # Without a loader of torch's, what the models are given tells, where a wrapper says who has samples of its own.
    given = ranks.of(Given)
    drawn = given.batches or (given.inputs if ranks.groups else {})
    observed(drawn and is_data_parallel(ranks), "data-parallel ranks and their batches")
    # Of one batch, each rank may take its stretch: models that are not given the same.
    taking_shares = {pair for pair, (same, every, _) in given.inputs.items() if same < every}
    site, what, call = ("batch", "batch as", "draw") if given.batches else ("input", "inputs as", "call")
    for (one, two), (same, every, first) in sorted(drawn.items()):
        lowest = min(rank for rank in ranks.numbers if rank == two or share_samples(ranks, rank, two))
        if same == every and (one, two) not in taking_shares and share_samples(ranks, one, two) and one == lowest:
            evidence = f"rank {two} was given the same {what} rank {one} in {same} of {count(every, call)}"
            yield Hit(first, site, evidence, two)


@rank_rule(
    "uneven-batches",
    Level.WARNING,
    "data-parallel ranks are given batches of different sizes",
    "in one step, batches differ in their first dimension alone",
    "a last batch that is not full; weigh by samples, or drop it",
)
def uneven_batches(ranks: Ranks) -> Iterator[Hit]:
    observed(is_data_parallel(ranks), "data-parallel ranks and their batches")
    sizes = ranks.of(Given).sizes
    if sizes is not None:
        yield sizes


@rank_rule(
    "rank-settings",
    Level.WARNING,
    "versions, flags, hardware, sources, hyper-parameters or modules' attributes differ between ranks",
    f"any value of {', '.join(_SETTINGS)} differs, or a hyper-parameter in any step; of data-parallel ranks a "
    "flag or a fraction that a module of torch's begins with, or any module's mode",
    "machines that are not set up alike, or a setting that depends on the rank",
)
def rank_settings(ranks: Ranks) -> Iterator[Hit]:
    hits = [*ranks.of(Given).hyperparameters.values(), *_attributes(ranks)]
    observed(hits or ranks.run.manifests, "settings of each rank")
    yield from hits
    if not ranks.run.manifests:
        return
    base, *others = ranks.numbers
    settings = {rank: dict(_flat(ranks.run.settings_of(rank))) for rank in ranks.numbers}
    for rank in others:
        for name in sorted(settings[base].keys() | settings[rank].keys()):
            one, two = settings[base].get(name), settings[rank].get(name)
            if one != two:
                evidence = f"{name} is {two!r} on rank {rank} and {one!r} on rank {base}"
                yield Hit(ranks.steps[0] if ranks.steps else 0, name, evidence, rank)


def _attributes(ranks: Ranks) -> Iterator[Hit]:
    """Flags and fractions of torch's own modules that differ between ranks which train one model.

    A script's modules may know which rank they are on, such as the one that prints.
    """
    if not is_data_parallel(ranks):
        return
    attributes = {
        rank: {
            (module.fqn, module.module_class, name): (value, module.step)
            for module in ranks.run.rank(rank).modules
            for name, value in module.attributes
            if _PLAIN.fullmatch(value) and (name == "training" or module.source.startswith(_TORCHS))
        }
        for rank in ranks.numbers
    }
    base, *others = ranks.numbers
    for rank in others:
        if not share_samples(ranks, base, rank):
            continue
        for place, (one, _) in attributes[base].items():
            two, step = attributes[rank].get(place, (one, 0))
            if one != two:
                name = f"{place[0]}.{place[2]}"
                yield Hit(step, name, f"{name} is {two} on rank {rank} and {one} on rank {base}", rank)


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
