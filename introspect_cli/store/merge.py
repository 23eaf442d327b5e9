"""The ranks of a launch put together as one run, as it would be had one process run.

Comparing layouts reads every rank of every step, each time. What comes of that is one record a site, whatever the
layout: so it is written down, as a store like any other, whose records say how they were put together. Steps depend on
one another in nothing, so stretches of them are put together wherever there is a processor; see `tasks`.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.tasks import as_one, combined_elsewhere
from introspect_cli.store.whole import WholeReader
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Work


@contextmanager
def whole_or_nothing(out: Path) -> Iterator[Path]:
    """A directory to fill that gets the name `out` once the block ends, and is removed where the block raises.

    It is made beside `out`, whose parents are made too.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield fresh
        fresh.chmod(0o755)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


_OF_RANKS = frozenset(
    {"id", "format", "launch", "world_size", "rank", "local_rank", "host", "pipeline", "groups", "meshes", "left_out"}
)
"""What a manifest says of ranks, which a run of wholes has none of."""


def merge(source: str | Path, out: Path, work: Work, *, texts: bool = True) -> int:
    """Write a run of one rank that holds the combined records of all ranks of `source`.

    Args:
        source: the run.
        out: the directory of the run to make, which must not exist.
        work: runs tasks, see `tasks.Work`.
        texts: whether the text of source files goes with it.

    Returns:
        how many steps it has.

    Raises:
        StoreError: the source is of one process, put together already, still being written or damaged; or `out`
            exists.
        OSError: it cannot be written.
    """
    if out.exists():
        raise StoreError(f"{out} exists: choose another directory with -o")
    with open_run(source) as run:
        if run.combined_ranks:
            raise StoreError(f"{source} is put together already, of {count(run.combined_ranks, 'rank')}")
        if run.world_size < 2 or not run.ranks:
            raise StoreError(f"{source} is a run of one process: merge takes a run of several ranks")
        if run.state is RunState.RUNNING:
            raise StoreError(f"{source} is still being written: wait for its end, then merge")
        with whole_or_nothing(out) as fresh, StoreWriter.create(fresh) as store:
            steps = _write_combined(run, store, work, texts=texts)
    return steps


def _write_combined(run: Run, store: StoreWriter, work: Work, *, texts: bool) -> int:
    """Combine and write the steps that all ranks have, names, settings, sources and manifest.

    Returns the number of steps.

    Args:
        run: the opened source.
        store: the run to be written.
        work: runs tasks.
        texts: whether the text of source files goes with it.
    """
    reader = as_one(run)
    assert isinstance(reader, WholeReader)  # of several ranks
    steps = reader.common_steps.tolist()
    done = combined_elsewhere(reader, run.address, work)
    some = next(done, None)
    kept: dict[str, Any] = {}
    if some is not None:
        kept = {"stats": bool(some.counts), "sketch": some.sketch is not None, "sorted_stats": tuple(some.floats)}
    writer = store.rank(0, **kept, whole=True)
    for site, info in reader.sites:
        writer.site(site, info)
    writer.modules(reader.module_rows)
    for step, batch in zip(steps, chain([] if some is None else [some], done), strict=True):
        numbers = np.array([writer.layout(layout) for layout in reader.layouts] or [0], np.uint32)
        writer.append(step, replace(batch, layout=numbers[batch.layout]), reader.labels.get(step))
    for name, value in run.settings.items():
        store.write_settings(name, value)
    for digest in run.kept_sources if texts else ():
        if (data := run.source(digest)) is not None:
            store.save_source(digest, data)
    store.write_manifest({**_manifest(run, reader), "steps": len(steps)})
    return len(steps)


def _manifest(run: Run, reader: WholeReader) -> dict[str, Any]:
    """The manifest of the combined run: the source's without what is of single ranks, plus what was lost."""
    manifest = {name: value for name, value in run.manifest.items() if name not in _OF_RANKS}
    size = count(run.world_size, "rank")
    lost = f"what differs between its {size}, which are one here"
    return {
        **manifest,
        "status": "complete",
        "whole": {"world_size": run.world_size, "of": run.manifest.get("id"), "layout": reader.layout_mark},
        "not_observed": [*manifest.get("not_observed", ()), lost],
        "notes": [*manifest.get("notes", ()), *(f"{sentence}." for sentence in run.endings)],
    }
