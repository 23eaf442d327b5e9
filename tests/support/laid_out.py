"""Small launches whose ranks share out tensors in several ways, with something changed in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from introspect_cli.records import Kind, Layout, Part, Phase, Site, SiteInfo, Status
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch, Texts
from introspect_cli.store.run_writer import Launch, StoreWriter
from introspect_cli.store.whole import WholeReader
from introspect_cli.sums import header, mix

SHAPE = (8, 8)
HEAD = header("float32", SHAPE)
STATES = [
    *(Site(Phase.OPTIMIZER, kind, f"Net.{name}") for kind in (Kind.PARAM, Kind.GRAD) for name in "abc"),
    Site(Phase.OPTIMIZER, Kind.OPTIMIZER_STATE, "Net.a", 0, "['step']"),
    Site(Phase.OPTIMIZER, Kind.BUFFER, "Net.norm.mean"),
]
FLOWS = [
    Site(Phase.DATA, Kind.BATCH, "batch"),
    Site(Phase.FORWARD, Kind.INPUT, "Net.a", 0, "[0]"),
    Site(Phase.FORWARD, Kind.OUTPUT, "Net.a"),
    Site(Phase.BACKWARD, Kind.GRAD_OUTPUT, "Net.a"),
    Site(Phase.LOSS, Kind.LOSS, "loss"),
    Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, "SGD", 0, "lr"),
]
WHOLE, ROWS, COLUMNS, TWICE, ALONE = range(5)
"""All of it on each rank; a share of the rows, or columns, on each; half of the rows on each, twice; on one rank."""


def rows_of(rank, ranks):
    return ((rank * 8 // ranks, 8 // ranks),), ((0, 8),)


def place(how, rank, ranks):
    """Which part of a tensor a rank has, and how many different ones there are; None where it has nothing."""
    if how == ROWS:
        return Part(rows_of(rank, ranks)), rank, ranks
    if how == COLUMNS:
        return Part(rows_of(rank, ranks)[::-1]), rank, ranks
    if how == TWICE:
        half = rank % 2
        return Part(rows_of(half, 2)), half, 2
    return (None, 0, 1) if how == WHOLE or rank == 0 else None


def raw(number, step, part, parts):
    """What the elements of a part add up to: the whole's, whatever the parts are."""
    source = np.random.default_rng([number, step])
    whole = int(source.integers(1 << 62))
    others = np.random.default_rng([number, step, parts]).integers(1, 1 << 62, parts).tolist()
    return others[part] if part else (whole - sum(others[1:])) % (1 << 64)


def write(path, ranks, hows, *, steps=3, changed=None, lean=False):
    """Write a run whose states lie as `hows` says.

    Args:
        path: where.
        ranks: how many.
        hows: of each state.
        steps: how many.
        changed: takes a step, rank, site, part and record, a list of status and checksum, and may change the latter;
            True leaves it out.
        lean: whether checksums alone are kept.
    """
    for rank in range(ranks):
        store = StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, ranks))
        writer = store.rank(rank, stats=not lean, sketch=not lean, sorted_stats=())
        for step in range(steps):
            made = []
            for number, site in enumerate((*STATES, *FLOWS)):
                is_state = number < len(STATES)
                held = place(hows[number], rank, ranks) if is_state else (None, rank if number < 13 else 0, 1)
                if held is None:
                    continue
                part, which, parts = held
                if is_state:
                    sum_ = raw(number, step, which, parts)
                    checksum = mix((sum_ + HEAD) % (1 << 64))
                else:
                    checksum = mix((raw(number, step, 0, 1) + 977 * which) % (1 << 64))
                status = Status.PARTIAL if part is not None else Status.OBSERVED
                record = [int(status), checksum]
                if changed is None or not changed(step, rank, site, record):
                    layout = writer.layout(Layout(SHAPE, "float32", "cpu", "contiguous", part))
                    made.append((writer.site(site, SiteInfo()), layout, *record))
            if not made:
                break
            site, layout, status, checksum = (np.array(column, object) for column in zip(*made, strict=True))
            numbers = np.random.default_rng(checksum.tolist()).normal(size=(len(made), 16)).astype(np.float32)
            batch = StepBatch(
                site=site.astype(np.uint32),
                sequence=np.arange(len(made), dtype=np.uint32),
                layout=layout.astype(np.uint32),
                status=status.astype(np.uint8),
                checksum=checksum.astype(np.uint64),
                counts={}
                if lean
                else {n: np.zeros(len(made), np.int64) for n in ("nans", "posinfs", "neginfs", "zeros")},
                floats={}
                if lean
                else {n: numbers[:, 0].astype(float) for n, s in STATISTICS.items() if s.type[1] == "f"},
                sketch=None if lean else numbers,
            )
            writer.append(step, batch)
        ended = {"status": "complete", "rank": rank, "world_size": ranks, "steps": steps, "exit_code": 0}
        store.write_manifest(ended)
        store.close()
    return path


