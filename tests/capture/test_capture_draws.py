"""Random numbers drawn within a step: who drew them, and what follows from one draw more."""

import random

import numpy as np
import pytest
import torch
from neutrality import watched
from opcapture import captured, compared
from torch import nn

from introspect_cli.capture.draws import state_of
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind, Phase
from introspect_cli.store.read.run import open_run


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.lin(x)) if self.drop else nn.functional.dropout(self.lin(x), 0.5)


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = [fault]
        self.left = Branch()
        self.right = Branch()
        self.head = nn.Linear(8, 4)
        if fault == "as functions":
            self.left.drop = self.right.drop = None
        self.steps = 0

    def forward(self, x):
        fault = self.fault[0]
        self.steps += 1
        now = self.steps == 2
        if fault == "swapped":
            right, left = self.right(x), self.left(x)
        else:
            left = self.left(x)
            if fault == "between modules" and now:
                torch.rand(1)
            right = self.right(x)
        if fault == "behind all draws" and now:
            torch.rand(1)
        both = nn.functional.dropout(left + right, 0.1, training=fault != "functional dropout off")
        return self.head(both)


def train(fault=""):
    torch.manual_seed(0)
    net = Net(fault)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    for step in range(3):
        if fault == "before the step" and step == 1:
            torch.rand(1)
        if fault == "other p":
            net.right.drop.p = 0.4
        if fault == "eval mode":
            net.right.drop.eval()
        loss = nn.functional.cross_entropy(net(x), y)
        if fault == "before the backward pass" and step == 1:
            torch.rand(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "run"
    with watched(path):
        train()
    return path


def answer(plain, path, fault):
    with watched(path / "run"):
        train(fault)
    with open_run(plain) as a, open_run(path / "run") as b:
        return compare_runs(a, b, DiffOptions(), [])


FAULTS = {
    "between modules": (
        1,
        (Phase.FORWARD, Kind.RNG, "Net.right.drop"),
        "random numbers were drawn between Net.left and Net.right in b and not in a",
    ),
    "swapped": (
        0,
        (Phase.FORWARD, Kind.RNG, "Net.left.drop"),
        "in b it is that of Net.right.drop in a, and the other way round",
    ),
    "behind all draws": (
        1,
        (Phase.FORWARD, Kind.INPUT, "Net.head"),
        "between Net.right and Net.head, in the forward code of Net",
    ),
    "before the backward pass": (
        2,
        (Phase.START, Kind.RNG, "torch"),
        "random numbers were drawn between Net and backward in b and not in a",
    ),
    "before the step": (
        1,
        (Phase.START, Kind.RNG, "torch"),
        "left: random draws of one run after the backward pass of the step before",
    ),
    "other p": (
        0,
        (Phase.FORWARD, Kind.OUTPUT, "Net.right.drop"),
        "although its inputs and the random state are equal; cause: p 0.5 -> 0.4",
    ),
    "eval mode": (
        0,
        (Phase.FORWARD, Kind.OUTPUT, "Net.right.drop"),
        "although its inputs are equal; cause: train mode in a, eval mode in b",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_draw_is_named_and_no_module_is_blamed_for_it(tmp_path, plain, fault):
    step, place, words = FAULTS[fault]
    result = answer(plain, tmp_path, fault)
    assert result.first is not None
    site = result.first.site
    assert (result.first.step, (site.phase, site.kind, site.fqn)) == (step, place), result.sentence
    assert words in result.sentence
    if place[1] is Kind.RNG:
        assert "inside this module" not in result.sentence


def test_what_draws_in_one_run_only_is_said_beside_the_answer(tmp_path, plain):
    result = answer(plain, tmp_path, "functional dropout off")
    assert "between Net.right and Net.head" in result.sentence
    said = "Random numbers were drawn between Net.right and Net.head in a and not in b."
    assert said in result.evidence


LESS = {
    "modules": {"modules": ("head",)},
    "lean": {"record": frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS, Kind.RNG})},
    "no loss": {"record": frozenset({Kind.PARAM, Kind.GRAD, Kind.INPUT, Kind.OUTPUT, Kind.RNG})},
}


@pytest.mark.parametrize("less", LESS)
def test_states_that_were_looked_at_at_other_moments_are_no_divergence(tmp_path, plain, less):
    with watched(tmp_path / "run", **LESS[less]):
        train()
    for paths in ((plain, tmp_path / "run"), (tmp_path / "run", plain)):
        with open_run(paths[0]) as a, open_run(paths[1]) as b:
            result = compare_runs(a, b, DiffOptions(), [])
        assert result.verdict is Verdict.SAME, result.sentence


@pytest.mark.parametrize("fault", ["other p", "as functions"])
def test_a_draw_that_is_on_record_elsewhere_is_not_called_one_runs_alone(tmp_path, plain, fault):
    with watched(tmp_path / "run", **({"modules": ("head",)} if fault == "other p" else {})):
        train(fault)
    for paths in ((plain, tmp_path / "run"), (tmp_path / "run", plain)):
        with open_run(paths[0]) as a, open_run(paths[1]) as b:
            result = compare_runs(a, b, DiffOptions(), [])
        said = " ".join((result.sentence, *result.evidence))
        assert "drew random numbers" not in said
        assert "were drawn" not in said
        if fault == "other p":
            assert result.first is not None
            assert result.first.site.fqn == "Net.head"
            assert "or what was not recorded" in result.sentence


def test_twins_are_the_same_and_every_module_that_draws_has_a_record_of_the_state_before(tmp_path, plain):
    result = answer(plain, tmp_path, "")
    assert result.verdict is Verdict.SAME
    with open_run(plain) as run:
        assert run.manifest["draws"] is True
        drawn = [(r.site.fqn, r.site.path) for r in run.rank(0).records(1) if r.site.kind is Kind.RNG]
    assert drawn[3:] == [("Net.left.drop", "torch"), ("Net.right.drop", "torch"), ("Net.head", "torch before")]


def test_runs_that_do_not_know_every_draw_claim_only_the_state_at_the_start_of_the_step(tmp_path, plain, monkeypatch):
    monkeypatch.setattr("introspect_cli.tensors.generators.Generators.look", lambda _self, _devices: None)
    for name, fault in (("a", ""), ("b", "between modules")):
        with watched(tmp_path / name):
            train(fault)
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        assert a.manifest["draws"] is False
        result = compare_runs(a, b, DiffOptions(), [])
    assert result.first is not None
    assert result.first.site.fqn == "Net.right.drop"
    assert "the random state at the start of the step" in result.sentence
    assert "other random numbers drawn before it in this step" in result.sentence


def draw_here_and_there():
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = random.getstate()
    changes = (
        lambda: None,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: np.random.randn(1),  # noqa: NPY002 - the global generator is what is recorded
        lambda: np.random.randn(1),  # noqa: NPY002 - as above
        lambda: None,
        lambda: random.seed(3),
        lambda: random.setstate(kept),
        lambda: np.random.seed(4),  # noqa: NPY002 - as above
        lambda: None,
    )
    for change in changes:
        change()
        net(torch.ones(3, 2)).sum().backward()
        optimizer.step()


def states(path):
    with open_run(path) as run:
        rank = run.rank(0)
        kept = [[each for each in rank.records(entry.step) if each.site.kind is Kind.RNG] for entry in rank.steps]
        return [
            {each.site.path or each.site.fqn: (each.summary.checksum, each.summary.text) for each in step}
            for step in kept
        ]


def test_states_that_stand_as_they_did_are_recorded_as_if_they_were_asked_for(tmp_path, monkeypatch):
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 - as above
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    with watched(tmp_path / "reused"):
        draw_here_and_there()
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002 - as above
    monkeypatch.setattr("introspect_cli.tensors.generators.Generators.mark", lambda *_: None)
    with watched(tmp_path / "asked"):
        draw_here_and_there()
    reused = states(tmp_path / "reused")
    assert reused == states(tmp_path / "asked")
    python, numpy = ([step[name] for step in reused] for name in ("python", "numpy"))
    assert [python.index(each) for each in python] == [0, 1, 2, 2, 2, 2, 6, 0, 0, 0]
    assert [numpy.index(each) for each in numpy] == [0, 0, 0, 3, 4, 4, 4, 4, 8, 8]


def test_a_state_is_read_inside_a_transform_of_torch_func_too():
    generator, seen = torch.Generator().manual_seed(3), []
    torch.func.grad(lambda x: (seen.append(state_of(generator)), x.sum())[1])(torch.ones(2))
    assert seen == [state_of(generator)] != [0]


def test_a_draw_in_a_compiled_region_is_not_called_missing(tmp_path):
    """It is recorded of the region; of which module in it, nothing tells."""

    def work(*, compiled, scale=1.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        run = torch.compile(net, backend="eager") if compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        (run(torch.ones(5, 4)) * scale).square().sum().backward()
        optimizer.step()

    one = captured(tmp_path / "a", lambda: work(compiled=False))
    result = compared(one, captured(tmp_path / "b", lambda: work(compiled=True, scale=1.1)))
    assert result.verdict is Verdict.DIVERGED
    assert not any("drew random numbers in a" in line for line in result.evidence), result.evidence
