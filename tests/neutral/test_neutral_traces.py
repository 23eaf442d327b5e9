"""After a capture nothing of it is left in the process, and during it nothing lives longer than it would have."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import torch
from neutrality import mlp, subnormals_kept, watched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def process():
    """Everything about the process that a capture might touch."""
    state = {
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "numpy errors": np.geterr(),
        "subnormals": subnormals_kept(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "dtype": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "print options": repr(torch._tensor_str.PRINT_OPTS),
        "meta path": list(sys.meta_path),
        "path hooks": list(sys.path_hooks),
        "hooks": (
            sys.excepthook,
            threading.excepthook,
            sys.unraisablehook,
            sys.displayhook,
            sys.getprofile(),
            sys.gettrace(),
        ),
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "gc": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "directory": Path.cwd(),
    }
    for owner in (nn.Module, torch.Tensor, torch.autograd, torch.optim.Optimizer, torch.amp.GradScaler, DataLoader):
        state[f"members of {owner.__name__}"] = dict(vars(owner))
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    state["members of the iterator"] = dict(vars(iterator))
    for module in (nn.modules.module, sys.modules["torch.optim.optimizer"]):
        for name, value in vars(module).items():
            if name.startswith("_global") and "hook" in name:
                state[f"{module.__name__}.{name}"] = dict(value) if isinstance(value, dict) else value
    return state


def train(log=lambda *things: None, steps=3):
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for (batch,) in DataLoader(TensorDataset(torch.randn(4 * steps, 8)), batch_size=4, shuffle=True):
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log(net, optimizer)
    return net, optimizer


def differing(before, after):
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


PROCESS_WIDE = (
    "subnormals", "torch threads", "warnings", "environment", "grad", "autocast", "deterministic", "dtype", "modes",
    "gc", "numpy errors", "recursion",
)  # fmt: skip


def test_modes_of_the_process_are_untouched_while_it_lasts_and_all_is_as_it_was_after_a_failure(tmp_path):
    train()
    before = process()
    with contextlib.suppress(ZeroDivisionError), watched(tmp_path / "run"):
        train()
        during = process()
        raise ZeroDivisionError
    assert differing(before, process()) == {}
    assert {name: during[name] for name in PROCESS_WIDE} == {name: before[name] for name in PROCESS_WIDE}


def test_hooks_left_on_live_tensors_do_nothing(tmp_path):
    net = mlp()
    x = torch.randn(4, 8, requires_grad=True)
    with watched(tmp_path / "run"):
        loss = net(x).sum()
    size = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    loss.backward()
    assert x.grad is not None
    assert not x._backward_hooks
    assert size == sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())


def lives(run):
    """What is still alive after `run` has let go of it, without and with the collector's help."""
    gc.collect()
    gc.disable()
    try:
        references = run()
        at_once = [name for name, reference in references.items() if reference() is not None]
    finally:
        gc.enable()
    gc.collect()
    return at_once, [name for name, reference in references.items() if reference() is not None]


def lifetimes():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    references = {"net": weakref.ref(net), "optimizer": weakref.ref(optimizer), "weight": weakref.ref(net[0].weight)}
    for step in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        hidden = net[0](x)
        out = net[2](net[1](hidden))
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        watched = {"input": x, "hidden": hidden, "output": out, "loss": loss, "gradient": x.grad}
        references |= {f"{name} {step}": weakref.ref(value) for name, value in watched.items()}
        del watched
    loader = DataLoader(torch.randn(4, 8), batch_size=2)
    iterator = iter(loader)
    references |= {
        "batch": weakref.ref(next(iterator)),
        "loader": weakref.ref(loader),
        "iterator": weakref.ref(iterator),
    }
    return references


def test_nothing_lives_longer_under_capture(tmp_path):
    bare = lives(lifetimes)
    with watched(tmp_path / "run"):
        seen = lives(lifetimes)
    assert seen == bare
    assert bare[1] == []


def test_parameter_used_as_input_gathers_no_hooks(tmp_path):
    class Prompt(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(4, 8))
            self.linear = nn.Linear(8, 1)

        def forward(self):
            return self.linear(self.prompt)

    with watched(tmp_path / "run"):
        net = Prompt()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            net().sum().backward()
            optimizer.step()
            assert not net.prompt._backward_hooks
    assert not net.prompt._backward_hooks


def test_a_script_that_patches_torch_itself(tmp_path):
    """A patch that the script puts on top of introspect's stays when that is removed, and still works."""
    calls = []
    original = nn.Module.__call__
    try:
        with watched(tmp_path / "run"):
            ours = nn.Module.__call__

            def patched(self, *args, **kwargs):
                calls.append(type(self).__name__)
                return ours(self, *args, **kwargs)

            nn.Module.__call__ = patched
            mlp()(torch.randn(4, 8))
        assert nn.Module.__call__ is patched
        seen = len(calls)
        assert mlp()(torch.randn(4, 8)).shape == (4, 1)
        assert len(calls) == 2 * seen == 8
    finally:
        nn.Module.__call__ = original


def test_signatures_look_the_same_under_capture(tmp_path):
    import inspect

    def looks():
        things = [nn.Module.__call__, torch.autograd.backward, torch.autograd.grad, torch.optim.Optimizer.__init__]
        things += [torch.amp.GradScaler.step, DataLoader.__iter__]
        return [(thing.__name__, str(inspect.signature(thing))) for thing in things]

    before = looks()
    with watched(tmp_path / "run"):
        assert looks() == before
