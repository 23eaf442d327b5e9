"""Records as flat tables: one row a record, one column a word, as pyarrow, polars, pandas and DuckDB take them.

The tables go to notebooks as they are, and to Parquet, CSV and JSON lines as files.
"""

from __future__ import annotations

import csv
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError
from introspect_cli.exchange.formats import EVERYTHING, wanted_records, wanted_steps
from introspect_cli.records import SKETCH_SIZE
from introspect_cli.statistics import DERIVED_STATS, STATISTICS
from introspect_cli.store.names import INFO, SITE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from introspect_cli.records import Record
    from introspect_cli.selection import Selection
    from introspect_cli.store.run import Run


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
    whole, real, text = pa.int64(), pa.float64(), pa.string()
    types = {
        **dict.fromkeys(("step", "rank", "sequence"), whole),
        **dict.fromkeys(("phase", "kind", "fqn", "module_class"), text),
        "call": whole,
        **dict.fromkeys(("path", "op", "source", "status"), text),
        "shape": pa.list_(whole),
        **dict.fromkeys(("dtype", "device", "strides"), text),
        "numel": whole,
        "checksum": text,
        **{name: whole if statistic.type == "<i8" else real for name, statistic in STATISTICS.items()},
        **dict.fromkeys(DERIVED_STATS, real),
        **({"sketch": pa.list_(pa.float32(), SKETCH_SIZE)} if sketch else {}),
        "text": text,
    }
    rows = [_row(record) for record in wanted_records(run, step, rank, selection)]
    return pa.Table.from_pylist(rows, pa.schema(types))


def _row(record: Record) -> dict[str, Any]:
    """A record as values by column; what it lacks is missing."""
    summary, layout = record.summary, record.summary.layout
    named = {name: getattr(record.site, name) for name in SITE} | {name: getattr(record.info, name) for name in INFO}
    return {
        **vars(record) | named | vars(layout) | summary.stats,
        **{name: float(summary.stats[name]) for name in DERIVED_STATS.keys() & summary.stats.keys()},  # `infs` is one
        "status": summary.status.name.lower(),
        "numel": min(layout.numel, 2**63 - 1),
        "checksum": f"{summary.checksum:016x}",
        "sketch": summary.sketch or None,
        "text": summary.text,
    }


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
