"""Inside somebody else's process: what is the script's stays the script's, and what it does behind our back is seen."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from neutrality import Seen, assert_neutral, trajectory, watched
from torch import nn

import introspect_cli
from introspect_cli.store.run import open_run
from introspect_cli.store.verify import verify_run

PACKAGE = str(Path(introspect_cli.__file__).parent)


def is_introspects(frame):
    return frame.f_code.co_filename.startswith(PACKAGE)


def records(path, kind):
    """Step, phase, FQN and call of every record of a kind."""
    found = []
    with open_run(path) as run:
        rank = run.rank(0)
        sites = rank.sites
        for step in (entry.step for entry in rank.steps):
            wanted = [site for site in rank.read(step).site if sites.kind[site] == kind]
            found += [(step, sites.phase[site], sites.fqn[site], int(sites.call[site])) for site in wanted]
    return found


def test_a_timeout_that_comes_while_an_object_of_the_script_goes_reaches_it(tmp_path):
    """Python drops what is raised in the callback of a weak reference: so none of a capture's is written in python."""
    ran = []

    def watch(frame, event, _):
        ran.extend([frame.f_code.co_name] * (event == "call" and is_introspects(frame)))

    with watched(tmp_path / "run"):
        for _ in range(4):
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            gone = weakref.ref(net)
            sys.setprofile(watch)
            del net, optimizer
            sys.setprofile(None)
            assert gone() is None
    assert ran == []


class Sent(Exception):
    """What one thread of a script raises in another."""


DROPPING = {"forget", "is_alive", "<genexpr>", "parameters_in", "modules_in", "find_spec"}
"""Python drops what comes in a callback of a weak reference, and where it closes a generator that was not exhausted;
torch drops what comes while it imports what it can do without."""


SENDER = """
def watch(frame, event, _):
    names = []  # of what runs, up to introspect's code
    while frame is not None and not is_introspects(frame):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    if event == "call" and frame is not None and not {*names, frame.f_code.co_name} & dropping:
        left[0] -= 1
        if not left[0]:
            sys.setprofile(None)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Sent))
"""


