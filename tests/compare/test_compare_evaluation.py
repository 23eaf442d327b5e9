"""Training and evaluation have a verdict each: a fault in one of them is not laid at the other's door."""

from __future__ import annotations

import torch
from opcapture import captured, compared, records
from torch import nn

from introspect_cli.compare.result import Verdict
from introspect_cli.records import Phase


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
