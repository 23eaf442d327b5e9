"""One training in several layouts: each is the same run, and a planted fault is found whatever the layout."""

from __future__ import annotations

import opcapture
import pytest
from artefacts import LEAN, launched
from launches import DISTRIBUTED, lacks, needs

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.health.check import check
from introspect_cli.records import Joined, Kind, Phase, Status
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

RUNS = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp2": (2, "fsdp2"),
    "unreduced": (2, "manual", "--fault", "unreduced"),
}
ACCUMULATED = ("--accumulate", 2)
THREE = ("ddp", "fsdp1", "fsdp2", "zero1")
SIXES = ("--batch", 6, "--experts")
"""Three ranks share out six samples, and four experts so that the last rank has none; shards of 16 rows are uneven."""

ALONE = {
    "experts": (1, "single", "--experts"),
    "compiled": (1, "single", "--compile"),
    "accumulated": (1, "single", *ACCUMULATED),
    "sixes": (1, "single", *SIXES),
    "groups": (1, "single", "--groups"),
    "bf16": (2, "fsdp2", "--bf16"),
}
LAYOUTS = {
    "fsdp1": (2, "fsdp1"),
    "tp": (2, "tp"),
    "tpsp": (2, "tpsp"),
    "zero1": (2, "zero1"),
    "zero2": (2, "zero2"),
    "zero2-groups": (2, "zero2", "--groups"),
    "zero2-4": (4, "zero2"),
    "zero3": (2, "zero3"),
    "zero3-4": (4, "zero3"),
    "gpipe": (2, "gpipe"),
    "1f1b": (2, "1f1b"),
    "ep": (2, "ep", "--experts"),
    "manual": (2, "manual"),
    "ddp-accumulated": (2, "ddp", *ACCUMULATED),
    "ddp-no-sync": (2, "ddp", *ACCUMULATED, "--no-sync"),
    "ddp-checkpoint": (2, "ddp", "--checkpoint"),
    "ddp-compile": (2, "ddp", "--compile"),
    "ddp-4": (4, "ddp"),
    "fsdp2-4": (4, "fsdp2"),
    "ep-4": (4, "ep", "--experts"),
    "hsdp": (4, "hsdp"),
    "fsdp2tp": (4, "fsdp2tp"),
    "fsdp1-no-sync": (2, "fsdp1", *ACCUMULATED, "--no-sync"),
    "fsdp2-accumulated": (2, "fsdp2", *ACCUMULATED),
    "fsdp2-unshard": (2, "fsdp2", "--unshard"),
    "fsdp2-checkpoint": (2, "fsdp2", "--checkpoint"),
    "fsdp2-bf16-4": (4, "fsdp2", "--bf16"),
    "tp-checkpoint": (2, "tp", "--checkpoint"),
    **{f"{layout}-3": (3, layout, *SIXES) for layout in THREE},
}
FEW = ("fsdp1", "zero2-groups", "tpsp", "1f1b", "ep", "ddp-no-sync", "fsdp2-3")
BESIDE = {
    "ep": "experts",
    "ep-4": "experts",
    "ddp-compile": "compiled",
    "zero2-groups": "groups",
    "fsdp2-bf16-4": "bf16",
    **{f"{name}-3": "sixes" for name in THREE},
}


def captured(folder, runs):
    return launched(folder, {name: words for name, words in runs.items() if not lacks(name)}, options=LEAN)


def capture_now(folder, name):
    """A run that only some tests want, captured once."""
    if not (folder / name).exists():
        captured(folder, {name: {**ALONE, **LAYOUTS}[name]})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("layouts"), RUNS)


def compared(folder, a, b, **options):
    needs(a, b)
    return opcapture.compared(folder / a, folder / b, **options)


def whole(run):
    return WholeReader(str(run.path), [run.rank(rank) for rank in run.ranks])


READS_AFTER = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
model = fully_shard(model) if sys.argv[1] == "fsdp2" else nn.parallel.DistributedDataParallel(model)
held = list(model.parameters())
optimizer = torch.optim.SGD(held, lr=0.1)
for x in torch.randn(3, dist.get_world_size(), 4, 4):
    optimizer.zero_grad()
    model(x[dist.get_rank()]).square().mean().backward()
    optimizer.step()
