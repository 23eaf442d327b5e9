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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.records import EVALUATED, Kind, Phase
from introspect_cli.store.reader import Reader
from introspect_cli.store.tasks import as_one
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.store.reader import RankReader, Reader
    from introspect_cli.store.run import Run

    Pairs = Sequence[tuple[RankReader, RankReader]]
    from collections.abc import Callable, Iterable, Mapping

    from introspect_cli.compare.match import Correspondence
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.run import Stages

    Key = tuple[bool, str]

_TRAINED_KINDS = frozenset({Kind.PARAM.value, Kind.GRAD.value})
_STATE_KINDS = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})


def are_alike(a: Run, b: Run, pairs: Pairs) -> bool:
    """Whether each rank has a partner in the other run with the same parts of every tensor that both runs have.

    True for two runs of one rank. Of two runs whose ranks are put together already: whether their manifests name the
    same layout; False if one alone is. `pairs` are the readers of the ranks that both have.
    """
    if a.world_size != b.world_size or bool(a.combined_ranks) != bool(b.combined_ranks):
        return False
    if a.combined_ranks:
        return bool(a.manifest["whole"].get("layout") == b.manifest["whole"].get("layout"))
    if len(a.ranks) == len(b.ranks) == 1:
        return True
    if any(_parts(one) != _parts(two) for one, two in pairs) or not _cut_alike(*pairs[0]):
        return False
    held = {(id(one.sites), id(two.sites)): (_states(one), _states(two)) for one, two in pairs}  # many have one table
    of_a, of_b = (frozenset[tuple[str, str]]().union(*each) for each in zip(*held.values(), strict=True))
    return all(one & of_b == two & of_a for one, two in held.values())


def _cut_alike(one: RankReader, two: RankReader) -> bool:
    """Whether each parameter and gradient is a part in both runs or in neither, in the first step that both have.

    It is read if either run has parts.
    """
    steps = {*one.entries["step"].tolist()} & {*two.entries["step"].tolist()}
    cut: list[dict[tuple[str, str], bool]] = [{}, {}]
    for reader, is_part in zip((one, two), cut, strict=True) if steps and (_parts(one) or _parts(two)) else ():
        batch, sites = reader.read(min(steps)), reader.sites
        for site, layout in zip(batch.site.tolist(), batch.layout.tolist(), strict=True):
            if sites.kind[site] in _TRAINED_KINDS:
                is_part[sites.kind[site], sites.fqn[site]] = reader.layouts[layout].part is not None
    return all(cut[0][name] == cut[1][name] for name in cut[0].keys() & cut[1].keys())


def _states(reader: Reader) -> frozenset[tuple[str, str]]:
    """(FQN, kind) of a reader's parameters and optimizer states."""
    states = zip(reader.sites.fqn, reader.sites.kind, strict=True)
    return frozenset((fqn, kind) for fqn, kind in states if kind in _STATE_KINDS)


def _parts(reader: Reader) -> frozenset[object]:
    """(shape, part) of each layout of a reader that is a part of a tensor."""
    return frozenset((layout.shape, layout.part) for layout in reader.layouts if layout.part is not None)


# --- microbatches


class Microbatch(NamedTuple):
    """One call of the model on one rank.

    Attributes:
        samples: leading size of what it is given; 0 where that is not on record.
        elements: how many elements that has.
        tokens: rows of the gradient of what the loss is computed of that are not zero; 0 where that is not on record.
    """

    samples: int = 0
    elements: int = 0
    tokens: int = 0


class Microbatches(NamedTuple):
    """How one rank divides the batch of a step into microbatches.

    Attributes:
        number: forward passes of a step, at most.
        sizes: samples of those of the first step of both; empty where any is not on record.
        elements: elements of their inputs together.
    """

    number: int
    sizes: tuple[int, ...] = ()
    elements: int = 0

    @property
    def usual(self) -> int:
        """How many microbatches the first common step has; where that is not on record, the most of any step."""
        return len(self.sizes) or self.number

    @property
    def words(self) -> str:
        """In words: `4 microbatches of 2 samples`, `2 microbatches of 3, 1 samples`."""
        sizes = [*dict.fromkeys(self.sizes)]
        of = f" of {', '.join(map(str, sizes))} sample{'s' * (sizes != [1])}" if sizes else ""
        return f"{count(self.usual, 'microbatch', 'microbatches')}{of}"


