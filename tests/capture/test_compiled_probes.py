"""The compiled twins of probes record what their Python records, let pass what is the script's, and leave nothing."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import pytest
import torch
from neutrality import Seen, assert_same, trajectory, watched
from torch import nn

from introspect_cli.capture.ops import probe as operators
from introspect_cli.capture.probes import gradients, modules
from introspect_cli.capture.probes.module_calls import ModuleCalls
from introspect_cli.capture.probes.module_values import ModuleValues
from introspect_cli.records import Kind
from introspect_cli.store.read.run import open_run
from introspect_cli.tensors.kernels import KERNELS

ENDLESS = 2000
"""Rounds of a loop that a timeout has to end long before."""
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels, so no compiled probes")


class Everything(nn.Module):
    """Modules called plainly and in every other way."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        self.shared = nn.Linear(8, 8)
        self.two = nn.Bilinear(8, 8, 8)
        self.by_name = ByName()
        self.wide = nn.Linear(8, 4096)
        self.inplace = nn.ReLU(inplace=True)
        self.nested = Nested()

    def forward(self, x):
        y = self.inner(x)
        y = self.shared(self.shared(y))
        y = self.two(y, y)
        y = self.by_name(y, scale=2.0) + self.nested([y, {"a": y}])["sum"]
        wide = self.inplace(self.wide(y))
        return y.sum() + wide.mean()


class ByName(nn.Module):
    def forward(self, x, *, scale):
        return x * scale


class Nested(nn.Module):
    def forward(self, values):
        return {"sum": values[0] + values[1]["a"]}


