"""What of parameters, buffers and optimizers is recorded, and when; of plain tensors, evaluations and children too."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from neutrality import watched
from opcapture import captured, compared, records
from torch import multiprocessing, nn
from torch.utils.data import DataLoader
from validated import Net

from introspect_cli.compare.result import Role, Verdict
from introspect_cli.records import Kind, Phase
from introspect_cli.store.run import open_run

TENSORS = {Kind.PARAM, Kind.BUFFER}


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 40_000))  # small ones, and a large one


def fit_around(between, steps=4, frozen=0):
    """Train all but the first modules; before step 2 something is done to the model."""

    def work():
        torch.manual_seed(0)
        net = network()
        optimizer = torch.optim.SGD(net[frozen:].parameters(), lr=0.1)
        net[:frozen].requires_grad_(requires_grad=False)
        first = copy.deepcopy(net.state_dict())
        for step in range(steps):
            if step == 2:
                between(net, first)
            for _ in range(2):
                net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def found(path, step):
    """FQNs and calls of what was recorded at the start of a step."""
    return {
        (r.site.fqn, r.site.call) for r in records(path, step) if r.site.phase is Phase.START and r.site.kind in TENSORS
    }


ALL = {f"Sequential.{name}" for name in network().state_dict()}


@pytest.mark.parametrize(
    ("between", "changed"),
    [
        (lambda net, first: None, set()),
        (lambda net, first: net.load_state_dict(first), ALL),
        (lambda net, first: net.load_state_dict(first, assign=True), ALL),
        (lambda net, first: net[0].bias.detach().add_(1), {"Sequential.0.bias"}),
        (lambda net, first: net[1].reset_running_stats(), {name for name in ALL if "running" in name or "num" in name}),
        (lambda net, first: setattr(net[2].weight, "data", torch.ones(40_000, 4)), {"Sequential.2.weight"}),
        (lambda net, first: net[0].weight.data.mul_(0.5), {"Sequential.0.weight"}),
        (lambda net, first: net[2].weight.data.mul_(0.5), {"Sequential.2.weight"}),
        (lambda net, first: net[2].weight.sum().item(), set()),
    ],
    ids=["nothing", "loaded", "assigned", "in place", "buffers", "new memory", "through data", "of much", "looked at"],
)
def test_what_changed_since_it_was_recorded_is_recorded_again(tmp_path, between, changed):
    path = captured(tmp_path / "run", fit_around(between))
    assert {name for name, _ in found(path, 0)} == ALL
    assert found(path, 1) == set()
    assert found(path, 2) == {(name, 0) for name in changed}
    assert found(path, 3) == set()


class Adapting(nn.Module):
    """Moves what its part computes with, before it calls it, in the steps that are asked for."""

    def __init__(self, asked, kind):
        super().__init__()
        self.asked, self.kind, self.calls, self.part = asked, kind, 0, Shifted()

    def forward(self, x):
        if self.calls in self.asked:
            with torch.no_grad():
                {"param": self.part.weight, "buffer": self.part.shift}[self.kind].mul_(1.5)
        self.calls += 1
        return self.part(x)


class Shifted(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return super().forward(x) + self.shift


def adapt(*asked, kind):
    torch.manual_seed(0)
    net = Adapting(asked, kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for _ in range(2):
            net(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["param", "buffer"])
@pytest.mark.parametrize("call", [0, 4])
def test_what_a_forward_pass_changes_before_a_module_runs_is_not_called_equal_then(tmp_path, kind, call):
    a, b = (captured(tmp_path / name, lambda to=to: adapt(*to, kind=kind)) for name, to in (("a", ()), ("b", (call,))))
    with open_run(a) as one, open_run(b) as two:
        assert [len(run.rank(0)) for run in (one, two)] == [4, 4]
    result = compared(a, b)
    equal = {fact.thing for fact in result.rests_on if fact.known == "equal"}
    if kind == "buffer":  # which is looked at before each call of its module
        assert (result.first.step, result.first.site.fqn) == (call // 2, "Adapting.part.shift")
        assert equal == {"value_before"}
        assert [(one.code, one.fields.get("side")) for one in result.explains] == [("changed-in-one", "b")]
        assert {one.site.fqn for one in result.divergences if one.role is Role.ORIGIN} == {result.first.site.fqn}
    else:
        assert (result.first.step, result.first.site.fqn) == (call // 2, "Adapting.part")
        assert equal == {"inputs", "buffers"}


class TwiceCalled(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.part, self.outside = nn.BatchNorm1d(3), outside

    def forward(self, x):
        first = self.part(x)
        self.outside(self.part)
        return self.part(x) + first


def fail_once(part):
    failing = part.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        part(torch.randn(5, 3))
    failing.remove()


@pytest.mark.parametrize(
    ("outside", "changed"),
    [
        (lambda part: None, set()),
        (fail_once, set()),
        (lambda part: part.num_batches_tracked.add_(1), {"num_batches_tracked"}),
        (lambda part: part.running_var.data.mul_(2), {"running_var"}),
        (lambda part: setattr(part, "running_var", torch.ones(3)), {"running_var"}),
    ],
    ids=["nothing", "a call that raised", "in place", "through data", "assigned"],
)
def test_a_buffer_is_recorded_before_a_call_where_something_else_than_its_module_has_written_to_it(
    tmp_path, outside, changed
):
    def work():
        net = TwiceCalled(outside)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()

    path = captured(tmp_path / "run", work)
    for step in range(2):
        found = [
            r.site.fqn for r in records(path, step) if r.site.kind is Kind.BUFFER and r.site.phase is Phase.FORWARD
        ]
        assert sorted(found) == [f"TwiceCalled.part.{name}" for name in sorted(changed)]


def idle(*_):
    """What the children of these tests do."""


class Idle(multiprocessing.get_context("fork").Process):
    def run(self):
        pass


def started(process):
    process.start()
    process.join()


@pytest.mark.parametrize(
    ("start", "answered"),
    [
        (lambda fork: started(fork.Process(target=idle)), ["idle"]),
        (lambda fork: started(Idle()), ["Idle"]),
        (lambda fork: multiprocessing.start_processes(idle, nprocs=2, start_method="fork"), ["idle"]),
        (lambda fork: None, []),
    ],
    ids=["function", "class", "ranks", "none"],
)
def test_processes_that_the_script_starts_are_reported(tmp_path, start, answered):
    def work():
        start(multiprocessing.get_context("fork"))
        list(DataLoader(torch.arange(4), num_workers=1, multiprocessing_context="fork"))
        nn.Linear(1, 1)(torch.ones(1, 1))

    with open_run(captured(tmp_path / "run", work)) as run:
        assert run.manifest["children"] == answered
        said = [text for text in run.manifest["not_observed"] if "in a process of its own" in text]
    assert [text.split()[3] for text in said] == answered


# --- scripts of plain tensors: what is recorded of them, and what is said where nothing was


FIVE = 5


def train_plainly(how):
    torch.manual_seed(0)
    w = torch.randn(4, 3, requires_grad=True)
    others = {"b": torch.zeros(3, requires_grad=True)}
    x, y = torch.randn(16, 4), torch.randn(16, 3)
    tensors = [w, others["b"]]
    optimizer = torch.optim.SGD(tensors, lr=0.1) if how == "optimizer" else None
    for _ in range(FIVE):
        loss = ((torch.tanh(x @ w + others["b"]) - y) ** 2).mean()
        if how == "autograd.grad":
            found = torch.autograd.grad(loss, tensors)
        else:
            loss.backward()
            found = [tensor.grad for tensor in tensors]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            continue
        with torch.no_grad():
            for tensor, gradient in zip(tensors, found, strict=True):
                tensor.sub_(0.1 * gradient)
                tensor.grad = None


@pytest.mark.parametrize("how", ["by hand", "optimizer", "autograd.grad"])
def test_leaves_and_gradients_are_recorded_under_the_scripts_own_names_and_what_was_not_seen_is_said(tmp_path, how):
    for name in "ab":
        with watched(tmp_path / name):
            train_plainly(how)
    with open_run(tmp_path / "a") as run:
        assert run.manifest["steps"] == FIVE
        found = {(r.site.kind, r.site.fqn) for r in run.rank(0).records(FIVE - 1)}
    names = {(kind, name) for kind in (Kind.PARAM, Kind.GRAD) for name in ("w", "others['b']")}
    assert names | {(Kind.LOSS, "loss")} <= found
    result = compared(tmp_path / "a", tmp_path / "b")
    assert result.verdict is Verdict.SAME
    assert any("no module was called, so nothing between" in note for note in result.notes)


def test_looking_for_names_keeps_no_tensor_alive(tmp_path):
    def step():
        w = torch.ones(3, requires_grad=True)
        big = torch.ones(1000)
        reference = weakref.ref(big)
        (w * big[:3]).sum().backward()
        del big
        gc.collect()
        return reference() is None

    with watched(tmp_path / "run"):
        assert step()


# --- evaluation never shifts training: the same training with and without it is the same run


def places_of(run):
    sites = run.rank(0).sites
    return set(zip(sites.phase, sites.fqn, sites.kind, sites.call.tolist(), strict=True))


def test_a_forward_before_the_optimizer_whose_graph_is_used_is_training(tmp_path):
    torch.manual_seed(3)
    net, criterion = Net(), nn.CrossEntropyLoss()
    with watched(tmp_path / "run"):
        loss = criterion(net(torch.ones(2, 4)), torch.zeros(2, dtype=torch.long))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss.backward()
        optimizer.step()
    with open_run(tmp_path / "run") as run:
        assert run.manifest["steps"] == 1
        found = {(record.site.phase.value, record.site.fqn) for record in run.rank(0).records(0)}
        assert {("forward", "Net"), ("loss", "loss")} <= found


@pytest.mark.parametrize("held", [False, True], ids=["its own", "frozen in the optimizer"])
def test_a_teacher_belongs_to_training(tmp_path, held):
    def distill():
        torch.manual_seed(1)
        net, teacher, criterion = Net(), Net().eval().requires_grad_(not held), nn.MSELoss()
        optimizer = torch.optim.SGD([*net.parameters(), *(teacher.parameters() if held else ())], lr=0.1)
        for x in DataLoader(torch.randn(8, 4), batch_size=4):
            with torch.no_grad():
                wanted = teacher(x)
            criterion(net(x), wanted).backward()
            optimizer.step()

    with watched(tmp_path / "run"):
        distill()
    with open_run(tmp_path / "run") as run:
        found = {(fqn, phase) for phase, fqn, kind, _ in places_of(run) if fqn in ("Net", "Net#2") and kind == "output"}
    assert found == {("Net", "forward"), ("Net#2", "forward")}


def test_a_script_that_only_runs_a_model_is_recorded_without_being_asked_to(tmp_path):
    torch.manual_seed(0)
    net = Net().eval()
    with watched(tmp_path / "run"), torch.no_grad():
        for x in DataLoader(torch.ones(6, 4), batch_size=2):
            net(x)
    with open_run(tmp_path / "run") as run:
        assert run.manifest["steps"] == 3
        assert {("data", "batch"), ("forward", "output")} <= {(phase, kind) for phase, _, kind, _ in places_of(run)}


# --- what an optimizer keeps is recorded by a plan while it stays the same, and records the same as without one


CHANGES = (
    lambda net, optimizer: net[0].bias.requires_grad_(requires_grad=False),
    lambda net, optimizer: optimizer.state.pop(net[0].weight),
    lambda net, optimizer: optimizer.state[net[0].weight].update(seen=torch.ones(2)),
    lambda net, optimizer: optimizer.state[net[0].weight].update(
        exp_avg=optimizer.state[net[0].weight].pop("exp_avg")  # in another order
    ),
    lambda net, optimizer: optimizer.state[net[0].weight].update(note=7.0),
    lambda net, optimizer: optimizer.state.update({net[0].weight: OrderedDict(optimizer.state[net[0].weight])}),
    lambda net, optimizer: optimizer.add_param_group({"params": [net[2].weight]}),
)


def train_and_change():
    """A training for each change, which comes before the fourth of its steps."""
    torch.manual_seed(0)
    for change in CHANGES:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
        held = [*net[0].parameters(), *net[1].parameters()]
        optimizer = torch.optim.AdamW(held, lr=0.1, foreach=False)
        for step in range(6):
            if step == 3:
                change(net, optimizer)
            net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def contents(path):
    with open_run(path) as run:
        rank = run.rank(0)
        return [
            [repr((str(record.site), record.summary)) for record in rank.records(entry.step)] for entry in rank.steps
        ]


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


@pytest.mark.parametrize(
    "draw", [lambda: random.gauss(0, 1), random.random, lambda: None], ids=["gauss", "one", "none"]
)
def test_the_state_of_pythons_generator_is_another_after_every_draw(tmp_path, draw):
    states = []

    def work():
        random.seed(3)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(6):
            states.append(random.getstate())
            net(torch.ones(5, 3)).square().mean().backward()
            optimizer.step()
            draw()  # every second normal number is one to spare: the words stay

    captured(tmp_path / "run", work)
    at = [
        r.summary.checksum
        for step in range(6)
        for r in records(tmp_path / "run", step)
        if r.site.fqn == "python" and r.site.kind is Kind.RNG
    ]
    assert [[one == other for one in at] for other in at] == [[one == other for one in states] for other in states]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net, _: net[1].running_mean.add_(1), "Sequential.1.running_mean"),
        (lambda net, _: net[0].weight.detach().mul_(2), "Sequential.0.weight"),  # frozen, on record in step 0 alone
    ],
)
def test_a_tensor_that_one_run_changes_between_steps_is_compared_with_what_the_other_has(tmp_path, change, name):
    a, b = (captured(tmp_path / run, fit_around(do, frozen=1)) for run, do in (("a", idle), ("b", change)))
    for first, second, alone in ((a, b, "b"), (b, a, "a")):
        result = compared(first, second)
        assert (result.first.step, result.first.site.fqn, result.first.only) == (2, name, "")
        assert f"{alone} alone changes it" in result.sentence  # whether or not the step before recorded it


@pytest.mark.parametrize("ends", ["raises", "is saved"])
def test_a_model_is_let_go_after_a_forward_pass_that_raises_and_after_it_was_saved(tmp_path, ends):
    class Net(nn.Linear):
        def forward(self, x):
            if ends == "raises" and self.weight.grad is not None:
                raise MemoryError
            return super().forward(x)

    def work():
        net = Net(3, 2)
        net(torch.ones(5, 3)).square().mean().backward()
        reference = weakref.ref(net.weight)
        with suppress(MemoryError):
            net(torch.ones(5, 3))
        if ends == "is saved":
            torch.save(net.state_dict(), tmp_path / "saved.pt")
        del net
        gc.collect()
        assert reference() is None

    captured(tmp_path / "run", work)