def microbatches(reader: RankReader, root: str, step: int) -> list[Microbatch]:
    """One microbatch per forward call of `root`, in order, by the shape of its first input (else output).

    Tokens are the rows that are not all zero in the gradient at a module's output, of the first module with one; 0 in
    all unless every call has some.
    """
    sites, batch = reader.sites, reader.read(step)
    given: dict[int, tuple[int, ...]] = {}
    tokens: dict[int, int] = {}
    last = ""
    for row in np.argsort(batch.sequence, kind="stable").tolist():
        number = int(batch.site[row])
        call, kind, fqn = int(sites.call[number]), sites.kind[number], sites.fqn[number]
        shape = reader.layouts[int(batch.layout[row])].shape
        if fqn == root and sites.phase[number] == Phase.FORWARD.value and kind in {"input", "output"}:
            given[call] = given.get(call) or shape
        elif kind == Kind.GRAD_OUTPUT.value and len(shape) > 1 and "zeros" in batch.counts:
            last = last or fqn
            if fqn == last and call not in tokens:
                tokens[call] = _nonzero_rows(shape, int(batch.counts["zeros"][row]))
    exact = all(tokens.get(call, 0) > 0 for call in given) and len(tokens) == len(given)
    return [
        Microbatch(shape[0] if shape else 0, math.prod(shape) if shape else 0, tokens[call] if exact else 0)
        for call, shape in sorted(given.items())
    ]


def _nonzero_rows(shape: tuple[int, ...], zeros: int) -> int:
    """Rows of a gradient of this shape that are not all zero, if all its zeros fill whole rows; else 0.

    Args:
        shape: of the gradient; the last dimension is a row.
        zeros: number of its zeros; negative if unknown.
    """
    rows, rest = math.prod(shape[:-1]), zeros % shape[-1]
    return 0 if zeros < 0 or rest else rows - zeros // shape[-1]


# --- wholes


_COARSE = frozenset({"bfloat16", "float16"})
_MODULE_KINDS = frozenset(kind.value for kind in (Kind.INPUT, Kind.OUTPUT))
_CALLED_KINDS = _MODULE_KINDS | {kind.value for kind in (Kind.BATCH, Kind.LOSS, Kind.VALUE)}


@dataclass(frozen=True)
class Splits:
    """How both runs are split over ranks and microbatches.

    Attributes:
        a: how run a takes the batch of a step.
        b: how run b does.
        folds: of run a, and of run b, how many calls of a name one microbatch makes; of what is to be put together.
        alike: whether each rank of one run has its partner in the other, with the same share of every tensor.
        differ: whether they cut the same batch into other microbatches, as far as that is on record.
        roots: the outermost module that both call, as a and as b calls it; "" where none is on record.
        match: which name of a is which of b, where that was looked for.
    """

    a: Microbatches
    b: Microbatches
    folds: tuple[Mapping[Key, int], Mapping[Key, int]]
    alike: bool
    differ: bool = False
    roots: tuple[str, str] = ("", "")
    match: Correspondence | None = None

    @property
    def words(self) -> list[str]:
        """How a, and how b, takes a batch, in words; without sizes where a sample of one has more elements."""
        sized = sum(self.a.sizes) * self.b.elements == sum(self.b.sizes) * self.a.elements
        return [(cut if sized else Microbatches(cut.number)).words for cut in (self.a, self.b)]


class Wholes(NamedTuple):
    """Both runs as wholes, with options and notes.

    Attributes:
        splits: how the runs are split up.
        options: what counts, with the tolerance that they need.
    """

    readers: tuple[Reader, Reader]
    splits: Splits
    options: DiffOptions
    notes: list[str]


