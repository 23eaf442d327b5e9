"""Faults in loops as people write them: reinforcement learning, adapters, decoders. Each was once told wrongly."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from neutrality import watched
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.settings.settings import setting_changes
from introspect_cli.compare.terms.findings import StructureChange
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


class Scored(nn.Module):
    """Its dropout may be a function that knows no mode, and what a layer gives leaves the model and is used in it."""

    def __init__(self, functional, half):
        super().__init__()
        self.mean, self.head, self.drop, self.last = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(), nn.Dropout()
        self.scores = nn.Embedding(2, 4)
        self.functional, self.half = functional, half

    def forward(self, x):
        mean = self.mean(self.drop(x))
        used = halved(mean) if self.half == "mean" else mean
        scores = halved(self.scores.weight) if self.half == "scores" else self.scores.weight
        y = self.head(torch.tanh(used))
        y = nn.functional.dropout(y) if self.functional else self.last(y)
        return y + (mean.detach() @ scores.T).tanh(), mean


def halved(x):
    """The same value with half the gradient."""
    return x.detach() + (x - x.detach()) / 2


def score(*, functional=False, half=""):
    torch.manual_seed(0)
    net = Scored(functional, half)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=0.1), Policy()
    for step, x in enumerate(torch.randn(3, 6, 4)):
        before(x)
        net.eval()
        with torch.no_grad():
            [net(x) for _ in range(step)]
        net.train()
        optimizer.zero_grad()
        y, mean = net(x)
        (y.square().mean() + mean.square().mean()).backward()
        optimizer.step()


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


def penalise(*, clears=True):
    """Two optimizers in turn; a penalty leaves gradients in one layer of the first network, long before they show."""
    torch.manual_seed(0)
    nets = Policy(), Policy()
    steps = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for x in torch.randn(2, 6, 4):
        for net, optimizer in zip(nets, steps, strict=True):
            if clears:
                net.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            if net is nets[0]:
                net.zero_grad()
                net.layer1(x).square().mean().backward()
                optimizer.step()


class Weighing(nn.Module):
    """Attention that is handed the dropout of the module around it, and keeps a number of numpy's."""

    def __init__(self, scale):
        super().__init__()
        self.scale = np.float64(scale)

    def forward(self, x, dropout):
        return dropout((x @ x.T) * self.scale) @ x


class Handing(nn.Module):
    """It calls what a module inside it does, and not that module, as a function that another one is given."""

    def __init__(self, scale):
        super().__init__()
        self.weighing, self.dropout = Weighing(scale), nn.Dropout(0.1)

    def forward(self, x):
        return self.weighing(x, self.dropout)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, inner):
        return x + self.dropout(inner(x))


