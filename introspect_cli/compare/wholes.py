"""How two runs are split over ranks and microbatches; where that differs, each run is put together as one.

Ranks are compared one by one where every rank has its partner with the same parts of tensors; otherwise whole with
whole. Two layouts add up in another order, so that a tolerance applies. Of values gathered from several ranks, extrema
and means are compared (`passes.py`).

Microbatches of a run that accumulates gradients are put together like ranks' shares. Where a model calls a layer
several times, first calls of all microbatches belong together, then second ones.

Each microbatch has a number of samples, and of tokens that count: rows of the gradient at the model's output that are
not zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.ledger import At, Tensor, first_sites, tensor_of
from introspect_cli.compare.table import columns
from introspect_cli.records import EVALUATED, Kind, Phase
from introspect_cli.store.tasks import as_one
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from introspect_cli.compare.match import Correspondence
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.reader import RankReader, Reader
    from introspect_cli.store.run import Run

    Key = tuple[bool, str]

_CALLED_KINDS = frozenset(kind.value for kind in (Kind.INPUT, Kind.OUTPUT, Kind.BATCH, Kind.LOSS, Kind.VALUE))


def are_alike(a: Run, b: Run, pairs: Sequence[tuple[RankReader, RankReader]]) -> bool:
    """Whether each rank has a partner in the other run with the same parts of every tensor that both runs have.

    True for two runs of one rank, or without a common rank. Of two runs whose ranks are put together already: whether
    their manifests name the same layout; False if one alone is. `pairs` are the readers of the ranks that both have.
    """
    if a.world_size != b.world_size or bool(a.combined_ranks) != bool(b.combined_ranks):
        return False
    if a.combined_ranks:
        return bool(a.manifest["whole"].get("layout") == b.manifest["whole"].get("layout"))
    if not pairs or len(a.ranks) == len(b.ranks) == 1:
        return True
    if any(_parts(one) != _parts(two) for one, two in pairs) or (_parts(pairs[0][0]) and not _cut_alike(*pairs[0])):
        return False
    tables = {(id(one.sites), id(two.sites)): (one.sites, two.sites) for one, two in pairs}  # many have one table
    held = [(first_sites(columns(one)).keys(), first_sites(columns(two)).keys()) for one, two in tables.values()]
    of_a, of_b = (set[Tensor]().union(*each) for each in zip(*held, strict=True))
    return all(one & of_b == two & of_a for one, two in held)


def _cut_alike(one: RankReader, two: RankReader) -> bool:
    """Whether each parameter and gradient is a part in both runs or in neither, in the first step that both have."""
    step = _first_common_step(one, two)
    cut, cut_b = (
        {tensor_of(at.sites, site): at.layout(row).part is not None for row, site in at.rows([Kind.PARAM, Kind.GRAD])}
        for at in (At(reader, columns(reader.sites), step) for reader in (one, two))
    )
    return all(cut_b.get(tensor, is_part) == is_part for tensor, is_part in cut.items())


def _first_common_step(one: Reader, two: Reader) -> int:
    """Number of the first step that both recorded; -1 for none."""
    return min({*one.entries["step"].tolist()} & {*two.entries["step"].tolist()}, default=-1)


def _parts(reader: Reader) -> frozenset[object]:
    """(shape, part) of each layout of a reader that is a part of a tensor."""
    return frozenset((layout.shape, layout.part) for layout in reader.layouts if layout.part is not None)


# --- microbatches


class Microbatch(NamedTuple):
    """One call of the model on one rank.

    Attributes:
        samples: leading size of what it is given.
        elements: how many elements that has.
        tokens: rows of the gradient of what the loss is computed of that are not zero; 0 where that is not on record.
    """

    samples: int
    elements: int
    tokens: int


def microbatches(reader: Reader, root: str, step: int) -> list[Microbatch]:
    """One microbatch per forward call of `root`, in order, by the shape of its first input (else output).

    Tokens are the rows that are not all zero in the gradient at a module's output, of the first module with one, where
    zeros fill whole rows; 0 in all unless every call has some. [] where the samples of any call are not on record.
    """
    at = At(reader, columns(reader.sites), step)
    given: dict[int, tuple[int, ...]] = {}
    tokens: dict[int, int] = {}
    last = ""
    for row, number in at.rows([Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT]):
        site, shape = at.sites.site(number), at.layout(row).shape
        if site.kind is Kind.GRAD_OUTPUT and len(shape) > 1 and "zeros" in at.batch.counts:
            last = last or site.fqn
            if site.fqn == last:
                zeros, rest = divmod(int(at.batch.counts["zeros"][row]), shape[-1])  # rows; -1 where they are unknown
                tokens.setdefault(site.call, 0 if rest or zeros < 0 else math.prod(shape[:-1]) - zeros)
        elif site.fqn == root and site.phase is Phase.FORWARD:
            given[site.call] = given.get(site.call) or shape
    exact, calls = tokens.keys() == given.keys() and all(tokens.values()), sorted(given.items())
    known = all(shape and shape[0] for _, shape in calls)
    return [Microbatch(shape[0], math.prod(shape), tokens[call] if exact else 0) for call, shape in calls if known]


# --- wholes


_COARSE = frozenset({"bfloat16", "float16"})


class Cut(NamedTuple):
    """How one run takes the batch of a step.

    Attributes:
        number: microbatches of the first step of both; where these are not on record, the most of any step.
        root: the outermost module that both runs call, as this run calls it.
        folds: how many calls of a name one microbatch makes; of what is to be put together.
        first: microbatches of its first rank in the first step of both; empty where these are not on record.
    """

    number: int
    root: str
    folds: Mapping[Key, int]
    first: Sequence[Microbatch]


class Splits(NamedTuple):
    """Both runs as wholes, and how they are split over ranks and microbatches.

    Attributes:
        readers: of all of a, and of all of b.
        cuts: how run a takes the batch of a step, and how b does.
        differ: whether they cut the same batch into other microbatches, as far as that is on record.
        match: which name of a is which of b, where that was looked for.
        options: what counts, with the tolerance that the runs need.
        note: how they are compared, in words.
    """

    readers: tuple[Reader, Reader]
    cuts: tuple[Cut, Cut]
    differ: bool
    match: Correspondence | None
    options: DiffOptions
    note: str = ""

    @property
    def words(self) -> list[str]:
        """How a, and how b, takes a batch: `4 microbatches of 2 samples`, `2 microbatches of 3, 1 samples`.

        Without sizes where a sample of one has more elements.
        """
        (samples, elements), (samples_b, elements_b) = map(_size, self.cuts)
        words, sized = list[str](), samples * elements_b == samples_b * elements
        for cut in self.cuts:
            sizes = [*dict.fromkeys(micro.samples for micro in cut.first)] * sized
            of = f" of {', '.join(map(str, sizes))} sample{'s' * (sizes != [1])}" if sizes else ""
            words.append(f"{count(cut.number, 'microbatch', 'microbatches')}{of}")
        return words


def _size(cut: Cut) -> tuple[int, int]:
    """(samples, elements) of the first common step; (0, 0) where these are not on record."""
    return sum(micro.samples for micro in cut.first), sum(micro.elements for micro in cut.first)


def wholes_of(a: Run, b: Run, options: DiffOptions, match: Correspondence | None = None) -> Splits | None:
    """Both runs with ranks and calls put together; None where they can be compared rank by rank and call by call.

    That is, each rank has its partner, and batches are cut alike or `strict` is given. The tolerance in `options` is
    set for runs of different layouts, if none is given. Reads the first common step unless the runs have the same
    sites.

    Args:
        a: run a.
        b: run b.
        options: what counts.
        match: which name of a is which of b, if that was looked for.
    """
    alike = are_alike(a, b, [(a.rank(rank), b.rank(rank)) for rank in a.ranks if rank in b.ranks])
    first_a, first_b = (run.rank(run.recorded[0]) for run in (a, b))
    if alike and (options.strict or np.array_equal(first_a.sites.key, first_b.sites.key)):
        return None  # the same calls of all that they call
    step = _first_common_step(first_a, first_b)
    cuts = _cuts_of(a, b, (match.rename if match is not None else None) or str, step)
    unlike = cuts[0].number != cuts[1].number
    differ = step >= 0 and unlike and (not alike or _cut_differently((first_a, first_b), cuts, step))
    if alike and not differ:
        return None
    one, two = (as_one(run, cut.folds) for run, cut in zip((a, b), cuts, strict=True))
    coarse = all(any(_COARSE & {*layout.dtype.split(" and ")} for layout in reader.layouts) for reader in (one, two))
    seen = any(Kind.OUTPUT.value in reader.sites.kind for reader in (one, two))
    throughout = (not seen and all(map(autocasts, (a, b)))) or all(map(_in_tf32, (a, b), (one, two)))
    options = options.between_layouts(coarse=coarse, throughout=throughout)
    why = ", since both may compute all of it in bfloat16, float16 or TF32" * throughout
    splits = Splits((one, two), cuts, differ, match, options)
    return splits._replace(note=f"{_layouts_note(a, b, splits)}{why}.")


def autocasts(run: Run) -> bool:
    """Whether a run's settings have autocast to bfloat16 or float16."""
    words = str(run.settings.document("autocast").get("autocast", "")).replace(",", "").split()
    return not _COARSE.isdisjoint(words)