whole = [each.full_tensor() if sys.argv[1] == "fsdp2" else each.detach().clone() for each in held]
print(sum(each.sum().item() for each in whole))
dist.destroy_process_group()
"""


def test_a_script_that_holds_parameters_and_reads_them_after_training_is_the_same_under_either(tmp_path):
    launched(tmp_path, {name: (2, name) for name in ("ddp", "fsdp2") if not lacks(name)}, script=READS_AFTER)
    result = compared(tmp_path, "ddp", "fsdp2")
    assert result.verdict is Verdict.SAME, result.sentence
    for name in ("ddp", "fsdp2"):
        with open_run(tmp_path / name) as run:
            assert run.steps == 3
            assert "product" not in set(run.rank(0).sites.kind)


def test_noise_runs_that_say_nothing_of_a_layout_are_reported_to_be_left_out(runs):
    with open_run(runs / "single") as one, open_run(runs / "ddp") as two:
        notes = compare_runs(one, two, DiffOptions(), noise=[one]).notes
    assert any("noise runs are not used" in note for note in notes), notes


def test_parts_of_parameters_add_up_to_the_bits_of_one_process(runs):
    needs("fsdp2")
    with open_run(runs / "single") as one, open_run(runs / "fsdp2") as two:
        both = [{r.site: r.summary for r in reader.records(0)} for reader in (one.rank(0), whole(two))]
        batch = whole(two).read(0)
    starts = [site for site in both[0] if site.phase is Phase.START and site.kind is Kind.PARAM]
    assert len(starts) == 17
    for site in starts:
        assert both[1][site].checksum == both[0][site].checksum, site
        assert both[1][site].stats["mean"] == pytest.approx(both[0][site].stats["mean"], abs=1e-7)
        assert both[1][site].sketch == pytest.approx(both[0][site].sketch, abs=1e-5)
    assert (batch.how == Joined.PARTS).sum() >= 4 * len(starts)
    assert (batch.how == Joined.GATHERED).any()


def test_a_shard_says_where_it_lies(runs):
    needs("fsdp2")
    with open_run(runs / "fsdp2") as run:
        found = {r.site.fqn: r.summary for r in run.rank(1).records(0) if r.site.kind is Kind.PARAM}
    summary = found["GPT.tok.weight"]
    assert summary.status is Status.PARTIAL
    assert summary.layout.shape == (12, 16)
    assert summary.layout.part.ranges == (((6, 6),), ((0, 16),))


def test_names_do_not_change_with_the_layout(runs):
    needs("fsdp2")
    names = []
    for name in ("single", "ddp", "fsdp2"):
        with open_run(runs / name) as run:
            names.append({module.fqn for module in run.rank(0).modules if module.fqn})
            classes = {module.fqn: module.module_class for module in run.rank(0).modules}
            assert classes["GPT"] == "GPT"
    assert names[0] == names[1] == names[2]


def test_what_a_script_gathers_before_a_step_is_recorded_as_this_ranks_shard(runs):
    """Its optimizer knows the shard alone."""
    capture_now(runs, "fsdp2-unshard")
    result = compared(runs, "fsdp2", "fsdp2-unshard")
    assert result.verdict is Verdict.SAME, result.sentence
    with open_run(runs / "fsdp2-unshard") as run:
        found = {(r.site.phase, r.site.fqn): r.summary for r in run.rank(1).records(0) if r.site.kind is Kind.PARAM}
    assert {fqn for phase, fqn in found if phase is Phase.START} == {
        fqn for phase, fqn in found if phase is not Phase.START
    }
    for phase in (Phase.START, Phase.OPTIMIZER):
        assert found[phase, "GPT.tok.weight"].layout.part.ranges == (((6, 6),), ((0, 16),))


@pytest.mark.parametrize(
    "layout", [name if name in FEW else pytest.param(name, marks=pytest.mark.sweep) for name in LAYOUTS]
)
def test_every_layout_is_the_same_run_as_one_process(runs, layout):
    needs(layout)
    alone = BESIDE.get(layout, "single")
    for name in {alone, layout} - {"single"}:
        capture_now(runs, name)
    result = compared(runs, alone, layout)
    assert result.verdict is Verdict.SAME, result.sentence
    half = "; those in bfloat16 or float16, and what comes of them, by 0.03" if "bf16" in layout else ""
    assert f"may differ by 0.0001 of the values{half}." in result.notes[0]
    starts = start_parameters(runs, alone), start_parameters(runs, layout)
    assert len(starts[0]) == 17
    assert starts[0] == starts[1]
    with open_run(runs / layout) as run:
        assert check(run).findings == ()


def start_parameters(folder, name):
    """Checksums of all parameters before training, by name; parts added up to wholes."""
    with open_run(folder / name) as run:
        records = list(whole(run).records(0))
    found = [r for r in records if (r.site.phase, r.site.kind, r.site.call) == (Phase.START, Kind.PARAM, 0)]
    return {r.site.fqn: r.summary.checksum for r in found}


def test_a_loss_that_is_not_divided_by_the_number_of_batches_is_no_layout(runs):
    """Other than a loss that is: its gradients are twice as large."""
    captured(runs, {"undivided": (2, "ddp", *ACCUMULATED, "--fault", "undivided")})
    result = compared(runs, "single", "undivided")
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.kind is Kind.GRAD
    assert "gradients of b are 2 x those of a: " in result.sentence
    assert "in b the losses of the 2 microbatches of a step are added up, not averaged" in result.sentence


def test_a_compiled_model_is_said_to_be_unseen_beside_one_that_is_not(runs):
    capture_now(runs, "compiled")
    result = compared(runs, "single", "compiled")
    assert result.verdict is Verdict.SAME  # by its results, all of which both runs recorded
    assert "Not compared: " in result.sentence
    assert "that only one run could see" in result.sentence
