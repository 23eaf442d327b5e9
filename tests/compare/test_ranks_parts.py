"""Parts of one tensor on two ranks that leave some of it out, or overlap: what `diff` and `check` say of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Role, Verdict
from introspect_cli.health.check import check
from introspect_cli.records import UNPLACED, Kind, Layout, Part, Phase, Site, SiteInfo, Status
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.format.batch import StepBatch
from introspect_cli.store.ranks.tasks import as_one
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.run import open_run
from introspect_cli.store.write.launch import Launch
from introspect_cli.store.write.run_writer import StoreWriter

SHAPE = (4, 3)
HALVES = ((0, 2), (2, 2))
FULL = (0, 3)
STRIDES = "contiguous"
GRAD, PARAM = (Phase.OPTIMIZER, Kind.GRAD), (Phase.OPTIMIZER, Kind.PARAM)


def written(path, *ranks, world=None, left_out=()):
    """A run of one step; each rank a list of (phase and kind, FQN, rows held or None for all, checksum, mean)."""
    world = world or len(ranks)
    for rank, given in enumerate(ranks):
        launch = Launch("0" * 32, "0" * 32, rank, world) if world > 1 else None
        store = StoreWriter.create(path, launch=launch)
        said = {"status": "complete", "rank": rank, "world_size": world, "steps": 1}
        if rank in left_out:
            said["left_out"] = True
        store.write_manifest(said)
        writer = store.rank(rank, stats=True, sketch=True, sorted_stats=())
        records = [] if rank in left_out else given
        number = len(records)
        sites = [writer.site(Site(*place, fqn), SiteInfo("Linear")) for place, fqn, *_ in records]
        layout = Layout(SHAPE, "float32", "cpu", STRIDES)
        layouts = [replace(layout, part=Part(((each,), (FULL,)))) if each else layout for _, _, each, *_ in records]
        batch = StepBatch(
            site=np.array(sites, np.uint32),
            sequence=np.arange(number, dtype=np.uint32),
            layout=np.array([writer.layout(each) for each in layouts], np.uint32),
            status=np.array([int(Status.PARTIAL if each[2] else Status.OBSERVED) for each in records], np.uint8),
            checksum=np.array([each[3] for each in records], np.uint64),
            counts={name: np.zeros(number, np.int64) for name, kept in STATISTICS.items() if kept.type == "<i8"},
            floats={
                name: np.array([each[4] for each in records], np.float64)
                for name, kept in STATISTICS.items()
                if kept.type != "<i8"
            },
            sketch=np.array([[each[4]] * 16 for each in records], np.float32).reshape(number, 16),
            text=[""] * number,
        )
        if number:
            writer.append(0, batch)
        store.close()
    return path


def cut(*parts, place=PARAM, name="Net.head.weight"):
    """Each rank's record of one tensor, of which it holds those rows."""
    return [[(place, name, each, 5 + 10 * rank + sum(each or ()), 1.0)] for rank, each in enumerate(parts)]


@pytest.fixture
def sound(tmp_path):
    return written(tmp_path / "sound", *cut(*HALVES))


def compared(one, two):
    with open_run(one) as a, open_run(two) as b:
        return compare_runs(a, b, DiffOptions())


@pytest.mark.parametrize("place", [PARAM, GRAD])
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (((0, 2), (2, 1)), "the parts of it on record cover 3/4 of it"),
        (((0, 3), (2, 2)), "parts of it overlap: those of ranks 0, 1"),
        (((0, 2), (1, 2)), "parts of it overlap: those of ranks 0, 1"),
    ],
)
def test_parts_that_are_not_the_whole_are_a_divergence(tmp_path, place, parts, said):
    runs = [written(tmp_path / name, *cut(*each, place=place)) for name, each in (("a", HALVES), ("b", parts))]
    result = compared(*runs)
    assert (result.verdict, result.first.role, result.first.reason) == (Verdict.DIVERGED, Role.ORIGIN, "parts")
    assert (result.first.step, result.first.site.fqn) == (0, "Net.head.weight")
    assert said in result.sentence
    assert said in compared(*runs[::-1]).sentence