def _in_tf32(run: Run, reader: Reader) -> bool:
    """Whether a run with a tensor on a GPU allows TF32 for matrix products, or, if it has any, for convolutions."""
    switches = run.settings.document("runtime")
    convolves = any(module.module_class.startswith("Conv") for module in reader.modules)
    asked = switches.get("matmul_allow_tf32") or (convolves and switches.get("cudnn_allow_tf32"))
    return bool(asked) and any(layout.device.startswith("cuda") for layout in reader.layouts)


def _cuts_of(a: Run, b: Run, rename: Callable[[str], str], step: int) -> tuple[Cut, Cut]:
    """How each run takes the batch of a step, by numbers of calls; reads the step.

    Args:
        a: run a.
        b: run b.
        rename: changes names of a to those of b.
        step: the first common step; -1 for none.
    """
    one, two = _called(a, rename), _called(b, str)
    key = (False, _common_root(one, two) or "loss")
    of_a, of_b = (calls.get(key, _Called(1, frozenset(), "")) for calls in (one, two))
    cuts = []
    for run, calls, others, mine, theirs in ((a, one, two, of_a, of_b), (b, two, one, of_b, of_a)):
        first = microbatches(run.rank(run.recorded[0]), mine.own, step)
        folds = _folds(calls, others, mine.times, theirs.times)
        cuts.append(Cut(len(first) or mine.times, mine.own, folds, first))
    return cuts[0], cuts[1]


