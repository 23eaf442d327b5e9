"""What scripts change by hand: averages inside a forward pass, targets, and parts of a model that are called alone."""

import copy

import pytest
import torch
from neutrality import watched
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Origin, Verdict
from introspect_cli.records import Kind
from introspect_cli.store.read.run import open_run

STEPS = 3


class Contrast(nn.Module):
    """An encoder, its moving average, which the forward pass itself moves, and a queue of what that gave."""

    def __init__(self, pace, late, noise):
        super().__init__()
        self.pace, self.late = pace, late
        self.body, self.slow = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Threshold(noise, 0.0))
        for mine, its in zip(self.body.parameters(), self.slow.parameters(), strict=True):
            its.requires_grad_(False).copy_(2 * mine.detach())
        self.register_buffer("queue", torch.ones(8, 4))

    @torch.no_grad()
    def move(self):
        for mine, its in zip(self.body.parameters(), self.slow.parameters(), strict=True):
            its.mul_(1 - self.pace).add_(self.pace * mine)

    def forward(self, x):
        near = self.body(x)
        if not self.late:
            self.move()
        with torch.no_grad():
            far = self.slow(x)
        if self.late:
            self.move()
        product = near @ self.queue.clone().T
        self.queue.copy_(far)
        return product


def trained(made, held=nn.Module.parameters):
    """Steps of a model on random batches, from one seed; `held` says which parameters the optimizer has."""

    def run():
        torch.manual_seed(0)
        net = made()
        optimizer = torch.optim.SGD(held(net), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    return run


def contrast(*, pace=0.1, late=False, noise=-1.0, every=True):
    held = nn.Module.parameters if every else lambda net: net.body.parameters()
    return trained(lambda: Contrast(pace, late, noise), held)


def compared(tmp_path, one, two, **options):
    for name, run in (("a", one), ("b", two)):
        with watched(tmp_path / name, **options):
            run()
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        return compare_runs(a, b, DiffOptions())


@pytest.mark.parametrize("change", [{"pace": 0.2}, {"late": True}], ids=["by another step", "at another place"])
def test_parameters_that_a_forward_pass_changes_are_not_called_equal_within_it(tmp_path, change):
    result = compared(tmp_path, contrast(), contrast(**change))
    assert result.first.site.fqn == "Contrast.slow.0"
    assert "although its inputs are equal" in result.sentence
    assert "(its parameters at this point of a forward pass that changes them were not recorded)" in result.sentence


def test_by_lean_records_the_parameter_that_a_forward_pass_changes_is_the_place(tmp_path):
    result = compared(tmp_path, contrast(), contrast(pace=0.2), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS}))
    assert result.first.site.kind.value == "param"
    assert result.sentence.startswith(
        "First divergence at step 0: the parameter Contrast.slow.0.weight differs after the forward pass"
    )
    assert "the script changes it by hand (a moving average, copying, in-place code)" in result.sentence


def test_whether_an_optimizer_holds_what_the_forward_pass_changes_is_no_divergence(tmp_path):
    result = compared(tmp_path, contrast(), contrast(every=False))
    assert result.verdict is Verdict.SAME, result.sentence


def test_a_buffer_follows_from_what_ran_inside_its_module(tmp_path):
    result = compared(tmp_path, contrast(), contrast(noise=-0.5))
    assert (result.first.site.kind.value, result.first.site.fqn) == ("output", "Contrast.slow.1")
    origins = [finding for finding in result.findings if isinstance(finding, Origin)]
    assert not any("queue" in origin.sentence for origin in origins)


def averaged(*, first=False, keeps=0.9):
    """A frozen average that an optimizer is given, too, moved after its step or before."""

    def run():
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        slow = copy.deepcopy(net).requires_grad_(False)
        model = nn.ModuleDict({"net": net, "slow": slow})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def move():
            with torch.no_grad():
                for mine, its in zip(net.parameters(), slow.parameters(), strict=True):
                    its.mul_(keeps).add_(0.05 * mine)

        for _ in range(STEPS):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            (model["net"](x) - model["slow"](x)).square().mean().backward()
            if first:
                move()
            optimizer.step()
            if not first:
                move()

    return run


