"""Faults in loops as people write them: reinforcement learning, adapters, decoders. Each was once told wrongly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from neutrality import watched
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.settings.settings import setting_changes
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Origin, Role, Verdict
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.read.run import open_run


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


def adapt(*, scaling=2.0, momentum=0.1, frozen=False, evaluates=True):
    """An adapter that adds nothing yet, before a norm in train mode."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapter(scaling), nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad or frozen], lr=0.1)
    for x in torch.randn(2, 6, 4):
        optimizer.zero_grad()
        net.train()(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            net.train(not evaluates)(x)


def images(*, shuffle=False, mean=0.1, seed=0):
    """A data set whose transform is a module, as torchvision's are, so that it runs while the loader makes a batch."""
    torch.manual_seed(0)

    class Normalize(nn.Module):
        def __init__(self, mean):
            super().__init__()
            self.mean = mean

        def forward(self, x):
            return x - self.mean

    class Images(torch.utils.data.Dataset):
        rows, norm = torch.randn(8, 4), Normalize(mean)

        def __len__(self):
            return 8

        def __getitem__(self, place):
            return self.norm(self.rows[place]), self.rows[place].sum()

    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        if epoch:
            net.eval()
            if seed:
                torch.manual_seed(seed)
            for x, _ in torch.utils.data.DataLoader(Images(), batch_size=4):
                net(x)
            net.train()
        for x, y in torch.utils.data.DataLoader(Images(), batch_size=4, shuffle=shuffle):
            optimizer.zero_grad()
            (net(x)[:, 0] - y).square().mean().backward()
            optimizer.step()


def recur(*, forgets=False, again="", losses=(nn.MSELoss,), rate=0.1):
    """A recurrent model that is given its state of the step before, and may run again with or without it."""
    torch.manual_seed(0)
    net = nn.GRU(3, 4)
    optimizer, state = torch.optim.SGD(net.parameters(), lr=rate), torch.zeros(1, 2, 4)
    for x in torch.randn(3, 5, 2, 3):
        optimizer.zero_grad()
        out, state = net(x, torch.zeros(1, 2, 4) if forgets else state.detach())
        if again:
            out = out + net(*(x, state.detach())[: 2 if again == "fed" else 1])[0]
        Many(losses)(out).backward()
        optimizer.step()


class Many(nn.Module):
    """It makes its losses anew in every call."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def forward(self, x):
        return sum(loss()(x, torch.zeros_like(x)) for loss in self.losses)


def descend(*, by_hand=False, rate=0.1):
    """Gradient descent by an optimizer or by hand; by a rate of 0, not at all."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = None if by_hand else torch.optim.SGD(net.parameters(), lr=rate)
    for x in torch.randn(3, 6, 4):
        net.zero_grad()
        net(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        elif rate:
            for own in net.parameters():
                own.data.add_(own.grad, alpha=-rate)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run(loop, fault, every):
        name = repr((loop.__name__, sorted(fault.items()), every))
        if name not in made:
            made[name] = folder / str(len(made))
            with watched(made[name], steps=Schedule.parse(f"::{every}")):
                loop(**fault)
        return made[name]

    def compare(loop, base=(), every=1, **fault):
        with open_run(run(loop, dict(base), every)) as a, open_run(run(loop, fault, every)) as b:
            return compare_runs(a, b, DiffOptions())

    return compare


def test_a_target_that_the_script_computes_is_not_laid_to_the_data_pipeline(compared):
    found = compared(q_learning, gamma=0.9)
    assert (found.first.site.fqn, found.first.site.path, found.first.reason) == ("SmoothL1Loss", "[1]", "script")
    assert any("every module output recorded before it" in line for line in found.evidence), found.evidence
    assert "left: what the script computes from module outputs" in found.sentence
    assert "pipeline" not in found.sentence
    assert "data loader and" not in found.sentence


def test_a_network_that_moves_before_the_first_step_may_have_been_changed_by_the_script(compared):
    found = compared(q_learning, tau=0.1)
    assert found.first.site.fqn == "Policy#2.layer1.weight"
    assert "the script changed it before it was recorded" in found.sentence


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


def test_a_module_that_the_loader_runs_is_laid_to_the_data_pipeline_and_the_batch_follows_from_it(compared):
    found = compared(images, shuffle=True)
    assert (found.first.site.fqn, found.first.reason) == ("Normalize", "script")
    assert "Normalize runs while DataLoader makes the batch" in found.sentence
    assert not any("not recorded" in line.lower() for line in found.evidence), found.evidence
    found = compared(images, mean=0.2)
    assert (found.first.site.fqn, found.first.reason) == ("Normalize", "module")
    assert sum(isinstance(finding, Origin) for finding in found.findings) < 2


def test_a_batch_from_a_random_state_that_was_set_is_no_second_cause(compared):
    found = compared(images, {"shuffle": True}, shuffle=True, seed=5)
    assert found.first.site.kind is Kind.RNG
    assert sum(isinstance(finding, Origin) for finding in found.findings) < 2


def test_a_state_that_is_not_carried_over_is_what_the_script_prepares(compared):
    found = compared(recur, forgets=True)
    assert (found.first.step, found.first.site.kind, found.first.site.path) == (1, Kind.INPUT, "[1]")
    assert (found.first.role, found.first.reason) == (Role.ORIGIN, "script")


def test_what_a_step_that_is_not_recorded_gave_is_no_fault_of_the_data(compared):
    found = compared(recur, {"rate": 0.0}, every=2, rate=0.0, forgets=True)
    assert found.first.step == 2
    assert found.sentence.endswith("or a step before that is not recorded.")


def test_an_optimizer_that_has_frozen_parameters_too_changes_no_number(compared):
    found = compared(adapt, frozen=True)
    assert found.verdict is Verdict.SAME, found.sentence


def test_an_optimizer_in_the_place_of_an_update_by_hand_is_compared_by_what_it_leaves(compared):
    assert compared(descend, by_hand=True).verdict is Verdict.SAME
    found = compared(descend, by_hand=True, rate=0.2)
    assert (found.first.step, found.first.site.kind) == (1, Kind.PARAM)
    assert "differs when the step begins" in found.sentence
    found = compared(descend, by_hand=True, rate=0)
    assert "left: the update of the step before" in found.sentence
    assert "no-optimizer" in {one.code for one in found.explains}
