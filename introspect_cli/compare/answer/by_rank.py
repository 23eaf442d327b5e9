"""Two runs compared rank by rank, in other processes where there are many; or all ranks of each as one.

Thousands of ranks are compared in groups, each by a task that opens those ranks alone and returns only counts and the
first divergence. The rank that diverges first is then compared once more, with all its steps and names.

Training and evaluation are also compared alone: one run that evaluates another way may train the same. Each has an
account of the same walk, with the other's records masked, though reasons know of all of them. The first divergence is
the earlier of the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from introspect_cli.compare.answer.compared import Compared
from introspect_cli.compare.comparison import Comparison
from introspect_cli.compare.ledger import At
from introspect_cli.compare.match import Correspondence, correspond, other_roots
from introspect_cli.compare.resumed import detected_offset, offset_by_labels
from introspect_cli.compare.say import told
from introspect_cli.compare.walk import compare_rank
from introspect_cli.compare.watched import is_list
from introspect_cli.compare.wholes import Splits, wholes_of
from introspect_cli.errors import UsageError
from introspect_cli.records import Phase
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.remote import prefetch
from introspect_cli.store.tasks import MANY, ended_unevenly, tasks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.measure import Ids
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Task, Work

_LEAST = 4_000
"""Records that are counted in the time that opening a step of both runs takes."""


class RunPair(NamedTuple):
    """Two runs, with what the comparison of a single rank needs to know of all ranks.

    Attributes:
        noise: runs that should equal a.
        ends: the last step of a, and of b, that counts: a rank that was lost takes the others' last step with it; None
            for all.
    """

    a: Run
    b: Run
    noise: Sequence[Run]
    ends: tuple[int | None, int | None]

    @classmethod
    def from_runs(cls, a: Run, b: Run, noise: Sequence[Run]) -> RunPair:
        """Pair two open runs with all their ranks.

        A run's last step becomes its end where its endings are on record and its ranks ended evenly; else its end is
        None.
        """
        one, two = (run.last_step if run.endings and not ended_unevenly(run) else None for run in (a, b))
        return cls(a, b, noise, (one, two))

    def compare(
        self, readers: tuple[Reader, Reader], options: DiffOptions, splits: Splits | None = None
    ) -> RankOutcome:
        """Compare one rank, or all ranks as one, under the renamings that are found and a step offset.

        The offset is that of `options`, else the detected one. Where one rank diverges and evaluates, training and
        evaluation are compared alone too, and the first divergence is the earlier of theirs. With `splits`, and where
        both runs have one rank, what a resumed run restored is that of these ranks as they are recorded. The outcome
        has notes on offset, names, what was put together of ranks, and rounding.

        Args:
            readers: of the rank in a and in b; of all ranks together with `splits`.
            options: how to compare.
            splits: how ranks and batches are split up; None where one rank is compared.
        """
        one, two = readers
        by_labels = offset_by_labels(one.labels, two.labels) if options.offset is None else options.offset
        match = splits.match if splits is not None else None
        if match is None:
            listed = is_list(self.a.manifest) or is_list(self.b.manifest)
            match = correspond(one, two, options, by_labels, listed=listed)
        later = 0
        if match.is_port:  # differences of rounding grow from step to step
            later = 0 if options.steps else max(0, min(len(one.entries), len(two.entries)) - 1)
            steps = options.steps or Schedule.only(int(one.entry(0).step))
            options = replace(options, steps=steps, rtol=options.rtol if options.tolerant else 1e-5)
        noise = [run for run in self.noise if splits is None and one.rank in run.ranks]
        comparison = Comparison(
            rank=one.rank,
            a=one,
            b=two,
            manifests=(self.a.manifest, self.b.manifest),
            runs=(self.a, self.b),
            options=options,
            noise=tuple((run.rank(one.rank), run.manifest) for run in noise),
            match=match,
            splits=splits,
            ends=self.ends,
        )
        offset, note = detected_offset(comparison, by_labels) if options.offset is None else (options.offset, "")
        comparison = replace(comparison, offset=offset)
        outcome = compare_rank(comparison)
        if splits is not None and len(self.a.ranks) == len(self.b.ranks) == 1 and not options.narrowed:
            one, two = (run.rank(run.ranks[0]) for run in (self.a, self.b))
            alone = replace(comparison, a=one, b=two, splits=splits if splits.differ else None)
            outcome.resumption = alone.resumption
        outcome.tally["later"] = later
        if not comparison.is_whole:
            _add_evaluation(outcome, comparison)
        port = told("port", step=one.entry(0).step, close=options.rtol) if match.is_port else ""
        outcome.notes = [note, port, *outcome.notes]
        return outcome

    def compare_rank(self, rank: int, options: DiffOptions) -> RankOutcome:
        """Compare rank `rank` of a with the same rank of b."""
        return self.compare((self.a.rank(rank), self.b.rank(rank)), options)


def compared_runs(a: Run, b: Run, options: DiffOptions, noise: Sequence[Run], work: Work | None = None) -> Compared:
    """Compare each rank of a with that of b, or, where layout or batch split differ, all ranks of each run as one.

    With `options.ranks` ranks are always compared. The one outcome of all has notes on the layouts, and that noise runs
    are not used.

    Args:
        a: one run.
        b: the other run.
        options: how to compare, and which ranks.
        noise: runs that should equal a.
        work: runs tasks in other processes; None to compare here.

    Raises:
        UsageError: no selected rank is in both runs.
    """
    ranks = [rank for rank in a.ranks if rank in b.ranks and options.wants_rank(rank)]
    if options.ranks and not ranks:
        raise UsageError(f"no rank of {options.ranks} is in both runs; run a has {a.ranks} and run b {b.ranks}.")
    pair = RunPair.from_runs(a, b, noise)
    cut = a.ranks and b.ranks and not options.ranks
    splits = wholes_of(a, b, options, other_roots(a, b, options)) if cut else None
    if splits is not None:
        outcome = pair.compare(splits.readers, splits.options, splits)
        outcome.notes = [splits.note, *outcome.notes, told("noise-unused") if noise else ""]
        return Compared(a, b, splits.options, [outcome], splits)
    return Compared(a, b, options, compare_ranks(pair, ranks, options, work))


def compare_group(task: Task) -> list[RankOutcome]:
    """Outcomes of the ranks of one task, in its order; they can be pickled.

    The task's runs are opened and closed here, with the manifests that the task gives in place of their own.
    """
    manifests, options, pair = task.given
    with task.opened() as runs:
        for run, manifest in zip(runs, manifests, strict=True):
            run.manifest = manifest  # which other ranks have their part in
        prefetch(runs[0].rank(rank).ranges((0, -1)) for rank in task.ranks)
        pair = pair._replace(a=runs[0], b=runs[1], noise=runs[2:])
        return [_without_readers(pair.compare_rank(rank, options)) for rank in task.ranks]


def compare_ranks(
    pair: RunPair, ranks: Sequence[int], options: DiffOptions, work: Work | None = None
) -> list[RankOutcome]:
    """Outcomes of ranks compared one by one, in the order of `ranks`.

    With `work` and several ranks, or with more than MANY ranks, outcomes lack cause, step and origins, except that of
    the rank that diverges first, which is compared a second time. `options.later` is shared out among the ranks.

    Args:
        pair: the runs.
        ranks: numbers of ranks that both runs have.
        options: how to compare. With `whole_step` and more than MANY ranks, only the rank that diverges first, which is
            compared a second time, lists divergences.
        work: runs tasks in other processes; None to compare here.
    """
    many = len(ranks) > MANY
    options = replace(options, later=options.later // max(len(ranks), 1), least=_LEAST if many else options.least)
    less = replace(options, whole_step=False, limit=0) if options.whole_step and many else options
    if work is None or len(ranks) < 2:
        prefetch(pair.a.rank(rank).ranges((0, -1)) for rank in ranks)  # which are asked what was not seen
        if not many:
            return [pair.compare_rank(rank, options) for rank in ranks]
        outcomes = [_without_readers(pair.compare_rank(rank, less)) for rank in ranks]
    else:
        runs = (pair.a, pair.b, *pair.noise)
        closed = pair._replace(a=cast("Run", None), b=cast("Run", None), noise=())
        given = tuple(run.manifest for run in runs), less, closed
        outcomes = [each for done in work(compare_group, tasks_of(runs, ranks, given)) for each in done]
    for outcome in outcomes:
        outcome.listed = [] if less is not options else outcome.listed
        for one in (outcome, *outcome.parts.values()):
            one.paired = replace(one.paired, readers=(pair.a.rank(one.rank), pair.b.rank(one.rank)))
    best = Compared(pair.a, pair.b, options, outcomes).best
    return [pair.compare_rank(outcome.rank, options) if outcome is best else outcome for outcome in outcomes]


def _without_readers(outcome: RankOutcome) -> RankOutcome:
    """A copy of an outcome that can be pickled: without readers, cause, step, and what only the first rank needs."""
    paired = replace(outcome.paired, readers=())  # until `compare_ranks` has them
    parts, nothing = {each: _without_readers(of) for each, of in outcome.parts.items()}, Correspondence()
    bare = replace(outcome, cause=None, step=None, heat=None, match=nothing, origins=[])
    return replace(bare, paired=paired, parts=parts)


# --- training and evaluation alone


def _add_evaluation(outcome: RankOutcome, comparison: Comparison) -> None:
    """Set an outcome's trailing steps, and drop its part of evaluation unless both runs evaluate.

    Where the outcome diverges as well, its first divergence becomes the earlier of those of training and of evaluation.
    """
    options, paired, shifts = comparison.options, outcome.paired, (0, outcome.offset)
    ends = zip(paired.tails, paired.readers, comparison.sites, paired.only, shifts, paired.rows, strict=True)
    tails = (
        0 if tail == 1 and _changes_nothing(At(reader, sites, only[-1] - offset), rows) else tail
        for tail, reader, sites, only, offset, rows in ends
    )
    outcome.paired = replace(paired, tails=tuple(tails))
    if not outcome.parts:
        return
    selected = [sites.selected(options.kinds, options.modules) & sites.evaluating for sites in comparison.sites]
    if not all(mask.any() for mask in selected):
        del outcome.parts[True]
    _set_earliest(outcome, options)


def _changes_nothing(end: At, rows: Ids) -> bool:
    """Whether the step has no loss, gradient or update while the last common one has, and changes no tensor.

    Args:
        end: the one step of a run after the last common one.
        rows: rows of the common steps in that run.
    """
    if not end.recorded:
        return False
    trains = end.sites.are(Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
    before = [end.reader.read(end.reader.entry(int(row)).step).site for row in rows[-1:]]
    if trains[np.asarray(end.batch.site)].any() or not any(trains[there].any() for there in before):
        return False
    left = end.later(-1).tensors()
    return all(left.get(tensor, value) == value for tensor, value in end.tensors(Phase.START).items())


def _set_earliest(outcome: RankOutcome, options: DiffOptions) -> None:
    """Make the earliest first divergence of its parts, by (step, sequence), the outcome's first and the first it lists.

    Its cause, step, tolerance and origins come with it, and the list is cut to `options.limit` (with `whole_step`, to
    its length before). Does nothing where no part diverges.
    """
    firsts = [(part.first, part) for part in outcome.parts.values() if part.first is not None]
    if not firsts:
        return
    first, part = min(firsts, key=lambda pair: (pair[0].step, pair[0].sequence))
    listed = [other for other in outcome.listed if (other.step, other.site) != (first.step, first.site)]
    outcome.first, outcome.cause, outcome.step, outcome.tolerated = first, part.cause, part.step, part.tolerated
    outcome.origins = part.origins
    room = len(outcome.listed) if options.whole_step else options.limit
    outcome.listed = [first, *listed][:room]