def wholes_of(a: Run, b: Run, options: DiffOptions, match: Correspondence | None = None) -> Wholes | None:
    """Both runs with ranks and calls put together; None where they can be compared rank by rank and call by call.

    That is, each rank has its partner, and batches are cut alike or `strict` is given. The tolerance in `options` is
    set for runs of different layouts, if none is given.

    Args:
        a: run a.
        b: run b.
        options: what counts.
        match: which name of a is which of b, if that was looked for.
    """
    splits = _splits_of(a, b, match)
    if splits.alike and (options.strict or not splits.differ):
        return None
    one, two = (as_one(run, fold) for run, fold in zip((a, b), splits.folds, strict=True))
    coarse = all(any(_COARSE & {*layout.dtype.split(" and ")} for layout in reader.layouts) for reader in (one, two))
    seen = any(Kind.OUTPUT.value in reader.sites.kind for reader in (one, two))
    are_coarse = not seen and all(map(autocasts, (a, b)))
    in_tf32 = all(map(_in_tf32, (a, b), (one, two)))
    options = options.between_layouts(coarse=coarse, throughout=are_coarse or in_tf32)
    why = ", since both compute float32 in TF32 on a GPU" * in_tf32
    why = ", since autocast computes in bfloat16 or float16 in both and no output is on record" if are_coarse else why
    return Wholes((one, two), splits, options, [f"{_layouts_note(a, b, options, splits)}{why}."])


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


def _splits_of(a: Run, b: Run, match: Correspondence | None) -> Splits:
    """How two runs are split over ranks and microbatches, by their layouts and numbers of calls.

    One microbatch each where ranks have partners and the first pair has the same sites; else reads the first common
    step.

    Args:
        a: run a.
        b: run b.
        match: which name of a is which of b, if that was looked for.
    """
    pairs = [(a.rank(rank), b.rank(rank)) for rank in a.ranks if rank in b.ranks]
    every = [[run.rank(rank) for rank in run.ranks] for run in (a, b)]
    first_a, first_b = (run.rank(run.recorded[0]) for run in (a, b))
    alike = are_alike(a, b, pairs)
    if alike and pairs and np.array_equal(pairs[0][0].sites.key, pairs[0][1].sites.key):
        return Splits(Microbatches(1), Microbatches(1), ({}, {}), alike=True)  # the same calls of all that they call
    rename = (match.rename if match is not None else None) or str
    one, two = _called(every[0], a.stages, rename), _called(every[1], b.stages, str)
    root = _common_root(one, two)
    at = (False, root or "loss")
    numbers = [calls[at].times if at in calls else 1 for calls in (one, two)]
    of_a = {(key[0], one[key].own): fold for key, fold in _folds(one, two, *numbers).items()}
    folds = of_a, _folds(two, one, *numbers[::-1])
    step = min({*first_a.entries["step"].tolist()} & {*first_b.entries["step"].tolist()}, default=None)
    cuts, roots = list[Microbatches](), (one[at].own if root else root, root)
    for reader, of, number in zip((first_a, first_b), roots, numbers, strict=True):
        first = [] if step is None else microbatches(reader, of, step)
        sizes = tuple(micro.samples for micro in first)
        cuts.append(Microbatches(number, sizes if all(sizes) else (), sum(micro.elements for micro in first)))
    splits = Splits(cuts[0], cuts[1], folds, alike, roots=roots, match=match)
    return replace(splits, differ=step is not None and _cut_differently((first_a, first_b), splits, step))


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


def _called(
    readers: Iterable[RankReader], stages: Mapping[int, Stages], rename: Callable[[str], str]
) -> dict[Key, _Called]:
    """What a run calls, by the sites of all its ranks; no step is read.

    Args:
        readers: of the run's ranks.
        stages: the pipeline stages of ranks that are some.
        rename: changes the run's own names to b's.
    """
    calls: dict[Key, _Called] = {}
    for reader in readers:
        sites, of_rank = reader.sites, stages.get(reader.rank)
        for kind, phase, name, call in zip(sites.kind, sites.phase, sites.fqn, sites.call, strict=True):
            if kind in _CALLED_KINDS:
                own = name if of_rank is None else of_rank.name(name)
                key = phase == Phase.EVAL.value or EVALUATED in name.partition(".")[0], rename(own)
                times, kinds, _ = calls.get(key, (0, frozenset[str](), own))
                if call >= times or kind not in kinds:
                    calls[key] = _Called(max(times, int(call) + 1), kinds | {kind}, own)
    return calls


