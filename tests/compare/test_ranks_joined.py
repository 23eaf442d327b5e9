"""Ranks put together: layouts that agree to the last bit, and captures of one rank for each part of a model."""

from __future__ import annotations

import sys

import opcapture
import pytest
from artefacts import LEAN, launched
from launches import DISTRIBUTED, SCRIPT, needs
from sweeps import sliced

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.engine import Engine
from introspect_cli.errors import UsageError
from introspect_cli.health.check import check
from introspect_cli.records import Kind
from introspect_cli.selection import read_selection
from introspect_cli.store.ranks.merge import reduce_run
from introspect_cli.store.ranks.tasks import as_one
from introspect_cli.store.read.run import open_run

sys.path.append(str(SCRIPT.parent))
from train_ranks import Tokens

pytestmark = [pytest.mark.launch, DISTRIBUTED]

ONE = ("--ranks", "one-per-replica")
RUNS = {
    "single": (1, "single", ()),
    "ddp": (2, "ddp", ()),
    "ddp-one": (2, "ddp", ONE),
    "manual-one": (2, "manual", ONE),
    "rolled": (2, "ddp --fault rolled", ()),
}
ASKED = {
    "fsdp2": (2, "fsdp2", ()),
    "zero1": (2, "zero1", ()),
    "gpipe": (2, "gpipe", ()),
    "1f1b": (2, "1f1b", ()),
    "zero1-one": (2, "zero1", ONE),
    "hsdp-one": (4, "hsdp", ONE),
}


def captured(folder, runs):
    needs(*runs)
    for name, (world, layout, more) in runs.items():
        launched(folder, {name: (world, *layout.split(), "--steps", "2")}, options=(*LEAN, *more))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("joined"), RUNS)


def have(runs, *names):
    """Capture runs that only some tests want, once."""
    captured(runs, {name: ASKED[name] for name in names if not (runs / name).exists()})


def compared(runs, a, b, **options):
    have(runs, a, b)
    return opcapture.compared(runs / a, runs / b, **options)


@pytest.mark.parametrize(
    ("a", "b"), sliced([("ddp", "fsdp2"), ("ddp", "zero1"), ("gpipe", "1f1b")], [("ddp", "fsdp2")])
)
def test_layouts_that_add_up_in_one_order_agree_in_every_checksum(runs, a, b):
    """Each has two values to add, or the same microbatches in another order of running: no sum is taken otherwise."""
    result = compared(runs, a, b)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.counts.within == 0, result.sentence
    assert "tolerance" not in result.sentence
    assert result.counts.records > 250


def test_steps_of_layouts_that_agree_have_one_digest(runs):
    """So that none of them is read: parts and copies are counted as they are put together."""
    have(runs, "ddp", "fsdp2")
    digests = []
    for name in ("ddp", "fsdp2"):
        with open_run(runs / name) as run:
            digests.append([entry.digest for entry in as_one(run).steps])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["ddp", "rolled"])
def test_ranks_that_were_put_together_give_the_answer_that_they_give_themselves(runs, tmp_path, name):
    whole = tmp_path / "whole"
    reduce_run(runs / name, whole, Engine().run)
    ranks, together = (opcapture.compared(runs / "single", b) for b in (runs / name, whole))
    assert (together.verdict, together.sentence, together.counts) == (ranks.verdict, ranks.sentence, ranks.counts)
    assert "b: 2 ranks put together" in together.notes[0]


@pytest.mark.parametrize(
    ("name", "kept"),
    sliced(
        [("ddp-one", {0}), ("hsdp-one", {0, 1}), ("zero1-one", {0, 1}), ("manual-one", {0, 1})],
        [("ddp-one", {0}), ("manual-one", {0, 1})],
    ),
)
def test_one_rank_for_each_part_of_the_model_is_recorded(runs, name, kept):
    have(runs, name)
    with open_run(runs / name) as run:
        assert {rank for rank in run.ranks if len(run.rank(rank))} == kept
        assert set(run.ranks) - run.left_out == kept
        assert run.endings == []
        assert check(run).findings == ()


@pytest.mark.parametrize(
    ("name", "of"), sliced([("ddp-one", "1 of 2"), ("hsdp-one", "2 of 4")], [("ddp-one", "1 of 2")])
)
def test_what_the_ranks_left_out_had_of_their_own_is_not_compared(runs, name, of):
    result = compared(runs, "single", name)
    assert result.verdict is Verdict.UNDECIDED, result.sentence
    assert "all that both runs saw agrees" in result.sentence
    assert result.first is None
    states = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})
    result = compared(runs, "single", name, kinds=states)
    assert result.verdict is Verdict.SAME, (of, result.sentence)


def test_one_rank_for_each_part_can_be_asked_of_a_comparison(runs):
    options = read_selection(ranks="one-per-replica")
    assert compared(runs, "ddp", "ddp", replicas=options.replicas).verdict is Verdict.SAME
    assert read_selection(ranks="all") == read_selection()
    with pytest.raises(UsageError, match="which ranks are copies of one another is not known in either run"):
        compared(runs, "single", "single", replicas=True)


@pytest.mark.parametrize("layout", sliced(["gpipe", "1f1b"], ["1f1b"]))
def test_calls_of_a_stage_are_numbered_as_its_microbatches(runs, layout):
    """In whatever order a schedule runs them, and with the losses and gradients of each."""
    have(runs, layout)
    expected = Tokens(2).ids[:8, :-1].chunk(4)
    with open_run(runs / layout) as run:
        for rank in (0, 1):
            records = list(run.rank(rank).records(0))
            calls = {record.site.call for record in records if record.site.kind is Kind.OUTPUT}
            assert calls == {0, 1, 2, 3}
        given = [r for r in run.rank(0).records(0) if r.site.kind is Kind.INPUT and r.site.fqn == "GPT"]
        losses = [r.site.call for r in records if r.site.kind is Kind.LOSS]
    assert sorted(losses) == [0, 1, 2, 3]
    assert len(given) == 4
    for record in given:
        assert record.summary.stats["mean"] == pytest.approx(expected[record.site.call].double().mean().item())
