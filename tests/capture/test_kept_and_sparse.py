"""What a comparison says of state that modules keep, sparse gradients, penalties, and models without gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import introspect_cli

LEAN = "param,grad,loss"


def built(make, **options):
    torch.manual_seed(0)
    return make(**options)


class Embedded(nn.Module):
    def __init__(self, *, sparse=True):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 1)

    def forward(self, ids):
        return self.head(self.table(ids)).mean()


def embedded(path, *, sparse=True, zero=True, record="default", steps=3):
    net = built(Embedded, sparse=sparse)
    ids = torch.randint(0, 9, (steps, 8), generator=torch.Generator().manual_seed(1))
    with introspect_cli.recording(net, path, record=record):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in ids:
            if zero:
                optimizer.zero_grad()
            net(batch).backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("record", ["default", LEAN])
def test_a_dense_gradient_is_another_form_of_a_sparse_one_where_the_optimizer_makes_the_same_of_it(tmp_path, record):
    a, b = (embedded(tmp_path / name, sparse=sparse, record=record) for name, sparse in (("a", True), ("b", False)))
    exact, close = introspect_cli.diff(a, b), introspect_cli.diff(a, b, rtol=1e-5)
    assert close.verdict == "same"
    assert any("9x3 float32 (sparse) in a, 9x3 float32 in b" in note for note in close.result.notes)
    assert record == LEAN or "it is sparse in a and dense in b" in exact.sentence


def accumulated(path, *, twice=False):
    """Four batches, two a step, and one more that no step takes; the first layer runs once more, to no effect."""
    net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    batches = torch.arange(30.0).view(5, 2, 3) / 30
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number, x in enumerate(batches):
            if twice:
                net[0](x + 1)
            net(x).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return path


def test_equal_results_decide_though_an_accumulation_is_left_over_at_the_end(tmp_path):
    result = introspect_cli.diff(accumulated(tmp_path / "a"), accumulated(tmp_path / "b", twice=True))
    assert result.verdict == "same"
    counts = result.result.counts
    assert counts.records == counts.equal > 0
    assert [change.change for change in result.result.structure] == ["calls"]


TEACHER = """
import sys, torch
from torch import nn
torch.manual_seed(0)
teacher, net = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*net.parameters(), *teacher.parameters()], lr=0.1)
with torch.no_grad():
    x = teacher(torch.ones(2, 3)) * float(sys.argv[1])
net(x).mean().backward()
optimizer.step()
"""


def test_a_model_without_gradients_may_have_made_what_goes_into_another(introspect, tmp_path):
    (tmp_path / "train.py").write_text(TEACHER)
    for name, scale in (("a", "1"), ("b", "2")):
        assert introspect("capture", "-q", "-o", name, "train.py", scale).returncode == 0
    answer = introspect("diff", "a", "b").stdout
    assert "a model that ran without gradients, which was not recorded" in answer


@pytest.mark.sweep
def test_a_model_that_is_also_called_compiled_has_its_tensors_twice_and_is_not_changed_by_that(tmp_path):
    def run(path, compiled):
        net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        trained = torch.compile(net, backend="eager") if compiled else net
        with introspect_cli.recording(net, path):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(3):
                if step == 1:
                    net(torch.ones(2, 3))
                optimizer.zero_grad()
                trained(torch.ones(2, 3)).mean().backward()
                optimizer.step()
        return path

    sentence = introspect_cli.diff(run(tmp_path / "a", compiled=False), run(tmp_path / "b", compiled=True)).sentence
    assert "was changed outside of an optimizer step" not in sentence