ALL = [WHOLE] * len(STATES)
SHARED = [ROWS, COLUMNS, WHOLE, ROWS, TWICE, ROWS, WHOLE, WHOLE]


def swap(step, rank, site, record):
    """Two ranks exchange what they have of a site."""
    if site == FLOWS[2] and rank < 2:
        record[1] = mix((raw(10, step, 0, 1) + 977 * (1 - rank)) % (1 << 64))


def copy(site):
    """One rank's copy is another."""

    def changed(step, rank, cut, record):
        if cut == site and rank == 2 and step == 1:
            record[1] ^= 5

    return changed


def exchanged(names):
    """Two copies are another, one way or the other round."""

    def changed(step, rank, cut, record):
        if cut == STATES[0] and rank in names and step > 0:
            record[1] ^= 1 + names.index(rank)

    return changed


def lost(step, rank, site, record):
    return site == STATES[2] and rank == 1 and step == 2


def unseen(step, rank, site, record):
    if site == STATES[3] and rank == 1 and step == 1:
        record[:] = int(Status.NOT_OBSERVED), 0


CHANGES = {
    "nothing": None,
    "swapped samples": swap,
    "a copy of a parameter": copy(STATES[0]),
    "a copy of a buffer": copy(STATES[7]),
    "a sample": copy(FLOWS[1]),
    "a hyper-parameter": copy(FLOWS[5]),
    "copies": exchanged((1, 2)),
    "copies the other way round": exchanged((2, 1)),
    "a lost record": lost,
    "an unseen record": unseen,
}
LAYOUTS = {"whole": ALL, "shared": SHARED, "rows": [ROWS] * 7 + [WHOLE], "alone": [ALONE] * 7 + [WHOLE]}


def write_changed(folder, layouts=("whole", "shared", "rows", "alone")):
    """Write layouts with each change."""
    for layout in layouts:
        for change, how in CHANGES.items():
            write(folder / f"{layout} {change}", 4, LAYOUTS[layout], changed=how)
    return folder


SMALL = Layout((4, 3), "float32", "cpu", "contiguous")
"""Of the tensors of `write_step`."""


def small_rows(first, number):
    """The layout of some rows of a small tensor."""
    return replace(SMALL, part=Part((((first, number),) if number else (), ((0, 3),))))


def write_step(path, *ranks, world=None, left_out=(), settings=None, modules=()):
    """Write a run of one step of several ranks.

    Args:
        path: where.
        ranks: of each rank its records: site, layout, checksum, and where they are others mean, status and text.
        world: how many ranks there were; as many as are given if None.
        left_out: ranks that the capture left out.
        settings: documents of settings, by name.
        modules: of each rank.
    """
    world = world or len(ranks)
    for rank, given in enumerate(ranks):
        store = StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, world) if world > 1 else None)
        said = {"status": "complete", "rank": rank, "world_size": world, "steps": 1}
        store.write_manifest(said | ({"left_out": True} if rank in left_out else {}))
        for name, document in (settings or {}).items():
            store.write_settings(name, document)
        writer = store.rank(rank, stats=True, sketch=True, sorted_stats=())
        writer.modules(modules)
        records = [] if rank in left_out else [(*each, *(1.0, None, "")[len(each) - 3 :]) for each in given]
        if records:
            sites, layouts, checksums, means, statuses, texts = zip(*records, strict=True)
            parts = [Status.PARTIAL if layout.part else Status.OBSERVED for layout in layouts]
            floats = {name: np.array(means, np.float64) for name, kept in STATISTICS.items() if kept.type != "<i8"}
            counts = {name: np.zeros(len(sites), np.int64) for name, kept in STATISTICS.items() if kept.type == "<i8"}
            batch = StepBatch(
                site=np.array([writer.site(site, SiteInfo("Linear")) for site in sites], np.uint32),
                sequence=np.arange(len(sites), dtype=np.uint32),
                layout=np.array([writer.layout(layout) for layout in layouts], np.uint32),
                status=np.array(
                    [own if own is not None else part for own, part in zip(statuses, parts, strict=True)], np.uint8
                ),
                checksum=np.array(checksums, np.uint64),
                counts=counts,
                floats=floats | {"var": np.zeros(len(sites)), "skew": np.ones(len(sites))},
                sketch=np.repeat(np.array(means, np.float32)[:, None], 16, axis=1),
                text=Texts(enumerate(texts)),
            )
            writer.append(0, batch)
        store.close()
    return path


def together(run):
    """What reads all ranks of a run as one."""
    readers = [run.rank(rank) for rank in run.ranks]
    return WholeReader(str(run.path), readers, stages=run.stages, complete=len(readers) >= run.world_size)