# --- which calls are put together


class _Called(NamedTuple):
    """How a run calls something that is (of evaluation or not, FQN under b's name).

    Attributes:
        times: the largest number of calls in a step.
        kinds: kinds of its records.
        own: the run's own name for it.
    """

    times: int
    kinds: frozenset[str]
    own: str


def _called(run: Run, rename: Callable[[str], str]) -> dict[Key, _Called]:
    """What a run calls, by the sites of all its ranks; no step is read.

    Args:
        run: the run.
        rename: changes its own names to b's.
    """
    calls: dict[Key, _Called] = {}
    for reader in map(run.rank, run.ranks):
        sites, of_rank = reader.sites, run.stages.get(reader.rank)
        for kind, phase, name, call in zip(sites.kind, sites.phase, sites.fqn, sites.call, strict=True):
            if kind in _CALLED_KINDS:
                own = name if of_rank is None else of_rank.name(name)
                key = phase == Phase.EVAL.value or EVALUATED in name.partition(".")[0], rename(own)
                times, kinds, _ = calls.get(key, (0, frozenset[str](), own))
                if call >= times or kind not in kinds:
                    calls[key] = _Called(max(times, int(call) + 1), kinds | {kind}, own)
    return calls


def _folds(calls: Mapping[Key, _Called], others: Mapping[Key, _Called], number: int, number_b: int) -> dict[Key, int]:
    """How many calls in a row one microbatch makes, by (evaluation, own FQN), of what is to be put together.

    Left out is what both runs call equally often; batches and one-sided names if both runs have as many microbatches,
    or of evaluation; and one-sided names that are called once.

    Args:
        calls: of the run.
        others: of the other run.
        number: microbatches of the run.
        number_b: microbatches of the other run.
    """
    folds: dict[Key, int] = {}
    for (evaluated, name), (times, kinds, own) in calls.items():
        loads, partner = Kind.BATCH.value in kinds, others.get((evaluated, name))
        each, rest = divmod(times, number)
        if loads or partner is None:
            if number != number_b and not evaluated and (times > 1 or loads):
                folds[evaluated, own] = 1 if rest or loads else each  # which may be asked for batches ahead
        elif partner.times != times:
            folds[evaluated, own] = each if not rest and each * number_b == partner.times and not evaluated else 1
    return folds


