"""TensorBoard event files, of TensorBoard's own messages: scalars of every site."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError
from introspect_cli.exchange.formats import wanted_records, wanted_steps
from introspect_cli.records import Kind, Record, Status

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.run import Run

STATS = ("mean", "std", "l2", "absmax", "nans", "infs", "zeros")
"""Statistics written as scalars."""


class EventFile:
    """A TensorBoard event file, appended to; each event has its time in seconds since 1970."""

    def __init__(self, path: Path, time: float) -> None:
        """Create and open the file and write its version event.

        Raises:
            UsageError: TensorBoard is not installed.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise UsageError("TensorBoard's files need its package: `pip install tensorboard`") from None
        self._event, self._file = Event, RecordWriter(path.open("wb"))
        self._write(wall_time=time, file_version="brain.Event:2")

    def add(self, step: int, values: list[dict[str, Any]], time: float) -> None:
        """Append an event with the values (`scalar`) of a step and flush."""
        self._write(wall_time=time, step=step, summary={"value": values})

    def _write(self, **fields: Any) -> None:
        """Append an event with these fields and flush."""
        self._file.write(self._event(**fields).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def scalar(tag: str, value: float) -> dict[str, Any]:
    """A value of a summary: a number, rounded to float32."""
    with np.errstate(over="ignore"):
        return {"tag": tag, "simple_value": float(np.float32(value))}


def write_tensorboard(run: Run, directory: Path, selection: Selection) -> None:
    """Write an event file for each rank with a selected step, in a directory of its own where the run has several.

    The time of an event is the number of its step.
    """
    files: dict[int, EventFile] = {}
    with ExitStack() as stack:
        for step, rank in wanted_steps(run, selection):
            if rank not in files:
                place = directory / f"rank{rank}" if len(run.ranks) > 1 else directory
                place.mkdir(exist_ok=True)
                made = EventFile(place / f"events.out.tfevents.0.introspect.{rank}", 0.0)
                files[rank] = stack.enter_context(closing(made))
            values = [value for record in wanted_records(run, step, rank, selection) for value in _values(record)]
            # Nothing of the clock is kept with a step; the step itself stands for it.
            files[rank].add(step, values, float(step))


def _values(record: Record) -> list[dict[str, Any]]:
    """Summary values of a record: plain numbers and statistics as scalars.

    Of a loss, and of a tensor without dimensions, the mean alone. Empty for what was not observed, and for a plain
    value that is no number.
    """
    site, summary = record.site, record.summary
    again = f"/call{site.call}" if site.call else ""
    phase = "" if site.phase.value in ("forward", "backward", "optimizer", "loss", "data") else f"{site.phase.value}/"
    tag = f"{phase}{site.kind.value}/{site.fqn}{site.path}{again}"
    if summary.status is Status.VALUE:
        try:
            return [scalar(tag, float(summary.text))]
        except ValueError:
            return []
    if site.kind is Kind.LOSS or not summary.layout.shape:
        return [scalar(tag, summary.stats["mean"])] if "mean" in summary.stats else []
    return [scalar(f"{tag}/{name}", summary.stats[name]) for name in STATS if name in summary.stats]
