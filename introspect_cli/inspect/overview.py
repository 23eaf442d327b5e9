"""One run as plain data to be shown: what ran, its modules, the records of a step, one site over all steps."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.records import Kind, Record, Status
from introspect_cli.selection import Selection, matches, near_module, selects
from introspect_cli.statistics import DERIVED_STATS, STATISTICS
from introspect_cli.texts import gpu_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.labels import Labels


@dataclass(frozen=True)
class Overview:
    """What a run is.

    Attributes:
        path: where it is.
        state: `complete`, `running` or `interrupted`.
        manifest: the manifest.
        ranks: its ranks.
        steps: steps recorded, of the rank with most.
        first_step: first step; None for none.
        last_step: last step that all ranks have whole; None for none.
        records: records of all ranks.
        sites: distinct sites of rank 0.
        kinds: records by kind at the first recorded step.
        not_observed: records of the first step that could not be seen.
        modules: modules of rank 0.
        called: those of them of which a call is on record.
        parameters: elements of all parameters, as recorded first.
        size: bytes on disk.
        directory: where it ran.
        machine: versions and processor it ran on.
        endings: sentences on ranks that left nothing or ended before the others.
        labels: what its framework calls the first and the last step that it has a name for; empty without one.
        thinned: which steps were recorded and dropped again, in words.
    """

    path: str
    state: str
    manifest: dict[str, Any]
    ranks: tuple[int, ...]
    steps: int
    first_step: int | None
    last_step: int | None
    records: int
    sites: int
    kinds: dict[str, int]
    not_observed: int
    modules: int
    called: int
    parameters: int
    size: int
    directory: str = ""
    machine: str = ""
    endings: tuple[str, ...] = ()
    labels: tuple[Labels, ...] = ()
    thinned: tuple[str, ...] = ()


def reader_of(run: Any, rank: int | None = None, step: int | None = None) -> Any:
    """The reader of a rank, the first by default.

    Raises:
        UsageError: the run has no such rank, or the rank no such step.
    """
    if rank is None:
        if not run.ranks:
            raise UsageError(f"{run.path} holds no rank yet: nothing was recorded.")
        rank = run.ranks[0]
    if rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {rank}; it has {', '.join(map(str, run.ranks)) or 'none'}.")
    reader = run.rank(rank)
    if step is not None and step not in reader:
        raise UsageError(f"{run.path} has no step {step}: {_steps(reader)}.")
    return reader


def _steps(reader: Any) -> str:
    """`it has 5 from 0 to 4`, with the steps that it dropped again, for an error's sentence.

    Or that it has no complete step.
    """
    if not len(reader):
        return "it has no complete step"
    numbers = reader.entries["step"]
    dropped = "".join(f", and does not hold {steps}" for steps in reader.thinned)
    return f"it has {len(numbers)} from {int(numbers[0])} to {int(numbers[-1])}{dropped}"


def overview(run: Any) -> Overview:
    """The overview of a run; reads records of the first step of the first rank that has any, and file sizes."""
    readers = [run.rank(rank) for rank in run.ranks]
    first = next((reader for reader in readers if len(reader)), None)
    batch = first.read_row(0) if first is not None else None
    fqns, names = (first.sites.fqn, first.sites.kind) if first is not None else ((), ())
    labels = list(first.labels.values()) if first is not None else []
    modules = {module.fqn for module in first.modules} if first is not None else set[str]()
    returned = {fqn for fqn, kind in zip(fqns, names, strict=True) if kind == Kind.OUTPUT.value}
    runtime, hardware = run.settings.document("runtime"), run.settings.document("hardware")
    parts = [f"{name} {text}" for name in ("torch", "python", "cuda") if (text := _text(runtime.get(name))).strip()]
    parts += [text for name in ("cpu", "system") if (text := _text(hardware.get(name)))]
    return Overview(
        path=str(run.path),
        state=run.state.value,
        manifest=run.manifest,
        ranks=tuple(run.ranks),
        steps=max((len(reader) for reader in readers), default=0),
        first_step=int(first.entries["step"][0]) if first is not None else None,
        last_step=run.last_step,
        records=sum(int(reader.entries["rows"].sum(dtype=np.int64)) for reader in readers),
        sites=len(names),
        kinds=dict(Counter(names[number] for number in batch.site.tolist())) if batch is not None else {},
        not_observed=int((batch.status == int(Status.NOT_OBSERVED)).sum()) if batch is not None else 0,
        modules=len(first.modules) if first is not None else 0,
        called=len(returned & modules),
        parameters=sum(parameter_sizes(first).values()) if first is not None else 0,
        size=size_on_disk(str(run.path)) or sum(int(reader.frames.begins[-1]) for reader in readers),
        directory=_text(run.settings.document("command").get("directory")),
        machine=", ".join([*parts, *([gpu_names(gpus)] if (gpus := hardware.get("gpus")) else ())]),
        endings=tuple(run.endings),
        labels=(labels[0], labels[-1]) if labels else (),
        thinned=tuple(dict.fromkeys(str(steps) for reader in readers for steps in reader.thinned)),
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def size_on_disk(path: str) -> int:
    """Bytes of all files below a run, links not followed; of a packed run, of its file; 0 where there is none."""
    total = 0
    if os.path.isfile(path):  # noqa: PTH113 - as below
        return os.path.getsize(path)  # noqa: PTH202
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a Path an entry is slow
    return total


def parameter_sizes(reader: Any) -> dict[str, int]:
    """Elements of each parameter by FQN, as recorded at the first recorded step; {} without a step."""
    if not len(reader):
        return {}
    batch, sites = reader.read_row(0), reader.sites
    sizes: dict[str, int] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        if sites.kind[number] == Kind.PARAM.value:
            sizes.setdefault(sites.fqn[number], reader.layouts[int(batch.layout[row])].numel)
    return sizes


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
    """The selected records of a step, in the order they were made; [] where the step has none and nothing narrows it.

    Raises:
        UsageError: the run has no such step or rank, or nothing of the step is selected.
    """
    reader = reader_of(run, rank, step)
    records = [record for record in reader.records(step) if selection.wants(record.site.kind, record.site.fqn)]
    if not records and selection.narrowed:
        raise UsageError(f"step {step} of {run.path} has no record that --kinds and --modules select.")
    return records


def histories(run: Any, fqn: str, stat: str, kinds: frozenset[Kind], *, rank: int | None = None) -> list[History]:
    """A statistic of all sites whose FQN matches, over all steps; sites without any record are left out.

    Args:
        run: the run.
        fqn: name or glob; where no site has it itself, sites of the modules inside it are taken.
        stat: name of the statistic; of plain values, their number is taken for any statistic.
        kinds: which kinds; empty for all.
        rank: whose; None for the first.

    Raises:
        UsageError: the run has no site of that name, or the statistic is unknown.
    """
    reader = reader_of(run, rank)
    sites = reader.sites
    wanted_kind = [number for number in range(len(sites)) if not kinds or Kind(sites.kind[number]) in kinds]
    chosen = [number for number in wanted_kind if matches(sites.fqn[number], fqn)]
    chosen = chosen or [number for number in wanted_kind if selects(sites.fqn[number], [fqn])]
    if not chosen:
        raise _no_record(run, fqn, sites)
    names = (*STATISTICS, *DERIVED_STATS)
    if stat not in names:
        hint = did_you_mean(stat, names) or f"; choose from {', '.join(names)}"
        raise UsageError(f"there is no statistic {stat!r}{hint}")
    points: dict[int, list[tuple[int, float | None, str]]] = {number: [] for number in chosen}
    for row in range(len(reader)):
        batch, step = reader.read_row(row), int(reader.entries["step"][row])
        for place in np.flatnonzero(np.isin(batch.site, chosen)).tolist():
            summary = reader.record(batch, place, step).summary
            text = summary.text if summary.status is Status.VALUE else ""
            value = summary.stats.get(stat)
            with suppress(ValueError):  # most plain values are no numbers
                value = float(text) if value is None and text else value
            points[int(batch.site[place])].append((step, value, text))
    return [_history(sites, number, points[number]) for number in chosen if points[number]]


def _history(sites: Any, number: int, rows: list[tuple[int, float | None, str]]) -> History:
    """The history of a site from (step, value, text) rows, at least one; without texts where all are ""."""
    site, _ = sites[number]
    call = f" #{site.call}" if site.call else ""
    name = f"{site.phase.value} {site.kind.value} {site.fqn}{site.path and ' ' + site.path}{call}"
    steps, values, texts = zip(*rows, strict=True)
    return History(name, site.kind.value, steps, values, texts if any(texts) else ())


def stored_values(
    run: Any, fqn: str, selection: Selection, *, step: int | None = None, rank: int | None = None
) -> list[Stored]:
    """The records of an FQN (or glob) at one step, with the tensors that were stored.

    Args:
        run: the run.
        fqn: name or glob.
        selection: which kinds and modules.
        step: its number; None for the first step that has any values.
        rank: whose; None for the first.

    Raises:
        UsageError: there is no such site or step, or nothing of it was stored whole.
    """
    reader = reader_of(run, rank, step)
    recorded = False
    for number in [step] if step is not None else reader.entries["step"].tolist():
        named = (record for record in reader.records(int(number)) if matches(record.site.fqn, fqn))
        records = [record for record in named if selection.wants(record.site.kind, record.site.fqn)]
        recorded = recorded or bool(records)
        checksums = (record.summary.checksum for record in records)
        tensors = (run.tensor(checksum) if checksum else None for checksum in checksums)
        stored = list(map(Stored, records, tensors))
        if any(one.values is not None or one.record.summary.status is Status.VALUE for one in stored):
            return stored
    if not recorded:
        raise _no_record(run, fqn, reader.sites)
    place = f"at step {step}" if step is not None else "at any step"
    raise UsageError(f"{run.path} holds no values of {fqn} {place}: capture with --save-tensors '{fqn}'.")


def _no_record(run: Any, fqn: str, sites: Any) -> UsageError:
    """The error that a run has no record of a name."""
    hint = near_module(fqn, set(sites.fqn)) or ": `introspect show tree` lists the modules of a run"
    return UsageError(f"{run.path} has no record of {fqn}{hint}")