class Handed(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first, self.handing, self.residual = nn.Linear(4, 4), Handing(scale), Residual()

    def forward(self, x):
        return self.residual(self.first(x), self.handing.forward)


def hand_on(*, scale=1.0, rate=0.1, calls=0.0):
    """A rate that numpy computed, and a network that runs as often as a number says."""
    torch.manual_seed(0)
    net, often = Handed(scale), Policy()
    optimizer = torch.optim.SGD([*net.parameters(), *often.parameters()], lr=0.1)
    for step, x in enumerate(torch.randn(3, 6, 4)):
        optimizer.param_groups[0]["lr"] = np.float32(rate) * np.ones(3, np.float32)[step]
        optimizer.zero_grad()
        loss = net(x).square().mean()
        for _ in range(2 + round(math.cos(calls + step * math.pi))):
            loss = loss + often(x).square().mean()
        loss.backward()
        optimizer.step()


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
    assert "cause: scaling 2.0 -> 2.8284271247461903 of Sequential.0" in found.sentence


def test_a_buffer_names_what_its_module_is_reported(compared):
    found = compared(adapt, momentum=0.01)
    assert found.first.site.fqn == "Sequential.1.running_mean"
    assert found.sentence.endswith("cause: momentum 0.1 -> 0.01 of Sequential.1.")


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


def test_a_call_with_more_inputs_is_no_further_call(compared):
    found = compared(recur, {"again": "fed"}, again="plain")
    texts = [each.text for each in found.findings if isinstance(each, StructureChange)]
    assert texts == ["only a has the input [1] of GRU (call 1)"]
    found = compared(recur, {"losses": (nn.MSELoss, nn.MSELoss)}, losses=(nn.MSELoss, nn.L1Loss))
    assert "Many.MSELoss runs twice in this step of a and once in b" in found.sentence


def test_a_function_in_the_place_of_a_module_is_told_by_the_module_whose_values_it_has_not_on_record(compared):
    found = compared(score, functional=True)
    assert (found.first.step, found.first.site.kind, found.first.site.fqn) == (0, Kind.INPUT, "Scored.last")
    assert (found.first.role, found.first.reason, found.first.only) == (Role.ORIGIN, "structure", "a")


def test_what_leaves_the_model_and_is_used_inside_it_is_not_laid_to_the_loss_alone(compared):
    found = compared(score, half="mean")
    assert (found.first.site.kind, found.first.site.fqn) == (Kind.GRAD_OUTPUT, "Scored.mean")
    assert "left: the backward pass of what uses that output or the loss code" in found.sentence


def test_a_parameter_whose_module_never_runs_is_used_by_the_code_around_it(compared):
    found = compared(score, half="scores")
    assert (found.first.site.kind, found.first.site.fqn) == (Kind.GRAD, "Scored.scores.weight")
    assert "cause: half '' -> 'scores' of Scored" in found.sentence
    assert "unscaling" not in found.sentence


def test_an_optimizer_that_has_frozen_parameters_too_changes_no_number(compared):
    found = compared(adapt, frozen=True)
    assert found.verdict is Verdict.SAME, found.sentence


def test_a_buffer_that_an_evaluation_in_train_mode_updates_is_told_so(compared):
    found = compared(adapt, evaluates=False)
    assert (found.first.site.kind, found.first.reason) == (Kind.BUFFER, "outside")
    assert "b alone changed it outside of an optimizer step" in found.sentence


def test_an_optimizer_in_the_place_of_an_update_by_hand_is_compared_by_what_it_leaves(compared):
    assert compared(descend, by_hand=True).verdict is Verdict.SAME
    found = compared(descend, by_hand=True, rate=0.2)
    assert (found.first.step, found.first.site.kind) == (1, Kind.PARAM)
    assert "differs when the step begins" in found.sentence
    found = compared(descend, by_hand=True, rate=0)
    assert "left: the update of the step before" in found.sentence
    assert "no-optimizer" in {one.code for one in found.explains}


def test_what_runs_while_a_call_runs_is_inside_it_whoever_holds_it(compared):
    found = compared(hand_on, scale=2.0)
    assert (found.first.site.kind, found.first.site.fqn) == (Kind.INPUT, "Handed.handing.dropout")
    said = "before Handed.handing.dropout, in the forward code of Handed.handing.weighing; cause: scale 1.0 -> 2.0."
    assert said in found.sentence
    assert sum(isinstance(finding, Origin) for finding in found.findings) < 2


def test_a_gradient_that_is_left_over_from_long_before_is_not_said_to_be_cleared(compared):
    found = compared(penalise, clears=False)
    assert (found.first.site.kind, found.first.site.fqn) == (Kind.GRAD, "Policy.layer1.weight")
    assert "zero_grad" in found.sentence


def test_a_rate_that_numpy_computed_is_a_number(compared):
    found = compared(hand_on, rate=0.0)
    assert found.sentence.endswith("cause: lr 0.1 -> 0; in b the optimizer (SGD) leaves it as it was.")


def test_a_number_of_calls_that_numbers_decide_is_told_once(compared):
    found = compared(hand_on, calls=math.pi)
    texts = [each.text for each in found.findings if isinstance(each, StructureChange)]
    assert texts == ["Policy runs more often in some steps of a, and in others of b"]
