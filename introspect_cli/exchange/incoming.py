"""Records made elsewhere, written as a run, so that `diff`, `check` and `show` take them.

A record from a report has what the file said and no more: statistics that were not printed are absent, no sketch is
kept (distances are told from the statistics that both sides have, or not at all), and the checksum is made from the
file's own hash, or from the printed text where there is none. Equal checksums then mean equal text. An array that lies
there whole gets all that a capture would have kept of it.
"""

from __future__ import annotations

import os
import pickle
import re
import stat
import struct
import zipfile
import zlib
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import Layout, Site, SiteInfo, Status, Summary
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch, Texts
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.sums import number_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from introspect_cli.store.rank_writer import RankWriter

Row = tuple[Site, SiteInfo, Summary]
Stored = tuple[int, memoryview, str, tuple[int, ...]]
"""A whole tensor: checksum, data, element type, shape."""

_ON_REQUEST = tuple(name for name, statistic in STATISTICS.items() if statistic.on_request)

_CHECKSUM = re.compile(r"[0-9a-fA-F]{16}")

DAMAGE = (
    *(ValueError, EOFError, LookupError, TypeError, AttributeError, SyntaxError, OverflowError, RecursionError),
    *(struct.error, zipfile.BadZipFile, zlib.error, NotImplementedError, pickle.UnpicklingError),
)
"""What readers of files raise of one that is damaged."""
LIMIT_FILE = 256 * 2**20
"""Bytes of the largest file that is read."""


class Incoming(NamedTuple):
    """The imported records of one step of one rank.

    Attributes:
        step: its number.
        rank: of the process.
        rows: its records in order.
    """

    step: int
    rank: int
    rows: tuple[Row, ...]


def checksum_of(text: str) -> int:
    """A 64-bit checksum for a text: its value where it is 16 hex digits, else a hash of it."""
    return int(text, 16) if _CHECKSUM.fullmatch(text) else number_of(text.encode())


def plain_summary(plain: object) -> Summary:
    """The summary of a plain value, by its type and the first 200 characters of its repr."""
    kind = type(plain).__name__
    text = repr(plain)[:200]
    return Summary(Status.VALUE, Layout((), f"python.{kind}"), checksum_of(f"{kind} {text}"), text=text)


def scalar_summary(number: float, dtype: str = "float32") -> Summary:
    """The summary of a tensor without dimensions, of which only the printed value is known.

    Statistics follow from the value; of NaN and infinity only the counts. The status is PARTIAL, and the checksum a
    hash of the value's text, not of bits.
    """
    printed = float(number)
    flags = {"nans": np.isnan(printed), "posinfs": printed == np.inf, "neginfs": printed == -np.inf}
    stats: dict[str, float] = {**{name: int(flag) for name, flag in flags.items()}, "zeros": int(printed == 0)}
    if np.isfinite(printed):
        stats |= dict.fromkeys(("min", "max", "mean"), printed) | dict.fromkeys(("absmin", "amean"), abs(printed))
        stats["var"] = 0.0
    return Summary(Status.PARTIAL, Layout((), dtype), checksum_of(f"scalar {number!r}"), stats)


def open_regular(path: Path) -> Any:
    """Open a regular file for reading; StoreError for a pipe, device or directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{path} is not a regular file: nothing is read from it")
    return os.fdopen(fd, "rb")


def is_file_beside(name: object) -> bool:
    """Whether what another file gives is the name of a file in its directory, and no path that leads elsewhere."""
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")  # noqa: PTH119


def read_small(path: Path) -> bytes:
    """The bytes of a regular file; StoreError for any other, and for one that is larger than any report or index."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LIMIT_FILE:
            raise StoreError(f"{path} is too large to be imported: it has more than {LIMIT_FILE >> 20} MiB")
        return bytes(file.read())


def write_run(
    path: Path,
    steps: Iterable[Incoming],
    *,
    source: str,
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
    sketch: bool = False,
    stored: Iterable[Stored] = (),
    force: bool = False,
) -> tuple[int, int]:
    """Write imported steps as a run; returns the numbers of steps and records.

    Args:
        path: directory of the run.
        steps: what was found, in any order.
        source: what it was read from.
        settings: settings documents by name.
        about: what the manifest says beside, of what was not observed at least.
        sketch: whether the records have sketches, and the statistics that a capture keeps.
        stored: whole tensors to keep.
        force: replace a run that is there.

    Raises:
        StoreError: there is a run already (without `force`), or it cannot be written.
    """
    from introspect_cli.version import __version__

    ordered = sorted(steps, key=lambda step: (step.rank, step.step))
    kinds = sorted({site.kind.value for step in ordered for site, _, _ in step.rows})
    with StoreWriter.create(path, force=force, rank=ordered[0].rank if ordered else 0) as store:
        manifest: dict[str, Any] = {
            "tool": {"name": "introspect-cli", "version": __version__},
            "status": "running",
            "imported_from": source,
            "options": {"record": kinds, "sketch": sketch, "modules": [], "exclude": [], "steps": ":"},
            "observed": kinds,
            **about,
        }
        store.write_manifest(manifest)
        for name, document in settings.items():
            store.write_settings(name, document)
        for rank, of_rank in groupby(ordered, key=lambda step: step.rank):
            writer = store.rank(rank, sketch=sketch, sorted_stats=() if sketch else _ON_REQUEST)
            for step in of_rank:
                writer.append(step.step, _batch(writer, step.rows, sketch=sketch))
        for checksum, data, dtype, shape in stored:
            store.save_tensor(checksum, data, dtype, shape)
        store.write_manifest({**manifest, "status": "complete"})
    return len(ordered), sum(len(step.rows) for step in ordered)


def _batch(writer: RankWriter, rows: Sequence[Row], *, sketch: bool) -> StepBatch:
    """The batch of imported rows, their sites and layouts numbered by `writer`; zeros for a sketch that a row lacks."""
    kept = [summary for _, _, summary in rows]
    counts = [name for name, statistic in STATISTICS.items() if statistic.type == "<i8"]
    floats = [name for name in STATISTICS if name not in counts]
    blank = (0.0,) * max((len(summary.sketch) for summary in kept), default=0)  # of what is no tensor
    return StepBatch(
        site=np.array([writer.site(site, info) for site, info, _ in rows], np.uint32),
        sequence=np.arange(len(rows), dtype=np.uint32),
        layout=np.array([writer.layout(summary.layout) for summary in kept], np.uint32),
        status=np.array([summary.status.value for summary in kept], np.uint8),
        checksum=np.array([summary.checksum for summary in kept], np.uint64),
        counts={name: np.array([int(s.stats.get(name, -1)) for s in kept], np.int64) for name in counts},
        floats={name: np.array([s.stats.get(name, np.nan) for s in kept], np.float64) for name in floats},
        sketch=np.array([s.sketch or blank for s in kept], np.float32).reshape(len(kept), -1) if sketch else None,
        text=Texts(enumerate(summary.text for summary in kept)),
    )
