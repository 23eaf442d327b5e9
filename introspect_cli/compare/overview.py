"""One run as plain data to be shown: what ran, its modules, the records of a step, one site over all steps."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.names import selects
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind, ModuleInfo, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.records import Record


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
        parameters: elements of all parameters, as recorded first.
        size: bytes on disk.
        directory: where it ran.
        machine: versions and processor it ran on.
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
    parameters: int
    size: int
    directory: str = ""
    machine: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """One module of the tree.

    Attributes:
        info: name, class, where it is defined.
        parameters: elements of its parameters, those inside it included.
        shape: shape of its first output at the first recorded step; None where none was recorded.
        dtype: dtype of that output.
        scale: standard deviation of that output; None where not recorded.
        calls: how often it ran in that step.
        folded: how many equal neighbours this row stands for beside itself.
    """

    info: ModuleInfo
    parameters: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scale: float | None = None
    calls: int = 0
    folded: int = 0


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


def _reader(run: Any, rank: int | None = None) -> Any:
    """The reader of a rank, the first by default."""
    if rank is None:
        if not run.ranks:
            raise UsageError(f"{run.path} holds no rank yet: nothing was recorded.")
        return run.rank(run.ranks[0])
    if rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {rank}; it has {', '.join(map(str, run.ranks)) or 'none'}.")
    return run.rank(rank)


def overview(run: Any) -> Overview:
    """What a run is, without opening more than its first step."""
    readers = [run.rank(rank) for rank in run.ranks]
    first = next((reader for reader in readers if len(reader)), None)
    kinds: dict[str, int] = {}
    blind = parameters = 0
    if first is not None:
        batch = first.read_row(0)
        names = first.sites.kind
        for number in np.asarray(batch.site):
            kinds[names[number]] = kinds.get(names[number], 0) + 1
        blind = int((np.asarray(batch.status) == int(Status.NOT_OBSERVED)).sum())
        parameters = sum(_parameters(first).values())
    return Overview(
        path=str(run.path),
        state=run.state.value,
        manifest=run.manifest,
        ranks=tuple(run.ranks),
        steps=max((len(reader) for reader in readers), default=0),
        first_step=int(first.entries["step"][0]) if first is not None else None,
        last_step=run.last_step,
        records=sum(int(reader.entries["rows"].sum(dtype=np.int64)) for reader in readers),
        sites=len(first.sites) if first is not None else 0,
        kinds=kinds,
        not_observed=blind,
        modules=len(first.modules) if first is not None else 0,
        parameters=parameters,
        size=_size(str(run.path)),
        directory=_text(run.settings, "command", "directory"),
        machine=_machine(run.settings),
    )


def _text(settings: Any, document: str, name: str) -> str:
    """One value of a settings document, "" where there is none."""
    found = settings.get(document)
    value = found.get(name) if isinstance(found, dict) else None
    return "" if value is None else str(value)


def _machine(settings: Any) -> str:
    parts = [f"{name} {_text(settings, 'runtime', name)}" for name in ("torch", "python", "cuda")]
    parts = [part for part in parts if " " in part.strip()]
    parts += [text for name in ("cpu", "system") if (text := _text(settings, "hardware", name))]
    hardware = settings.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, dict) else None
    return ", ".join([*parts, *(map(str, gpus) if isinstance(gpus, list) else ())])


def _size(path: str) -> int:
    """Bytes of all files of a run, links not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a Path an entry is slow
    return total


def _parameters(reader: Any) -> dict[str, int]:
    """Elements of each parameter, as recorded at the first step."""
    if not len(reader):
        return {}
    batch, sites = reader.read_row(0), reader.sites
    found: dict[str, int] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        if sites.kind[number] == Kind.PARAM.value:
            found.setdefault(sites.fqn[number], reader.layouts[int(batch.layout[row])].numel)
    return found


def module_tree(run: Any, *, fold: bool = True, rank: int | None = None) -> list[ModuleRow]:
    """The module tree; of runs of equal numbered neighbours only the first and the last, unless told otherwise.

    Raises:
        UsageError: there is no such rank.
    """
    reader = _reader(run, rank)
    sizes = _parameters(reader)
    outputs = _outputs(reader)
    rows = []
    for info in reader.modules:
        prefix = info.fqn + "."
        inside = sum(size for name, size in sizes.items() if name.startswith(prefix))
        shape, dtype, scale, calls = outputs.get(info.fqn, (None, "", None, 0))
        rows.append(ModuleRow(info, inside, shape, dtype, scale, calls))
    return _folded(rows) if fold else rows


