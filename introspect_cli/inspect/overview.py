"""One run as plain data to be shown: what ran, its modules, the records of a step, one site over all steps."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError
from introspect_cli.records import Kind, Status
from introspect_cli.store.documents import gpu_names

if TYPE_CHECKING:
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
    """Which steps a rank has."""
    if not len(reader):
        return "it has no complete step"
    numbers = reader.entries["step"]
    dropped = "".join(f", and does not hold {steps}" for steps in reader.thinned)
    return f"it has {len(numbers)} from {int(numbers[0])} to {int(numbers[-1])}{dropped}"


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
        parameters = sum(parameter_sizes(first).values())
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
        size=run.size_elsewhere or size_on_disk(str(run.path)),
        directory=_text(run.settings, "command", "directory"),
        machine=_machine(run.settings),
        endings=tuple(run.endings),
        labels=_labels(first),
        thinned=tuple(dict.fromkeys(str(steps) for reader in readers for steps in reader.thinned)),
    )


def _labels(reader: Any) -> tuple[Labels, ...]:
    labels = list(reader.labels.values()) if reader is not None else []
    return (labels[0], labels[-1]) if labels else ()


def _text(settings: Any, document: str, name: str) -> str:
    """One value of a settings document, "" where there is none."""
    values = settings.get(document)
    value = values.get(name) if isinstance(values, dict) else None
    return "" if value is None else str(value)


def _machine(settings: Any) -> str:
    parts = [f"{name} {_text(settings, 'runtime', name)}" for name in ("torch", "python", "cuda")]
    parts = [part for part in parts if " " in part.strip()]
    parts += [text for name in ("cpu", "system") if (text := _text(settings, "hardware", name))]
    hardware = settings.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, dict) else None
    return ", ".join([*parts, *([gpu_names(gpus)] if gpus else ())])


def size_on_disk(path: str) -> int:
    """Bytes of all files of a run, links not followed; of a packed run, of its file."""
    total = 0
    if os.path.isfile(path):  # noqa: PTH113 - as below
        return os.path.getsize(path)  # noqa: PTH202
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a Path an entry is slow
    return total


def parameter_sizes(reader: Any) -> dict[str, int]:
    """Elements of each parameter, as recorded at the first step."""
    if not len(reader):
        return {}
    batch, sites = reader.read_row(0), reader.sites
    sizes: dict[str, int] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        if sites.kind[number] == Kind.PARAM.value:
            sizes.setdefault(sites.fqn[number], reader.layouts[int(batch.layout[row])].numel)
    return sizes