def _folds(calls: Mapping[Key, _Called], others: Mapping[Key, _Called], number: int, number_b: int) -> dict[Key, int]:
    """How many calls in a row one microbatch makes, by (evaluation, FQN), of what is to be put together.

    Left out is what both runs call equally often; batches and one-sided names if both runs have as many microbatches,
    or of evaluation; and one-sided names that are called once.

    Args:
        calls: of the run.
        others: of the other run.
        number: microbatches of the run.
        number_b: microbatches of the other run.
    """
    folds: dict[Key, int] = {}
    for key, (times, kinds, _) in calls.items():
        evaluated, loads, partner = key[0], Kind.BATCH.value in kinds, others.get(key)
        each, rest = divmod(times, number)
        if loads or partner is None:
            if number != number_b and not evaluated and (times > 1 or loads):
                folds[key] = 1 if rest or loads else each  # which may be asked for batches ahead
        elif partner.times != times:
            folds[key] = each if not rest and each * number_b == partner.times and not evaluated else 1
    return folds


def _common_root(a: Mapping[Key, _Called], b: Mapping[Key, _Called]) -> str:
    """The outermost module (fewest dots) that both runs call, if possible one they call differently often; "" for none.

    Of several, the one with the fewest calls in both (by product), then a's first.
    """
    both = [key for key in a if not key[0] and key in b]
    trained = [key for key in both if all(_MODULE_KINDS & calls[key].kinds for calls in (a, b))]
    rank = {key: (key[1].count("."), a[key].times == b[key].times, a[key].times * b[key].times) for key in trained}
    return min(trained, key=rank.__getitem__, default=(False, ""))[1]


def _cut_differently(readers: Iterable[RankReader], splits: Splits, step: int) -> bool:
    """Whether the runs cut the same batch into different microbatches.

    False if they make as many forward passes; else True if ranks have no partners. Else numbers of microbatches have to
    differ, and samples or elements to add up equally; where these are not on record, numbers of losses have to differ.

    Args:
        readers: of the first rank of a and of b.
        splits: what is known so far.
        step: the first common step.
    """
    one, two = splits.a, splits.b
    if one.number == two.number:
        return False
    if not splits.alike:
        return True
    if one.sizes and two.sizes:
        cut = len(one.sizes) != len(two.sizes)  # from the first step on
        return cut and (sum(one.sizes) == sum(two.sizes) or one.elements == two.elements)
    losses = [sum(of.sites.kind[site] == Kind.LOSS.value for site in of.read(step).site.tolist()) for of in readers]
    return bool(min(losses) and losses[0] != losses[1])  # who cuts a batch differently does so from the first step on


# --- what is told of it


def _layouts_note(a: Run, b: Run, options: DiffOptions, splits: Splits) -> str:
    """Note on how runs of different layouts are compared, without its stop.

    Args:
        a: run a.
        b: run b.
        options: with the tolerance that is used.
        splits: how both are split.
    """
    sizes = [count(run.world_size, "rank") if run.world_size > 1 else "one process" for run in (a, b)]
    sizes = [f"{size}{' put together' * bool(run.combined_ranks)}" for size, run in zip(sizes, (a, b), strict=True)]
    differ, operators = "The layouts differ", " and results of operators" * any(splits.folds)
    if splits.differ:
        assumed = "The" if splits.a.sizes and splits.b.sizes else "By the number of losses, the"
        differ = f"{assumed} batch of a step is cut differently"
        several = "" if a.world_size == b.world_size == 1 else "{}, "
        sizes = [f"{several.format(size)}{cut}" for size, cut in zip(sizes, splits.words, strict=True)]
    coarse = f"; those in {' or '.join(sorted(_COARSE))}, and what comes of them, by {options.rtol:g}"
    return (
        f"{differ} (a: {sizes[0]}, b: {sizes[1]}), so whole tensors are compared: parts are added up, copies count "
        f"once, of other values extrema and means are compared where not all samples are equal, and random "
        f"states{operators} are not. Sums in another order may differ by {options.rtol_fine or options.rtol:g} of the "
        f"values{coarse if options.rtol_fine else ''}"
    )
