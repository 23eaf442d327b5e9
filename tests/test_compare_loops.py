"""Faults in loops as people write them: reinforcement learning, adapters, decoders. Each was once told wrongly."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from neutrality import watched
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.reasons.settings import setting_changes
from introspect_cli.records import Kind
from introspect_cli.store.reader import open_run


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(4, 8)
        self.layer2 = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


def q_learning(*, gamma=0.99, tau=0.0, double=False):
    """Deep Q-learning: the targets come from a second network, which moves before the first optimizer step."""
    torch.manual_seed(0)
    policy, target = Policy(), Policy()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters())
    states, following, rewards = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(1 + tau)
    for _ in range(2):
        q = policy(states).max(1).values
        with torch.no_grad():
            expected = rewards + gamma * (policy if double else target)(following).max(1).values
        loss = nn.SmoothL1Loss()(q, expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Adapter(nn.Module):
    def __init__(self, scaling):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 4))
        self.lora_b = nn.Parameter(torch.zeros(4, 2))
        self.scaling = scaling

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T * self.scaling


def adapt(*, scaling=2.0, momentum=0.1):
    """An adapter that adds nothing yet, before a norm in train mode."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapter(scaling), nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
    for x in torch.randn(2, 6, 4):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def decode(*, forced=True):
    """A decoder that is told by a flag whether it sees the target."""
    torch.manual_seed(0)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 4)

        def forward(self, x, target, forced):
            return self.out(x + target if forced else x)

    net, encoder = Decoder(), Policy()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in torch.randn(2, 6, 4):
        encoder(x)
        optimizer.zero_grad()
        net(x, -x, forced).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(loop, fault):
        name = repr((loop.__name__, sorted(fault.items())))
        if name not in made:
            made[name] = folder / str(len(made))
            with watched(made[name]):
                loop(**fault)
        return made[name]

    def compare(loop, **fault):
        with open_run(run(loop, {})) as a, open_run(run(loop, fault)) as b:
            return compare_runs(a, b, DiffOptions())

    return compare


def test_a_target_that_the_script_computes_is_not_laid_to_the_data_pipeline(compared):
    found = compared(q_learning, gamma=0.9)
    assert (found.first.site.fqn, found.first.site.path, found.first.reason) == ("SmoothL1Loss", "[1]", "script")
    assert any("every module output recorded before it" in line for line in found.evidence), found.evidence
    assert "script's own code that computes it: from module outputs" in found.sentence
    assert "pipeline" not in found.sentence
    assert "data loader and" not in found.sentence


def test_a_network_that_is_not_called_is_not_said_to_be_missing(compared):
    found = compared(q_learning, double=True)
    assert "the module Policy#2 runs only in a (Policy)" in found.sentence


def test_a_network_that_moves_before_the_first_step_may_have_been_changed_by_the_script(compared):
    found = compared(q_learning, tau=0.1)
    assert found.first.site.fqn == "Policy#2.layer1.weight"
    assert "the script changed it before it was recorded" in found.sentence


def test_a_gradient_that_a_module_computes_in_its_own_code_is_not_laid_to_clipping_alone(compared):
    found = compared(adapt, scaling=2 * math.sqrt(2))
    assert (found.first.site.kind, found.first.site.fqn) == (Kind.GRAD, "Sequential.0.lora_b")
    assert "or how Sequential.0 itself uses the parameter (scaling 2.0 -> 2.8284271247461903)" in found.sentence


def test_a_buffer_names_what_its_module_is_reported(compared):
    found = compared(adapt, momentum=0.01)
    assert found.first.site.fqn == "Sequential.1.running_mean"
    assert found.sentence.endswith("it is updated differently: its module has momentum 0.1 -> 0.01.")


def test_a_flag_is_reported_with_both_values(compared):
    found = compared(decode, forced=False)
    assert "the input [2] of Decoder differs (True in a, False in b)" in found.sentence


def test_the_same_script_in_another_folder_explains_nothing():
    """A pair of worktrees: the path of the script differs, and what it holds is told by its hash."""

    def said(path_a, path_b, **more):
        a, b = (
            SimpleNamespace(settings={"command": {"argv": [path, "--lr", "1e-3"]}, **more}, manifest={})
            for path in (path_a, path_b)
        )
        return [change.name for change in setting_changes(a, b)]

    assert said("/projects/one/train.py", "/projects/two/train.py", sources={}) == []
    assert said("/projects/one/train.py", "/projects/two/train.py") == ["argument 0"]  # what they hold is not on record
    assert said("/projects/one/train.py", "/projects/two/other.py", sources={}) == ["argument 0"]