def test_a_parameter_without_a_gradient_that_changes_within_a_step_is_not_laid_to_the_optimizer(tmp_path):
    result = compared(tmp_path, averaged(), averaged(first=True))
    assert "cause: b alone changes it" in result.sentence
    assert "optimizer or its hyper-parameters" not in result.sentence


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return self.head(self.body(x))


def in_parts(*, scale=1.0, grow=1.0):
    """A part of a model is called alone and its parameters are moved; then comes the whole."""

    def run():
        torch.manual_seed(0)
        net = Scaled(scale)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            x = torch.randn(8, 4)
            loss = (net.body(x) * net.scale).square().mean()
            if step == 1:
                with torch.no_grad():
                    net.body.weight.mul_(grow)
            optimizer.zero_grad()
            (loss + net(x).square().mean() if step == 1 else loss).backward()
            optimizer.step()

    return run


def test_what_a_model_holds_is_on_record_where_only_a_part_of_it_is_called(tmp_path):
    result = compared(tmp_path, in_parts(), in_parts(scale=2.0))
    assert (result.first.site.fqn, result.first.site.phase.value) == ("Scaled.scale", "start"), result.sentence


def test_a_parameter_that_changed_before_the_whole_model_was_first_called_is_the_place(tmp_path):
    result = compared(tmp_path, in_parts(grow=1.1), in_parts(grow=1.2))
    assert (result.first.step, result.first.site.kind.value, result.first.site.fqn) == (
        1,
        "param",
        "Scaled.body.weight",
    )


def acting(*, speed=0.5, double=False):
    """An agent acts without gradients in training mode; then a target gives the goal of the loss."""

    def run():
        torch.manual_seed(0)
        actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
        target = copy.deepcopy(critic)
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
        for _ in range(STEPS):
            state = torch.randn(8, 4)
            with torch.no_grad():
                action = actor(state)
            with torch.no_grad():
                goal = target(torch.cat([state * (1 + double), action], 1))
            optimizer.zero_grad()
            (critic(torch.cat([state, action], 1)) - 0.9 * goal).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for mine, its in zip(critic.parameters(), target.parameters(), strict=True):
                    its.lerp_(mine, speed)

    return run


def test_the_target_of_a_loss_is_recorded_though_an_agent_acted_before(tmp_path):
    result = compared(tmp_path, acting(), acting(speed=0.4))
    assert (result.first.step, result.first.site.kind.value) == (1, "param"), result.sentence
    assert "a moving average" in result.sentence
    result = compared(tmp_path / "other", acting(), acting(double=True))
    assert (result.first.step, result.first.site.kind.value) == (0, "input"), result.sentence


def in_rounds(*, mode):
    """Each round has a copy of the model, a loader and an optimizer of its own, as federated averaging has."""

    def run():
        torch.manual_seed(0)
        whole = nn.Linear(4, 2)
        for _ in range(3):
            net, loader = copy.deepcopy(whole).train(mode), DataLoader(torch.randn(8, 4), batch_size=4)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for x in loader:
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            whole.load_state_dict(net.state_dict())

    return run


def test_training_in_eval_mode_on_batches_of_a_new_loader_is_training(tmp_path):
    result = compared(tmp_path, in_rounds(mode=True), in_rounds(mode=False))
    assert result.verdict is Verdict.SAME, result.sentence
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        assert [len(a.rank(0).read(step)) for step in range(6)] == [len(b.rank(0).read(step)) for step in range(6)]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x)
        return self.head(x * 2 if self.training else x)