def _common_root(a: Mapping[Key, _Called], b: Mapping[Key, _Called]) -> str:
    """The outermost module (fewest dots) that both runs call, if possible one they call differently often; "" for none.

    Of several, the one with the fewest calls in both (by product), then a's first.
    """
    both = [key for key in a if not key[0] and key in b]
    trained = [key for key in both if all({"input", "output"} & calls[key].kinds for calls in (a, b))]
    rank = {key: (key[1].count("."), a[key].times == b[key].times, a[key].times * b[key].times) for key in trained}
    return min(trained, key=rank.__getitem__, default=(False, ""))[1]


def _cut_differently(readers: Iterable[RankReader], cuts: tuple[Cut, Cut], step: int) -> bool:
    """Whether runs with other numbers of microbatches, whose ranks have partners, cut the same batch differently.

    Samples or elements have to add up equally; where these are not on record, numbers of losses have to differ.

    Args:
        readers: of the first rank of a and of b.
        cuts: how a and b take a batch.
        step: the first common step.
    """
    if all(cut.first for cut in cuts):
        return any(one == two for one, two in zip(*map(_size, cuts), strict=True))
    losses = [sum(of.sites.kind[site] == Kind.LOSS.value for site in of.read(step).site.tolist()) for of in readers]
    return bool(min(losses) and losses[0] != losses[1])  # who cuts a batch differently does so from the first step on


# --- what is told of it


def _layouts_note(a: Run, b: Run, splits: Splits) -> str:
    """Note on how runs of different layouts are compared, without its stop.

    Args:
        a: run a.
        b: run b.
        splits: how both are split.
    """
    options, operators = splits.options, " and results of operators" * any(cut.folds for cut in splits.cuts)
    differ = "The batch of a step is cut differently" if splits.differ else "The layouts differ"
    joined = [" put together" * bool(run.combined_ranks) for run in (a, b)]
    ranks = [f"{count(run.world_size, 'rank')}{how}" for run, how in zip((a, b), joined, strict=True)]
    sizes = [f"{of_run}, {cut}" for of_run, cut in zip(ranks, splits.words, strict=True)]
    coarse = f"; those in {' or '.join(sorted(_COARSE))}, and what comes of them, by {options.rtol:g}"
    return (
        f"{differ} (a: {sizes[0]}; b: {sizes[1]}), so whole tensors are compared: parts are added up, copies count "
        f"once, of other values extrema and means are compared where not all samples are equal, and random "
        f"states{operators} are not. Sums in another order may differ by {options.rtol_fine or options.rtol:g} of the "
        f"values{coarse if options.rtol_fine else ''}"
    )
