"""Runs that nothing computed, by the store's own writer: as many records, steps and ranks as a benchmark wants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import SKETCH_SIZE, Kind, Layout, Part, Phase, Site, SiteInfo
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch, Texts
from introspect_cli.store.run_writer import Launch, StoreWriter
from introspect_cli.sums import header, mix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from introspect_cli.store.rank_writer import RankWriter

_COPIED = 8
"""One site in so many is whole on every rank."""


def batch_of(
    writer: RankWriter,
    sites: Sequence[Site],
    layout: np.ndarray | int,
    *,
    values: Callable[[int], np.ndarray] | None = None,
    sketch: np.ndarray | None = None,
    text: Sequence[str] = (),
) -> StepBatch:
    """A step of one record a site, checksums 0.

    Args:
        writer: of the rank.
        sites: of the records.
        layout: the layout of each, or of all.
        values: what makes a column of statistics; None where checksums alone are kept.
        sketch: of each record.
        text: of each record; none where it is empty.
    """
    count = len(sites)
    kept = STATISTICS.items() if values is not None else ()
    make = values or np.ones
    return StepBatch(
        site=np.array([writer.site(site, SiteInfo("Linear")) for site in sites], np.uint32),
        sequence=np.arange(count, dtype=np.uint32),
        layout=np.broadcast_to(layout, count).astype(np.uint32),
        status=np.zeros(count, np.uint8),
        checksum=np.zeros(count, np.uint64),
        counts={name: np.zeros(count, np.int64) for name, stat in kept if stat.type == "<i8"},
        floats={name: make(count).astype(stat.type) for name, stat in kept if stat.type != "<i8"},
        sketch=sketch,
        text=Texts(enumerate(text)),
    )


def write_large(path: Path, steps: int, sites: int, *, change: str = "") -> None:
    """Write a run of one rank; `change` is "last" for another record in the last step, "all" for a rounding in all."""
    random = np.random.default_rng(0)
    with StoreWriter.create(path) as store:
        store.write_manifest({"status": "running"})
        writer = store.rank(0, stats=True, sketch=True, sorted_stats=())
        named = [Site(Phase.FORWARD, Kind.OUTPUT, f"Model.blocks.{n // 10}.layer{n % 10}") for n in range(sites)]
        base = random.integers(1, 1 << 62, sites, dtype=np.uint64)
        sketch = random.normal(size=(sites, SKETCH_SIZE)).astype(np.float32) * 45
        sketch *= np.float32(1 + 2e-7 * (change == "all"))
        layout = writer.layout(Layout((64, 512), "float32", "cpu", "contiguous"))
        batch = batch_of(writer, named, layout, values=lambda count: random.normal(size=count), sketch=sketch)
        batch.floats["var"][:] = 1
        for step in range(steps):
            checksum = (base + np.uint64(step)) ^ np.uint64((change == "all") << 63)
            if change == "last" and step == steps - 1:
                checksum[sites // 2] ^= np.uint64(1)
            writer.append(step, replace(batch, checksum=checksum))
        store.write_manifest({"status": "complete"})


RANKS = {
    "rows": "parameters cut by rows",
    "columns": "the same parameters, cut by columns",
    "again": "equal to `rows`",
    "late": "`again` with another last step on one rank",
    "once": "`rows`, in which all differs from the first step on",
    "near": "`columns` with other bits and equal sketches, as another order of summation leaves them",
    "half": "`near`, in which all differs from the middle on",
    "odd": "`rows`, in which one rank's copy of what all have is another from the middle on",
}
"""The runs of many ranks that `write_ranks` makes."""


def write_ranks(path: Path, name: str, ranks: int, steps: int, sites: int, *, lean: bool) -> None:
    """Write one of `RANKS`: parts that add up to the same wholes however they are cut, and copies."""
    total = np.random.default_rng(0).integers(1, 1 << 62, sites, dtype=np.uint64)
    side, by_columns = 8 * ranks, name in {"columns", "near", "half"}
    shape, copied = (side, side), np.arange(sites) % _COPIED == 0
    heads = np.full(sites, header("float32", shape), np.uint64)
    bits = np.random.default_rng(1 + by_columns)
    named = [Site(Phase.OPTIMIZER, Kind.PARAM, f"Model.blocks.{n // 10}.layer{n % 10}.weight") for n in range(sites)]
    added = np.zeros(sites, np.uint64)
    for rank in range(ranks):
        about = {"rank": rank, "world_size": ranks, "host": f"node{rank // 8}"}
        with StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, ranks)) as store:
            store.write_manifest({"status": "running", **about})
            writer = store.rank(rank, stats=not lean, sketch=not lean, sorted_stats=())
            held, whole = ((rank * 8, 8),), ((0, side),)
            part = Part((whole, held) if by_columns else (held, whole))
            layouts = [writer.layout(Layout(shape, "float32", "cpu", "contiguous", which)) for which in (part, None)]
            adds_up = rank == ranks - 1 and name not in {"near", "half"}
            sums = total - added if adds_up else bits.integers(1, 1 << 62, sites, dtype=np.uint64)
            added += sums
            sums = np.where(copied, total, sums)
            sketch = None if lean else np.ones((sites, SKETCH_SIZE), np.float32) * (2 if name == "once" else 1)
            layout = np.where(copied, layouts[1], layouts[0])
            batch = batch_of(writer, named, layout, values=None if lean else np.ones, sketch=sketch)
            for step in range(steps):
                late = step >= steps // 2
                more = np.uint64(step) * (copied | (rank == 0))
                if name == "once" or (name == "half" and late):
                    more = more + np.uint64(1)
                if name == "late" and step == steps - 1 and rank == ranks // 2:
                    more = more + ~copied
                if name == "odd" and rank == ranks // 3 and late:
                    more = more + copied
                made = replace(batch, checksum=mix(sums + more.astype(np.uint64) + heads))
                if name == "half" and late and sketch is not None:
                    made = replace(made, sketch=-sketch)
                writer.append(step, made)
            store.write_manifest({"status": "complete", **about, "steps": steps, "exit_code": 0})
