"""What ranks share out is known as parts of one whole: owed sums, samples, columns, stretches, ZeRO's partitions."""

from __future__ import annotations

import pytest
import torch
from artefacts import LEAN, launched
from launches import DISTRIBUTED, SCRIPT, needs
from opcapture import compared

import introspect_cli
from introspect_cli.compare.result import Verdict
from introspect_cli.records import Joined, Kind, Phase
from introspect_cli.store.run import open_run
from introspect_cli.store.whole import WholeReader

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
    result = compared(runs / "single", runs / "tpsp")
    assert result.verdict is Verdict.SAME, result.sentence


@pytest.mark.sweep
def test_where_ranks_have_other_samples_too_nothing_is_added_up(runs):
    """The same columns on two ranks are those of other samples."""
    captured(runs, fsdp2tp=4)
    assert compared(runs / "single", runs / "fsdp2tp").verdict is Verdict.SAME
    with open_run(runs / "fsdp2tp") as two:
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
    result = compared(begun / "single", begun / "tpsp")
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


# --- what libraries do to a loss: ranks divide it by the samples of all, and positions have one embedding for all


SHARED = {"single": (1,), "ddp": (2,)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    return launched(folder, SHARED, options=LEAN, script=SCRIPT.parent / "shares.py")


@pytest.mark.parametrize(("a", "b", "large"), [("single", "ddp", "a"), ("ddp", "single", "b")])
def test_a_loss_that_is_divided_by_the_samples_of_all_ranks_is_no_difference(shared, a, b, large):
    result = compared(shared / a, shared / b)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.counts.steps_compared == 3
    assert any(
        note.startswith(f"The output Model['loss'] of run {large} is 2 x that of the other") for note in result.notes
    ), result.notes


def test_gradients_of_what_all_ranks_have_are_added_up(shared):
    """An embedding of positions comes out alike on all ranks; its gradient is the sum over their samples."""
    with open_run(shared / "single") as one, open_run(shared / "ddp") as two:
        whole = WholeReader(str(two.path), [two.rank(rank) for rank in two.ranks])
        found = [
            {r.site.fqn: r.summary for r in reader.records(0) if r.site.kind is Kind.GRAD_OUTPUT}["Model.pos"]
            for reader in (one.rank(0), whole)
        ]
    assert found[1].text == "gradients of several ranks, added up"
    assert found[1].layout.shape == found[0].layout.shape
    # each rank's loss is a mean over its own half of the samples
    assert found[1].sketch == pytest.approx([2 * value for value in found[0].sketch], rel=1e-4, abs=1e-6)


# --- a gradient that ranks have not added up yet is not the equal of one that they have


OWES = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))

    def forward(self, x):
        return nn.functional.layer_norm(x, (8,), self.weight.to_local(grad_placements=[Partial()]))

class Local(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.to_local().add_(parameter.grad.to_local(), alpha=-0.1)

torch.manual_seed(0)
net = Norm()
optimizer = Local(net.parameters())
half = torch.randn(4, 8).chunk(2)[dist.get_rank()]
(net(half) * torch.arange(8.0)).sum().backward()
if sys.argv[1] == "reduced":
    net.weight.grad = net.weight.grad.redistribute(mesh, [Replicate()])
optimizer.step()
"""


@pytest.fixture(scope="module")
def owing(tmp_path_factory):
    needs("tp")
    owing = {name: (2, name) for name in ("reduced", "owed")}
    return launched(tmp_path_factory.mktemp("owed"), owing, script=OWES)


@pytest.mark.parametrize(("names", "side"), [(("reduced", "owed"), "b"), (("owed", "reduced"), "a")])
def test_a_sum_that_is_still_owed_is_named_and_not_the_optimizer(owing, names, side):
    result = introspect_cli.diff(*(owing / name for name in names)).result
    assert ("gradient_sum", "within") in {(one.thing, one.known) for one in result.rests_on}
    found = {one.code: one for one in result.explains}
    assert found["owed"].fields == {"side": side}
    assert found["owed"].certainty.value == "on record"
    assert "amplified" not in found


# --- runs under DeepSpeed's ZeRO: its model's parameters are recorded, of what its optimizers keep flat nothing


PARTITIONED = {
    "single": (1, "single", "--groups"),
    "zero2": (2, "zero2", "--groups"),
    "again": (2, "zero2", "--groups"),
    "fault": (2, "zero2", "--groups", "--fault", "partition"),
    "zero3": (2, "zero3", "--groups"),
    "zero3-fault": (2, "zero3", "--groups", "--fault", "partition"),
}


PARTITION_FAULTS = [("zero2", "fault", "GPT.blocks.1.up.weight"), ("zero3", "zero3-fault", "GPT.blocks.0.up.weight")]


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("zero"), PARTITIONED, options=LEAN)


def whole_step(folder, name, step):
    with open_run(folder / name) as run:
        reader = WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])
        return {record.site: record.summary for record in reader.records(step)}


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_parameters_begin_with_the_bits_of_one_process(partitioned, layout):
    found = [
        {site.fqn: each.checksum for site, each in whole_step(partitioned, name, 0).items() if is_start(site)}
        for name in ("single", layout)
    ]
    assert len(found[0]) == 17
    assert found[0] == found[1]


def is_start(site):
    return (site.phase, site.kind, site.call) == (Phase.START, Kind.PARAM, 0)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_parameters_are_stepped_to_those_of_one_process(partitioned, layout):
    """Each is as many numbers as there, and they add up to nearly the same."""
    for step in range(3):
        one, two = (whole_step(partitioned, name, step) for name in ("single", layout))
        stepped = (Kind.PARAM, Phase.OPTIMIZER)
        left = [{s.fqn: each for s, each in run.items() if (s.kind, s.phase) == stepped} for run in (one, two)]
        assert len(left[0]) == 17
        assert set(left[0]) == set(left[1])
        for fqn, summary in left[1].items():
            assert summary.layout.shape == left[0][fqn].layout.shape
            assert summary.stats["l2"] == pytest.approx(left[0][fqn].stats["l2"], rel=1e-5)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_groups_that_step_in_turn_are_one_step(partitioned, layout):
    with open_run(partitioned / layout) as run:
        assert len(run.rank(0).steps) == 3
        (optimizer,) = run.settings["optimizers"]
        assert [group["weight_decay"] for group in optimizer["groups"]] == [0.01, 0.0]
        assert any("DeepSpeed" in sentence for sentence in run.manifest["not_observed"])


@pytest.mark.parametrize(("one", "other"), [("zero2", "again"), ("single", "zero2"), ("single", "zero3")])
def test_what_a_deepspeed_optimizer_keeps_is_said_not_to_be_recorded_and_makes_no_divergence(partitioned, one, other):
    result = compared(partitioned / one, partitioned / other)
    assert result.verdict is Verdict.SAME


@pytest.mark.parametrize(("sound", "fault", "named"), PARTITION_FAULTS)
def test_a_fault_of_one_rank_is_named_by_parameter(partitioned, sound, fault, named):
    result = compared(partitioned / sound, partitioned / fault)
    assert result.verdict is Verdict.DIVERGED
    assert (result.first.step, result.first.site.kind, result.first.site.phase) == (0, Kind.PARAM, Phase.OPTIMIZER)
    assert result.first.site.fqn == named
