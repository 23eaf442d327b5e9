"""Runs under DeepSpeed's ZeRO: what its optimizers keep flat is recorded as parts of the model's parameters.

`fixtures/ranks/partitions.py` stands in for DeepSpeed.
"""

from __future__ import annotations

import opcapture
import pytest
import torch
from launches import launch, recorded

from introspect_cli.compare.result import Verdict
from introspect_cli.records import Kind, Phase
from introspect_cli.store.reader import open_run
from introspect_cli.store.whole import WholeReader

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

RUNS = {
    "single": (1, "single", "--groups"),
    "zero2": (2, "zero2", "--groups"),
    "fault": (2, "zero2", "--groups", "--fault", "partition"),
    "unmapped": (2, "zero2", "--groups", "--fault", "unmapped"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    options = ("--no-packages", "--no-env", "--no-source")
    recorded(folder, {name: launch(folder, name, *run, options=options) for name, run in RUNS.items()})
    return folder


def whole(folder, name, step):
    with open_run(folder / name) as run:
        reader = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])
        return {record.site: record.summary for record in reader.records(step)}


def by_parameter(found, kind):
    return {(site.fqn, site.path): summary for site, summary in found.items() if site.kind is kind}


def test_gradients_parameters_and_state_are_those_of_one_process(runs):
    """Each is as many numbers as there, and they add up to nearly the same."""
    for step in range(3):
        one, two = (whole(runs, name, step) for name in ("single", "zero2"))
        for kind in (Kind.GRAD, Kind.OPTIMIZER_STATE):
            expected, got = by_parameter(one, kind), by_parameter(two, kind)
            assert set(got) == set(expected)
            assert len({name for name, _ in got}) == 17
            for key, summary in got.items():
                assert summary.status is expected[key].status
                assert summary.layout.shape == expected[key].layout.shape
                assert summary.stats["l2"] == pytest.approx(expected[key].stats["l2"], rel=1e-4)
        stepped = (Kind.PARAM, Phase.OPTIMIZER)
        left = [{s.fqn: own for s, own in run.items() if (s.kind, s.phase) == stepped} for run in (one, two)]
        assert set(left[0]) == set(left[1])
        for fqn, summary in left[1].items():
            assert summary.stats["l2"] == pytest.approx(left[0][fqn].stats["l2"], rel=1e-5)


def test_groups_that_step_in_turn_are_one_step(runs):
    with open_run(runs / "zero2") as run:
        assert len(run.rank(0).steps) == 3
        (optimizer,) = run.settings["optimizers"]
        names = [group["params"] for group in optimizer["groups"]]
        assert [group["weight_decay"] for group in optimizer["groups"]] == [0.01, 0.0]
    assert names[0][0] == "GPT.tok.weight"
    assert [len(own) for own in names] == [6, 11]


def test_a_fault_of_one_rank_is_named_by_parameter(runs):
    for other in ("single", "zero2"):
        result = opcapture.compared(runs / other, runs / "fault")
        assert result.verdict is Verdict.DIVERGED
        assert (result.first.step, result.first.site.kind) == (0, Kind.GRAD)
        assert result.first.site.fqn == "GPT.blocks.1.up.weight"
    assert "rank 1" in result.sentence


def test_what_does_not_say_where_it_lies_is_said_to_be_flat(runs):
    with open_run(runs / "unmapped") as run:
        assert any("is recorded flat" in sentence for sentence in run.manifest["not_observed"])
