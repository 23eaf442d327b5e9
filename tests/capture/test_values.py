"""Stored values: of one run, and of two side by side, the elements that differ marked."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from opcapture import captured  # noqa: E402 - torch first: without it there is nothing to test
from torch import nn  # noqa: E402


def train(change):
    def run():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            with torch.no_grad():
                net[0].bias[1] += change
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("values")
    for name, change in (("a", 0.0), ("b", 1e-3)):
        captured(place / name, train(change), save_tensors=("*",))
    captured(place / "bare", train(0.0))
    return place


def test_show_values_prints_the_tensor(introspect, runs):
    done = introspect("show", "values", "0", runs / "a", "--kinds", "output", "--step", "0")
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 3))(torch.ones(2, 4)).detach().numpy()
    assert "output of Sequential.0" in done.stdout
    assert f"{expected[0, 0]:.6g}"[:8] in done.stdout
    document = json.loads(
        introspect("show", "values", "0", runs / "a", "--kinds", "output", "--step", "0", "--format", "json").stdout
    )
    assert np.array(document["values"][0]["values"]) == pytest.approx(expected)


def test_values_that_were_not_stored_are_a_sentence(introspect, runs):
    done = introspect("show", "values", "0", runs / "bare")
    assert done.returncode == 2
    assert "holds no values of 0 at any step" in done.stderr
    assert "--save-tensors" in done.stderr
    said = introspect("diff", runs / "bare", runs / "b", "--values").stdout
    assert "it was not stored whole by run a" in said


def test_diff_values_lists_what_differs(introspect, runs):
    done = introspect("diff", runs / "a", runs / "b", "--values", "--kinds", "output")
    assert done.returncode == 1, done.stderr
    assert "2 of 6 elements differ (33.3 %), max |a-b| 0.001 at" in done.stdout
    assert done.stdout.count("0.001\n") == 2
