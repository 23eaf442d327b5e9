"""What a module is apart from its tensors, where it was called, by what it is known, and values inside of values."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from opcapture import captured, records
from torch import nn

import introspect_cli
from introspect_cli.records import Kind, Phase
from introspect_cli.store.run import open_run


class Strange:
    """An object of the script's that must not be looked into."""

    def __getattribute__(self, name):
        raise AssertionError(name)

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None


class Net(nn.Module):
    def __init__(self, eps=1e-5, p=0.1):
        super().__init__()
        self.norm, self.drop, self.conv = nn.LayerNorm(4, eps=eps), nn.Dropout(p), nn.Conv1d(2, 2, 3, padding=1)
        self.scale, self.label, self.ratio = 2, "wide", None
        self.api_key, self.num_tokens = "hunter2", 12
        self.calls, self.act = 0, nn.functional.gelu
        vars(self)["odd"] = Strange()

    @property
    def heads(self):
        raise AssertionError("a property was read")

    def extra_repr(self):
        raise AssertionError("extra_repr was called")

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.act(self.conv(x)))) * self.scale


def seen_hook(_module, _args, _output):
    pass


def trained(steps=4, *, before=(), **options):
    """Train a net; `before` maps a step to what is done to the net before it."""

    def work():
        torch.manual_seed(0)
        net = Net(**options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(steps):
            dict(before).get(step, lambda _: None)(net)
            net(torch.randn(3, 2, 4)).sum().backward()
            optimizer.step()

    return work


def rows(path, fqn):
    with open_run(path) as run:
        return [(row.step, dict(row.attributes)) for row in run.rank(0).module_rows if row.fqn == fqn]


def changed(net):
    net.drop.p = 0.5
    net.norm.eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    hooked = {2: changed, 3: lambda net: net.conv.register_forward_hook(functools.partial(seen_hook))}
    return captured(tmp_path_factory.mktemp("attributes") / "run", trained(12, before=hooked))


def test_plain_attributes_are_written_with_the_tree(path):
    (step, net), *_ = rows(path, "Net")
    assert step == 0
    assert net == {
        "training": "True",
        "scale": "2",
        "label": "'wide'",
        "ratio": "None",
        "api_key": "<redacted>",
        "num_tokens": "12",
        "calls": "0",
        "act": "torch._C._nn.gelu",
    }
    assert rows(path, "Net.conv")[0][1]["kernel_size"] == "(3,)"


def test_changes_are_written_with_their_step(path):
    assert [(step, found["p"]) for step, found in rows(path, "Net.drop")] == [(0, "0.1"), (2, "0.5")]
    assert [(step, found["training"]) for step, found in rows(path, "Net.norm")] == [(0, "True"), (2, "False")]
    assert [(step, found.get("hooks")) for step, found in rows(path, "Net.conv")] == [
        (0, None),
        (3, "forward functools.partial"),
    ]


class Fresh(nn.Module):
    """A module that makes another one in each forward."""

    def __init__(self, eps):
        super().__init__()
        self.linear, self.eps = nn.Linear(4, 4), eps

    def forward(self, x):
        return nn.LayerNorm(4, eps=self.eps)(self.linear(x))


def test_a_module_that_is_made_in_each_forward_has_its_attributes_on_record(tmp_path):
    for name, eps in (("a", 1e-5), ("b", 1e-2)):
        torch.manual_seed(0)
        net = Fresh(eps)
        with introspect_cli.recording(net, tmp_path / name, source=False):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                net(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
    with open_run(tmp_path / "a") as run:
        rows = [row for row in run.rank(0).modules if row.fqn == "Fresh.LayerNorm" and row.attributes]
    assert len(rows) == 1  # as it is the same each time
    assert ("eps", "1e-05") in rows[0].attributes
    sentence = introspect_cli.diff(tmp_path / "a", tmp_path / "b").sentence
    assert "the output of Fresh.LayerNorm (LayerNorm)" in sentence
    assert sentence.endswith("Likely: eps 1e-05 -> 0.01.")


def train_resumed(model):
    """Train as a script that resumes from a checkpoint: its optimizer makes its state before the model is called."""
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        if step == 0:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), "Sequential.1.bias"),
        (lambda: nn.Linear(4, 1), "Linear.bias"),
    ],
)
def test_parameters_have_the_names_of_their_model_where_the_optimizer_steps_first(tmp_path, build, name):
    """A model is found by its parts, or is alone."""
    with open_run(captured(tmp_path / "run", lambda: train_resumed(build()))) as run:
        for step in range(3):
            for kind in ("grad", "param", "optimizer_state"):
                found = [r.site.fqn for r in run.rank(0).records(step) if r.site.kind.value == kind]
                assert name in found
                assert not any("Adam.group" in fqn for fqn in found)
        assert name in run.settings["optimizers"][0]["groups"][0]["params"]
        assert not any("no module was called" in said for said in run.manifest["not_observed"])