def test_shards_whose_place_is_not_known_are_not_seen(tmp_path, monkeypatch):
    """That they are such shards is a fact of their layout, and not a word of their text."""
    monkeypatch.setattr(f"{__name__}.STRIDES", UNPLACED)
    runs = [written(tmp_path / name, *cut(None, None)) for name in "ab"]
    with open_run(runs[0]) as run:
        batch = as_one(run).read(0)
        assert [Status(status) for status in batch.status.tolist()] == [Status.NOT_OBSERVED]


def test_ranks_that_were_not_recorded_leave_no_hole(tmp_path, sound):
    """What they have is not known: no more is said than that."""
    other = written(tmp_path / "other", *cut((0, 2), (2, 2)), left_out=(1,))
    result = compared(sound, other)
    assert result.verdict is Verdict.UNDECIDED
    assert result.first is None


def test_a_rank_whose_records_are_gone_is_not_said_to_be_the_same(tmp_path):
    both = written(tmp_path / "both", *([(PARAM, "Net.head.weight", None, 5, 1.0)] for _ in range(2)))
    one = written(tmp_path / "one", [(PARAM, "Net.head.weight", None, 5, 1.0)], world=2)
    result = compared(both, one)
    assert result.verdict is Verdict.UNDECIDED
    said = (
        "Could not tell: all that both runs recorded agrees up to and including step 0, but rank 1 of b left nothing."
    )
    assert result.sentence == said


def test_what_ranks_share_out_is_not_seen_where_a_rank_is_gone(tmp_path):
    batch = (Phase.DATA, Kind.BATCH)
    alone = written(tmp_path / "alone", [(batch, "DataLoader", None, 5, 1.0), (PARAM, "Net.a", None, 5, 1.0)])
    half = written(tmp_path / "half", [(batch, "DataLoader", None, 7, 2.0), (PARAM, "Net.a", None, 5, 1.0)], world=2)
    result = compared(alone, half)
    assert result.verdict is Verdict.UNDECIDED
    assert "only one of them could see (the first: batch of DataLoader at step 0)" in result.sentence


def test_gradients_of_parts_that_all_samples_share_are_added_up(tmp_path):
    """Positions that are cut over two ranks come out alike on two pairs of them, and get a gradient from each pair."""
    given, back = (Phase.FORWARD, Kind.OUTPUT), (Phase.BACKWARD, Kind.GRAD_OUTPUT)
    ranks = [
        [(given, "Net.pos", HALVES[rank % 2], 5 + rank % 2, 1.0), (back, "Net.pos", HALVES[rank % 2], 11 + rank, 1.0)]
        for rank in range(4)
    ]
    with open_run(written(tmp_path / "run", *ranks)) as run:
        whole = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])
        found = {record.site.kind: record.summary for record in whole.records(0)}
    assert found[Kind.GRAD_OUTPUT].text == "gradients of several ranks, added up"
    assert found[Kind.GRAD_OUTPUT].layout.shape == SHAPE


def test_a_parameter_without_recorded_gradients_is_not_said_to_have_equal_ones(tmp_path):
    def rank(value, gradient):
        start = [((Phase.START, Kind.PARAM), "Net.head.weight", None, 5, 1.0)]
        grads = [(GRAD, "Net.head.weight", None, 9, 1.0)] if gradient else []
        return [*start, *grads, (PARAM, "Net.head.weight", None, value, 1.0 * value)]

    found = {}
    for name in ("with", "without"):
        run = written(tmp_path / name, rank(6, name == "with"), rank(7, name == "with"))
        with open_run(run) as opened:
            (found[name],) = [each.evidence for each in check(opened).findings if each.rule == "copies-differ"]
    said = "from step 0 on the parameter Net.head.weight differs on rank 1, compared with rank 0"
    assert found["with"].startswith(said)
    assert found["with"].endswith("although no gradient of it was seen to differ")
    assert found["without"].startswith(said)
    assert found["without"].endswith("and no gradients of it were compared")
