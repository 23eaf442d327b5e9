"""Ranks of two runs compared one by one, wherever there is a processor.

Thousands of ranks are compared in groups, each by a task that opens those ranks alone. What comes back of a rank is
small: how much was compared and counted, and its first divergence. The answer is made of these; only of the rank that
diverges first more is needed, steps and names, so that one is compared once more by whoever asks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from introspect_cli.compare.compared import first_of
from introspect_cli.compare.join.distance import Tensors
from introspect_cli.compare.join.resume import checkpoints_read, detected_offset
from introspect_cli.compare.join.steps import Sides
from introspect_cli.compare.match.correspondence import Correspondence, correspond
from introspect_cli.compare.reasons.beginning import DOCUMENT
from introspect_cli.compare.reasons.documents import tensor_files
from introspect_cli.compare.structure import changes_of
from introspect_cli.compare.training import add_evaluation
from introspect_cli.compare.walk import compare_rank
from introspect_cli.records import perturbed_by
from introspect_cli.store.rank_reader import expect
from introspect_cli.store.spread import MANY, tasks_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.join.split import Splits
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run
    from introspect_cli.store.spread import Task, Work
    from introspect_cli.store.whole import Reader

_LEAST = 4_000
"""Records that are counted in the time that opening a step of both runs takes."""


@dataclass(frozen=True)
class Pair:
    """Two runs, and what of all their ranks the comparison of one needs.

    Attributes:
        a: the reference run.
        b: the run that should equal it.
        noise: runs that should equal a.
        ends: the last step of a, and of b, that counts: a rank that was lost takes the others' last step with it; None
            for all.
        same_size: whether both have as many ranks.
        files: files of tensors that a read, and b, by what they are.
    """

    a: Run
    b: Run
    noise: Sequence[Run]
    ends: tuple[int | None, int | None]
    same_size: bool
    files: tuple[Mapping[str, str], Mapping[str, str]]

    @classmethod
    def of(cls, a: Run, b: Run, noise: Sequence[Run]) -> Pair:
        """Two runs that were opened with all their ranks."""
        ends = (a.last_step if a.endings else None, b.last_step if b.endings else None)
        return cls(a, b, noise, ends, a.world_size == b.world_size, (tensor_files(a), tensor_files(b)))

    def compare(
        self, readers: tuple[Reader, Reader], options: DiffOptions, splits: Splits | None = None
    ) -> RankOutcome:
        """Compare one rank, or all as one, under the offset and the moves that make their sites meet."""
        one, two = readers
        a, b, match = self.a, self.b, correspond(one, two, options)
        noise = [run for run in self.noise if splits is None and one.rank in run.ranks]
        sides = Sides(
            rank=one.rank,
            a=one,
            b=two,
            noise=tuple(run.rank(one.rank) for run in noise),
            seeds=tuple(perturbed_by(run.manifest) for run in noise),
            manifest_a=a.manifest,
            manifest_b=b.manifest,
            tensors=Tensors(a, b),
            rename=match.rename,
            splits=splits,
            read=(
                {**self.files[0], **checkpoints_read(a.settings_of(one.rank).get(DOCUMENT))},
                {**self.files[1], **checkpoints_read(b.settings_of(two.rank).get(DOCUMENT))},
            ),
            ends=self.ends,
        )
        offset, note = options.offset, ""
        if offset is None:
            offset, note = detected_offset(sides, same_size=self.same_size)
        outcome = compare_rank(sides, options, offset)
        outcome.match = match
        add_evaluation(outcome, sides, options)
        root = match.root_words(outcome.first.site.fqn) if outcome.first is not None else ""
        outcome.notes = [text for text in (*match.notes, note, root) if text]
        outcome.notes += outcome.gathered.notes() if outcome.gathered is not None else ()
        return outcome

    def compare_rank(self, rank: int, options: DiffOptions) -> RankOutcome:
        """Compare one rank."""
        return self.compare((self.a.rank(rank), self.b.rank(rank)), options)


def compare_group(task: Task) -> list[RankOutcome]:
    """Compare some ranks."""
    manifests, options, pair = task.given
    with task.opened() as runs:
        for run, manifest in zip(runs, manifests, strict=True):
            run.manifest = manifest  # which other ranks have their part in
        expect((runs[0].rank(rank) for rank in task.ranks), 0, -1)
        pair = replace(pair, a=runs[0], b=runs[1], noise=runs[2:])
        return [_closed(pair.compare_rank(rank, options)) for rank in task.ranks]


def compare_ranks(
    pair: Pair, ranks: Sequence[int], options: DiffOptions, work: Work | None = None
) -> list[RankOutcome]:
    """Compare ranks one by one; what came of each.

    Of many ranks, all divergences of the first step are listed of the rank that diverges first alone.

    Args:
        pair: the runs.
        ranks: their numbers.
        options: what counts.
        work: runs tasks elsewhere; None to compare here.
    """
    options = replace(
        options, later=options.later // max(len(ranks), 1), least=_LEAST if len(ranks) > MANY else options.least
    )
    if work is None:
        expect((pair.a.rank(rank) for rank in ranks), 0, -1)  # which are asked what was not seen
    if len(ranks) < 2 or (work is None and len(ranks) <= MANY):
        return [pair.compare_rank(rank, options) for rank in ranks]
    less = replace(options, whole_step=False, limit=0) if options.whole_step and len(ranks) > MANY else options
    if work is None:
        outcomes = [_closed(pair.compare_rank(rank, less)) for rank in ranks]
    else:
        runs = (pair.a, pair.b, *pair.noise)
        closed = replace(pair, a=cast("Run", None), b=cast("Run", None), noise=())
        given = tuple(run.manifest for run in runs), less, closed
        outcomes = [outcome for done in work(compare_group, tasks_of(runs, ranks, given)) for outcome in done]
    outcomes = [_opened(pair, outcome) for outcome in outcomes]
    for outcome in outcomes if less is not options else ():
        outcome.listed = []
    best, structural = first_of(outcomes), next((outcome for outcome in outcomes if outcome.structural), None)
    for at, outcome in enumerate(outcomes):
        if outcome is best or outcome is structural:
            outcomes[at] = pair.compare_rank(ranks[at], options if outcome is best else less)
    return outcomes


def _alone(outcome: RankOutcome) -> dict[bool, RankOutcome]:
    """Its evaluation (True) and training (False) alone, where they are told apart."""
    which = (False, True) if outcome.evaluated else (False,)
    return {} if outcome.alone is None else {evaluation: outcome.alone(evaluation) for evaluation in which}


def _closed(outcome: RankOutcome) -> RankOutcome:
    """An outcome without readers and steps, and what is asked of the rank alone that diverges first."""
    nobody = cast("Reader", None)  # until `_opened`
    alone = {evaluation: _closed(part) for evaluation, part in _alone(outcome).items()}
    structure = outcome.structure
    return replace(
        outcome,
        paired=replace(outcome.paired, a=nobody, b=nobody),
        structural=structure is not None and bool(changes_of(structure, outcome.match, same=False)),
        cause=None,
        step=None,
        heat=None,
        structure=None,
        match=Correspondence(),
        gathered=None,
        origins=[],
        lost=[],
        alone=alone.__getitem__ if alone else None,
    )


def _opened(pair: Pair, outcome: RankOutcome) -> RankOutcome:
    """An outcome with the readers that are open here."""
    for one in (outcome, *_alone(outcome).values()):
        one.paired = replace(one.paired, a=pair.a.rank(one.rank), b=pair.b.rank(one.rank))
    return outcome
