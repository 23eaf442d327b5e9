"""The records of one step, and one site over all steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from introspect_cli.errors import UsageError
from introspect_cli.inspect.overview import reader_of
from introspect_cli.records import DERIVED_STATS, STATISTICS, Kind, Record, Status
from introspect_cli.selection import Selection, did_you_mean, matches, near_module, selects


@dataclass(frozen=True)
class History:
    """One site over all steps.

    Attributes:
        site: the site, in words for a table.
        kind: its kind.
        steps: steps at which it was recorded.
        values: the statistic at each; None where it has none.
        texts: for plain values, their text at each.
    """

    site: str
    kind: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    texts: tuple[str, ...] = field(default=())


def step_records(run: Any, step: int, selection: Selection, *, rank: int | None = None) -> list[Record]:
    """The selected records of a step, in the order they were made.

    Raises:
        UsageError: the run has no such step or rank, or nothing of the step is selected.
    """
    reader = reader_of(run, rank)
    if step not in reader:
        raise UsageError(f"{run.path} has no step {step}: {steps_in_words(reader)}.")
    found = [record for record in reader.records(step) if selection.wants(record.site.kind, record.site.fqn)]
    if not found and selection.narrowed:
        raise UsageError(f"step {step} of {run.path} has no record that --kinds and --modules select.")
    return found


def steps_in_words(reader: Any) -> str:
    """Which steps a rank has."""
    if not len(reader):
        return "it has no complete step"
    numbers = reader.entries["step"]
    dropped = "".join(f", and does not hold {own}" for own in reader.thinned)
    return f"it has {len(numbers)} from {int(numbers[0])} to {int(numbers[-1])}{dropped}"


def histories(run: Any, fqn: str, stat: str, kinds: frozenset[Kind], *, rank: int | None = None) -> list[History]:
    """All sites of an FQN (or glob) over all steps; of what is inside it, where it has none of the kinds itself.

    Raises:
        UsageError: the run has no site of that name, or the statistic is unknown or was not kept.
    """
    reader = reader_of(run, rank)
    sites = reader.sites
    wanted_kind = [number for number in range(len(sites)) if not kinds or Kind(sites.kind[number]) in kinds]
    chosen = [number for number in wanted_kind if matches(sites.fqn[number], fqn)]
    chosen = chosen or [number for number in wanted_kind if selects(sites.fqn[number], [fqn])]
    if not chosen:
        hint = near_module(fqn, set(sites.fqn)) or ": `introspect show --tree` lists the modules of a run"
        raise UsageError(f"{run.path} has no record of {fqn}{hint}")
    wanted = set(chosen)
    points: dict[int, list[tuple[int, float | None, str]]] = {number: [] for number in chosen}
    known = False
    for row in range(len(reader)):
        batch = reader.read_row(row)
        step = int(reader.entries["step"][row])
        known = known or stat in batch.floats or stat in batch.counts or (bool(batch.floats) and stat in DERIVED_STATS)
        places = np.flatnonzero(np.isin(np.asarray(batch.site), chosen))
        for place in places:
            number = int(batch.site[place])
            if number in wanted:
                record = reader.record(batch, int(place), step)
                text = record.summary.text if record.summary.status is Status.VALUE else ""
                points[number].append((step, _number(record.summary.stats.get(stat), text), text))
    if not known and not any(text for own in points.values() for _, _, text in own):
        names = (*STATISTICS, *DERIVED_STATS)
        hint = did_you_mean(stat, names) or f": known are {', '.join(names)}"
        raise UsageError(f"{run.path} keeps no statistic {stat!r}{hint}")
    return [_history(sites, number, points[number]) for number in chosen if points[number]]


def paired(a: list[History], b: list[History]) -> list[tuple[History | None, History | None]]:
    """The histories of two runs by site, in a's order, those of b alone last."""
    own = {history.site: history for history in b}
    names = dict.fromkeys([*(history.site for history in a), *own])
    first = {history.site: history for history in a}
    return [(first.get(name), own.get(name)) for name in names]


def _history(sites: Any, number: int, own: list[tuple[int, float | None, str]]) -> History:
    site, _ = sites[number]
    call = f" #{site.call}" if site.call else ""
    name = f"{site.phase.value} {site.kind.value} {site.fqn}{site.path and ' ' + site.path}{call}"
    steps, values, texts = zip(*own, strict=True)
    return History(name, site.kind.value, steps, values, texts if any(texts) else ())


def _number(value: float | None, text: str) -> float | None:
    if value is not None or not text:
        return value
    try:
        return float(text)
    except ValueError:
        return None
