"""Ranks' records put together as columns: each kind of site, next to what can be worked out by hand."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from laid_out import ALL, SHARED, SMALL, small_rows, write, write_step

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Joined, Kind, Part, Phase, Site
from introspect_cli.store.run import open_run
from introspect_cli.store.whole import WholeReader, misfit
from introspect_cli.sums import header, mix

WHOLE, rows = SMALL, small_rows


def owed(how, over=2):
    return replace(SMALL, part=Part((((0, 4),), ((0, 3),)), how, over))


PARAM = Site(Phase.OPTIMIZER, Kind.PARAM, "Net.a")
GRAD = Site(Phase.OPTIMIZER, Kind.GRAD, "Net.a")
OUTPUT = Site(Phase.FORWARD, Kind.OUTPUT, "Net")


@pytest.fixture
def put(tmp_path):
    """What becomes of sites, each rank a list of records as `write_step` takes them: the step, and its layouts."""

    def together(*ranks, complete=False):
        for file in sorted(tmp_path.iterdir()):
            shutil.rmtree(file)
        with open_run(write_step(tmp_path / "run", *ranks)) as run:
            reader = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks], complete=complete)
            step = reader.read(0)
            return step, [reader.layouts[number] for number in step.layout.tolist()]

    return together


def test_equal_copies_count_once_and_stay_as_recorded(put):
    found, known = put([(PARAM, WHOLE, 7)], [(PARAM, WHOLE, 7)])
    assert (len(found), found.how[0], found.checksum[0], known) == (1, Joined.AS_RECORDED, 7, [WHOLE])


def test_parts_add_up_modulo_two_to_the_64_whoever_else_has_a_copy(put):
    head = header("float32", SMALL.shape)
    raws = [(1 << 64) - 5, 9]
    sums = [mix((raw + head) % (1 << 64)) for raw in raws]
    found, known = put(
        [(PARAM, rows(0, 3), sums[0], 2.0)],
        [(PARAM, rows(3, 1), sums[1], 6.0)],
        [(PARAM, rows(0, 3), sums[0], 2.0)],
        [(PARAM, rows(4, 0), mix(head), 50.0)],
    )
    assert (found.how[0], int(found.checksum[0])) == (Joined.PARTS, mix((sum(raws) + head) % (1 << 64)))
    assert known == [WHOLE]
    assert found.floats["mean"][0] == pytest.approx((9 * 2 + 3 * 6) / 12)
    assert found.floats["var"][0] == pytest.approx((9 * 1 + 3 * 9) / 12)
    assert (found.floats["min"][0], found.floats["max"][0]) == (2.0, 6.0)
    assert np.isnan(found.floats["skew"][0])


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[(PARAM, rows(0, 2), 1)], [(PARAM, rows(2, 1), 2)]], "the parts of it on record cover 9 of its 12 elements"),
        ([[(PARAM, rows(0, 2), 1)], [(PARAM, rows(1, 3), 2)]], "parts of it overlap: those of ranks 0, 1"),
        ([[(PARAM, rows(0, 2), 1)], [(PARAM, rows(1, 2), 2)]], "parts of it overlap: those of ranks 0, 1"),
        (
            [[(PARAM, rows(0, 4), 1)], [(PARAM, rows(0, 4), 2)]],
            "ranks 0, 1 hold the same part of it with different values",
        ),
        (
            [[(PARAM, rows(0, 2), 1)], [(PARAM, WHOLE, 2)]],
            "some ranks hold parts of it and others what has no known place",
        ),
        ([[(PARAM, WHOLE, 1, 1.0, 1, "a meta tensor")], [(PARAM, WHOLE, 2)]], "a meta tensor"),
        ([[(PARAM, owed("max"), 1)], [(PARAM, owed("max"), 2)]], "a max over 2 ranks is still owed"),
    ],
)
def test_what_cannot_be_put_together_says_why_and_is_called_nothing(put, ranks, said):
    found, _ = put(*ranks)
    assert (found.status[0], int(found.checksum[0]), found.text[0]) == (1, 0, said)
    assert np.isnan(found.sketch[0]).all()


@pytest.mark.parametrize("site", [PARAM, OUTPUT])
def test_of_a_run_with_all_its_ranks_what_is_missing_of_the_model_is_missing(put, site):
    found, _ = put([(site, rows(0, 2), 1)], [(site, rows(2, 1), 2)], complete=True)
    said = "the parts of it on record cover 9 of its 12 elements"
    if site is PARAM:
        assert (found.status[0], found.text[0]) == (0, f"parts are not the whole: {said}")
        assert found.checksum[0] != 0
    else:
        assert (found.status[0], found.text[0]) == (1, said)


def test_a_rank_that_holds_nothing_of_it_changes_nothing(put):
    found, _ = put([(PARAM, rows(4, 0), 5)], [(PARAM, WHOLE, 7)])
    assert (found.how[0], found.checksum[0]) == (Joined.AS_RECORDED, 7)


def test_copies_that_differ_by_rounding_are_one_and_others_are_reported(put):
    found, _ = put([(PARAM, WHOLE, 1, 1.0)], [(PARAM, WHOLE, 2, 1.0 + 1e-6)])
    assert (found.how[0], found.checksum[0]) == (Joined.AS_RECORDED, 1)
    found, _ = put([(PARAM, WHOLE, 1)], [(PARAM, WHOLE, 2, 1.1)], [(PARAM, WHOLE, 1)])
    assert (found.how[0], found.text[0]) == (Joined.COPIES, "copies differ: rank 1 from rank 0")


def test_samples_of_ranks_are_gathered_and_their_order_means_nothing(put):
    one, two = [(OUTPUT, WHOLE, 1, 2.0)], [(OUTPUT, replace(WHOLE, shape=(2, 3)), 2, 5.0)]
    found, known = put(one, two)
    assert (found.how[0], found.text[0]) == (Joined.GATHERED, "values of 2 ranks together")
    assert known[0].shape == (6, 3)
    assert found.floats["mean"][0] == pytest.approx(3.0)
    other, _ = put(two, one)
    assert other.checksum[0] == found.checksum[0]


@pytest.mark.parametrize("how", ["sum", "avg"])
def test_sums_still_owed_are_added_up_by_sketches(put, how):
    found, _ = put([(GRAD, owed(how), 1, 1.0)], [(GRAD, owed(how), 2, 4.0)])
    assert found.how[0] == Joined.OWED
    assert found.sketch[0] == pytest.approx(5.0 if how == "sum" else 2.5)
    assert found.text[0] == f"{how} over 2 ranks, still owed"


def test_buffers_are_the_first_ranks_and_random_states_nobodys(put):
    buffer, state = Site(Phase.OPTIMIZER, Kind.BUFFER, "Net.b"), Site(Phase.START, Kind.RNG, "torch")
    ranks = (
        [(buffer, WHOLE, 1 + rank), (state, WHOLE, 3 + rank), (OUTPUT, WHOLE, 5 + rank, 1.0, 3, f"{rank}")]
        for rank in range(2)
    )
    found, _ = put(*ranks)
    assert found.checksum.tolist() == [1, 0, 0]
    assert [found.text[row] for row in range(3)] == ["", "each rank has its own", "a plain value, another on each rank"]
    assert found.status.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([0, 2], ""),
        ([0, 1], "parts of it overlap: those of ranks 0, 1"),
        ([0], "the parts of it on record cover 6 of its 12 elements"),
        ([2, 2], "the parts of it on record cover 6 of its 12 elements: ranks 0, 1 hold the same part"),
        ([0, 1, 2], "parts of it overlap: those of ranks 0, 1, 2"),
    ],
)
def test_what_parts_leave_out_or_have_twice_is_said_with_its_ranks(starts, said):
    assert misfit([(rank, rows(start, 2).part) for rank, start in enumerate(starts)], (4, 3)) == said


def test_what_was_put_together_stays_when_the_next_step_is_read(tmp_path):
    """Ranks read every step into the same memory."""
    with open_run(write(tmp_path / "run", 2, SHARED, steps=2)) as run:
        whole = WholeReader("run", [run.rank(0), run.rank(1)], complete=True)
        first = whole.read(0)
        columns = (first.checksum, first.sketch, *first.floats.values(), *first.counts.values())
        before, texts = [np.array(each) for each in columns], dict(first.text)
        whole.read(1)
    for one, two in zip(before, columns, strict=True):
        assert np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    assert texts == dict(first.text)
    assert {Joined.PARTS, Joined.AS_RECORDED} <= set(first.how.tolist())


def test_ranks_share_tables_and_have_few_files_open(tmp_path):
    """A process may have 1,024 files open, as a rule, and a run thousands of ranks."""
    path = write(tmp_path / "run", 70, ALL, steps=2, lean=True)
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
