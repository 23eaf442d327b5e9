"""Plain tensors of tensor and sequence parallel modules: known as parts by what `to_local` and the styles say."""

from __future__ import annotations

import pytest
import torch
from artefacts import launched
from launches import DISTRIBUTED, SCRIPT, needs
from opcapture import compared

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Joined, Kind, Phase
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

FLOWING = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT)


NESTED = SCRIPT.parent / "nested.py"
QUIET = ("--no-packages", "--no-env", "--no-source")

KEPT = {
    "no more than": ("--record", "param,grad,loss"),
    "outputs": ("--record", "output"),
    "no sketch": ("--no-sketch",),
    "a step": ("--steps", "1"),
    "a block": ("--modules", "*.blocks.1*"),
    "without a block": ("--exclude", "*.blocks.1*"),
    "top": ("--max-depth", "1"),
}
"""Captures that keep less."""


def captured(folder, **runs):
    needs(*runs)
    words = {name: (world, name, "--steps", "2") for name, world in runs.items()}
    launched(folder, words, options=(*QUIET, "--steps", "0"))


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
    added = {site for site, (_, how) in parts.items() if how == Joined.PARTS and site.kind in FLOWING}
    assert len(added) >= 20
    for site in added:
        sketches = [torch.tensor(each[site][0].summary.sketch) for each in (alone, parts)]
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
    assert hows == {Joined.GATHERED}
    up = next(record for site, (record, _) in found.items() if site.kind is Kind.OUTPUT and site.fqn.endswith("0.up"))
    assert up.summary.layout.shape == (8, 4, 32)


def nested(folder, *words, options=(), **runs):
    """Captures of the model whose modules hand on shares in tuples, dictionaries and dataclasses."""
    needs(*(layout for layout, _ in runs.values()))
    ranks = {name: (world, layout, *words) for name, (layout, world) in runs.items()}
    launched(folder, ranks, options=(*QUIET, *options), script=NESTED)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """With layers that begin at zero, and an evaluation without gradients after each step."""
    folder = tmp_path_factory.mktemp("nested")
    nested(folder, "--zero", "--evaluate", options=("--eval",), single=("single", 1), tpsp=("tpsp", 2))
    nested(folder, "--fault", "1.01", fault=("tpsp", 2))
    nested(folder, plain=("single", 1))
    return folder


def test_shares_that_happen_to_be_equal_are_not_taken_for_copies_of_another_shape(begun):
    """Gradients of layers that begin at zero are zero on all ranks, half as many on each."""
    result = compared(begun / "single", begun / "tpsp")
    assert result.verdict is Verdict.SAME, result.sentence
    with open_run(begun / "tpsp") as run:
        hows = {
            site.fqn: (record, how) for site, (record, how) in whole_of(run).items() if site.kind is Kind.GRAD_OUTPUT
        }
    record, how = hows["Net.blocks.2.act"]
    assert (record.summary.layout.shape, record.summary.text, how) == ((8, 6, 16), "equal on 2 ranks", Joined.ALIKE)


def test_an_evaluation_without_gradients_is_compared_too(begun):
    result = compared(begun / "single", begun / "tpsp", evaluation=True)
    assert result.verdict is Verdict.SAME, result.sentence
    with open_run(begun / "tpsp") as run:
        evaluated = [
            record for step in (0, 1, 2) for record in run.rank(0).records(step) if record.site.phase is Phase.EVAL
        ]
    assert {".out", "['out']", "[0]"} <= {record.site.path for record in evaluated}


@pytest.mark.sweep
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("layout", ["tp", "tpsp"])
def test_a_capture_that_keeps_less_says_no_more(tmp_path, kept, layout):
    nested(tmp_path, "--evaluate", options=KEPT[kept], single=("single", 1), ranks=(layout, 2))
    # norms of sequence parallel ranks have gradients that are yet to be added up; of a sum only sketches tell
    wanted = Verdict.UNDECIDED if (layout, kept) == ("tpsp", "no sketch") else Verdict.SAME
    for one, two in (("single", "ranks"), ("ranks", "single")):
        for options in ({}, {"rtol": 1e-2}):
            result = compared(tmp_path / one, tmp_path / two, **options)
            assert result.verdict is wanted, result.sentence
