"""`--vjp` and `--jacobian-norm`: exact against torch's own, and without a trace in the script's training."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, records
from summaries import checksum
from torch import nn

from introspect_cli.capture.options.parse import Pair, ValueName, parse_pairs
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind, Status

KINDS = frozenset({Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.OP_OUTPUT, Kind.PARAM})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)

    def forward(self, x):
        return {"out": self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


INPUT = torch.linspace(-1, 1, 8).view(2, 4)


def trained(model, steps=2):
    def work():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(INPUT)["out"].pow(2).sum().backward()
            optimizer.step()

    return work


def found(path, step=0):
    return {r.site.path: r.summary for r in records(path, step) if r.site.kind is Kind.OP_OUTPUT}


def test_a_product_is_the_gradient_of_one_value_at_the_other(model, tmp_path):
    hidden = model.a(INPUT)
    (expected,) = torch.autograd.grad(model.c(torch.tanh(model.b(torch.tanh(hidden)))).sum(), hidden)
    path = captured(tmp_path / "run", trained(model), vjp=("c:a",), record=KINDS)
    assert found(path)["vjp(c:a)"].checksum == checksum(expected)


def test_sites_by_path_and_inputs(model, tmp_path):
    hidden = model.a(INPUT)
    inside = torch.tanh(hidden)
    (expected,) = torch.autograd.grad(model.c(torch.tanh(model.b(inside))).sum(), inside)
    pair = "Net['out']:b/input[0]"
    path = captured(tmp_path / "run", trained(model), vjp=(pair,), record=KINDS)
    assert found(path)[f"vjp({pair})"].checksum == checksum(expected)


def test_the_norm_is_within_its_error_and_exact_where_it_must_be(model, tmp_path):
    hidden = model.a(INPUT).detach()
    jacobian = torch.autograd.functional.jacobian(lambda h: model.c(torch.tanh(model.b(torch.tanh(h)))), hidden)
    path = captured(tmp_path / "run", trained(model), jacobian_norm=("c:a",), probes=64, record=KINDS)
    seen = found(path)
    norm = float(seen["jacobian_norm(c:a)"].text)
    error = float(seen["jacobian_norm(c:a) standard error"].text)
    assert 0 < error < 0.2 * norm
    assert abs(norm - float(jacobian.norm())) < 4 * error


def test_values_that_do_not_depend_on_each_other_are_said_not_to(model, tmp_path):
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return {"out": self.a(x) + self.b(x)}

    path = captured(tmp_path / "run", trained(Apart()), vjp=("b:a",), record=KINDS)
    assert found(path)["vjp(b:a)"].status is Status.NOT_OBSERVED


def test_the_two_ends_of_a_product_are_read_from_the_command_line():
    assert ValueName.parse("x.y['h'][0]") == ValueName("x.y", Kind.OUTPUT, "['h'][0]")
    assert ValueName.parse("x/input['k']") == ValueName("x", Kind.INPUT, "['k']")
    assert ValueName.parse("x/input").path == "[0]"
    assert parse_pairs(["a:b"], ["c:d"])[1] == Pair("c:d", ValueName.parse("c"), ValueName.parse("d"), norm=True)
    for wrong in ("a", "a/side:b", ":b"):
        with pytest.raises(UsageError):
            parse_pairs([wrong], [])


def test_products_can_be_asked_for_on_the_command_line(introspect, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))\n"
        "model(torch.ones(4, 2)).sum().backward()\n",
        encoding="utf-8",
    )
    said = introspect("capture", "-o", "run", "--vjp", "2:0", "--jacobian-norm", "2:0", "--probes", "4", "train.py")
    assert said.returncode == 0, said.stderr
    assert {"vjp(2:0)", "jacobian_norm(2:0)"} <= set(found(tmp_path / "run"))
    said = introspect("capture", "-o", "other", "--vjp", "nonsense", "train.py")
    assert said.returncode == 2
    assert "OUTPUT:INPUT" in said.stderr
