"""Rules about the ranks of one run: copies that part, gradients that were not reduced, samples seen twice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Level
from introspect_cli.health.rule import Hit, RankAnswer, RankRule, Unseen
from introspect_cli.records import count
from introspect_cli.store.launched import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from introspect_cli.health.apart import Apart
    from introspect_cli.health.replicas import Replicas

_FEW = Unseen("two ranks that recorded the same parameter")
_MULTIPLE = "is a multiple there, as clipping by a norm that this one is part of makes it"
_MULTIPLES = "are multiples there, as clipping by a norm that this one is part of makes them"
_SETTINGS = ("runtime", "hardware", "packages", "sources", "git")
_TORCHS = "torch/nn/modules/"
_PLAIN = re.compile(r"True|False|-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+")
_OWN = frozenset({"local_rank", "host", "hostname", "pid", "process_id"})


def _far(apart: Apart) -> str:
    if not np.isnan(apart.scale) and f"{apart.scale:.6g}" != "1":
        return f"{apart.scale:.6g} x"
    return "" if np.isnan(apart.distance) else f"relative L2 {apart.distance:.1e}"


def _whose(apart: Apart) -> str:
    return f"{rank_list(list(apart.others))}, compared with rank {apart.base}"


def _why(replicas: Replicas, fqn: str, apart: Apart) -> str:
    """Why gradients of copies differ: the reduction, unless the ranks had parted before it."""
    if replicas.unreduced.get(fqn):
        return replicas.unreduced[fqn]
    peers = replicas.peers
    parted = [found[0] for found in (peers.rounds, peers.idle) if found is not None]
    parted += [own.first.step for own in peers.outputs.values() if own.first is not None]
    if any(begun <= apart.step for begun in parted):
        return "the ranks had parted before it, as is told beside"
    if not np.isnan(apart.scale):
        return "it is a multiple there: divided by another number, clipped by a norm of its own or unscaled alone"
    if replicas.alike.get(fqn):
        return f"{replicas.alike[fqn]}: it was not reduced over all ranks, or changed after that"
    return "it was not reduced, or not over these ranks, or changed on one after that"


def _reduction(replicas: Replicas) -> RankAnswer:
    if not replicas.everything:
        return _FEW
    hits = []
    many = count(len(replicas.steps), "step")
    own = [fqn for fqn, apart in replicas.grads.items() if np.isnan(apart.scale) and not apart.lone]
    begun = {replicas.grads[fqn].step for fqn in own}
    follow = [fqn for fqn, apart in replicas.grads.items() if fqn not in own and apart.step in begun]
    for fqn, apart in replicas.grads.items():
        if fqn in follow:
            continue
        moved, why = replicas.params.get(fqn), _why(replicas, fqn, apart)
        if moved is not None and why.startswith("its gradient"):
            evidence = f"{_parts_from(moved, fqn)}: {why}"
        elif moved is not None:
            far = f" ({_far(apart)})" if _far(apart) else ""
            evidence = f"{_parts_from(moved, fqn)}, and its gradient{far} when the optimizer takes it: {why}"
        else:
            evidence = (
                f"the gradient of {fqn} differs on {_whose(apart)} ({_far(apart)}) when the optimizer takes it, "
                f"although the parameter was equal on all ranks: {why}"
            )
        beside = [one for one in follow if replicas.grads[one].step == apart.step]
        if beside:
            evidence += f"; {count(len(beside), 'other gradient')} {_MULTIPLES if len(beside) > 1 else _MULTIPLE}"
        hits.append((apart.rank, Hit(apart.step, f"grad {fqn}", f"{evidence} ({many} looked at)")))
    return hits


def _parts_from(apart: Apart, fqn: str) -> str:
    """`from step 3 on rank 1's parameter head.bias differs from rank 0's (relative L2 1.4e-3)`."""
    far = f" ({_far(apart)})" if _far(apart) else ""
    if len(apart.others) == 1:
        return f"from step {apart.step} on rank {apart.rank}'s parameter {fqn} differs from rank {apart.base}'s{far}"
    whose = rank_list(list(apart.others))
    return f"from step {apart.step} on the parameter {fqn} of {whose} differs from rank {apart.base}'s{far}"


def _copies(replicas: Replicas) -> RankAnswer:
    if not replicas.everything:
        return _FEW
    hits = []
    for fqn, apart in replicas.params.items():
        if fqn in replicas.grads and replicas.grads[fqn].step <= apart.step:
            continue  # told there
        seen = fqn in replicas.graded
        told = "although no gradient of it was seen to differ" if seen else "and its gradients were not recorded"
        evidence = f"{_parts_from(apart, fqn)}, {told}"
        hits.append((apart.rank, Hit(apart.step, f"param {fqn}", evidence)))
    for fqn, apart in replicas.stale.items():
        if fqn not in replicas.params and fqn not in replicas.peers.shards:
            evidence = (
                f"{fqn} differs on {_whose(apart)} ({_far(apart)}) from the first step on record, although its "
                "gradient is equal on all of them: one of them was loaded or written to alone, or these are experts of "
                "their own ranks and their gradients were averaged over them"
            )
            hits.append((apart.rank, Hit(apart.step, f"param {fqn}", evidence)))
    return hits


def _samples(replicas: Replicas) -> RankAnswer:
    # Without a loader of torch's, what the models are given tells, where a wrapper says who has samples of its own.
    inputs = replicas.inputs
    drawn = replicas.batches or (inputs if replicas.groups else {})
    if not drawn or not replicas.is_data_parallel:
        return Unseen("data-parallel ranks and their batches")
    what = ("batch", "the same batch as", "draw") if replicas.batches else ("input", "the same inputs as", "call")
    return [
        (two, Hit(first, what[0], f"rank {two} was given {what[1]} rank {one} in {same} of {count(all_, what[2])}"))
        for (one, two), (same, all_, first) in sorted(drawn.items())
        if same == all_
        and (one, two) not in _taking_shares(inputs)
        and replicas.share_samples(one, two)
        and one == _lowest(replicas, two)
    ]


def _taking_shares(inputs: Mapping[tuple[int, int], Sequence[int]]) -> set[tuple[int, int]]:
    """Pairs of ranks whose models are not given the same: of one batch, each takes its stretch."""
    return {pair for pair, (same, all_, _) in inputs.items() if same < all_}


def _lowest(replicas: Replicas, rank: int) -> int:
    """The lowest of the ranks that a rank shares samples with: each is told once."""
    return min(one for one in replicas.ranks if one == rank or replicas.share_samples(one, rank))


def _settings(replicas: Replicas) -> RankAnswer:
    run = replicas.run
    hits: list[tuple[int, Hit]] = []
    for name, (step, values) in replicas.learning.items():
        first, told = _unlike(values)
        hits.append((first, Hit(step, name, f"{name} differs from rank to rank ({told})")))
    hits += _attributes(replicas)
    if not run.manifests:
        return hits or Unseen("settings of each rank")
    base = replicas.ranks[0]
    own = {rank: dict(_flat(run.settings_of(rank))) for rank in replicas.ranks}
    for rank in replicas.ranks[1:]:
        for name in sorted(own[base].keys() | own[rank].keys()):
            one, two = own[base].get(name), own[rank].get(name)
            if one != two:
                evidence = f"{name} is {two!r} on rank {rank} and {one!r} on rank {base}"
                hits.append((rank, Hit(replicas.steps[0] if replicas.steps else 0, name, evidence)))
    return hits


def _attributes(replicas: Replicas) -> Iterator[tuple[int, Hit]]:
    """Flags and fractions of torch's own modules that differ between ranks which train one model.

    A script's modules may know which rank they are on, such as the one that prints.
    """
    if not replicas.is_data_parallel:
        return
    own = {
        rank: {
            (module.fqn, module.module_class, name): (value, module.step)
            for module in replicas.run.rank(rank).modules
            for name, value in module.attributes
            if _PLAIN.fullmatch(value) and (name == "training" or module.source.startswith(_TORCHS))
        }
        for rank in replicas.ranks
    }
    base = replicas.ranks[0]
    for rank in replicas.ranks[1:]:
        if not replicas.share_samples(base, rank):
            continue
        for place, (one, _) in own[base].items():
            two, step = own[rank].get(place, (one, 0))
            if one != two:
                name = f"{place[0]}.{place[2]}"
                yield rank, Hit(step, name, f"{name} is {two} on rank {rank} and {one} on rank {base}")


def _flat(settings: object) -> Iterator[tuple[str, object]]:
    """Plain values of the documents that are the same on all ranks of a sound run, by name."""
    for document in _SETTINGS:
        found = settings.get(document) if hasattr(settings, "get") else None
        stack = [(document, found)] if found is not None else []
        while stack:
            name, value = stack.pop()
            if isinstance(value, dict):
                stack += [(f"{name}.{key}", inner) for key, inner in value.items() if str(key) not in _OWN]
            else:
                yield name, value


def _layouts(replicas: Replicas) -> RankAnswer:
    if not replicas.everything and not replicas.layouts:
        return _FEW
    hits = []
    for fqn, told in replicas.layouts.items():
        first, values = _unlike(told)
        hits.append((first, Hit(replicas.steps[0], f"param {fqn}", f"{fqn} differs in dtype or shape ({values})")))
    for fqn, (step, told) in replicas.dtypes.items():
        first, values = _unlike(told)
        hits.append((first, Hit(step, f"output {fqn}", f"the output of {fqn} differs in dtype ({values})")))
    return hits


def _unlike(values: Mapping[int, str]) -> tuple[int, str]:
    """The first rank whose value is not that of the first one, and all values in words."""
    one = next(iter(values.values()))
    told = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
    return next(rank for rank, value in values.items() if value != one), told


def _lost(replicas: Replicas) -> RankAnswer:
    run = replicas.run
    last = {rank: run.rank(rank).last_step for rank in run.ranks}
    missing = [rank for rank in range(run.world_size) if last.get(rank) is None]
    latest = max((step for step in last.values() if step is not None), default=0)
    short = [rank for rank, step in last.items() if step is not None and step < latest]
    rank = (missing or short or [0])[0]
    step = last.get(rank)
    return [
        (rank, Hit(0 if step is None else step, f"rank {rank}", told))
        for told in run.endings
        if " rank" in f" {told.lower()}"
    ]


RULES: tuple[RankRule, ...] = (
    RankRule(
        "lost-rank",
        Level.ERROR,
        "a rank left nothing, was cut off, or ended before the others",
        "its records are missing, have no end, or stop at an earlier step than the others'",
        "a crash, a kill or a hang of that rank; its own output says more",
        _lost,
    ),
    RankRule(
        "reduction",
        Level.ERROR,
        "gradients of one parameter differ between ranks when the optimizer takes them",
        "the parameter was equal on them before; --record default,collective tells over whom the gradient was reduced",
        "an all-reduce that is missing, over the wrong group, or skipped on some ranks; of multiples, clipping or "
        "unscaling by what each rank has of its own",
        _reduction,
    ),
    RankRule(
        "copies-differ",
        Level.ERROR,
        "copies of a parameter differ between ranks",
        "no gradient of it was seen to differ; or it differs from the first step on, although its gradients are equal",
        "a checkpoint that only some ranks loaded, a step that only some took, settings that differ, or experts whose "
        "gradients are averaged over the wrong group",
        _copies,
    ),
    RankRule(
        "same-samples",
        Level.WARNING,
        "data-parallel ranks are given the same batches",
        "every batch of one is bit for bit that of the other; without a torch DataLoader, every input of their models",
        "a loader without a DistributedSampler, or one that does not know its rank",
        _samples,
    ),
    RankRule(
        "rank-settings",
        Level.WARNING,
        "versions, flags, hardware, sources, hyper-parameters or modules' attributes differ between ranks",
        f"any value of {', '.join(_SETTINGS)} differs, or a hyper-parameter in any step; of data-parallel ranks a "
        "flag or a fraction that a module of torch's begins with, or any module's mode",
        "machines that are not set up alike, or a setting that depends on the rank",
        _settings,
    ),
    RankRule(
        "rank-layout",
        Level.ERROR,
        "a parameter has another dtype or shape, or a module's output another dtype, on some ranks",
        "it is so in any step that all ranks have",
        "a model that is built or cast differently there, or an autocast that is not entered on all ranks",
        _layouts,
    ),
)
"""Rules that are put to all ranks together, where a run has several."""