def test_an_exception_that_another_thread_sends_reaches_the_script(tmp_path):
    """Wherever it comes: in our code, and in what that calls of python's, numpy's and torch's."""
    ends = []
    Sent.__module__ = "__main__"  # as in a script

    def work(number):
        left = [4 if number == 0 else 1 + 47 * number]  # the fourth is in what a thread's stack is made by
        words = {"sys": sys, "ctypes": ctypes, "threading": threading, "is_introspects": is_introspects}
        words |= {"left": left, "Sent": Sent, "__name__": "introspect_cli.sender", "dropping": DROPPING}
        exec(compile(SENDER, "<sender>", "exec"), words)
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sys.setprofile(words["watch"])
        try:
            for _ in range(5):
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            ends.append("none was sent" if left[0] > 0 else f"lost {number}")
        except Sent:
            ends.append("arrived")
        finally:
            sys.setprofile(None)

    with watched(tmp_path / "run") as session:
        for number in range(30):
            thread = threading.Thread(target=work, args=(number,))
            thread.start()
            thread.join()
        train = [nn.Linear(4, 1)]
        optimizer = torch.optim.SGD(train[0].parameters(), lr=0.1)
        for _ in range(2):
            train[0](torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert set(ends) <= {"arrived", "none was sent"}
    assert len(ends) == 30  # nothing else was raised in its place
    assert ends.count("arrived") > 20
    assert session._guard.details == []
    assert verify_run(tmp_path / "run").findings == ()


def test_tensors_can_be_swapped(tmp_path):
    net, alone = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([alone, *net.parameters()])
    with watched(tmp_path / "run") as session:
        for _ in range(3):
            x = torch.ones(2, 4, requires_grad=True)
            net(x * alone).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.utils.swap_tensors(net.weight, nn.Parameter(net.weight.detach().clone()))
            torch.utils.swap_tensors(alone, nn.Parameter(2 * alone.detach()))
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                net.to(torch.float64).to(torch.float32)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
    assert session._guard.details == []
    assert {fqn for _, _, fqn, _ in records(tmp_path / "run", "param")} == {
        "Linear.weight",
        "Linear.bias",
        "Adam.group0.0",
    }


class Hostile:
    """An object whose every method of its own is a trap."""

    asked = 0

    def __init__(self, tensor):
        vars(self)["tensor"] = tensor

    def _trap(self, *_args):
        type(self).asked += 1
        raise SystemExit(1)

    __repr__ = __len__ = __iter__ = __getattr__ = __eq__ = __bool__ = __hash__ = _trap
    __class__ = property(_trap)


class HostileList(list):
    __iter__ = __len__ = __getitem__ = __repr__ = Hostile._trap


class HostileDict(dict):
    items = values = keys = __iter__ = __len__ = __repr__ = Hostile._trap


def test_no_code_of_objects_that_modules_are_given_is_run(tmp_path):
    class Taker(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, *_others):
            return x * self.weight

    things = [Hostile(torch.ones(2)), HostileList([torch.ones(2)]), HostileDict(a=torch.ones(2)), {"b": Hostile(1)}]
    net = Taker()
    with watched(tmp_path / "run") as session:
        net(torch.ones(2), *things, [Hostile(torch.ones(1))])
    assert Hostile.asked == 0
    assert session._guard.details == []
    with open_run(tmp_path / "run") as run:
        paths = {record.site.path for record in run.rank(0).records(0) if record.site.kind.value == "input"}
    assert {"[0]", "[1].tensor", "[2][0]", "[3]['a']"} <= paths


class Quits(nn.Linear):
    """Ends whoever asks for its class, as nobody does in a training without us."""

    @property
    def __class__(self):
        raise SystemExit("asked for a class")


class Group(dict):
    """Settings that end whoever goes through them."""

    def items(self):
        raise SystemExit("gone through")


@pytest.mark.parametrize("made", [Quits, nn.Linear], ids=["a class", "settings"])
def test_what_objects_of_the_script_raise_because_we_asked_ends_nothing(tmp_path, made):
    def train(_log):
        net = made(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if made is nn.Linear:
            optimizer.param_groups = [Group(group) for group in optimizer.param_groups]
        for _ in range(3):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.detach().clone() for value in net.parameters()]

    bare = trajectory(train)
    with watched(tmp_path / "run") as session:
        captured = trajectory(train)
    assert all(map(torch.equal, bare.returned, captured.returned))
    assert any("SystemExit: " in sentence for sentence in session._guard.sentences)
    assert verify_run(tmp_path / "run").findings == ()


THREADS_THAT_ARE_NONE = """
import _thread, threading
threading.RLock = threading._PyRLock  # as gevent has it, which says 1 and not True where it is held already
_thread.start_new_thread = lambda *_: 0  # gevent's runs when the one that waits for it lets it
import torch
torch.manual_seed(0)
torch.set_num_threads(2)
net = torch.nn.Sequential(torch.nn.Linear(2, 2**16), torch.nn.ReLU(), torch.nn.Linear(2**16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
def train():
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
train()
one = threading.Thread(target=train)
one.start()  # a true one: `threading` took python's function before
one.join()
print(net[0].weight.sum().item(), net[2].weight.sum().item())
"""


def test_locks_and_threads_that_were_replaced_lock_nobody_out(forks, tmp_path):
    """By gevent or eventlet, before torch was imported: a lock stayed held, and the next greenlet waited for ever."""
    (tmp_path / "train.py").write_text(THREADS_THAT_ARE_NONE)
    bare = forks.python("train.py", cwd=tmp_path)
    seen = forks("capture", "-q", "-o", "run", "train.py", cwd=tmp_path)
    assert (seen.returncode, seen.stdout, seen.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert bare.returncode == 0, bare.stderr
    with open_run(tmp_path / "run") as run:
        assert len(run.rank(0).steps) == 6


def test_an_unusual_module_costs_no_other_its_records(forks, tmp_path):
    """One whose `__init__` left out torch's, where the script catches what torch raises; one that was frozen."""
    (tmp_path / "train.py").write_text("""
import torch
class Unfinished(torch.nn.Module):
    def __init__(self):
        pass
    def forward(self, x):
        return x
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
frozen = torch.jit.freeze(torch.jit.trace(torch.nn.Linear(4, 1).eval(), torch.ones(1, 4)))
for _ in range(2):
    frozen(torch.ones(1, 4))
    try:
        Unfinished()(torch.ones(1, 4))
    except AttributeError as error:
        print(error)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
""")
    seen = forks("capture", "-o", "run", "train.py", cwd=tmp_path)
    assert "not observed" not in seen.stderr
    assert "Unfinished" in seen.stdout
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0, 1]
    assert records(tmp_path / "run", "output")


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


def test_a_graph_that_lives_on_keeps_its_hooks_to_itself(tmp_path):
    seen = assert_neutral(train_with_old_graphs, tmp_path / "run")
    assert [len(seen.of("grad_output", step=step)) for step in range(5)] == [4, 4, 12, 12, 4]


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
            assert session.context.stack.calls == []
        Raises.error = None
        net(torch.randn(2, 8)).sum().backward()
        assert session._guard.details == []
    seen = Seen(tmp_path / "run")
    assert len(seen.of("output", "Sequential.1")) == 2
    assert len(seen.of("grad_output", "Sequential.1")) == 2
