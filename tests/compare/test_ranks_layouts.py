"""One training in several layouts: each is the same run, and a planted fault is found whatever the layout."""

from __future__ import annotations

import opcapture
import pytest
from artefacts import decided, launched
from launches import DISTRIBUTED, needs

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Joined, Kind, Phase, Status
from introspect_cli.store.run import open_run
from introspect_cli.store.whole import WholeReader

pytestmark = [pytest.mark.launch, DISTRIBUTED]


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
    needs("fsdp2")
    launched(tmp_path, {name: (2, name) for name in ("ddp", "fsdp2")}, script=READS_AFTER)
    result = opcapture.compared(tmp_path / "ddp", tmp_path / "fsdp2")
    assert result.verdict is Verdict.SAME, result.sentence
    for name in ("ddp", "fsdp2"):
        with open_run(tmp_path / name) as run:
            assert run.steps == 3
            assert "product" not in set(run.rank(0).sites.kind)


def test_noise_runs_that_say_nothing_of_a_layout_are_reported_to_be_left_out():
    single, ddp = decided("ranks", "single", "ddp")
    with open_run(single) as one, open_run(ddp) as two:
        notes = compare_runs(one, two, DiffOptions(), noise=[one]).notes
    assert any("noise runs are not used" in note for note in notes), notes


def test_parts_of_parameters_add_up_to_the_bits_of_one_process():
    single, fsdp2 = decided("ranks", "single", "fsdp2")
    with open_run(single) as one, open_run(fsdp2) as two:
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


def test_names_do_not_change_with_the_layout():
    names = []
    for path in decided("ranks", "single", "ddp", "fsdp2"):
        with open_run(path) as run:
            names.append({module.fqn for module in run.rank(0).modules if module.fqn})
            classes = {module.fqn: module.module_class for module in run.rank(0).modules}
            assert classes["GPT"] == "GPT"
    assert names[0] == names[1] == names[2]


def test_what_a_script_gathers_before_a_step_is_recorded_as_this_ranks_shard():
    """Its optimizer knows the shard alone."""
    with open_run(*decided("layouts", "fsdp2-unshard")) as run:
        found = {(r.site.phase, r.site.fqn): r.summary for r in run.rank(1).records(0) if r.site.kind is Kind.PARAM}
    assert {fqn for phase, fqn in found if phase is Phase.START} == {
        fqn for phase, fqn in found if phase is not Phase.START
    }
    for phase in (Phase.START, Phase.OPTIMIZER):
        summary = found[phase, "GPT.tok.weight"]
        assert (summary.status, summary.layout.shape) == (Status.PARTIAL, (12, 16))
        assert summary.layout.part.ranges == (((6, 6),), ((0, 16),))