def _outputs(reader: Any) -> dict[str, tuple[tuple[int, ...] | None, str, float | None, int]]:
    """First output of each module at the first step: shape, dtype, scale, number of calls."""
    found: dict[str, tuple[tuple[int, ...] | None, str, float | None, int]] = {}
    if not len(reader):
        return found
    batch, sites = reader.read_row(0), reader.sites
    calls: dict[str, set[int]] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        if sites.kind[number] != Kind.OUTPUT.value or sites.phase[number] == Phase.RECOMPUTE.value:
            continue
        name = sites.fqn[number]
        calls.setdefault(name, set()).add(int(sites.call[number]))
        if name not in found:
            layout = reader.layouts[int(batch.layout[row])]
            var = batch.floats.get("var")
            scale = float(np.sqrt(var[row])) if var is not None and np.isfinite(var[row]) else None
            found[name] = (tuple(layout.shape), layout.dtype, scale, 0)
    return {name: (*value[:3], len(calls[name])) for name, value in found.items()}


def _folded(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Rows without the inner ones of runs of numbered siblings that look alike."""
    children: dict[str, list[ModuleRow]] = {}
    for row in rows:
        children.setdefault(row.info.fqn.rpartition(".")[0], []).append(row)

    def look(row: ModuleRow) -> tuple[Any, ...]:
        inner = tuple(look(child) for child in children.get(row.info.fqn, []))
        return (row.info.module_class, row.parameters, row.shape, inner)

    hidden: set[str] = set()
    folded: dict[str, int] = {}
    for siblings in children.values():
        start = 0
        while start < len(siblings):
            end = start
            numbered = siblings[start].info.fqn.rpartition(".")[2].isdecimal()
            while numbered and end + 1 < len(siblings) and look(siblings[end + 1]) == look(siblings[start]):
                end += 1
            if end - start >= 2:
                hidden.update(row.info.fqn for row in siblings[start + 1 : end])
                folded[siblings[start].info.fqn] = end - start - 1
            start = end + 1
    out = []
    for row in rows:
        head = row.info.fqn
        while head and head not in hidden:
            head = head.rpartition(".")[0]
        if not head:
            extra = folded.get(row.info.fqn, 0)
            out.append(ModuleRow(row.info, row.parameters, row.shape, row.dtype, row.scale, row.calls, extra))
    return out


def step_records(
    run: Any, step: int, kinds: frozenset[Kind], modules: tuple[str, ...], *, rank: int | None = None
) -> list[Record]:
    """The records of a step, in the order they were made.

    Raises:
        UsageError: the run has no such step or rank.
    """
    reader = _reader(run, rank)
    if step not in reader:
        raise UsageError(f"{run.path} has no step {step}: {steps_in_words(reader)}.")
    return [
        record
        for record in reader.records(step)
        if (not kinds or record.site.kind in kinds) and (not modules or selects(record.site.fqn, modules))
    ]


def steps_in_words(reader: Any) -> str:
    """Which steps a rank has."""
    if not len(reader):
        return "it has no complete step"
    numbers = reader.entries["step"]
    return f"it has {len(numbers)} from {int(numbers[0])} to {int(numbers[-1])}"


def histories(run: Any, fqn: str, stat: str, kinds: frozenset[Kind], *, rank: int | None = None) -> list[History]:
    """All sites of an FQN (or glob) over all steps.

    Raises:
        UsageError: the run has no site of that name, or the statistic is unknown or was not kept.
    """
    from introspect_cli.store.derived import DERIVED_STATS

    reader = _reader(run, rank)
    sites = reader.sites
    chosen = [
        number
        for number in range(len(sites))
        if selects_exactly(sites.fqn[number], fqn) and (not kinds or Kind(sites.kind[number]) in kinds)
    ]
    if not chosen:
        raise UsageError(f"{run.path} has no record of {fqn!r}{_near(fqn, set(sites.fqn))}.")
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
        raise UsageError(f"{run.path} keeps no statistic {stat!r}; try --stat mean, std, min, max or l2.")
    return [_history(sites, number, points[number]) for number in chosen if points[number]]


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


def selects_exactly(name: str, pattern: str) -> bool:
    """Whether a glob matches a name itself, with or without the root's name."""
    from fnmatch import fnmatchcase

    return name == pattern or fnmatchcase(name, pattern) or fnmatchcase(name.partition(".")[2], pattern)


def _near(name: str, names: set[str]) -> str:
    """A hint at a name that looks like it."""
    import difflib

    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; `show --tree` lists its modules"
