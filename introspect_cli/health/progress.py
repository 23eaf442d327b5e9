"""How far each rank gets: what was lost, what was skipped, and what has no gradient."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.findings import Hit, Level, rule
from introspect_cli.records import Kind, Phase
from introspect_cli.store.tasks import ended_unevenly
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass
class Progress(Gathered):
    """First steps in which ranks differ in losses, updates or gradients.

    Attributes:
        hits: where ranks began to be at different steps: `losses`, where they have another number of losses, and
            `unmoved`, where no parameter of some ranks changed, and those of others did.
        missing: the first step in which only some ranks have a gradient of a parameter, by its FQN.
        computing: ranks that have had a loss.
    """

    hits: dict[str, Hit] = field(default_factory=dict)
    missing: dict[str, Hit] = field(default_factory=dict)
    computing: set[int] = field(default_factory=set)
    _last: dict[tuple[int, str], int] = field(default_factory=dict)  # checksums of each rank's parameters, as last seen

    def step(self, now: AlignedStep) -> None:
        """Compare how many losses ranks have, which parameters have gradients, and whether any parameter changed.

        Call it in the order of steps; the first difference stays. Notes `losses` where ranks that have ever had a loss
        have another number of them, and `unmoved` where on some ranks no parameter with a gradient changed, and on
        others at least one did. Adds to `missing` each parameter that has a gradient on only some of the ranks that
        have any gradient; those cut over ranks do not count.
        """
        self._note_missing(now)
        times = Counter(rank for number in now.of(Kind.LOSS, Phase.LOSS) for rank in now.rows[number])
        self.computing |= times.keys()
        numbers = [rank for rank in self.ranks.numbers if rank in self.computing]  # of a pipeline, the last stage's
        if "losses" not in self.hits and len({times[rank] for rank in numbers}) > 1:
            most, least = (pick(numbers, key=lambda rank: times[rank]) for pick in (max, min))
            losses = f"in step {now.step} rank {most} has {times[most]} and rank {least} {times[least]} losses"
            evidence = f"{losses}: one stepped its optimizer where the other did not, or ran more batches for it"
            self.hits["losses"] = Hit(now.step, f"rank {most}", evidence, most)
        moved = self._moved_ranks(now)
        if "unmoved" not in self.hits and len(set(moved.values())) > 1:
            changed, unchanged = ([rank for rank in sorted(moved) if moved[rank] is flag] for flag in (True, False))
            evidence = f"step {now.step} changed no parameter of {rank_list(unchanged)}, some of {rank_list(changed)}"
            self.hits["unmoved"] = Hit(now.step, f"rank {unchanged[0]}", evidence, unchanged[0])

    def _note_missing(self, now: AlignedStep) -> None:
        """Add to `missing` the first hit of each parameter with a gradient on only some of the ranks that have any.

        Parameters whose gradient is cut over ranks do not count, nor do ranks that hold no element of the parameter.
        """
        holders = {now.sites[n].fqn: now.rows[n] for n in now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER)}
        gradients = now.of(Kind.GRAD, Phase.OPTIMIZER)
        stepping = {rank for number in gradients for rank in now.rows[number]}
        for number in gradients:
            fqn, rows = now.sites[number].fqn, now.rows[number]
            params = [item for item in holders.get(fqn, {}).items() if item[0] in stepping and item[0] not in rows]
            without = [rank for rank, row in params if now.numel(rank, row)]
            if without and all(now.layout(rank, row).part is None for rank, row in rows.items()):
                evidence = f"{rank_list(without)} has no gradient of {fqn} in step {now.step}, others have one"
                self.missing.setdefault(fqn, Hit(now.step, f"grad {fqn}", evidence, without[0]))

    def _moved_ranks(self, now: AlignedStep) -> dict[int, bool]:
        """By rank, whether any parameter with a gradient changed in the step; keeps checksums in `_last` for the next.

        A rank without such a parameter, or without an earlier value of one, is left out.
        """
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


@rule(Level.ERROR, over_ranks=True)
def lost_rank(ranks: Ranks) -> Iterator[Hit]:
    """A rank left nothing, was cut off, or ended before the others.

    When: its records are missing, have no end, or stop at an earlier step than the others'; not while the run is
    written, nor where all ranks ended properly after different numbers of steps (see rank-steps, uneven-batches)
    Cause: a crash, a kill or a hang of that rank; its own output says more
    """
    run = ranks.run
    for sentence, rank in run.lost_ranks.items() if not ended_unevenly(run) else ():  # else other rules say why
        step = run.rank(rank).last_step if rank in run.ranks else None
        yield Hit(step or 0, f"rank {rank}", sentence, rank)


@rule(Level.ERROR, over_ranks=True)
def rank_gradients(ranks: Ranks) -> Iterable[Hit]:
    """A parameter has a gradient on some ranks only.

    When: both have other gradients in the step; parameters that are cut over ranks do not count
    Cause: a parameter that some ranks do not use, and a reduction that leaves out what is None
    """
    return ranks.of(Progress).missing.values()


def uneven_ends(ranks: Ranks) -> Iterator[Hit]:
    """One hit, at the rank that ended first, where all ended by themselves at different steps; else none."""
    if ended_unevenly(ranks.run):
        last = {rank: ranks.run.rank(rank).last_step or 0 for rank in ranks.numbers}
        rank = min(last, key=lambda each: (last[each], each))
        yield Hit(last[rank], f"rank {rank}", "; ".join(ranks.run.lost_ranks), rank)
