"""The manifests of a run that several processes wrote, read as one.

Each rank says how it ended and what it saw. The run is what all of them say: it is complete where every rank is, and a
rank that was started and left nothing is told of, since silence would pass for agreement.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any

from introspect_cli.records import count

IN_FLIGHT = "collectives.txt"
"""A rank's file of the collectives that began in the step under way; gone once the rank has ended."""

_LISTS = ("not_observed", "notes", "failures", "children")
_MAX_WORLD = 65536
_SHOWN = 8


def launch_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a run's manifest says of its launch; None for a run that one process wrote."""
    found = manifest.get("launch")
    return found if isinstance(found, Mapping) else None


def world_size(manifest: Mapping[str, Any]) -> int:
    """How many ranks were started; 0 where the manifest does not say."""
    launch = launch_of(manifest)
    found = launch.get("world_size") if launch is not None else None
    return found if type(found) is int and 0 < found <= _MAX_WORLD else 0


def merged(own: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest for the run: the lowest rank's, with what any rank says of how it ended and what it did not see.

    Args:
        own: the launch's manifest.
        ranks: the ranks' manifests, by number.
    """
    if not ranks:
        return {**own, "status": "running"}
    first = ranks[min(ranks)]
    every = list(ranks.values())
    out = {**first, **own, "world_size": world_size(own)}
    for name in ("rank", "local_rank", "host"):
        out.pop(name, None)
    complete = len(ranks) >= world_size(own) and all(found.get("status") == "complete" for found in every)
    out["status"] = "complete" if complete else next((s for s in _statuses(every) if s != "complete"), "interrupted")
    for name in _LISTS:
        if any(name in found for found in every):
            out[name] = _together(name, ranks)
    steps = [found["steps"] for found in every if type(found.get("steps")) is int]
    if steps:
        out["steps"] = min(steps)
    failed = next((n for n, found in sorted(ranks.items()) if found.get("exit_code") not in (None, 0)), None)
    if failed is not None:
        out |= {name: ranks[failed].get(name) for name in ("exit_code", "how", "exception")}
    return out


def _statuses(manifests: list[Mapping[str, Any]]) -> list[str]:
    return [str(found.get("status")) for found in manifests]


def _together(name: str, ranks: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """What the ranks list, each entry once; of what only some say, which."""
    sayers: dict[str, list[int]] = {}
    entries: dict[str, Any] = {}
    for number, manifest in sorted(ranks.items()):
        listed = manifest.get(name)
        for entry in listed if isinstance(listed, list) else ():
            sayers.setdefault(repr(entry), []).append(number)
            entries[repr(entry)] = entry
    return [
        f"{entry} ({rank_list(sayers[key])})" if isinstance(entry, str) and len(sayers[key]) < len(ranks) else entry
        for key, entry in entries.items()
    ]


def group_label(ranks: list[int]) -> str:
    """What a group of ranks is called: `ranks 0-3`, `ranks 0,2,4`, `ranks 0-4094/2`."""
    if not ranks:
        return "no ranks"
    steps = {two - one for one, two in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and min(steps) > 0:
        stride = min(steps)
        return f"ranks {ranks[0]}-{ranks[-1]}{f'/{stride}' if stride > 1 else ''}"
    shown = ",".join(map(str, ranks[:_SHOWN]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f",... ({len(ranks)})" if len(ranks) > _SHOWN else "")


def group_size(label: str) -> int | None:
    """How many ranks a group of that name has; None where the name does not tell."""
    found = re.fullmatch(r"ranks? (\d+)(?:-(\d+)(?:/(\d+))?|((?:,\d+)+)(?:,\.\.\. \((\d+)\))?)?(?: #\d+)?", label)
    if found is None:
        return None
    first, last, stride, more, all_ = found.groups()
    if last is not None:
        return (int(last) - int(first)) // int(stride or 1) + 1 if int(stride or 1) else None
    return int(all_) if all_ else 1 + (more or "").count(",")


def rank_list(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 2`."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def endings(
    size: int, last: Mapping[int, int | None], ended: Mapping[int, bool], left_out: Collection[int] = ()
) -> list[str]:
    """Sentences on ranks that left nothing, or that ended before the others.

    Args:
        size: how many ranks were started.
        last: the last whole step of each rank that is there.
        ended: whether each closed its part properly.
        left_out: ranks that were to record no step.
    """
    out = []
    absent = [rank for rank in range(size) if rank not in last and rank not in left_out]
    if absent:
        out.append(f"{rank_list(absent)} of {size} left nothing".replace("rank", "Rank", 1))
    silent = [rank for rank, step in last.items() if step is None]
    if silent:
        out.append(f"{rank_list(silent)} of {size} left no step".replace("rank", "Rank", 1))
    known = {rank: step for rank, step in last.items() if step is not None}
    latest = max(known.values(), default=-1)
    by_step: dict[int, list[int]] = {}
    for rank, step in known.items():
        if step < latest or not ended[rank]:
            by_step.setdefault(step, []).append(rank)
    for step, ranks in sorted(by_step.items()):
        cut = [rank for rank in ranks if not ended[rank]]
        if cut:
            was = "was" if len(cut) == 1 else "were"
            out.append(f"{rank_list(cut)} of {size} {was} cut off after step {step}".replace("rank", "Rank", 1))
        whole = [rank for rank in ranks if ended[rank]]
        if whole:
            others = count(latest - step, "step")
            out.append(
                f"{rank_list(whole)} of {size} ended with step {step}, {others} before the others".replace(
                    "rank", "Rank", 1
                )
            )
    return out