def validated(*, again=True, at_the_end=False):
    """A validation leaves eval mode on; or the script ends with one in train mode, with gradients."""

    def run():
        torch.manual_seed(0)
        net, data = Masked(), torch.randn(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(STEPS):
            if again:
                net.train()
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()
            net.eval()
        if at_the_end:
            net.train()
            net(data)

    return run


def test_a_mode_that_differs_is_said_where_the_code_of_its_module_is_to_blame(tmp_path):
    result = compared(tmp_path, validated(), validated(again=False))
    assert result.first.step == 1
    assert "between Masked.body and Masked.head, in the forward code of Masked; cause: " in (result.sentence)
    assert "train mode in a, eval mode in b" in result.sentence


def test_a_forward_pass_at_the_end_that_trains_nothing_is_no_step_that_one_run_lacks(tmp_path):
    result = compared(tmp_path, validated(), validated(at_the_end=True))
    assert result.verdict is Verdict.SAME, result.sentence


def grouped(*, moved):
    """A parameter in another group, whose learning rate the loop sets: both begin with the same."""

    def run():
        torch.manual_seed(0)
        net, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(8, 4)
        first, second = [list(layer.parameters()) for layer in net]
        groups = [[*first, second[1]], second[:1]] if moved else [first, second]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
        for step in range(STEPS):
            optimizer.param_groups[1]["lr"] = 0.1 / (step + 1)
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()

    return run


def test_a_parameter_in_another_group_is_said_by_the_learning_rate_that_it_has_there(tmp_path):
    result = compared(tmp_path, grouped(moved=False), grouped(moved=True))
    assert (result.first.step, result.first.site.fqn) == (1, "Sequential.1.bias")
    assert "cause: lr 0.05 -> 0.1." in result.sentence


class Inner(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power, self.weight = power, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.weight) ** self.power


class Surprised(nn.Module):
    """Computes with the gradient of a part, which is taken where no record can be made, and with that part."""

    def __init__(self, power, tried):
        super().__init__()
        self.body, self.inner, self.head = nn.Linear(4, 4), Inner(power), nn.Linear(4, 4)
        if tried:
            with torch.no_grad():
                self.head(torch.randn(2, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x)
        surprise = torch.func.vmap(torch.func.grad(lambda one: self.inner(one).sum()))(x)
        return self.last(self.inner(self.head(x + surprise)))


def surprised(*, power=2, tried=False):
    return trained(lambda: Surprised(power, tried))


def test_what_ran_inside_and_could_not_be_seen_is_not_called_equal(tmp_path):
    result = compared(tmp_path, surprised(), surprised(power=3))
    assert (result.first.site.kind, result.first.site.fqn) == (Kind.INPUT, "Surprised.head")
    assert "(the outputs of the modules inside Surprised so far were not recorded)" in result.sentence


def test_a_draw_that_may_be_the_same_one_unseen_is_not_said_to_be_in_one_run_only(tmp_path):
    result = compared(tmp_path, surprised(), surprised(tried=True))
    assert "the first draw or seeding that differs is kaiming_uniform_ of Surprised.last.weight" in result.sentence
    assert " in a only" not in result.sentence
    assert "in a and a draw before" in result.sentence


class Kept(nn.Module):
    """Two buffers: the second is made of the first."""

    def __init__(self, begins):
        super().__init__()
        self.register_buffer("count", torch.full((4,), begins))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.count += 1
        self.mean += (x.detach().mean(0) - self.mean) / self.count
        return x


def kept(begins):
    return trained(lambda: nn.Sequential(nn.Linear(4, 4), Kept(begins), nn.Linear(4, 2)))


def test_a_buffer_follows_from_another_that_its_module_begins_with(tmp_path):
    result = compared(tmp_path, kept(0.0), kept(1.0))
    assert (result.first.site.kind, result.first.site.fqn) == (Kind.BUFFER, "Sequential.1.count")
    origins = [finding for finding in result.findings if isinstance(finding, Origin)]
    assert not any("mean" in origin.sentence for origin in origins)
