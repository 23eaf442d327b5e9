"""What an optimizer keeps is recorded by a plan while it stays the same, and records the same as without one."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured
from torch import nn

from introspect_cli.capture.probes.optimizer_values import Plan
from introspect_cli.store.read.run import open_run


def nothing(net, optimizer):
    pass


def freeze(net, optimizer):
    net[0].bias.requires_grad_(requires_grad=False)
    net[0].bias.grad = None


def forget_one(net, optimizer):
    del optimizer.state[net[0].weight]


def add_key(net, optimizer):
    optimizer.state[net[0].weight]["seen"] = torch.ones(2)


def swap_keys(net, optimizer):
    state = optimizer.state[net[0].weight]
    state["exp_avg"] = state.pop("exp_avg")


def put_number(net, optimizer):
    optimizer.state[net[0].weight]["note"] = 7.0


def put_other_mapping(net, optimizer):
    class Own(dict):
        pass

    optimizer.state[net[0].weight] = Own(optimizer.state[net[0].weight])


def add_group(net, optimizer):
    optimizer.add_param_group({"params": [net[2].weight]})


CHANGES = (nothing, freeze, forget_one, add_key, swap_keys, put_number, put_other_mapping, add_group)


def train(change):
    def work():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
        held = [*net[0].parameters(), *net[1].parameters()]
        optimizer = torch.optim.AdamW(held, lr=0.1, foreach=False)
        for step in range(6):
            if step == 3:
                change(net, optimizer)
            net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def contents(path):
    with open_run(path) as run:
        rank = run.rank(0)
        return [
            [repr((str(record.site), record.summary)) for record in rank.records(entry.step)] for entry in rank.steps
        ]


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_records_with_a_plan_and_without(change, tmp_path, monkeypatch):
    used, is_recorded = [], Plan.is_recorded
    monkeypatch.setattr(Plan, "is_recorded", lambda *given: used.append(is_recorded(*given)) or used[-1])
    planned = contents(captured(tmp_path / "planned", train(change)))
    monkeypatch.setattr(Plan, "is_recorded", lambda *_: False)
    alone = contents(captured(tmp_path / "alone", train(change)))
    assert planned == alone
    assert len(planned) == 6
    assert used[0]


class Container(torch.optim.Optimizer):
    """Steps others inside its own step, as torchtitan does; the rate that a schedule changes is theirs."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        groups = [group["params"] for each in optimizers for group in each.param_groups]
        decay = optimizers[0].param_groups[0]["weight_decay"]
        super().__init__([one for params in groups for one in params], {"lr": 0.1, "weight_decay": decay})

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)


def test_an_optimizer_that_is_made_of_others_shows_what_they_keep_and_step_with(tmp_path):
    def work():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        inner = [torch.optim.AdamW(part.parameters(), lr=0.1, foreach=False) for part in net]
        optimizer = Container(*inner)
        for step in range(2):
            inner[1].param_groups[0]["lr"] = 0.01 * (step + 1)
            net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    captured(tmp_path / "run", work)
    with open_run(tmp_path / "run") as run:
        records = list(run.rank(0).records(1))
    rates = {(r.site.fqn, r.site.path): float(r.summary.text) for r in records if r.site.path.endswith("['lr']")}
    assert rates == {("Container", "[0]['lr']"): 0.1, ("AdamW", "[0]['lr']"): 0.1, ("AdamW#2", "[0]['lr']"): 0.02}
    kept = {(r.site.fqn, r.site.path) for r in records if r.site.kind.value == "optimizer_state"}
    names = [f"Sequential.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")]
    assert kept == {(name, f"['{key}']") for name in names for key in ("step", "exp_avg", "exp_avg_sq")}


def test_hyperparameters_are_recorded_where_they_change_and_the_rate_always(tmp_path):
    odd = float("nan")
    settings = [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1}, {"lr": 0.5}, {"own": odd}, {}, {"betas": (0.5, 0.9)}]

    def work():
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
        for changed in settings:
            optimizer.param_groups[0].update(changed)
            net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()

    captured(tmp_path / "run", work)
    with open_run(tmp_path / "run") as run:
        found = [
            {
                r.site.path[3:]: r.summary.text
                for r in run.rank(0).records(step)
                if r.site.kind.value == "hyperparameter"
            }
            for step in range(len(settings))
        ]
    assert len(found[0]) > 5
    rate = [{"['lr']": "0.1"}] * 3 + [{"['lr']": "0.5"}] * 4
    more = {1: {"['weight_decay']": "0.1"}, 4: {}, 5: {}, 6: {"['betas']": "[0.5, 0.9]"}}
    nan = {"['own']": "nan"}  # equal to nothing, itself included
    assert found[1:] == [rate[step] | more.get(step, {}) | (nan if step >= 4 else {}) for step in range(1, 7)]
