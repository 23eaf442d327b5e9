"""Plain tensors of tensor and sequence parallel modules: known as parts by what `to_local` and the styles say."""

from __future__ import annotations

import pytest
import torch
from launches import finish, launch, needs

from introspect_cli.capture import private_api
from introspect_cli.capture.ranks import tags
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.store.batch import GATHERED, PARTS
from introspect_cli.store.reader import open_run
from introspect_cli.store.whole import WholeReader

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

FLOWING = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT)


def captured(folder, **runs):
    needs(*runs)
    options = ("--no-packages", "--no-env", "--no-source", "--steps", "0")
    started = {name: launch(folder, name, world, name, "--steps", "2", options=options) for name, world in runs.items()}
    for name, processes in started.items():
        told = finish(processes)
        assert (folder / name / "manifest.yaml").exists(), told


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags")
    captured(folder, single=1, tpsp=2)
    return folder


def whole_of(run):
    whole = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])
    batch = whole.read(0)
    return {whole.sites[int(site)][0]: (whole.record(batch, row, 0), batch.how[row])
            for row, site in enumerate(batch.site)}  # fmt: skip


def test_a_rank_knows_which_columns_and_which_stretch_it_has(runs):
    with open_run(runs / "tpsp") as run:
        found = {(r.site.kind, r.site.fqn): r.summary.layout for r in run.rank(1).records(0)}
    up = found[Kind.OUTPUT, "GPT.blocks.0.up"]
    assert (up.shape, up.part.ranges, up.part.source) == ((8, 4, 32), (((0, 8),), ((0, 4),), ((16, 16),)), "tag")
    assert found[Kind.GRAD_OUTPUT, "GPT.blocks.0.up"].part == up.part
    given = found[Kind.INPUT, "GPT.blocks.1.norm"]
    assert (given.shape, given.part.ranges, given.part.source) == (
        (8, 4, 16),
        (((0, 8),), ((2, 2),), ((0, 16),)),
        "style",
    )


def test_shares_add_up_to_what_one_process_has(runs):
    """Within another order of summation, and not by extrema and means alone."""
    with open_run(runs / "single") as one, open_run(runs / "tpsp") as two:
        alone, parts = whole_of(one), whole_of(two)
    added = {site for site, (_, how) in parts.items() if how == PARTS and site.kind in FLOWING}
    assert len(added) >= 20
    for site in added:
        sketches = [torch.tensor(own[site][0].summary.sketch) for own in (alone, parts)]
        assert alone[site][0].summary.layout.shape == parts[site][0].summary.layout.shape
        assert torch.allclose(*sketches, rtol=1e-4, atol=1e-5), site


def test_the_layout_is_the_same_run(runs):
    with open_run(runs / "single") as one, open_run(runs / "tpsp") as two:
        result = compare_runs(one, two, DiffOptions())
    assert result.verdict is Verdict.SAME, result.sentence


@pytest.mark.sweep
def test_where_ranks_have_other_samples_too_nothing_is_added_up(runs):
    """The same columns on two ranks are those of other samples."""
    captured(runs, fsdp2tp=4)
    with open_run(runs / "single") as one, open_run(runs / "fsdp2tp") as two:
        assert compare_runs(one, two, DiffOptions()).verdict is Verdict.SAME
        found = whole_of(two)
    hows = {how for site, (_, how) in found.items() if site.kind in FLOWING}
    assert hows == {GATHERED}
    up = next(record for site, (record, _) in found.items() if site.kind is Kind.OUTPUT and site.fqn.endswith("0.up"))
    assert up.summary.layout.shape == (8, 4, 32)


def test_a_tensor_that_no_call_made_has_no_place():
    x = torch.ones(2, 3, requires_grad=True)
    assert tags.from_call(x) is None
    assert tags.from_call(x * 2) is None
    assert private_api.styles_of(torch.nn.Linear(3, 2)) == []
