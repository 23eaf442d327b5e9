"""Modules that are called past `nn.Module.__call__` are seen, and what ran of a model unseen is never called equal."""

from __future__ import annotations

import json

from artefacts import REPOSITORY

from introspect_cli.store.run import open_run

BEGIN = """
import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(8, 4)


def train(model, run, steps=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(data).square().mean().backward()
        optimizer.step()


def evaluate(model, run):
    model.eval()
    with torch.no_grad():
        return run(data).mean().item()
"""


KEEPS_ITS_CALL = """
class Layer(nn.Linear):
    def __call__(self, x):
        return super().__call__(x)


class Bare(nn.Linear):
    def __call__(self, x):
        return self.forward(x + 1)

    def forward(self, x):
        return super().forward(x)


model = nn.Sequential(Layer(4, 4), Bare(4, 4))
train(model, model)
"""


def test_a_call_that_is_handed_on_is_one_call(tmp_path, introspect):
    (tmp_path / "train.py").write_text(BEGIN + KEEPS_ITS_CALL)
    introspect("capture", "-q", "-o", "run", "train.py")
    reader = open_run(tmp_path / "run").rank(0)
    calls = [(one.site.fqn, one.site.call) for one in reader.records(0) if one.site.kind.value == "output"]
    assert sorted(calls) == [("Sequential", 0), ("Sequential.0", 0), ("Sequential.1", 0), ("Sequential.1", 1)]


BY_NAME = """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(4, 4), Scale()

    def forward(self, x):
        return self.scale.forward(self.lin(x))


torch.jit.script(Net())(data)
model = Net()
train(model, lambda x: model.forward(x) + model(x))
"""


def test_a_forward_that_is_called_by_its_name_is_one_call(tmp_path, introspect):
    (tmp_path / "train.py").write_text(BEGIN + BY_NAME)
    ran = introspect("capture", "-q", "-o", "run", "train.py")
    assert ran.returncode == 0, ran.stderr
    with open_run(tmp_path / "run") as run:
        calls = [(one.site.fqn, one.site.call) for one in run.rank(0).records(0) if one.site.kind.value == "output"]
        assert sorted(calls) == [(name, call) for name in ("Net", "Net.lin", "Net.scale") for call in (0, 1)]
        assert "ran_unseen" not in run.manifest


def test_a_model_that_is_seen_in_whole_has_nothing_unseen(tmp_path, introspect):
    (tmp_path / "train.py").write_text(
        BEGIN
        + "layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)\n"
        + "model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), layer)\n"
        + "train(model, lambda x: model(x[None]))\nevaluate(model, lambda x: model(x[None]))\n"
    )
    introspect("capture", "-q", "--eval", "-o", "run", "train.py")
    assert "ran_unseen" not in open_run(tmp_path / "run").manifest
    shown = introspect("show", "run").stdout
    assert "calls of" in shown
    assert "without being seen" not in shown


def test_modules_that_a_capture_left_out_are_not_said_to_be_equal(tmp_path, introspect):
    script = REPOSITORY / "fixtures" / "train_gpt.py"
    for name, fault in (("a", "none"), ("b", "scaled-attention")):
        introspect("capture", "-q", "--modules", "GPT.wte", "-o", name, script, "--steps", "1", "--fault", fault)
    found = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert (found["first"]["kind"], found["first"]["role"]) == ("loss", "propagated")
    known = {one["thing"]: one["known"] for one in found["rests_on"]}
    assert known["left_out"] == "unseen"
    assert "outputs" not in known
