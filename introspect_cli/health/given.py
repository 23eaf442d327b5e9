"""What each rank is given, samples and settings, and how far it gets: what was skipped, and what has no gradient."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.copies import is_data_parallel, share_samples, unlike
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import SCALER, Kind, Phase
from introspect_cli.store.manifests import rank_list
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
            if len(set(values.values())) > 1:
                name, (rank, words) = f"{site.fqn}{site.path}", unlike(values)
                evidence = f"{name} differs from rank to rank ({words})"
                self.hyperparameters.setdefault(name, Hit(now.step, name, evidence, rank))

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
    "in one step, batches differ in their first dimension alone; without a torch DataLoader, inputs of their models",
    "a last batch that is not full; weigh by samples, or drop it",
)
def uneven_batches(ranks: Ranks) -> Iterator[Hit]:
    given = ranks.of(Given)
    observed((given.batches or given.inputs) and is_data_parallel(ranks), "data-parallel ranks and their batches")
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


@dataclass
class Progress(Gathered):
    """Steps in which ranks did not do the same.

    Attributes:
        losses: the first step in which ranks have another number of losses.
        unmoved: the first step in which no parameter of some ranks changed, and those of others did.
        missing: the first step in which only some ranks have a gradient of a parameter, by its FQN.
    """

    losses: Hit | None = None
    unmoved: Hit | None = None
    missing: dict[str, Hit] = field(default_factory=dict)
    _last: dict[tuple[int, str], int] = field(default_factory=dict)  # checksums of each rank's parameters, as last seen

    @property
    def begun(self) -> list[int]:
        """The steps in which they began to be so."""
        return [hit.step for hit in self.hits]

    @property
    def hits(self) -> list[Hit]:
        """Where ranks began to be at different steps."""
        return [hit for hit in (self.losses, self.unmoved) if hit is not None]

    def step(self, now: AlignedStep) -> None:
        """Compare what the ranks did in a step."""
        self._gradients(now)
        if self.losses is None:
            self.losses = self._losses(now)
        moved = self._moves(now)
        if self.unmoved is None and len(set(moved.values())) > 1:
            changed, unchanged = ([rank for rank in sorted(moved) if moved[rank] is flag] for flag in (True, False))
            evidence = (
                f"no parameter of {rank_list(unchanged)} was changed in step {now.step}, those of {rank_list(changed)} "
                "were: the optimizer step was skipped there alone (a gradient that was not finite, or a condition of "
                "its own)"
            )
            self.unmoved = Hit(now.step, f"rank {unchanged[0]}", evidence, unchanged[0])

    def _losses(self, now: AlignedStep) -> Hit | None:
        times = Counter(rank for number in now.of(Kind.LOSS, Phase.LOSS) for rank in now.rows[number])
        if len(times) < len(self.ranks.numbers) or len(set(times.values())) < 2:
            return None
        most, least = (pick(self.ranks.numbers, key=lambda rank: times[rank]) for pick in (max, min))
        evidence = (
            f"rank {most} has {count(times[most], 'loss', 'losses')} in step {now.step} and rank {least} "
            f"{times[least]}: it did not step its optimizer where the others did, or ran more batches for it"
        )
        return Hit(now.step, f"rank {most}", evidence, most)

    def _gradients(self, now: AlignedStep) -> None:
        holders = {now.sites[n].fqn: now.rows[n] for n in now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER)}
        gradients = now.of(Kind.GRAD, Phase.OPTIMIZER)
        stepping = {rank for number in gradients for rank in now.rows[number]}
        for number in gradients:
            fqn, rows = now.sites[number].fqn, now.rows[number]
            params = [item for item in holders.get(fqn, {}).items() if item[0] in stepping and item[0] not in rows]
            without = [rank for rank, row in params if now.numel(rank, row)]
            if without and all(now.layout(rank, row).part is None for rank, row in rows.items()):
                evidence = (
                    f"{rank_list(without)} has no gradient of {fqn} in step {now.step} and {rank_list(list(rows))} has "
                    "one: it was not used there, and nobody reduced it"
                )
                self.missing.setdefault(fqn, Hit(now.step, f"grad {fqn}", evidence, without[0]))

    def _moves(self, now: AlignedStep) -> dict[int, bool]:
        """Whether a rank changed any of the parameters that it has a gradient of."""
        with_grad = {(rank, now.sites[n].fqn) for n in now.of(Kind.GRAD, Phase.OPTIMIZER) for rank in now.rows[n]}
        before, moved = dict(self._last), dict[int, bool]()
        for phase in (Phase.START, Phase.OPTIMIZER):
            for number in now.of(Kind.PARAM, phase):
                for rank, row in now.rows[number].items():
                    held, checksum = (rank, now.sites[number].fqn), now.checksum(rank, row)
                    if phase is Phase.START:
                        before[held] = checksum
                    elif held in before and held in with_grad:
                        moved[rank] = moved.get(rank, False) or before[held] != checksum
                    self._last[held] = checksum
        return moved


@rank_rule(
    "lost-rank",
    Level.ERROR,
    "a rank left nothing, was cut off, or ended before the others",
    "its records are missing, have no end, or stop at an earlier step than the others'",
    "a crash, a kill or a hang of that rank; its own output says more",
)
def lost_rank(ranks: Ranks) -> Iterator[Hit]:
    run = ranks.run
    last = {rank: run.rank(rank).last_step for rank in run.ranks}
    missing = [rank for rank in range(run.world_size) if last.get(rank) is None]
    latest = max((step for step in last.values() if step is not None), default=0)
    short = [rank for rank, step in last.items() if step is not None and step < latest]
    rank = (missing or short or [0])[0]
    for sentence in run.lost_ranks:
        yield Hit(last.get(rank) or 0, f"rank {rank}", sentence, rank)


@rank_rule(
    "rank-steps",
    Level.ERROR,
    "ranks are at different steps: one skipped an optimizer step, or took one more",
    "no parameter of a rank changes in a step in which others' do, or it has more losses in one",
    "a step that one rank skips alone (gradients not finite there), or a condition on its own loss",
)
def rank_steps(ranks: Ranks) -> Iterable[Hit]:
    return ranks.of(Progress).hits


@rank_rule(
    "rank-gradients",
    Level.ERROR,
    "a parameter has a gradient on some ranks only",
    "both have other gradients in the step; parameters that are cut over ranks do not count",
    "a parameter that some ranks do not use, and a reduction that leaves out what is None",
)
def rank_gradients(ranks: Ranks) -> Iterable[Hit]:
    return ranks.of(Progress).missing.values()
