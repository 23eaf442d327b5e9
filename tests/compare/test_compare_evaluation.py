"""Training and evaluation have a verdict each: a fault in one of them is not laid at the other's door."""

from __future__ import annotations

import torch
from evaluated import STEPS, Net
from lit import fit
from neutrality import watched
from opcapture import captured, compared, records
from torch import nn

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Phase


def test_lightning_validates_apart(tmp_path):
    for name, scale in (("a", 1.0), ("b", 0.5)):
        torch.manual_seed(3)
        net = Net()
        with watched(tmp_path / name, eval=True):
            fit(net, tmp_path, STEPS, scale=scale)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.training.verdict is Verdict.SAME
    assert found.first.site.fqn.endswith("criterion")
    assert "; evaluation diverges at step " in found.sentence


def test_a_hand_trained_model_that_only_one_capture_saw_evaluated_is_the_same(tmp_path):
    """An evaluation that is recorded has the parameters looked at once more, which is no change that only it has."""

    def work():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        for step in range(6):
            net.train()
            net.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
                if step % 3 == 2:
                    net.eval()
                    net(torch.ones(2, 4))

    bare, seen = (captured(tmp_path / str(each), work, eval=each) for each in (False, True))
    assert [each.site for each in records(seen, 2) if each.site.phase is Phase.START and each.site.call]
    result = compared(bare, seen)
    assert result.verdict is Verdict.SAME, result.sentence
