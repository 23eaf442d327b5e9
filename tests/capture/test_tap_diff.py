"""Eager against compiled is an ordinary comparison: rounding passes as rounding, a wrong decomposition is found."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, compared
from sweeps import sliced
from taps import wrong_backend
from torch import nn

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.GELU()
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.act(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.act, self.head = nn.Linear(3, 9), nn.Linear(3, 3), nn.GELU(), nn.Linear(6, 1)

    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 2, 3)).chunk(3, -1)
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.head(self.act(self.proj(y)).flatten(1))


MODELS = (Perceptron, Convolutions, Attending)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def run(path, build, **settings):
    def work():
        torch.manual_seed(9)
        model = build()
        called = torch.compile(model, fullgraph=True, **settings) if settings else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            called(torch.randn(8, 6)).pow(2).mean().backward()
            optimizer.step()

    return captured(path, work, compile="keep")


@pytest.mark.sweep
@pytest.mark.parametrize("build", MODELS)
def test_rounding_passes_as_rounding(tmp_path, build):
    eager = run(tmp_path / "eager", build)
    assert compared(eager, run(tmp_path / "same", build, backend="aot_eager")).verdict is Verdict.SAME
    inductor = run(tmp_path / "inductor", build, backend="inductor")
    # The gradient of a bias before a normalisation is zero but for rounding, so nothing relative bounds it.
    result = compared(eager, inductor, rtol=1e-4, atol=1e-6)
    assert result.verdict is Verdict.SAME
    assert result.counts.records > 40
    exact = compared(eager, inductor)
    assert exact.verdict is Verdict.SAME or "rounding" in exact.sentence or "less than 1e-7" in exact.sentence


@pytest.mark.parametrize("build", sliced(MODELS, (Attending,)))
def test_a_wrong_decomposition_is_found_at_the_module_that_runs_it(tmp_path, build):
    eager = run(tmp_path / "eager", build)
    result = compared(eager, run(tmp_path / "wrong", build, backend=wrong_backend()), rtol=1e-4)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.module_class == "GELU"
    assert (result.first.step, result.first.site.kind) == (0, Kind.OUTPUT)
    assert result.first.role.value == "origin"
