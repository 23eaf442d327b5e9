"""One training in several layouts: each is the same run, and a planted fault is found whatever the layout."""

from __future__ import annotations

import pytest
import torch
from launches import finish, launch

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.result import Verdict
from introspect_cli.health.check import check
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.batch import GATHERED, PARTS
from introspect_cli.store.reader import open_run
from introspect_cli.store.whole import WholeReader

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

RUNS = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp2": (2, "fsdp2"),
    "unreduced": (2, "manual", "--fault", "unreduced"),
}
WIDE = {
    "tp": (2, "tp"),
    "tpsp": (2, "tpsp"),
    "zero1": (2, "zero1"),
    "gpipe": (2, "gpipe"),
    "1f1b": (2, "1f1b"),
    "hsdp": (4, "hsdp"),
    "fsdp2tp": (4, "fsdp2tp"),
    "fsdp2-4": (4, "fsdp2"),
    "manual": (2, "manual"),
    "sum": (2, "manual", "--fault", "sum"),
}


def captured(folder, runs):
    options = ("--no-packages", "--no-env", "--no-source")
    for batch in (list(runs)[at : at + 4] for at in range(0, len(runs), 4)):
        started = {name: launch(folder, name, *runs[name], options=options) for name in batch}
        for name, processes in started.items():
            told = finish(processes)
            assert (folder / name / "manifest.yaml").exists(), told
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("layouts"), RUNS)


@pytest.fixture(scope="module")
def wide_runs(runs):
    return captured(runs, WIDE)


def compared(folder, a, b, **options):
    with open_run(folder / a) as one, open_run(folder / b) as two:
        return compare_runs(one, two, DiffOptions(**options))


def whole(run):
    return WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_layout_is_the_same_run_as_one_process(runs, layout):
    result = compared(runs, "single", layout)
    assert result.verdict is Verdict.SAME, result.sentence
    assert "only within the tolerance or by extrema and means" in result.sentence
    assert "(a: one process, b: 2 ranks)" in result.notes[0]


def test_two_layouts_of_as_many_ranks_are_compared_as_wholes(runs):
    result = compared(runs, "ddp", "fsdp2")
    assert result.verdict is Verdict.SAME, result.sentence


def test_noise_runs_that_say_nothing_of_a_layout_are_told_to_be_left_out(runs):
    with open_run(runs / "single") as one, open_run(runs / "ddp") as two:
        notes = compare_runs(one, two, DiffOptions(), noise=[one]).notes
    assert any("noise runs are not used" in note for note in notes), notes


def test_parts_of_parameters_add_up_to_the_bits_of_one_process(runs):
    with open_run(runs / "single") as one, open_run(runs / "fsdp2") as two:
        both = [{r.site: r.summary for r in reader.records(0)} for reader in (one.rank(0), whole(two))]
        batch = whole(two).read(0)
    starts = [site for site in both[0] if site.phase is Phase.START and site.kind is Kind.PARAM]
    assert len(starts) == 17
    for site in starts:
        assert both[1][site].checksum == both[0][site].checksum, site
        assert both[1][site].stats["mean"] == pytest.approx(both[0][site].stats["mean"], abs=1e-7)
        assert both[1][site].sketch == pytest.approx(both[0][site].sketch, abs=1e-5)
    assert (batch.how == PARTS).sum() >= 4 * len(starts)
    assert (batch.how == GATHERED).any()


def test_a_shard_says_where_it_lies(runs):
    with open_run(runs / "fsdp2") as run:
        found = {r.site.fqn: r.summary for r in run.rank(1).records(0) if r.site.kind is Kind.PARAM}
    summary = found["GPT.tok.weight"]
    assert summary.status is Status.PARTIAL
    assert summary.layout.shape == (12, 16)
    assert summary.layout.part.ranges == (((6, 6),), ((0, 16),))


def test_names_do_not_change_with_the_layout(runs):
    names = []
    for name in ("single", "ddp", "fsdp2"):
        with open_run(runs / name) as run:
            names.append({module.fqn for module in run.rank(0).modules if module.fqn})
            classes = {module.fqn: module.module_class for module in run.rank(0).modules}
            assert classes["GPT"] == "GPT"
    assert names[0] == names[1] == names[2]


def test_a_gradient_that_was_not_reduced_is_the_first_divergence(runs):
    result = compared(runs, "single", "unreduced")
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.fqn == "GPT.head.bias"
    assert result.first.site.kind is Kind.GRAD
    assert result.first.step == 0


def test_one_run_alone_shows_that_a_gradient_was_not_reduced(runs):
    with open_run(runs / "unreduced") as run:
        found = {finding.rule: finding for finding in check(run).findings}
    assert set(found) == {"reduction"}
    finding = found["reduction"]
    assert (finding.step, finding.rank, finding.site) == (0, 1, "grad GPT.head.bias")
    assert "differs on rank 1, compared with rank 0" in finding.evidence
    assert "from step 0 on the parameter differs too" in finding.evidence


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_ranks_of_a_sound_run_are_found_sound(runs, layout):
    with open_run(runs / layout) as run:
        result = check(run)
    assert result.findings == ()
    assert {"lost-rank", "reduction", "copies-differ", "rank-settings", "rank-layout"} <= set(result.checked)


def test_one_rank_alone_is_compared_when_it_is_asked_for(runs):
    assert compared(runs, "ddp", "ddp", ranks=(1,)).verdict is Verdict.SAME


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tp", "tpsp", "zero1", "gpipe", "1f1b", "hsdp", "fsdp2tp", "fsdp2-4", "manual"])
def test_every_layout_is_the_same_run_as_one_process(wide_runs, layout):
    result = compared(wide_runs, "single", layout)
    assert result.verdict is not Verdict.DIVERGED, result.sentence


@pytest.mark.sweep
def test_a_sum_instead_of_a_mean_is_found(wide_runs):
    result = compared(wide_runs, "ddp", "sum")
    assert result.first.site.fqn == "GPT.blocks.1.down.weight"
    assert result.first.scale == pytest.approx(2)
