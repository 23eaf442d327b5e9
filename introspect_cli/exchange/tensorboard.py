"""TensorBoard event files: scalars of every site, histograms of what was stored whole.

An event file is a sequence of protocol buffers, each framed by its length and two masked CRC-32C sums. The four
messages needed are small, so they are written here rather than by a package of forty times our size.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.exchange.formats import wanted_records, wanted_steps
from introspect_cli.records import Kind, Record, Status

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.read.run import Run

STATS = ("mean", "std", "l2", "absmax", "nans", "infs", "zeros")
"""Statistics written as scalars."""

_BINS = 30
_MASK = 0xFFFFFFFF


def _crc_table() -> list[int]:
    """The 256 entries of the CRC-32C table."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(crc)
    return table


_CRC = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset as TFRecord files have it."""
    crc = _MASK
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= _MASK
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _MASK


def _varint(value: int) -> bytes:
    """An integer as a protobuf varint; negative ones as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(number: int, data: bytes) -> bytes:
    """The protobuf field `number`, holding bytes or a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _double(number: int, value: float) -> bytes:
    """The protobuf field `number`, holding a double."""
    return _varint(number << 3 | 1) + struct.pack("<d", value)


class EventFile:
    """A TensorBoard event file, appended to; each event has its time in seconds since 1970."""

    def __init__(self, path: Path, time: float) -> None:
        """Create and open the file and write its version event: wall_time = 1 (`time`), file_version = 3."""
        self._file = path.open("wb")
        self._write(_double(1, time) + _bytes(3, b"brain.Event:2"))

    def add(self, step: int, values: list[bytes], time: float) -> None:
        """Append an event with the values (`scalar`, `histogram`) of a step and flush.

        Its fields: wall_time = 1, step = 2, summary = 5.
        """
        summary = b"".join(_bytes(1, value) for value in values)
        self._write(_double(1, time) + _varint(2 << 3) + _varint(step) + _bytes(5, summary))

    def _write(self, data: bytes) -> None:
        """Append one record of a TFRecord file."""
        length = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", masked_crc(each)) for each in (length, data))
        self._file.write(length + next(sums) + data + next(sums))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def scalar(tag: str, value: float) -> bytes:
    """A value of a summary: tag = 1, simple_value = 2."""
    with np.errstate(over="ignore"):
        return _bytes(1, tag.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", np.float32(value))


def histogram(tag: str, array: np.ndarray[Any, Any]) -> bytes:
    """A value of a summary: tag = 1, histo = 5 with min, max, num, sum, sum of squares, bucket limits and counts."""
    flat = array.astype(np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    counts, edges = np.histogram(flat, _BINS) if len(flat) else (np.zeros(0), np.zeros(1))
    ends = (flat.min(), flat.max()) if len(flat) else (0.0, 0.0)
    numbers = (*ends, len(flat), flat.sum(), (flat * flat).sum())
    body = b"".join(_double(field, float(number)) for field, number in enumerate(numbers, 1))
    body += _bytes(6, edges[1:].astype("<f8").tobytes()) + _bytes(7, counts.astype("<f8").tobytes())
    return _bytes(1, tag.encode()) + _bytes(5, body)


def write_tensorboard(run: Run, directory: Path, selection: Selection) -> int:
    """Write an event file for each rank, in a directory of its own where there are several.

    Returns the number of files.
    """
    files: dict[int, EventFile] = {}
    try:
        for step, rank in wanted_steps(run, selection):
            if rank not in files:
                place = directory / f"rank{rank}" if len(run.ranks) > 1 else directory
                place.mkdir(exist_ok=True)
                files[rank] = EventFile(place / f"events.out.tfevents.0.introspect.{rank}", 0.0)
            values = [value for record in wanted_records(run, step, rank, selection) for value in _values(run, record)]
            # Nothing of the clock is kept with a step; the step itself stands for it.
            files[rank].add(step, values, float(step))
    finally:
        for file in files.values():
            file.close()
    return len(files)


def _values(run: Run, record: Record) -> list[bytes]:
    """Summary values of a record: plain numbers and statistics as scalars, a stored tensor as a histogram."""
    site, summary = record.site, record.summary
    again = f"/call{site.call}" if site.call else ""
    phase = "" if site.phase.value in ("forward", "backward", "optimizer", "loss", "data") else f"{site.phase.value}/"
    tag = f"{phase}{site.kind.value}/{site.fqn}{site.path}{again}"
    if summary.status is Status.VALUE:
        try:
            return [scalar(tag, float(summary.text))]
        except ValueError:
            return []
    if summary.status is Status.NOT_OBSERVED:
        return []
    if site.kind is Kind.LOSS or not summary.layout.shape:
        return [scalar(tag, summary.stats["mean"])] if "mean" in summary.stats else []
    scalars = [scalar(f"{tag}/{name}", summary.stats[name]) for name in STATS if name in summary.stats]
    stored = run.tensor(summary.checksum) if summary.checksum else None
    return [*scalars, histogram(tag, stored)] if stored is not None and stored.dtype.kind in "fiub" else scalars
