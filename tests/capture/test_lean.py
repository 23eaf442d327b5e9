"""Steps in which a GPU leaves out what costs most of the values that pass through a model; here one that is made up."""

from __future__ import annotations

import pytest
import torch
from made_gpu import made_gpu
from opcapture import captured, compared, records

from introspect_cli.records import Kind
from introspect_cli.store.run import open_run

pytestmark = pytest.mark.gpu

PASSING = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


class Written(torch.nn.Sequential):
    """Layers between which a write happens that torch does not count."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
            x.data.mul_(2)
        return x


def train(scale=1.0, steps=13, container=torch.nn.Sequential):
    torch.manual_seed(0)
    body = container(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(8, 16) * (scale if step == 11 else 1.0)
        body(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def lean_kinds(run, step):
    of_tensors = [record for record in records(run, step) if "var" in record.summary.stats]
    lean = [record for record in of_tensors if not record.summary.sketch]
    assert not any({"skew", "kurt"} & record.summary.stats.keys() for record in lean)
    assert any("kurt" in record.summary.stats for record in of_tensors)
    return {record.site.kind for record in lean}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lean")
    with made_gpu():
        options = {"plain": {}, "sometimes": {"full_every": 12}, "always": {"full_every": 1}}
        made = {name: captured(folder / name, train, **wanted) for name, wanted in options.items()}
        made["scaled"] = captured(folder / "scaled", lambda: train(1.5))
    made["cpu"] = captured(folder / "cpu", train)
    return made


def test_what_passes_through_the_model_is_lean_but_at_first_and_now_and_then(runs):
    assert lean_kinds(runs["plain"], 9) == set()
    assert lean_kinds(runs["plain"], 10) == lean_kinds(runs["plain"], 12) == set(PASSING)
    assert lean_kinds(runs["sometimes"], 11) == set(PASSING)
    assert lean_kinds(runs["sometimes"], 12) == set()
    assert lean_kinds(runs["always"], 12) == lean_kinds(runs["cpu"], 12) == set()


def test_a_lean_run_is_the_same_as_a_full_one_and_as_one_on_the_cpu(runs):
    for other in ("sometimes", "always", "cpu"):
        assert compared(runs["plain"], runs[other]).verdict.value == "same"


def test_a_difference_in_a_lean_step_has_its_place_and_is_called_tolerated_by_nothing_that_bounds_it_from_below(runs):
    result = compared(runs["plain"], runs["scaled"])
    assert (result.first.step, result.first.site.kind) == (11, Kind.INPUT)
    tolerant = compared(runs["plain"], runs["scaled"], rtol=1.0)
    assert tolerant.counts.not_observed > 0
    assert tolerant.counts.within > 0, "parameters and their gradients have their sketches"
    assert any("have no sketch to hold against the tolerance" in note for note in tolerant.notes)
    assert compared(runs["plain"], runs["scaled"], rtol=0.01).first.step == 11


def test_a_write_that_torch_does_not_count_is_found_in_full_steps_and_from_then_on_all_is_read(runs, tmp_path):
    with made_gpu():
        written = captured(tmp_path / "written", lambda: train(container=Written))
    noted = []
    for run in (runs["plain"], written):
        with open_run(run) as opened:
            noted.append(any("torch counted no write" in each for each in opened.manifest["not_observed"]))
    assert noted == [False, True]
    sums = {(each.site.fqn, each.site.kind): each.summary.checksum for each in records(written, 12)}
    assert sums["Written.1", Kind.INPUT] != sums["Written.0", Kind.OUTPUT]
