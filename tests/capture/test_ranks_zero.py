"""Runs under DeepSpeed's ZeRO: what its optimizers keep flat is recorded as parts of the model's parameters.

`fixtures/ranks/partitions.py` stands in for DeepSpeed.
"""

from __future__ import annotations

import opcapture
import pytest
from artefacts import LEAN, launched
from launches import DISTRIBUTED

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind, Phase
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

RUNS = {
    "single": (1, "single", "--groups"),
    "zero2": (2, "zero2", "--groups"),
    "fault": (2, "zero2", "--groups", "--fault", "partition"),
    "zero3": (2, "zero3", "--groups"),
    "zero3-fault": (2, "zero3", "--groups", "--fault", "partition"),
    "evaluated": (2, "zero2", "--groups", "--evaluate"),
    "single-bf16": (1, "single", "--groups", "--bf16"),
    "bf16": (2, "zero2", "--groups", "--bf16"),
    "unmapped": (2, "zero2", "--groups", "--fault", "unmapped"),
}


FAULTS = [("zero2", "fault", "GPT.blocks.1.up.weight"), ("zero3", "zero3-fault", "GPT.blocks.0.up.weight")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("zero"), RUNS, options=LEAN)


def whole(folder, name, step):
    with open_run(folder / name) as run:
        reader = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])
        return {record.site: record.summary for record in reader.records(step)}


def by_parameter(found, kind):
    return {(site.fqn, site.path): summary for site, summary in found.items() if site.kind is kind}


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_parameters_begin_with_the_bits_of_one_process(runs, layout):
    found = [
        {site.fqn: each.checksum for site, each in whole(runs, name, 0).items() if is_start(site)}
        for name in ("single", layout)
    ]
    assert len(found[0]) == 17
    assert found[0] == found[1]


def is_start(site):
    return (site.phase, site.kind, site.call) == (Phase.START, Kind.PARAM, 0)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_gradients_parameters_and_state_are_those_of_one_process(runs, layout):
    """Each is as many numbers as there, and they add up to nearly the same."""
    for step in range(3):
        one, two = (whole(runs, name, step) for name in ("single", layout))
        for kind in (Kind.GRAD, Kind.OPTIMIZER_STATE):
            expected, got = by_parameter(one, kind), by_parameter(two, kind)
            assert set(got) == set(expected)
            assert len({name for name, _ in got}) == 17
            for key, summary in got.items():
                assert summary.status is expected[key].status
                assert summary.layout.shape == expected[key].layout.shape
                assert summary.stats["l2"] == pytest.approx(expected[key].stats["l2"], rel=1e-4)
        stepped = (Kind.PARAM, Phase.OPTIMIZER)
        left = [{s.fqn: each for s, each in run.items() if (s.kind, s.phase) == stepped} for run in (one, two)]
        assert set(left[0]) == set(left[1])
        for fqn, summary in left[1].items():
            assert summary.stats["l2"] == pytest.approx(left[0][fqn].stats["l2"], rel=1e-5)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_groups_that_step_in_turn_are_one_step(runs, layout):
    with open_run(runs / layout) as run:
        assert len(run.rank(0).steps) == 3
        (optimizer,) = run.settings["optimizers"]
        names = [group["params"] for group in optimizer["groups"]]
        assert [group["weight_decay"] for group in optimizer["groups"]] == [0.01, 0.0]
    assert names[0][0] == "GPT.tok.weight"
    assert [len(each) for each in names] == [6, 11]


@pytest.mark.parametrize(("sound", "fault", "named"), FAULTS)
def test_a_fault_of_one_rank_is_named_by_parameter(runs, sound, fault, named):
    for other in ("single", sound):
        result = opcapture.compared(runs / other, runs / fault)
        assert result.verdict is Verdict.DIVERGED
        assert (result.first.step, result.first.site.kind) == (0, Kind.GRAD)
        assert result.first.site.fqn == named
    assert "rank 1" in result.sentence