def test_parameters_have_their_names_though_the_model_only_runs_with_others_in_their_place(tmp_path):
    def work():
        net = nn.Sequential(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def loss(weights, x):
            return torch.func.functional_call(net, weights, (x,)).square().sum()

        torch.func.vmap(loss, (None, 0))(dict(net.named_parameters()), torch.ones(3, 2)).sum().backward()
        optimizer.step()

    found = {r.site.fqn for r in records(captured(tmp_path / "run", work)) if r.site.kind is Kind.GRAD}
    assert found == {"Sequential.0.weight", "Sequential.0.bias"}


# --- each record's site has the line of the user's code that ran it


LINES_OF = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(
            h
        ) if len(x) else self.a(x)


net = Net()
optimizer = torch.optim.Adam(net.parameters())
for x in torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4):
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


LINES = {
    (Phase.DATA, Kind.BATCH, "DataLoader"): "train.py:19",
    (Phase.FORWARD, Kind.INPUT, "Net"): "train.py:20",
    (Phase.FORWARD, Kind.OUTPUT, "Net.a"): "train.py:11",
    (Phase.FORWARD, Kind.INPUT, "Net.b"): "train.py:12",
    (Phase.LOSS, Kind.LOSS, "loss"): "train.py:21",
    (Phase.BACKWARD, Kind.GRAD_OUTPUT, "Net.a"): "",
    (Phase.OPTIMIZER, Kind.GRAD, "Net.a.weight"): "train.py:22",
    (Phase.OPTIMIZER, Kind.PARAM, "Net.a.weight"): "train.py:22",
    (Phase.START, Kind.PARAM, "Net.a.weight"): "",
}


def test_a_site_has_the_line_that_ran_it(introspect, tmp_path):
    (tmp_path / "train.py").write_text(LINES_OF)
    assert introspect("capture", "-q", "-o", "run", "train.py").returncode == 0
    with open_run(tmp_path / "run") as run:
        sites = run.rank(0).sites
        found = [sites[number] for number in range(len(sites))]
    said = {}
    for site, info in found:
        said.setdefault((site.phase, site.kind, site.fqn), set()).add(info.source)
    assert {place: said[place] for place in LINES} == {place: {line} for place, line in LINES.items()}


def test_a_class_whose_forward_is_called_by_itself_has_its_own_line(introspect, tmp_path):
    """The capture stands in for such a `forward`, with a line of its own."""
    text = LINES_OF.replace("net(x)", "net.forward(x)").replace("class Net", "\n" * 300 + "class Net")
    (tmp_path / "train.py").write_text(text)
    assert introspect("capture", "-q", "-o", "run", "train.py").returncode == 0
    tree = json.loads(introspect("show", "tree", "run", "--format", "json").stdout)
    line = text.splitlines().index("class Net(nn.Module):") + 1
    assert f'"train.py:{line}"' in json.dumps(tree)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.norm(x))


@pytest.mark.parametrize("gradients", [True, False])
def test_a_copy_whose_statistics_are_made_anew_of_training_data_is_evaluated_all_the_same(tmp_path, gradients):
    def work():
        net, average = Normed(), Normed()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        training, validation = (torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=3) for _ in range(2))
        for _ in range(2):
            for x in training:
                optimizer.zero_grad()
                net(x).sum().backward()
                optimizer.step()
        for x in training:
            average.train()(x)
        with torch.set_grad_enabled(gradients):
            for x in validation:
                average.eval()(x)

    last = records(captured(tmp_path / "run", work, eval=True), 4)
    ran = [
        (each.site.phase, each.site.call) for each in last if each.site.kind is Kind.OUTPUT and "." not in each.site.fqn
    ]
    assert ran == [(Phase.FORWARD, 0), (Phase.FORWARD, 1), (Phase.EVAL, 0), (Phase.EVAL, 1)]
