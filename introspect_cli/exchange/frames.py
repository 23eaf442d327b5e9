"""Records as flat tables: one row a record, one column a word, as pyarrow, polars, pandas and DuckDB take them.

The tables go to notebooks as they are, and to Parquet, CSV and JSON lines as files.
"""

from __future__ import annotations

import csv
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.derived import derived_stats
from introspect_cli.errors import UsageError
from introspect_cli.exchange.formats import EVERYTHING, wanted_steps
from introspect_cli.records import Kind, Status
from introspect_cli.statistics import DERIVED_STATS, STATISTICS
from introspect_cli.store.columns import Column, absent_column

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.run import Run

_STATUS = [status.name.lower() for status in Status]


def arrow() -> Any:
    """Import `pyarrow`; UsageError with the command to install it where it is missing."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UsageError('flat tables need pyarrow: `pip install "introspect-cli[export]"`') from None
    return pa


def step_frame(run: Run, step: int, rank: int, selection: Selection = EVERYTHING, *, sketch: bool = False) -> Any:
    """The records of a step of a rank as a `pyarrow.Table`, in the order they were made.

    Of `selection`, only kinds and modules count here, not steps and ranks. Columns: step, rank, sequence (int64);
    phase, kind, fqn, module_class, path, op, source, status, dtype, device, strides, checksum (16 hex digits), text
    (strings); call, numel and counts (int64); shape (list of int64); float64 statistics; null where
    absent; `sketch` (list of 16 float32) when asked for and kept.

    Raises:
        KeyError: there is no such step or rank.
        StoreError: the run is damaged.
    """
    pa = arrow()

    reader = run.rank(rank)
    batch, sites, layouts = reader.read(step), reader.sites, reader.layouts
    order = np.argsort(batch.sequence, kind="stable")
    wanted = {site: selection.wants(Kind(sites.kind[site]), sites.fqn[site]) for site in set(batch.site.tolist())}
    rows = [int(row) for row in order if wanted[int(batch.site[row])]]
    at = np.asarray(rows, np.int64)
    names = batch.site[at].tolist()
    chosen = [layouts[number] for number in batch.layout[at]]
    numel = np.array([min(layout.numel, 2**63 - 1) for layout in chosen], np.int64)

    def texts(values: Iterable[str]) -> Any:
        """A column of texts."""
        return pa.array(list(values), pa.string())

    def of_sites(*words: str) -> dict[str, Any]:
        """Columns of what the sites' table says of each row, by name."""
        return {word: texts(map(getattr(sites, word).__getitem__, names)) for word in words}

    columns: dict[str, Any] = {
        "step": np.full(len(at), step, np.int64),
        "rank": np.full(len(at), rank, np.int64),
        "sequence": batch.sequence[at].astype(np.int64),
        **of_sites("phase", "kind", "fqn", "module_class"),
        "call": np.array([int(sites.call[site]) for site in names], np.int64),
        **of_sites("path", "op", "source"),
        "status": texts(_STATUS[status] for status in batch.status[at]),
        "shape": pa.array([list(layout.shape) for layout in chosen], pa.list_(pa.int64())),
        **{word: texts(getattr(layout, word) for layout in chosen) for word in ("dtype", "device", "strides")},
        "numel": numel,
        "checksum": texts(f"{int(checksum):016x}" for checksum in batch.checksum[at]),
    }
    counts = {name: column[at] for name, column in batch.counts.items()}
    floats = {name: column[at].astype(np.float64) for name, column in batch.floats.items()}
    floats |= derived_stats(counts, floats, numel)
    for name in (*STATISTICS, *DERIVED_STATS):
        column = counts.get(name, floats.get(name))
        if column is None:
            kind = STATISTICS[name].type if name in STATISTICS else "<f8"
            column = absent_column(Column(name, kind), len(at))
        missing = column < 0 if column.dtype.kind == "i" else np.isnan(column)
        columns[name] = pa.array(column if column.dtype.kind == "i" else column.astype(np.float64), mask=missing)
    if sketch and batch.sketch is not None:
        flat = pa.array(np.ascontiguousarray(batch.sketch[at]).ravel(), pa.float32())
        columns["sketch"] = pa.FixedSizeListArray.from_arrays(flat, batch.sketch.shape[1])
    columns["text"] = texts(batch.text[row] for row in rows)
    return pa.table(columns)


def frames(run: Run, selection: Selection = EVERYTHING, *, sketch: bool = False) -> Iterator[Any]:
    """A `pyarrow.Table` for each selected step of each rank, by step and then rank; made when asked for."""
    for step, rank in wanted_steps(run, selection):
        yield step_frame(run, step, rank, selection, sketch=sketch)


def write_parquet(run: Run, directory: Path, selection: Selection) -> None:
    """Write `step=<n>/rank=<n>/part-0.parquet`, with sketches, for each step and rank.

    Step and rank are not in the files: readers take them from the names of the directories.
    """
    arrow()
    import pyarrow.parquet as pq

    for step, rank in wanted_steps(run, selection):
        table = step_frame(run, step, rank, selection, sketch=True).drop_columns(["step", "rank"])
        place = directory / f"step={step}" / f"rank={rank}"
        place.mkdir(parents=True)
        pq.write_table(table, place / "part-0.parquet", compression="zstd")


def write_csv(run: Run, directory: Path, selection: Selection) -> None:
    """Write `records.csv`: shapes as `2x3`, absent numbers empty; nothing without any step.

    pyarrow's own writer, asked for one step after the other, left bytes of earlier rows behind rows of some lengths.
    """
    tables = frames(run, selection)
    first = next(tables, None)
    if first is None:
        return
    with (directory / "records.csv").open("w", encoding="utf-8", newline="") as file:
        made = csv.DictWriter(file, first.column_names, lineterminator="\n")
        made.writeheader()
        for table in chain([first], tables):
            made.writerows({**row, "shape": "x".join(map(str, row["shape"]))} for row in table.to_pylist())


def write_jsonl(run: Run, directory: Path, selection: Selection) -> None:
    """Write `records.jsonl`: an object a record, absent values null, infinities as text."""
    arrow()
    with (directory / "records.jsonl").open("w", encoding="utf-8") as file:
        for row in (row for table in frames(run, selection) for row in table.to_pylist()):
            plain = {name: repr(value) if value in (np.inf, -np.inf) else value for name, value in row.items()}
            file.write(json.dumps(plain, ensure_ascii=False) + "\n")
