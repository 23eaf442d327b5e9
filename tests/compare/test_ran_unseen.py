"""Modules that are called past `nn.Module.__call__` are seen, and what ran of a model unseen is never called equal."""

from __future__ import annotations

import json

import pytest
from artefacts import REPOSITORY

from introspect_cli.store.read.run import open_run

BEGIN = """
import sys
import torch
from torch import nn

other = "other" in sys.argv
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

OWN_CALL = """
class Base(nn.Module):
    def __call__(self, *inputs):
        return self.forward(*inputs)


class Inner(Base):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x) * (1.1 if other and {changed} else 1)


class Normal(torch.distributions.Normal):
    def __call__(self):
        return self.sample()


class Outer(Base):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return Normal({given}, 1.0)


model = Outer()
"""

METHODS = """
class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def density(self, x):
        for part in self.parts:
            x = part(x)
        return x * (1.1 if other and {changed} else 1)


model = Flow()
"""

FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x) * (1.1 if other and not self.training else 1)


model = Net()
"""

OF_A_DISTRIBUTION = "train(model, lambda x: model(x).mean)\nevaluate(model, lambda x: model(x).mean)\n"
OF_A_METHOD = "train(model, model.density)\nevaluate(model, model.density)\n"

CASES = {
    "a class runs forward itself": (
        OWN_CALL.format(changed="not self.training", given="self.inner(x)") + OF_A_DISTRIBUTION,
        1,
        {"verdict": "diverged", "training": "same", "evaluation": "diverged", "fqn": "Outer.inner"},
    ),
    "what it returns is looked into": (
        OWN_CALL.format(changed="False", given="self.inner(x) + (1 if other and not self.training else 0)")
        + OF_A_DISTRIBUTION,
        1,
        {"verdict": "diverged", "training": "same", "evaluation": "diverged", "fqn": "Outer"},
    ),
    "a method runs modules in an evaluation": (
        METHODS.format(changed="not self.training") + OF_A_METHOD,
        2,
        {"verdict": "undecided", "training": "same", "evaluation": "undecided"},
    ),
    "the loss code is not all that can be": (
        METHODS.format(changed="self.training") + "train(model, model.density)",
        1,
        {"verdict": "diverged", "unseen": "Flow.density()"},
    ),
    "forward is called by name": (
        FORWARD + "train(model, model.forward)\nevaluate(model, model.forward)\n",
        1,
        {"verdict": "diverged", "training": "same", "evaluation": "diverged", "fqn": "Net"},
    ),
    "forward is called by a name that no file has": (
        FORWARD + "train(model, getattr(model, 'for' 'ward'))\nevaluate(model, getattr(model, 'for' 'ward'))\n",
        1,
        {"verdict": "diverged", "training": "same", "evaluation": "diverged", "fqn": "Net"},
    ),
    "results alone, of a method": (
        METHODS.format(changed="True") + "with torch.no_grad():\n    model.density(data)",
        2,
        {"verdict": "undecided"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_not_seen_is_never_called_the_same(case, tmp_path, introspect):
    script, code, expected = CASES[case]
    (tmp_path / "train.py").write_text(BEGIN + script)
    for name in ("a", "other"):
        introspect("capture", "-q", "--eval", "-o", name, "train.py", name)
    answer = introspect("diff", "a", "other", "--format", "json")
    assert answer.returncode == code, answer.stdout
    found = json.loads(answer.stdout)
    assert found["verdict"] == expected["verdict"]
    for part in {"training", "evaluation"} & expected.keys():
        assert found[part]["verdict"] == expected[part]
    if "fqn" in expected:
        assert found["evaluation"]["first"]["fqn"] == expected["fqn"]
    assert expected.get("unseen", "") in found["sentence"]


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


def test_what_runs_before_the_optimizer_is_built_is_no_step(tmp_path, introspect):
    (tmp_path / "train.py").write_text(
        BEGIN + METHODS.format(changed="self.training") + "start = model.density(data)\ntrain(model, model.density)\n"
    )
    for name in ("a", "other"):
        introspect("capture", "-q", "-o", name, "train.py", name)
    assert open_run(tmp_path / "a").steps == 3
    found = json.loads(introspect("diff", "a", "other", "--format", "json").stdout)
    assert (found["first"]["step"], found["first"]["kind"]) == (0, "loss")


ONCE_MORE = """
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def run(data):
    if other:
        model(data * 2)
    return (model(data) + model(data + 1)) * (1.1 if other else 1)


train(model, run)
"""


def test_calls_are_paired_by_what_they_give_where_inputs_are_not_on_record(tmp_path, introspect):
    (tmp_path / "train.py").write_text(BEGIN + ONCE_MORE)
    for name in ("a", "other"):
        introspect("capture", "-q", "--record", "output,loss", "-o", name, "train.py", name)
    found = json.loads(introspect("diff", "a", "other", "--format", "json").stdout)
    assert (found["first"]["call"], found["first"]["role"]) == (2, "origin")
    assert [one["code"] for one in found["findings"]] == ["calls"]


def test_modules_that_a_capture_left_out_are_not_said_to_be_equal(tmp_path, introspect):
    script = REPOSITORY / "fixtures" / "train_gpt.py"
    for name, fault in (("a", "none"), ("b", "scaled-attention")):
        introspect("capture", "-q", "--modules", "GPT.wte", "-o", name, script, "--steps", "1", "--fault", fault)
    found = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert (found["first"]["kind"], found["first"]["role"]) == ("loss", "propagated")
    known = {one["thing"]: one["known"] for one in found["rests_on"]}
    assert known["left_out"] == "unseen"
    assert "outputs" not in known
