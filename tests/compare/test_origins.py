"""All that differs and rests on nothing that differs is told, each with its cause."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from opcapture import captured, compared
from rendered import text_of
from torch import nn

from introspect_cli.compare.terms.result import Role
from introspect_cli.records import Kind
from introspect_cli.render.cards import first_screen
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.render.json import diff_document


class Branches(nn.Module):
    """Two branches that get the same input and have nothing to do with one another."""

    def __init__(self, eps, slope):
        super().__init__()
        self.one, self.norm = nn.Linear(6, 6), nn.LayerNorm(6, eps=eps)
        self.two, self.act = nn.Linear(6, 6), nn.LeakyReLU(slope)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.one(x)) + self.act(self.two(x)))


def fit(*, eps=1e-5, slope=0.1, lr=0.05, momentum=0.1, draw=False):
    def work():
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - a generator that nothing draws from
        net = nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), Branches(eps, slope))
        if draw:
            torch.rand(1)
            np.random.rand()  # noqa: NPY002 - as above
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        source = torch.Generator().manual_seed(1)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(4, 6, generator=source)).square().mean().backward()
            optimizer.step()

    return work


@pytest.fixture
def said(tmp_path):
    """The comparison of a plain training with one that has some differences."""

    def run(**changes):
        return compared(captured(tmp_path / "a", fit()), captured(tmp_path / "b", fit(**changes)), limit=None)

    return run


def places(result):
    return [(origin.divergence.site.kind.value, origin.divergence.site.fqn) for origin in result.origins]


def test_two_branches_are_two_origins_each_with_its_cause(said):
    result = said(eps=0.1, slope=0.3)
    assert places(result) == [("output", "Sequential.1.norm"), ("output", "Sequential.1.act")]
    assert result.origins[0].divergence is result.first
    assert "eps 1e-05 -> 0.1" in result.origins[0].sentence
    assert "negative_slope 0.1 -> 0.3" in result.origins[1].sentence
    roles = {
        each.site.fqn: each.role for each in result.divergences if each.site.kind is Kind.OUTPUT and each.step == 0
    }
    assert roles["Sequential.1.act"] is Role.ORIGIN
    assert roles["Sequential.1"] is Role.PROPAGATED
    text = text_of(diff_blocks(result), 200)
    assert "Independent divergences (nothing they depend on differs):" in text
    assert "negative_slope 0.1 -> 0.3" in text
    document = diff_document(result)
    assert [origin["divergence"]["fqn"] for origin in document["origins"]] == ["Sequential.1.norm", "Sequential.1.act"]
    json.dumps(document, allow_nan=False)
    assert "negative_slope 0.1 -&gt; 0.3" in first_screen(result)


def test_a_buffer_that_is_updated_differently_is_an_origin_beside_a_module(said):
    result = said(eps=0.1, momentum=0.5)
    assert ("output", "Sequential.1.norm") in places(result)
    assert any(kind == "buffer" and fqn.startswith("Sequential.0.running") for kind, fqn in places(result))
    assert len(result.origins) == 2, "both running statistics have one cause"


def test_a_generator_that_nothing_draws_from_is_no_origin(said):
    """Both differ when training begins; dropout draws from torch's alone."""
    result = said(draw=True)
    assert result.first.site.fqn == "torch"
    assert places(result) == [("rng", "torch")]
