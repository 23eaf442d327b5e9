"""The ranks of a run put together once, into a run of one process's shape that is kilobytes a step.

Comparing layouts reads every rank of every step, each time. What comes of that is one record a site, whatever the
layout: so it is written down, as a store like any other, whose records say how they were put together. Steps depend on
one another in nothing, so stretches of them are put together wherever there is a processor; see `spread`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.merge import whole_or_nothing
from introspect_cli.store.pack import from_anywhere
from introspect_cli.store.reader import RunState, open_run
from introspect_cli.store.spread import as_one, carried_out, stretches
from introspect_cli.store.whole import WholeReader
from introspect_cli.store.writer import StoreWriter
from introspect_cli.texts import count

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.store.reader import Run
    from introspect_cli.store.spread import Work

_OF_RANKS = (
    "id",
    "format",
    "launch",
    "world_size",
    "rank",
    "local_rank",
    "host",
    "pipeline",
    "groups",
    "meshes",
    "left_out",
)
"""What a manifest says of ranks, which a run of wholes has none of."""


def reduce_run(
    source: str | Path,
    out: Path,
    work: Work,
    *,
    texts: bool = True,
) -> int:
    """Write a run of the wholes of a run of several ranks.

    Args:
        source: the run.
        out: the directory of the run to make, which must not exist.
        work: runs tasks, see above.
        texts: whether the text of source files goes with it.

    Returns:
        how many steps it has.

    Raises:
        StoreError: the source is of one process, is still being written or is damaged; or `out` exists, or cannot be
            written.
    """
    if out.exists():
        raise StoreError(f"{out} exists: choose another directory with -o")
    place = from_anywhere(source)
    with open_run(source) as run:
        if run.whole_of:
            raise StoreError(f"{source} is put together already, of {count(run.whole_of, 'rank')}")
        if run.world_size < 2 or not run.ranks:
            raise StoreError(f"{source} is a run of one process: --whole takes a run of several ranks")
        if run.state is RunState.RUNNING:
            raise StoreError(f"{source} is still being written: wait for its end, then merge")
        with whole_or_nothing(out) as fresh, StoreWriter.create(fresh) as store:
            steps = _write(run, place, store, work, texts=texts)
    return steps


def _write(run: Run, place: str, store: StoreWriter, work: Work, *, texts: bool) -> int:
    reader = _all(run)
    steps = reader.steps_of_all.tolist()
    done = carried_out(stretches(reader, place, range(len(steps)), {}), work, reader.names.layout_number)
    some = next(done, None)
    on_request = tuple(name for name, statistic in STATISTICS.items() if statistic.on_request)
    writer = store.rank(
        0,
        stats=some is not None and bool(some.counts),
        sketch=some is not None and some.sketch is not None,
        sorted_stats=tuple(name for name in on_request if some is not None and name in some.floats),
        samples=any(rank.has_samples for rank in reader.readers),
        whole=True,
    )
    for number in range(len(reader.sites)):
        writer.site(*reader.sites[number])
    writer.modules(reader.module_rows)
    for step, batch in zip(steps, chain([] if some is None else [some], done), strict=True):
        numbers = np.array([writer.layout(layout) for layout in reader.layouts] or [0], np.uint32)
        writer.append(step, replace(batch, layout=numbers[batch.layout]), reader.labels.get(step))
    for name, value in run.settings.items():
        store.write_settings(name, value)
    for digest in run.kept_sources if texts else ():
        data = run.source(digest)
        if data is not None:
            store.save_source(digest, data)
    store.write_manifest({**_manifest(run, reader), "steps": len(steps)})
    return len(steps)


def _manifest(run: Run, reader: WholeReader) -> dict[str, Any]:
    """What the run of wholes says of itself."""
    said = {name: value for name, value in run.manifest.items() if name not in _OF_RANKS}
    size = count(run.world_size, "rank")
    apart = f"what differs between its {size}, which are one here"
    return {
        **said,
        "status": "complete",
        "whole": {"world_size": run.world_size, "of": run.manifest.get("id"), "layout": reader.layout_mark},
        "not_observed": [*said.get("not_observed", ()), apart],
        "notes": [*said.get("notes", ()), *(f"{sentence}." for sentence in run.endings)],
    }


def _all(run: Run) -> WholeReader:
    """All ranks of a run as one."""
    reader = as_one(run)
    assert isinstance(reader, WholeReader)  # of several ranks
    return reader