def train(log):
    net = Everything()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(6, 8, requires_grad=True)
        loss = net(x)
        loss.backward(retain_graph=True)
        if step == 2:
            loss.backward()  # gradients come a second time
        with torch.no_grad():
            net.inner(x)  # a part by itself, in training mode
        log(loss, x.grad, net, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def records(path):
    with open_run(path) as run:
        rank = run.rank(0)
        return [
            (entry.step, entry.digest, [(str(record.site), record.summary) for record in rank.records(entry.step)])
            for entry in rank.steps
        ]


def count(monkeypatch, owner, name):
    original, calls = getattr(owner, name), []

    def counted(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def run(path, monkeypatch, *, compiled, train=train, **options):
    with monkeypatch.context() as patched:
        if not compiled:
            patched.setattr(modules, "KERNELS", None)
            patched.setattr(gradients, "KERNELS", None)
        long_calls = count(patched, ModuleCalls, "recorded")
        torch.manual_seed(3)
        with watched(path, **options):
            seen = trajectory(train)
    return seen, len(long_calls)


@pytest.mark.skipif(type(nn.Module()._parameters) is not dict, reason="modules of this torch go the way of python")
def test_both_record_the_same_and_the_compiled_one_is_used(tmp_path, monkeypatch):
    bare = trajectory(train)
    slow, every_call = run(tmp_path / "python", monkeypatch, compiled=False)
    fast, long_calls = run(tmp_path / "compiled", monkeypatch, compiled=True)
    assert_same(bare, slow)
    assert_same(bare, fast)
    assert repr(records(tmp_path / "python")) == repr(records(tmp_path / "compiled"))
    assert every_call == 4 * 13
    assert long_calls < every_call - 3 * 6


def test_calls_stay_compiled_where_no_random_state_is_recorded(tmp_path, monkeypatch):
    options = {"record": frozenset({Kind.LOSS, Kind.OUTPUT})}
    _, every_call = run(tmp_path / "python", monkeypatch, compiled=False, **options)
    _, long_calls = run(tmp_path / "compiled", monkeypatch, compiled=True, **options)
    assert repr(records(tmp_path / "python")) == repr(records(tmp_path / "compiled"))
    assert long_calls < every_call - 3 * 6


def train_with_operators(log):
    """Operators that come again as they were, and others: in place, several results, views, other inputs."""
    net, extra = Everything(), nn.GRU(8, 8)
    optimizer = torch.optim.SGD([*net.parameters(), *extra.parameters()], lr=1e-4)
    for step in range(5):
        x = torch.randn(6, 8, requires_grad=True)
        with torch.autocast("cpu", enabled=step == 3):
            y = net.shared(x)
        z = extra(y.float().view(1, 6, -1))[0]
        loss = net(x) + z.sort()[0].mean() + ((z if step < 2 else x) * 1).relu_().sum()
        loss.backward(retain_graph=True)
        if step:
            loss.backward()
        log(loss, x.grad, net, optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 3)


def test_operators_are_recorded_the_same_and_most_are_compiled(tmp_path, monkeypatch):
    options = {
        "level": "op",
        "record": frozenset({Kind.OP_OUTPUT, Kind.LOSS, Kind.OUTPUT}),
        "train": train_with_operators,
    }
    bare, found, by_python = trajectory(train_with_operators), {}, {}
    for compiled in (False, True):
        with monkeypatch.context() as patched:
            calls = count(patched, operators.OpProbe, "record_results")
            if not compiled:
                patched.setattr(operators, "KERNELS", None)
            seen, _ = run(tmp_path / str(compiled), monkeypatch, compiled=True, **options)
        assert_same(bare, seen)
        by_python[compiled] = len(calls)
        with open_run(tmp_path / str(compiled)) as one:
            rank = one.rank(0)
            found[compiled] = [repr(record) for step in rank.steps for record in rank.records(step.step)]
            assert one.manifest["failures"] == []
    assert found[True] == found[False]
    assert sum("OP_OUTPUT" in record for record in found[True]) > 300
    assert by_python[True] < by_python[False] / 2


def train_with_old_graphs(log):
    """Graphs outlive their steps, and gradients flow through them again later."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # what the graphs need stays as it is
    kept = []
    for step in range(5):
        kept.append(net(torch.randn(4, 8)).sum())
        kept[-1].backward(retain_graph=True)
        if step in (2, 3):
            kept[step - 2].backward()
            kept[step - 1].backward(retain_graph=True)
        log(kept[-1], net, optimizer)
        optimizer.step()


def test_a_graph_that_lives_on_keeps_its_hooks_to_itself(tmp_path, monkeypatch):
    bare = trajectory(train_with_old_graphs)
    slow, _ = run(tmp_path / "python", monkeypatch, compiled=False, train=train_with_old_graphs)
    fast, _ = run(tmp_path / "compiled", monkeypatch, compiled=True, train=train_with_old_graphs)
    assert_same(bare, slow)
    assert_same(bare, fast)
    assert repr(records(tmp_path / "python")) == repr(records(tmp_path / "compiled"))


def test_hooks_are_used_again_in_the_next_step(tmp_path):
    """New ones would cost the script a round of the garbage collector for every 700."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.ModuleList(nn.Tanh() for _ in range(30))

        def forward(self, x):
            made = [x]
            for module in self.inside:
                made.append(module(made[-1]))
            held.append([id(hooks.get(id(value))) for value in made[1:]])
            return made[-1]

    net, held = Keeps(), []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    x = torch.randn(2, 8, requires_grad=True)
    with watched(tmp_path / "run") as session:
        hooks = session.probes._modules._gradients._watched
        for _ in range(3):
            net(x).sum().backward()
            optimizer.step()
    assert len(set(held[0])) == 30
    assert held[0] == held[1] == held[2]


def test_what_a_module_raises_reaches_the_script_and_the_next_call_is_recorded(tmp_path):
    class Raises(nn.Module):
        error = None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return x * 2

    net = nn.Sequential(nn.Linear(8, 8), Raises(), nn.Linear(8, 1))
    with watched(tmp_path / "run") as session:
        net(torch.randn(2, 8)).sum().backward()
        for error in (ValueError("mine"), KeyboardInterrupt(), SystemExit(3)):
            Raises.error = error
            with pytest.raises(type(error)) as caught:
                net(torch.randn(2, 8))
            assert caught.value is error
            assert session.probes._modules.stack.calls == []
        Raises.error = None
        net(torch.randn(2, 8)).sum().backward()
        assert session._guard.details == []
    seen = Seen(tmp_path / "run")
    assert len(seen.of("output", "Sequential.1")) == 2
    assert len(seen.of("grad_output", "Sequential.1")) == 2


def test_modules_that_call_themselves_without_end_end_as_without_us(tmp_path):
    class Endless(nn.Module):
        def forward(self, x):
            return self(x)

    net = nn.Sequential(Endless())
    with watched(tmp_path / "run") as session:
        for _ in range(2):
            with pytest.raises(RecursionError):
                net(torch.randn(2))
        assert session.probes._modules.stack.calls == []


def test_a_mistake_beside_the_extension_is_reported_and_training_goes_on(tmp_path, monkeypatch):
    def fails(self, *_args):
        raise RuntimeError("broken by the test")

    net = nn.Sequential(nn.Sequential(nn.Linear(8, 4096)), nn.Tanh())
    x = torch.randn(6, 8)
    bare = net(x)
    with watched(tmp_path / "run") as session:
        net(x)  # the second call of a step has its sites only in the next step
        session.probes.context.clock.tick()
        monkeypatch.setattr(ModuleValues, "plain_tensor", fails)
        monkeypatch.setattr(ModuleValues, "value", fails)
        assert torch.equal(net(x), bare)
        assert torch.equal(net(x), bare)
    (said,) = session._guard.details
    assert "broken by the test" in said


@pytest.mark.usefixtures("no_gc_callbacks")
def test_timeouts_of_the_script_reach_it_wherever_they_fall(tmp_path):
    class Timeout(Exception):
        pass

    def handler(_number, _frame):
        raise Timeout

    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))
    with watched(tmp_path / "run") as session:
        before, caught = signal.signal(signal.SIGALRM, handler), 0
        try:
            for number in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.00003 * number)
                    for _ in range(ENDLESS):
                        net(torch.randn(2, 8)).sum().backward()
                except Timeout:  # noqa: PERF203 - each is one of those that are counted
                    caught += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert caught == 60
        assert session._guard.details == []
        assert session.probes._modules.stack.calls == []


def test_threads_record_each_its_own_calls(tmp_path):
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]

    def work(net):
        for _ in range(30):
            net(torch.randn(2, 8)).sum().backward()

    with watched(tmp_path / "run") as session:
        torch.optim.SGD([parameter for net in nets for parameter in net.parameters()])  # it alone would end steps
        for net in nets:
            work(net)  # the sites of each call are known from here on
        session.probes.context.clock.tick()
        threads = [threading.Thread(target=work, args=(net,)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session._guard.details == []
    seen = Seen(tmp_path / "run")
    for step in range(2):
        assert len(seen.of("output", step=step)) == 4 * 4 * 30
        assert len(seen.of("grad_output", step=step)) == 4 * 4 * 30
    assert not [site for site in seen.repeated() if "output" in site]


def test_nothing_of_a_capture_lives_on(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with watched(tmp_path / "run") as session:
        for _ in range(2):
            loss = net(torch.randn(2, 8)).sum()
            loss.backward(retain_graph=True)
    probe = weakref.ref(session.probes._modules)
    del session, loss
    gc.collect()
    assert probe() is None
