"""Rules about what each rank did beside the others: steps, gradients, outputs, draws, shards, tied weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Level
from introspect_cli.health.rule import Hit, RankAnswer, RankRule, Unseen
from introspect_cli.records import count
from introspect_cli.store.launched import rank_list

if TYPE_CHECKING:
    from introspect_cli.health.replicas import Replicas

_BY_DESIGN = 0.1
"""Outputs that always differ by more, without a draw, are meant to: a module that takes its rank's share."""


def _steps(replicas: Replicas) -> RankAnswer:
    peers = replicas.peers
    hits = []
    if peers.rounds is not None:
        step, times = peers.rounds
        most = max(times, key=lambda rank: times[rank])
        least = min(times, key=lambda rank: times[rank])
        evidence = (
            f"rank {most} has {count(times[most], 'loss', 'losses')} in step {step} and rank {least} "
            f"{times[least]}: it did not step its optimizer where the others did, or ran more batches for it"
        )
        hits.append((most, Hit(step, f"rank {most}", evidence)))
    if peers.idle is not None:
        step, stepped, idle = peers.idle
        evidence = (
            f"no parameter of {rank_list(idle)} was changed in step {step}, those of {rank_list(stepped)} were: the "
            "optimizer step was skipped there alone (a gradient that was not finite, or a condition of its own)"
        )
        hits.append((idle[0], Hit(step, f"rank {idle[0]}", evidence)))
    return hits


def _missing(replicas: Replicas) -> RankAnswer:
    return [
        (
            without[0],
            Hit(
                step,
                f"grad {fqn}",
                f"{rank_list(without)} has no gradient of {fqn} in step {step} and {rank_list(held)} has one: it was "
                "not used there, and nobody reduced it",
            ),
        )
        for fqn, (step, held, without) in replicas.peers.without.items()
    ]


def _uneven(replicas: Replicas) -> RankAnswer:
    peers = replicas.peers
    if not replicas.is_data_parallel:
        return Unseen("data-parallel ranks and their batches")
    if peers.uneven is None:
        return []
    step, sizes = peers.uneven
    told = ", ".join(f"rank {rank}: {size}" for rank, size in list(sizes.items())[:8])
    evidence = (
        f"batches of step {step} are of different sizes ({told}): where each rank takes a mean, and the mean of those "
        "is taken, samples of the smaller batch count for more"
    )
    smallest = min(sizes, key=lambda rank: sizes[rank])
    return [(smallest, Hit(step, "batch", evidence))]


def _outputs(replicas: Replicas) -> RankAnswer:
    hits = []
    for fqn, own in replicas.peers.outputs.items():
        apart, always = own.first, own.times == own.chances
        if apart is None or (always and not own.drew and apart.distance > _BY_DESIGN):
            continue
        far = "" if np.isnan(apart.distance) else f" (relative L2 {apart.distance:.1e})"
        why = "the random states it draws from differ" if own.drew else "nothing that it was given tells why"
        evidence = (
            f"the output of {fqn} on rank {apart.rank} differs from that on rank {apart.base}{far} although inputs and "
            f"parameters are equal, in {own.times} of {count(own.chances, 'call')}: {why}"
        )
        hits.append((apart.rank, Hit(apart.step, f"output {fqn}", evidence)))
    return sorted(hits, key=lambda hit: hit[1].step)


_DRAWS = "every random draw of every rank (`--record rng`, and the compiled kernels)"


def _draws(replicas: Replicas) -> RankAnswer:
    if not replicas.is_data_parallel:
        return Unseen("data-parallel ranks and their random draws")
    found = [
        (
            two,
            Hit(
                step,
                f"rng {fqn}",
                f"{fqn} draws from equal random states on rank {one} and rank {two} although their inputs differ "
                f"({count(times, 'call')}): they get the same random numbers, such as one dropout mask",
            ),
        )
        for fqn, (one, two, times, step) in replicas.peers.draws.items()
    ]
    return found if found or replicas.sees_draws else Unseen(_DRAWS)


