"""Ranks put together: layouts that agree to the last bit, and captures of one rank for each part of a model."""

from __future__ import annotations

import sys

import opcapture
import pytest
from artefacts import decided
from launches import DISTRIBUTED, SCRIPT
from sweeps import sliced
from verbs import verb

from introspect_cli.compare.result import Verdict
from introspect_cli.health.check import check
from introspect_cli.records import Kind
from introspect_cli.store.run import open_run

sys.path.append(str(SCRIPT.parent))
from train_ranks import Tokens

pytestmark = [pytest.mark.launch, DISTRIBUTED]


@pytest.mark.parametrize(
    ("a", "b"), sliced([("ddp", "fsdp2"), ("ddp", "zero1"), ("gpipe", "1f1b")], [("ddp", "fsdp2")])
)
def test_layouts_that_add_up_in_one_order_agree_in_every_checksum(a, b):
    """Each has two values to add, or the same microbatches in another order of running: no sum is taken otherwise."""
    paths = decided("ranks", a, b)
    result = opcapture.compared(*paths)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.counts.within == 0, result.sentence
    assert result.counts.records > 250


@pytest.mark.parametrize("name", ["ddp", "ddp-rolled"])
def test_ranks_that_were_put_together_give_the_answer_that_they_give_themselves(tmp_path, name):
    single, run = decided("ranks", "single", name)
    assert verb("merge", run, "-o", tmp_path / "whole").returncode == 0
    ranks, together = (opcapture.compared(single, b) for b in (run, tmp_path / "whole"))
    assert (together.verdict, together.sentence, together.counts) == (ranks.verdict, ranks.sentence, ranks.counts)
    assert "b: 2 ranks put together" in together.notes[0]


@pytest.mark.parametrize(
    ("group", "name", "kept"),
    sliced(
        [
            ("ranks", "ddp-one", {0}),
            ("layouts", "hsdp-one", {0, 1}),
            ("layouts", "zero1-one", {0, 1}),
            ("layouts", "manual-one", {0, 1}),
        ],
        [("ranks", "ddp-one", {0}), ("layouts", "manual-one", {0, 1})],
    ),
)
def test_ranks_that_hold_all_of_the_model_are_recorded_alone_and_no_more_is_compared(group, name, kept):
    (path,) = decided(group, name)
    with open_run(path) as run:
        assert {rank for rank in run.ranks if len(run.rank(rank))} == kept
        assert set(run.ranks) - run.left_out == kept
        assert run.endings == []
        assert check(run).findings == ()
    if name != "manual-one":  # whose gradients are of its own samples
        states = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})
        result = opcapture.compared(*decided("ranks", "single"), path, kinds=states)
        assert result.verdict is Verdict.SAME, result.sentence


@pytest.mark.parametrize("layout", sliced(["gpipe", "1f1b"], ["1f1b"]))
def test_calls_of_a_stage_are_numbered_as_its_microbatches(layout):
    """In whatever order a schedule runs them, and with the losses and gradients of each."""
    with open_run(*decided("ranks", layout)) as run:
        for rank in (0, 1):
            records = list(run.rank(rank).records(0))
            calls = {record.site.call for record in records if record.site.kind is Kind.OUTPUT}
            assert calls == {0, 1, 2, 3}
        given = [r for r in run.rank(0).records(0) if r.site.kind is Kind.INPUT and r.site.fqn == "GPT"]
        losses = [r.site.call for r in records if r.site.kind is Kind.LOSS]
        expected = Tokens(run.last_step + 1).ids[:8, :-1].chunk(4)
    assert sorted(losses) == [0, 1, 2, 3]
    assert len(given) == 4
    for record in given:
        assert record.summary.stats["mean"] == pytest.approx(expected[record.site.call].double().mean().item())
