"""Steps of two layouts that are passed over because what their ranks' records add up to agrees."""

from __future__ import annotations

import os
import shutil

import numpy as np
import opcapture
import pytest
from laid_out import ALL, CHANGES, SHAPE, SHARED, STATES, WHOLE, write, write_changed
from logs import rewrite, without

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Layout, SiteInfo
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.files import LOG
from introspect_cli.store.frames import HEAD, TOTALS
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """The steps of ranks that are read, in order."""
    seen = []
    with open_run(write(tmp_path / "any", 1, ALL)) as run:
        reader = type(run.rank(0))
    read = reader.read_row

    def noted(self, row, **options):
        seen.append((self.path, row))
        return read(self, row, **options)

    monkeypatch.setattr(reader, "read_row", noted)
    return seen


def test_steps_of_two_layouts_that_agree_are_not_read(tmp_path, reads):
    paths = [write(tmp_path / name, 4, hows, steps=40) for name, hows in (("a", ALL), ("b", SHARED))]
    result = opcapture.compared(*paths)
    assert result.verdict is Verdict.SAME, result.sentence
    assert (result.counts.steps_compared, result.counts.equal, result.counts.within) == (40, 40 * 14, 0)
    assert len({row for _, row in reads}) <= 2, "the first and the last step say what is in all of them"


@pytest.fixture(scope="module")
def changed_runs(tmp_path_factory):
    return write_changed(tmp_path_factory.mktemp("changed"))


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_is_the_same_as_from_reading_every_step(changed_runs, tmp_path, change):
    layouts = [("whole", "shared"), ("shared", "rows"), ("rows", "alone"), ("alone", "whole")]
    pairs = [(f"{one} {each}", f"{two} {change}") for one, two in layouts for each in ("nothing", change)]
    pairs += [(f"{one} copies", f"{one} {change}") for one in ("whole", "shared")]
    for name in {name for pair in pairs for name in pair}:
        for rank in shutil.copytree(changed_runs / name, tmp_path / name).glob("rank*"):
            rewrite(rank, without(TOTALS))
    for one, two in pairs:
        found, read = (opcapture.compared(folder / one, folder / two) for folder in (changed_runs, tmp_path))
        assert repr(found) == repr(read).replace(str(tmp_path), str(changed_runs)), (one, two)


def test_without_totals_every_step_is_read_and_altered_ones_are_damage(tmp_path, reads):
    one, two = (write(tmp_path / name, 4, hows, steps=20) for name, hows in (("a", ALL), ("b", SHARED)))
    for rank in range(4):
        rewrite(two / f"rank{rank}", without(TOTALS))
    reads.clear()
    assert opcapture.compared(one, two).verdict is Verdict.SAME
    assert len({row for _, row in reads}) == 20
    assert verify_run(one).sound
    file = one / "rank1" / LOG
    with open_run(one) as run:
        frames = run.rank(1).frames
        at = int(frames.begins[frames.numbers_of(TOTALS)[3]]) + HEAD.size
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert "SUMS" in verify_run(one).findings[0]


def test_a_run_of_one_process_keeps_no_totals(tmp_path):
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        site = writer.site(STATES[0], SiteInfo())
        one = np.ones(1, np.uint32)
        layout = writer.layout(Layout(SHAPE, "float32", "cpu", "contiguous"))
        writer.append(0, StepBatch(one * site, one * 0, one * layout, np.zeros(1, np.uint8), np.ones(1, np.uint64)))
    with open_run(tmp_path / "run") as run:
        assert not run.rank(0).frames.numbers_of(TOTALS)


def test_ranks_share_tables_and_have_few_files_open(tmp_path):
    """A process may have 1,024 files open, as a rule, and a run thousands of ranks."""
    path = write(tmp_path / "run", 70, [WHOLE] * 8, steps=2, lean=True)
    other = shutil.copytree(path, tmp_path / "other")
    before = len(os.listdir("/proc/self/fd"))
    with open_run(path) as one, open_run(other) as two:
        assert compare_runs(one, two, DiffOptions()).verdict is Verdict.SAME
        first = one.rank(0)
        assert all(one.rank(rank).sites is first.sites for rank in one.ranks)
        for step in range(2):
            for rank in one.ranks:
                assert len(one.rank(rank).read(step)) == 14
        assert len(os.listdir("/proc/self/fd")) - before < 2 * 64 + 8
    assert len(os.listdir("/proc/self/fd")) <= before  # what an earlier test left may close meanwhile