def _shards(replicas: Replicas) -> RankAnswer:
    if not replicas.has_parts:
        return Unseen("parameters that are cut over ranks")
    first = replicas.steps[0] if replicas.steps else 0
    return [
        (replicas.ranks[0], Hit(first, f"param {fqn}", f"of {fqn}, {told}"))
        for fqn, told in replicas.peers.shards.items()
    ]


def _tied(replicas: Replicas) -> RankAnswer:
    if not replicas.peers.tied:
        return Unseen("parameters that begin equal under different names on two ranks")
    hits = []
    for ((at, one), (other, two)), step in replicas.peers.tied.items():
        if step is not None:
            ranks = replicas.ranks[at], replicas.ranks[other]
            evidence = (
                f"{one} of rank {ranks[0]} and {two} of rank {ranks[1]} begin equal, as tied weights do, and differ "
                f"after step {step}: their gradients were not added up"
            )
            hits.append((ranks[1], Hit(step, f"param {two}", evidence)))
    return hits


def _collectives(replicas: Replicas) -> RankAnswer:
    found = replicas.collectives
    if not found.seen and not replicas.under_way:
        return Unseen("collectives (capture --record default,collective)")
    hits = [(rank, Hit(step, group, told)) for group, (step, rank, told) in found.apart.items()]
    hits += [(rank, Hit(step, group, told)) for group, (step, rank, told) in found.wrong.items()]
    hits += [(rank, Hit(step, "under way", told)) for step, rank, told in replicas.under_way]
    return sorted(hits, key=lambda hit: hit[1].step)


RULES: tuple[RankRule, ...] = (
    RankRule(
        "collectives",
        Level.ERROR,
        "a collective is missing, doubled, mismatched or in another order on a rank, or its result is wrong",
        "seen with --record default,collective, in a hang too; a send without a recv counts, and results are "
        "checked of reductions, gathers, broadcasts, scatters and all_to_all",
        "a call that only some ranks make, a loop of another length, an order that depends on the rank",
        _collectives,
    ),
    RankRule(
        "rank-steps",
        Level.ERROR,
        "ranks are at different steps: one skipped an optimizer step, or took one more",
        "no parameter of a rank changes in a step in which others' do, or it has more losses in one",
        "a step that one rank skips alone (gradients not finite there), or a condition on its own loss",
        _steps,
    ),
    RankRule(
        "rank-gradients",
        Level.ERROR,
        "a parameter has a gradient on some ranks only",
        "both have other gradients in the step; parameters that are cut over ranks do not count",
        "a parameter that some ranks do not use, and a reduction that leaves out what is None",
        _missing,
    ),
    RankRule(
        "rank-outputs",
        Level.ERROR,
        "a module's output differs between ranks although inputs and parameters are equal",
        "any bit differs in a call; what always differs, without a draw, by more than a relative L2 of "
        f"{_BY_DESIGN:g} is meant to",
        "random states that differ where ranks must draw alike, other flags or kernels, or a faulty device",
        _outputs,
    ),
    RankRule(
        "rank-draws",
        Level.WARNING,
        "data-parallel ranks draw from equal random states",
        "a module's inputs differ on two ranks, and its draws begin from one random state",
        "one seed on all ranks: add the rank to it after the model is made",
        _draws,
    ),
    RankRule(
        "uneven-batches",
        Level.WARNING,
        "data-parallel ranks are given batches of different sizes",
        "in one step, batches differ in their first dimension alone",
        "a last batch that is not full; weigh by samples, or drop it",
        _uneven,
    ),
    RankRule(
        "shards",
        Level.ERROR,
        "parts of a parameter overlap, leave some of it out, or hold the same values",
        "at the start, the ranges of indices that ranks hold do not have each element once, or two parts have the "
        "same extrema and moments, to the last bit",
        "a checkpoint that was cut with another rank's offset, or ranks that each drew their part from one seed",
        _shards,
    ),
    RankRule(
        "tied-weights",
        Level.ERROR,
        "tied weights on two ranks differ",
        "parameters that begin equal on two ranks, under two names, differ after a step",
        "an embedding and a head on two stages whose gradients are not all-reduced",
        _tied,
    ),
)
"""Rules that are put to all ranks together, where a run has several."""
