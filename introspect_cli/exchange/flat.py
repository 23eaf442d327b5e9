"""Flat files: Parquet, CSV and JSON lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from introspect_cli.exchange.frames import frames, step_frame
from introspect_cli.exchange.selection import wanted_steps

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.exchange.selection import Selection
    from introspect_cli.store.reader import Run


def write_parquet(run: Run, directory: Path, selection: Selection) -> int:
    """`step=<n>/rank=<n>/part-0.parquet`, the two being columns of the directory names; files written."""
    import pyarrow.parquet as pq

    written = 0
    for step, rank in wanted_steps(run, selection):
        table = step_frame(run, step, rank, selection, sketch=True).drop_columns(["step", "rank"])
        place = directory / f"step={step}" / f"rank={rank}"
        place.mkdir(parents=True)
        pq.write_table(table, place / "part-0.parquet", compression="zstd")
        written += 1
    return written


def write_csv(run: Run, directory: Path, selection: Selection) -> int:
    """`records.csv`; shapes as `2x3`, absent numbers empty; files written."""
    import pyarrow as pa
    from pyarrow import csv

    writer: Any = None
    for table in frames(run, selection):
        shapes = ["x".join(map(str, sizes)) for sizes in table.column("shape").to_pylist()]
        place = table.schema.get_field_index("shape")
        flat = table.set_column(place, "shape", pa.array(shapes, pa.string()))
        if writer is None:
            writer = csv.CSVWriter(str(directory / "records.csv"), flat.schema)
        writer.write_table(flat)
    if writer is None:
        return 0
    writer.close()
    return 1


def write_jsonl(run: Run, directory: Path, selection: Selection) -> int:
    """`records.jsonl`, one object a record, absent values null, infinities as text; files written."""
    written = 0
    with (directory / "records.jsonl").open("w", encoding="utf-8") as file:
        for table in frames(run, selection):
            for row in table.to_pylist():
                file.write(json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False))
                file.write("\n")
            written = 1
    return written


def _plain(value: Any) -> Any:
    """A value that strict JSON has a word for."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return repr(value)
    return value
