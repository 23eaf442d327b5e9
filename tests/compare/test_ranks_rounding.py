"""One training on other numbers of ranks: what only rounding moves, what one run cuts, and where one goes on."""

from __future__ import annotations

import pytest
import torch
from artefacts import artefact
from launches import DISTRIBUTED, launch, needs, recorded

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.health import training
from introspect_cli.health.check import check
from introspect_cli.store.read.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

layout, words = sys.argv[1], sys.argv[2:]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        if fused:
            self.qkv = nn.Linear(16, 48)
        else:
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.o = nn.Linear(16, 16)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        return self.o(scaled_dot_product_attention(*parts, is_causal=True))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.norm, self.head = nn.Embedding(12, 16), nn.LayerNorm(16), nn.Linear(16, 12)
        self.apart, self.fused = Attention(fused=False), Attention(fused=True)

    def forward(self, ids):
        x = self.tok(ids)
        x = x + self.apart(x)
        return self.head(self.norm(x + self.fused(x)))

torch.manual_seed(0)
model, start = Net(), 0
ids = torch.randint(12, (5 * 8, 5), generator=torch.Generator().manual_seed(1))
if world > 1:
    dist.init_process_group("gloo")
if layout == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
if layout == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    ignored = {model.norm.weight} if "ignored" in words else None
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=ignored)
if layout == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.9 if "betas" in words else 0.999))
if "resume" in words:
    saved = torch.load("saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = 2
order = [at for at in range(len(ids)) if at % world == rank]
loader = torch.utils.data.DataLoader(ids, batch_size=8 // world, sampler=order)
for step, batch in enumerate(loader):
    if step < start:
        continue
    optimizer.zero_grad()
    cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    if "save" in words and step == 1 and rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""

RUNS = {
    "alone": (1, "alone"),
    "ddp": (2, "ddp", "save"),
    "betas": (2, "ddp", "betas"),
    "fsdp1": (2, "fsdp1"),
    "fsdp2": (2, "fsdp2"),
    "ignored": (2, "fsdp2", "ignored"),
    "resumed": (1, "alone", "resume"),
}


@pytest.fixture(scope="module")
def runs():
    return artefact("rounding", made)


def made(folder):
    (folder / "train.py").write_text(SCRIPT)
    early = [name for name in RUNS if name != "resumed" and not (name in ("fsdp2", "ignored") and _lacks())]
    for names in (early, ["resumed"]):
        recorded(folder, {name: launch(folder, name, *RUNS[name], script=folder / "train.py") for name in names})


def _lacks():
    return tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)


def compared(folder, one, two):
    with open_run(folder / one) as a, open_run(folder / two) as b:
        return compare_runs(a, b, DiffOptions())


NOT_COMPARED = (
    "The gradient of Net.apart.k.bias and of 1 other parameter is nothing but rounding in both runs: what the "
    "optimizer makes of that, and what their modules return, was not compared."
)


@pytest.mark.parametrize("other", ["ddp", "fsdp1"])
def test_a_bias_that_nothing_but_rounding_moves_is_no_divergence(runs, other):
    """A key's bias changes no output: alone it is all of a gradient, beside queries and values a third of it."""
    result = compared(runs, "alone", other)
    assert result.verdict is Verdict.SAME, result.sentence
    assert [note for note in result.notes if "but rounding" in note] == [NOT_COMPARED]


def test_what_moves_other_parameters_is_a_divergence_beside_such_a_bias(runs):
    result = compared(runs, "alone", "betas")
    assert result.verdict is Verdict.DIVERGED
    assert "betas" in result.sentence


def test_a_rank_that_holds_nothing_of_a_parameter_is_not_said_to_have_no_gradient(runs, monkeypatch):
    monkeypatch.setattr(training, "LEAST", 3)
    with open_run(runs / "fsdp1") as run:
        result = check(run)
    assert result.findings == ()
    assert "no-gradient" in result.checked


def test_a_parameter_that_one_run_cuts_and_the_other_does_not_begins_alike(runs):
    needs("fsdp2")
    result = compared(runs, "fsdp2", "ignored")
    assert result.sentence.startswith("First divergence at step 0: the gradient of Net.norm.weight")
    assert [one.code for one in result.explains] == ["copies", "not-reduced-proved"]


def test_a_run_that_is_resumed_on_another_number_of_ranks_is_compared_from_there(runs):
    result = compared(runs, "ddp", "resumed")
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.sentence.startswith("Resumed correctly: run b restored all that is on record of step 1 of a")
    assert "not recorded: place in the data" in result.sentence  # two ranks read halves of what one process reads
