"""Parts of one tensor on two ranks that leave some of it out, or overlap: what `diff` and `check` say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laid_out import SMALL, small_rows, together, write_step
from opcapture import compared

from introspect_cli.compare.result import Role, Verdict
from introspect_cli.health.check import check
from introspect_cli.records import UNPLACED, Kind, Phase, Site, Status
from introspect_cli.store.run import open_run
from introspect_cli.store.whole import WholeReader

HALVES = ((0, 2), (2, 2))
GRAD, PARAM = (Site(Phase.OPTIMIZER, kind, "Net.head.weight") for kind in (Kind.GRAD, Kind.PARAM))
BATCH, OTHER = Site(Phase.DATA, Kind.BATCH, "DataLoader"), Site(Phase.OPTIMIZER, Kind.PARAM, "Net.a")


def cut(*parts, site=PARAM):
    """Each rank's record of one tensor, of which it holds those rows."""
    return [[(site, small_rows(*rows), 5 + 10 * rank + sum(rows))] for rank, rows in enumerate(parts)]


@pytest.fixture
def sound(tmp_path):
    return write_step(tmp_path / "sound", *cut(*HALVES))


@pytest.mark.parametrize("site", [PARAM, GRAD], ids=["param", "grad"])
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (((0, 2), (2, 1)), "the parts of it on record cover 9 of its 12 elements"),
        (((0, 3), (2, 2)), "parts of it overlap: those of ranks 0, 1"),
        (((0, 2), (1, 2)), "parts of it overlap: those of ranks 0, 1"),
    ],
)
def test_parts_that_are_not_the_whole_are_a_divergence(tmp_path, site, parts, said):
    runs = [write_step(tmp_path / name, *cut(*each, site=site)) for name, each in (("a", HALVES), ("b", parts))]
    result = compared(*runs)
    assert (result.verdict, result.first.role, result.first.reason) == (Verdict.DIVERGED, Role.ORIGIN, "parts")
    assert (result.first.step, result.first.site.fqn) == (0, "Net.head.weight")
    assert said in result.sentence
    assert said in compared(*runs[::-1]).sentence


def test_shards_whose_place_is_not_known_are_not_seen(tmp_path):
    """That they are such shards is a fact of their layout, and not a word of their text."""
    unplaced = replace(SMALL, strides=UNPLACED)
    with open_run(write_step(tmp_path / "a", *([(PARAM, unplaced, each)] for each in (5, 15)))) as run:
        batch = together(run).read(0)
        assert [Status(status) for status in batch.status.tolist()] == [Status.NOT_OBSERVED]


def test_ranks_that_were_not_recorded_leave_no_hole(tmp_path, sound):
    """What they have is not known: no more is said than that."""
    other = write_step(tmp_path / "other", *cut((0, 2), (2, 2)), left_out=(1,))
    result = compared(sound, other)
    assert result.verdict is Verdict.UNDECIDED
    assert result.first is None


def test_a_rank_whose_records_are_gone_is_not_said_to_be_the_same(tmp_path):
    both = write_step(tmp_path / "both", *([(PARAM, SMALL, 5)] for _ in range(2)))
    one = write_step(tmp_path / "one", [(PARAM, SMALL, 5)], world=2)
    result = compared(both, one)
    assert result.verdict is Verdict.UNDECIDED
    said = (
        "Could not tell: all that both runs recorded agrees up to and including step 0, but rank 1 of b left nothing."
    )
    assert result.sentence == said


def test_what_ranks_share_out_is_not_seen_where_a_rank_is_gone(tmp_path):
    alone = write_step(tmp_path / "alone", [(BATCH, SMALL, 5), (OTHER, SMALL, 5)])
    half = write_step(tmp_path / "half", [(BATCH, SMALL, 7, 2.0), (OTHER, SMALL, 5)], world=2)
    result = compared(alone, half)
    assert result.verdict is Verdict.UNDECIDED
    assert "only one run could see (the first: the batch from DataLoader in step 0)" in result.sentence


def test_gradients_of_parts_that_all_samples_share_are_added_up(tmp_path):
    """Positions that are cut over two ranks come out alike on two pairs of them, and get a gradient from each pair."""
    given, back = Site(Phase.FORWARD, Kind.OUTPUT, "Net.pos"), Site(Phase.BACKWARD, Kind.GRAD_OUTPUT, "Net.pos")
    halves = [small_rows(*rows) for rows in HALVES]
    ranks = [[(given, halves[rank % 2], 5 + rank % 2), (back, halves[rank % 2], 11 + rank)] for rank in range(4)]
    with open_run(write_step(tmp_path / "run", *ranks)) as run:
        whole = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])
        found = {record.site.kind: record.summary for record in whole.records(0)}
    assert found[Kind.GRAD_OUTPUT].text == "gradients of several ranks, added up"
    assert found[Kind.GRAD_OUTPUT].layout.shape == SMALL.shape


def test_a_parameter_without_recorded_gradients_is_not_said_to_have_equal_ones(tmp_path):
    def rank(value, gradient):
        start = Site(Phase.START, Kind.PARAM, PARAM.fqn)
        grads = [(GRAD, SMALL, 9)] if gradient else []
        return [(start, SMALL, 5), *grads, (PARAM, SMALL, value, 1.0 * value)]

    found = {}
    for name in ("with", "without"):
        run = write_step(tmp_path / name, rank(6, name == "with"), rank(7, name == "with"))
        with open_run(run) as opened:
            (found[name],) = [each.evidence for each in check(opened).findings if each.rule == "copies-differ"]
    said = "from step 0 on the parameter Net.head.weight differs on rank 1, compared with rank 0"
    assert found["with"].startswith(said)
    assert found["with"].endswith("although no gradient of it was seen to differ")
    assert found["without"].startswith(said)
    assert found["without"].endswith("and no gradients of it were compared")
