"""Steps of two layouts that are passed over because what their ranks' records add up to agrees."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import opcapture
import pytest

from introspect_cli.compare.result import Verdict
from introspect_cli.records import STATISTICS, Kind, Layout, Part, Phase, Site, SiteInfo, Status
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.launch import Launch
from introspect_cli.store.rank_reader import RankReader
from introspect_cli.store.reader import open_run
from introspect_cli.store.totals import TOTALS, decode
from introspect_cli.store.verify import verify_run
from introspect_cli.store.whole import WholeReader
from introspect_cli.store.writer import StoreWriter
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
                text=[""] * len(made),
            )
            writer.append(step, batch)
        ended = {"status": "complete", "rank": rank, "world_size": ranks, "steps": steps, "exit_code": 0}
        store.write_manifest(ended)
        store.close()
    return path


@pytest.fixture
def reads(monkeypatch):
    """The steps of ranks that are read, in order."""
    seen = []
    read = RankReader.read_row

    def noted(self, row, **options):
        seen.append((self.path, row))
        return read(self, row, **options)

    monkeypatch.setattr(RankReader, "read_row", noted)
    return seen


@pytest.fixture
def blind(monkeypatch):
    """Has the next readers see no totals."""

    def hide():
        nothing = property(lambda self: decode(b"", self.entries, ""))
        monkeypatch.setattr(RankReader, "totals", nothing)

    return hide


def free(path):
    """The layout-free digests of a run."""
    with open_run(path) as run:
        reader = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks], complete=True)
        return [
            entry.digest if known else None for entry, known in zip(reader.steps, reader._free_digests(), strict=True)
        ]


ALL = [WHOLE] * len(STATES)
SHARED = [ROWS, COLUMNS, WHOLE, ROWS, TWICE, ROWS, WHOLE, WHOLE]


def test_steps_of_two_layouts_that_agree_are_not_read(tmp_path, reads):
    paths = [write(tmp_path / name, 4, hows, steps=40) for name, hows in (("a", ALL), ("b", SHARED))]
    result = opcapture.compared(*paths)
    assert result.verdict is Verdict.SAME, result.sentence
    assert (result.counts.steps_compared, result.counts.equal, result.counts.within) == (40, 40 * 14, 0)
    assert len({row for _, row in reads}) <= 2, "the first and the last step say what is in all of them"


def test_a_digest_is_the_same_in_every_layout_and_another_for_each_change(tmp_path):
    whole = free(write(tmp_path / "whole", 4, ALL))
    assert None not in whole
    assert len(set(whole)) == 3
    for name, hows in (("shared", SHARED), ("rows", [ROWS] * 7 + [WHOLE]), ("once", [ALONE] * 7 + [WHOLE])):
        assert free(write(tmp_path / name, 4, hows)) == whole, name

    def changed(step, rank, site, record):
        if step == 1 and rank == 3 and site == STATES[1]:
            record[1] ^= 1

    other = free(write(tmp_path / "changed", 4, [ROWS] * 7 + [WHOLE], changed=changed))
    assert [one == two for one, two in zip(whole, other, strict=True)] == [True, False, True]


def swap(step, rank, site, record):
    """Two ranks exchange what they have of a site."""
    if site == FLOWS[2] and rank < 2:
        record[1] = mix((raw(10, step, 0, 1) + 977 * (1 - rank)) % (1 << 64))


def copy(site):
    """One rank's copy is another."""

    def changed(step, rank, own, record):
        if own == site and rank == 2 and step == 1:
            record[1] ^= 5

    return changed


def exchanged(names):
    """Two copies are another, one way or the other round."""

    def changed(step, rank, own, record):
        if own == STATES[0] and rank in names and step > 0:
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


@pytest.fixture(scope="module")
def changed_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    for layout, hows in LAYOUTS.items():
        for change, how in CHANGES.items():
            write(folder / f"{layout} {change}", 4, hows, changed=how)
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_is_the_same_as_from_reading_every_step(changed_runs, blind, change):
    layouts = [("whole", "shared"), ("shared", "rows"), ("rows", "alone"), ("alone", "whole")]
    pairs = [(f"{one} {own}", f"{two} {change}") for one, two in layouts for own in ("nothing", change)]
    pairs += [(f"{one} copies", f"{one} {change}") for one in ("whole", "shared")]
    found = [opcapture.compared(changed_runs / one, changed_runs / two) for one, two in pairs]
    blind()
    for (one, two), result in zip(pairs, found, strict=True):
        read = opcapture.compared(changed_runs / one, changed_runs / two)
        assert repr(result) == repr(read), (one, two)


def test_totals_of_other_records_are_ignored_and_altered_ones_are_damage(tmp_path, reads):
    one, two = (write(tmp_path / name, 4, hows, steps=20) for name, hows in (("a", ALL), ("b", SHARED)))

    def changed(step, rank, site, record):
        if site == STATES[0] and step == 4:
            record[1] ^= 1

    other = write(tmp_path / "c", 4, SHARED, steps=20, changed=changed)
    for rank in range(4):
        shutil.copy(two / f"rank{rank}" / TOTALS, other / f"rank{rank}" / TOTALS)
    result = opcapture.compared(one, other)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.step == 4
    for rank in range(4):
        (two / f"rank{rank}" / TOTALS).unlink()
    reads.clear()
    assert opcapture.compared(one, two).verdict is Verdict.SAME
    assert len({row for _, row in reads}) == 20
    assert verify_run(one).sound
    file = one / "rank1" / TOTALS
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert "totals.bin" in verify_run(one).findings[0]


def test_totals_follow_a_restart_and_steps_that_are_dropped(tmp_path):
    """Names stay when steps are taken back, and so does what is known of sites and layouts."""
    path = tmp_path / "run"
    whole = free(write(tmp_path / "other", 2, ALL, lean=True))
    append = None

    def twice(self, step, batch):
        append(self, step, batch)
        if step == 0 and not hasattr(self, "again"):
            self.again = True
            append(self, 1, batch)
            self.restart()
            append(self, step, batch)

    with pytest.MonkeyPatch.context() as patch:
        from introspect_cli.store.rank_writer import RankWriter

        append = RankWriter.append
        patch.setattr(RankWriter, "append", twice)
        write(path, 2, ALL, lean=True)
    assert free(path) == whole
    with StoreWriter.create(tmp_path / "thin", launch=Launch("0" * 32, "0" * 32, 0, 1)):
        pass
    assert verify_run(path).sound


def test_a_run_of_one_process_keeps_no_totals(tmp_path):
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        site = writer.site(STATES[0], SiteInfo())
        one = np.ones(1, np.uint32)
        layout = writer.layout(Layout(SHAPE, "float32", "cpu", "contiguous"))
        writer.append(0, StepBatch(one * site, one * 0, one * layout, np.zeros(1, np.uint8), np.ones(1, np.uint64)))
    assert not list(Path(tmp_path / "run").rglob(TOTALS))
