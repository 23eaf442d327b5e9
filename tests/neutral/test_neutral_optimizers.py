"""Optimizers, scalers and schedulers: each trains the same bits under capture, and steps are counted as they are."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from neutrality import assert_neutral, mlp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def train_with(make, *, steps=3, model=mlp, data=lambda: torch.randn(4, 8)):
    def train(log):
        net = model()
        optimizer = make(net.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            loss = log.loss(net(data()).square().mean())
            loss.backward()
            optimizer.step()
            log(net, optimizer)

    return train


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, foreach=False, lr=torch.tensor(0.01)),
    "adam-differentiable": lambda p: torch.optim.Adam(p, maximize=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
}
if hasattr(torch.optim, "Adafactor"):  # new in torch 2.5
    OPTIMIZERS["adafactor"] = torch.optim.Adafactor


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_the_same(tmp_path, name):
    seen = assert_neutral(train_with(OPTIMIZERS[name]), tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2]
    assert seen.repeated() == []
    weight = "Sequential.0.weight"
    assert len(seen.of("grad", weight)) == len(seen.of("param", weight, phase="optimizer")) == 3


def test_capturable_needs_an_accelerator_and_says_so_alike(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.Adam(net.parameters(), capturable=True)
        net(torch.randn(4, 8)).mean().backward()
        try:
            optimizer.step()
        except (AssertionError, RuntimeError) as error:
            log(str(error))
        log(net, optimizer)

    assert assert_neutral(train, tmp_path / "run").records


def test_sparse_gradients_train_the_same(tmp_path):
    def model():
        return nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(16, 1))

    def train(log):
        net = model()
        sparse, dense = torch.optim.SparseAdam(net[0].parameters()), torch.optim.SGD(net[2].parameters(), lr=0.1)
        for _ in range(2):
            log.loss(net(torch.randint(10, (4, 2))).square().mean()).backward()
            sparse.step()
            dense.step()
            log(net, sparse, dense)
            net.zero_grad()

    seen = assert_neutral(train, tmp_path / "run")
    (grad,) = seen.of("grad", "Sequential.0.weight", step=0)
    assert grad.summary.layout.strides == "sparse_coo"
    assert list(seen.steps) == [0, 1, 2, 3]  # two optimizers: each step of either ends a step


def test_lbfgs_with_a_closure_trains_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        x = torch.randn(8, 8)

        def closure():
            optimizer.zero_grad()
            loss = log.loss(net(x).square().mean())
            loss.backward()
            return loss

        for _ in range(2):
            log(optimizer.step(closure), net, optimizer)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1]
    assert seen.repeated() == []
    assert seen.calls("output", "Sequential", step=0) == list(range(len(seen.of("loss", step=0))))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: climbs, asks for the gradient there, and lets another optimizer step."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        climbed = []
        for group in self.param_groups:
            for parameter in group["params"]:
                climb = parameter.grad * group["rho"]
                parameter.add_(climb)
                climbed.append((parameter, climb))
        self.zero_grad()
        closure()
        for parameter, climb in climbed:
            parameter.sub_(climb)
        self.base.step()
        return loss


def test_a_sharpness_aware_optimizer_trains_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = Sam(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

        for _ in range(3):
            x = torch.randn(4, 8)

            def closure(x=x):
                loss = log.loss(net(x).square().mean())
                loss.backward()
                return loss

            optimizer.step(closure)
            log(net, optimizer, optimizer.base)
            optimizer.zero_grad()

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2]
    assert seen.calls("output", "Sequential", step=1) == [0, 1]


def test_step_that_raises_and_goes_on(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.LBFGS(net.parameters())

        def closure():
            raise ValueError("no")

        for _ in range(2):
            net(torch.randn(4, 8)).mean().backward()
            with pytest.raises(ValueError, match="no"):
                optimizer.step(closure)
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.randn(4, 8)).mean().backward()
            plain.step()
            log(net)

    seen = assert_neutral(train, tmp_path / "run")
    assert len(seen.of("param", "Sequential.0.weight", phase="optimizer")) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler_with_skipped_steps(tmp_path, fused):
    def train(log):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(4, 8)).square().mean()
            if step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            log(net, optimizer, scaler.state_dict())

    seen = assert_neutral(train, tmp_path / "run")
    assert list(seen.steps) == [0, 1, 2, 3]  # a skipped step is a step
    before = seen.of("param", "Sequential.0.weight", step=0, phase="optimizer")[0].summary.checksum
    after = seen.of("param", "Sequential.0.weight", step=1, phase="optimizer")[0].summary.checksum
    assert before == after
    assert seen.of("output", "Sequential.0", step=0)[0].summary.layout.dtype == "float16"
    assert seen.repeated() == []


def test_bf16_autocast_trains_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = log.loss(net(torch.randn(4, 8)).square().mean())
            loss.backward()
            optimizer.step()
            log(net, optimizer)
            optimizer.zero_grad()

    seen = assert_neutral(train, tmp_path / "run")
    assert seen.of("output", "Sequential.0", step=0)[0].summary.layout.dtype == "bfloat16"
    assert seen.of("grad", "Sequential.0.weight", step=1)[0].summary.layout.dtype == "float32"


def test_schedulers_step_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        then = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for _ in range(4):
            loss = log.loss(net(torch.randn(4, 8)).square().mean())
            loss.backward()
            optimizer.step()
            warm.step()
            then.step()
            plateau.step(float(loss))
            log(net, optimizer, optimizer.param_groups[0]["lr"], then.get_last_lr())

    seen = assert_neutral(train, tmp_path / "run")
    rates = [r.summary.text for r in seen.of("hyperparameter", "SGD") if r.site.path == "[0]['lr']"]
    assert len(rates) == 4
    assert len(set(rates)) > 1


def test_an_average_of_the_weights_is_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        copied = copy.deepcopy(net).eval().requires_grad_(requires_grad=False)
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            x = torch.randn(4, 8)
            log.loss(net(x).square().mean()).backward()
            optimizer.step()
            averaged.update_parameters(net)
            with torch.no_grad():
                for target, source in zip(copied.parameters(), net.parameters(), strict=True):
                    target.lerp_(source, 0.1)
                log(net, copied, averaged, copied(x), averaged(x))
            optimizer.zero_grad()

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert not any(name.startswith("Sequential#") for name in seen.modules)  # both copies are evaluated only
    assert seen.calls("output", "Sequential.0", step=1) == [0]


def test_a_saved_and_resumed_training_is_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters())
        saved = io.BytesIO()
        for step in range(4):
            if step == 2:
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, saved)
                saved.seek(0)
                state = torch.load(saved)
                net = mlp()
                optimizer = torch.optim.AdamW(net.parameters())
                net.load_state_dict(state["net"])
                optimizer.load_state_dict(state["optimizer"])
            log.loss(net(torch.randn(4, 8)).square().mean()).backward()
            optimizer.step()
            log(net, optimizer, net.state_dict(), saved.getvalue())
            optimizer.zero_grad()

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2, 3]


def test_several_models_and_optimizers_train_the_same(tmp_path):
    def train(log):
        maker, judge = mlp(), mlp()
        ours, theirs = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
        for _ in range(2):
            noise = torch.randn(4, 8)
            fake = maker(noise).expand(4, 8)
            theirs.zero_grad()
            log.loss(judge(fake.detach()).mean() - judge(torch.randn(4, 8)).mean()).backward()
            theirs.step()
            ours.zero_grad()
            log.loss(-judge(fake).mean()).backward()
            ours.step()
            log(maker, judge, ours, theirs)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2, 3]
    assert seen.calls("output", "Sequential#2", step=0) == [0, 1]
    assert {r.site.fqn for r in seen.of("hyperparameter")} == {"Adam", "Adam#2"}


def test_parameters_that_are_frozen_unused_added_and_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight
            self.unused = nn.Linear(8, 8)
            self.loose = torch.ones(8)

        def forward(self, ids):
            return self.head(self.frozen(self.embed(ids)) * self.loose)

    def train(log):
        net = Tied()
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(3):
            if step == 2:
                net.adapter = nn.Linear(8, 8)
                optimizer.add_param_group({"params": net.adapter.parameters(), "lr": 0.5})
                net.frozen.register_forward_hook(lambda module, args, out: net.adapter(out))
            log.loss(net(torch.randint(10, (4, 3))).logsumexp(-1).mean()).backward()
            optimizer.step()
            log(net, optimizer)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.repeated() == []
    assert len(seen.of("grad", "Tied.embed.weight")) == 3
    assert not seen.of("grad", "Tied.head.weight")
    assert not seen.of("grad", "Tied.frozen.weight")
    assert seen.of("grad", "Tied.adapter.weight", step=2)
    assert seen.of("param", "Tied.unused.weight", step=0, phase="start")
