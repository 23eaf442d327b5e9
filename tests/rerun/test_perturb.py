"""`capture --perturb` moves initial parameters by one rounding and says so; `diff --noise` measures b by such a run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from introspect_cli.api import capture
from introspect_cli.records import Kind, Phase
from introspect_cli.store.run import open_run

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}

SCRIPT = """\
import hashlib, random, sys
import numpy, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(1 if "other" in sys.argv else 0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
model[0].weight.data[0] = 0
if "load" in sys.argv:
    model.load_state_dict(torch.load("state.pt"))
torch.save(model.state_dict(), "state.pt")
if "eps" in sys.argv:
    model[1].eps = 1.1e-4
if "constant" in sys.argv:
    model[2].register_forward_hook(lambda module, args, out: out * (1 + 3e-6))
model.eval()
with torch.no_grad():
    before = model(torch.ones(1, 32))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), **({"foreach": True} if "foreach" in sys.argv else {"fused": True}))
for _ in range(6):
    x, y = torch.randn(64, 32), torch.randn(64, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
drawn = [torch.rand(1).item(), random.random(), float(numpy.random.rand())]
print(before.sum().item(), drawn[0])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    """An ordinary run, one with another kernel, some with a fault, and perturbed ones, made once."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    said = {}
    for name, options, words in (
        ("a", (), ()),
        ("foreach", (), ("foreach",)),
        ("eps", (), ("eps",)),
        ("constant", (), ("constant",)),
        ("p", ("--perturb", "7"), ()),
        ("sampled", ("--perturb", "0", "--steps", "0,2,4"), ("--perturb", "x")),
        ("other", ("--perturb=3",), ("other",)),
        ("loaded", ("--perturb", "0"), ("load",)),  # what the one before began with
    ):
        done = forks("capture", "-o", name, *options, "train.py", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        said[name] = done
    return folder, said


def diff(forks, folder, *words):
    done = forks("diff", *words, "--format", "json", cwd=folder)
    return done.returncode, json.loads(done.stdout)


def ulps(before, after):
    """By how many numbers two tensors of one dtype are apart, element by element."""
    kind = BITS[before.dtype]
    return (after.view(kind).to(torch.int64) - before.view(kind).to(torch.int64)).abs()


def moved(path, model, work, **options):
    """The parameters before and after the first forward of a capture that perturbs."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with capture(model, path, perturb=0, source=False, **options):
        work()
    return list(zip(before, (parameter.detach() for parameter in model.parameters()), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_each_number_moves_to_the_next_one_up_or_down_and_zeros_stay(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30)).to(dtype)
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([0.0, -0.0, math.inf, torch.finfo(dtype).max], dtype=dtype)
    (weight, new), *rest = moved(tmp_path / "run", model, lambda: model(torch.ones(2, 40, dtype=dtype)))
    assert torch.equal(new[0, :3].view(BITS[dtype]), weight[0, :3].view(BITS[dtype]))
    assert 0 < new[0, 3] < weight[0, 3]
    assert (ulps(weight, new).flatten()[3:] == 1).all()
    up = (new > weight).float().mean()
    assert 0.4 < up < 0.6
    assert all((ulps(before, after)[before != 0] == 1).all() for before, after in rest)


def test_tied_parameters_move_once_and_frozen_ones_and_buffers_stay(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model[3].weight.requires_grad_(False)
    alias = nn.Parameter(model[1].weight.data)  # another parameter in the same memory
    model.register_parameter("alias", alias)
    frozen, means = model[3].weight.clone(), model[1].running_var.clone()
    model[1].momentum = 0.0
    pairs = moved(tmp_path / "run", model, lambda: model(torch.randn(4, 8)))
    steps = [ulps(before, after)[before != 0].unique().tolist() for before, after in pairs]
    assert steps.count([1]) == 4
    assert torch.equal(model[3].weight, frozen)
    assert torch.equal(model[1].running_var, means)
    assert torch.equal(alias, model[1].weight)


def test_a_graph_that_exists_already_still_runs_backward(tmp_path):
    model = nn.Linear(4, 4)
    early = (model.weight * model.weight).sum()  # saves the weight

    def work():
        total = model(torch.ones(1, 4)).sum() + early
        total.backward()

    moved(tmp_path / "run", model, work)
    assert model.weight.grad is not None


def test_what_runs_without_gradients_moves_nothing(tmp_path):
    model = nn.Linear(4, 4)

    def work():
        with torch.no_grad():
            model(torch.ones(1, 4))

    assert all(torch.equal(before, after) for before, after in moved(tmp_path / "run", model, work))
    manifest = open_run(tmp_path / "run").manifest
    assert manifest["perturbed"]["elements"] == 0
    assert any("moved nothing" in sentence for sentence in manifest["not_observed"])


def test_an_unrecorded_first_step_is_perturbed_all_the_same(tmp_path):
    model = nn.Linear(4, 4)
    pairs = moved(tmp_path / "run", model, lambda: model(torch.ones(1, 4)), steps="5")
    assert all((ulps(before, after)[before != 0] == 1).all() for before, after in pairs)


def test_the_script_draws_as_before_and_an_evaluation_before_training_is_as_before(runs):
    folder, said = runs
    assert said["a"].stdout == said["p"].stdout
    with open_run(folder / "a") as a, open_run(folder / "p") as p:
        draws = [
            [record.summary.checksum for record in each.rank(0).records(0) if record.site.kind is Kind.RNG]
            for each in (a, p)
        ]
    assert draws[0] == draws[1] != []


def test_a_checkpoint_that_is_loaded_before_training_is_what_moves(runs):
    folder, _ = runs
    largest = float(torch.load(folder / "state.pt")["3.weight"].max())
    for name, is_loaded in (("loaded", True), ("p", False)):
        with open_run(folder / name) as p:
            found = {r.site.fqn: r.summary for r in p.rank(0).records(0) if r.site.phase is Phase.START}
        moved_by = abs(found["Sequential.3.weight"].stats["max"] - largest)
        assert (0 < moved_by <= float(np.spacing(np.float32(largest)))) is is_loaded


def test_every_surface_says_that_a_run_was_perturbed(runs, forks):
    folder, said = runs
    assert "after --perturb 7 moved" in said["p"].stderr
    manifest = open_run(folder / "p").manifest
    assert manifest["options"]["perturb"] == manifest["perturbed"]["seed"] == 7
    assert manifest["perturbed"]["parameters"] == 6
    listed = forks("runs", ".", cwd=folder).stdout.splitlines()
    assert [line for line in listed if "--perturb 7" in line] == [line for line in listed if line.startswith("p ")]
    assert "moved by one rounding (--perturb 7)" in forks("show", "p", cwd=folder).stdout
    assert "perturbed" not in forks("show", "a", cwd=folder).stdout
    code, found = diff(forks, folder, "a", "p")
    assert code == 1
    assert any(note.startswith("Run b is not an ordinary run") for note in found["notes"])
    assert "--perturb 7" in found["sentence"]


def test_the_seed_may_be_left_out_and_the_scripts_options_are_its_business(runs, forks):
    folder, _ = runs
    seeds = {name: (open_run(folder / name).manifest["perturbed"] or {}).get("seed") for name in ("a", "p", "sampled")}
    assert seeds == {"a": None, "p": 7, "sampled": 0}
    assert open_run(folder / "sampled").manifest["argv"][1:] == ["--perturb", "x"]
    assert open_run(folder / "other").manifest["perturbed"]["seed"] == 3
    refused = forks("capture", "--verify-neutral", "--perturb", "0", "train.py", cwd=folder)
    assert refused.returncode == 2
    assert "leave one out" in refused.stderr


def test_another_kernel_stays_within_what_one_rounding_does(runs, forks):
    code, found = diff(forks, runs[0], "a", "foreach", "--noise", "p")
    assert (code, found["verdict"]) == (0, "same")
    assert found["counts"]["within"]


@pytest.mark.parametrize(("fault", "place"), [("eps", "Sequential.1"), ("constant", "Sequential.2")])
def test_a_fault_of_the_size_of_rounding_leaves_it_where_it_is(runs, forks, fault, place):
    code, found = diff(forks, runs[0], "a", fault, "--noise", "p")
    assert (code, found["first"]["step"], found["first"]["fqn"]) == (1, 0, place)


def test_an_ordinary_run_given_as_noise_is_no_perturbed_one(runs, forks):
    _, found = diff(forks, runs[0], "a", "foreach", "--noise", "foreach")
    assert not any("one rounding" in note for note in found["notes"])
