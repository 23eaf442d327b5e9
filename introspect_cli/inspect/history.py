"""The records of one step, one site over all steps, and the values that `--save-tensors` kept whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.inspect.overview import reader_of
from introspect_cli.records import DERIVED_STATS, STATISTICS, Kind, Record, Status
from introspect_cli.selection import Selection, matches, near_module, selects

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


@dataclass(frozen=True, eq=False)
class Stored:
    """A record and its tensor.

    Attributes:
        record: the record.
        values: the whole tensor; None where it was not stored.
    """

    record: Record
    values: NDArray[Any] | None


def step_records(run: Any, step: int, selection: Selection, *, rank: int | None = None) -> list[Record]:
    """The selected records of a step, in the order they were made.

    Raises:
        UsageError: the run has no such step or rank, or nothing of the step is selected.
    """
    reader = reader_of(run, rank, step)
    records = [record for record in reader.records(step) if selection.wants(record.site.kind, record.site.fqn)]
    if not records and selection.narrowed:
        raise UsageError(f"step {step} of {run.path} has no record that --kinds and --modules select.")
    return records


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
    kept = False
    for row in range(len(reader)):
        batch = reader.read_row(row)
        step = int(reader.entries["step"][row])
        kept = kept or stat in batch.floats or stat in batch.counts or (bool(batch.floats) and stat in DERIVED_STATS)
        places = np.flatnonzero(np.isin(np.asarray(batch.site), chosen))
        for place in places:
            number = int(batch.site[place])
            if number in wanted:
                record = reader.record(batch, int(place), step)
                text = record.summary.text if record.summary.status is Status.VALUE else ""
                points[number].append((step, _number(record.summary.stats.get(stat), text), text))
    if not kept and not any(text for rows in points.values() for _, _, text in rows):
        names = (*STATISTICS, *DERIVED_STATS)
        hint = did_you_mean(stat, names) or f": known are {', '.join(names)}"
        raise UsageError(f"{run.path} keeps no statistic {stat!r}{hint}")
    return [_history(sites, number, points[number]) for number in chosen if points[number]]


def paired(a: list[History], b: list[History]) -> list[tuple[History | None, History | None]]:
    """The histories of two runs by site, in a's order, those of b alone last."""
    second = {history.site: history for history in b}
    names = dict.fromkeys([*(history.site for history in a), *second])
    first = {history.site: history for history in a}
    return [(first.get(name), second.get(name)) for name in names]


def _history(sites: Any, number: int, rows: list[tuple[int, float | None, str]]) -> History:
    site, _ = sites[number]
    call = f" #{site.call}" if site.call else ""
    name = f"{site.phase.value} {site.kind.value} {site.fqn}{site.path and ' ' + site.path}{call}"
    steps, values, texts = zip(*rows, strict=True)
    return History(name, site.kind.value, steps, values, texts if any(texts) else ())


def _number(value: float | None, text: str) -> float | None:
    if value is not None or not text:
        return value
    try:
        return float(text)
    except ValueError:
        return None


def stored_values(
    run: Any, fqn: str, selection: Selection, *, step: int | None = None, rank: int | None = None
) -> list[Stored]:
    """The records of an FQN (or glob) at one step, with the tensors that were stored.

    Raises:
        UsageError: there is no such site or step, or nothing of it was stored whole.
    """
    reader = reader_of(run, rank, step)
    recorded = False
    for number in [step] if step is not None else reader.entries["step"].tolist():
        records = [
            record
            for record in reader.records(int(number))
            if matches(record.site.fqn, fqn) and selection.wants(record.site.kind, record.site.fqn)
        ]
        recorded = recorded or bool(records)
        stored = [Stored(record, _values(run, record)) for record in records]
        if any(one.values is not None or one.record.summary.status is Status.VALUE for one in stored):
            return stored
    if not recorded:
        hint = near_module(fqn, set(reader.sites.fqn)) or ": `introspect show --tree` lists the modules of a run"
        raise UsageError(f"{run.path} has no record of {fqn}{hint}")
    place = f"at step {step}" if step is not None else "at any step"
    raise UsageError(
        f"{run.path} holds no values of {fqn} {place}, only checksums and statistics: "
        f"capture with --save-tensors '{fqn}'."
    )


def _values(run: Any, record: Record) -> NDArray[Any] | None:
    checksum = record.summary.checksum
    return run.tensor(checksum) if checksum and record.summary.status is not Status.VALUE else None
