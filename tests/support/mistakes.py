"""A probe that raises at a chosen place."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import random
import sys
import threading
import types
import unittest.mock
from pathlib import Path

import numpy as np
import torch
from neutrality import trajectory, watched
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import introspect_cli
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.store.run import open_run

CAPTURE = os.path.join(str(Path(introspect_cli.__file__).parent / "capture"), "")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 1)

    def forward(self, x, *, scale=1.0):
        return self.last(checkpoint(self.body, x, use_reentrant=False)) * scale


def train(log):
    net = Model()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, x in enumerate(DataLoader(torch.randn(12, 8), batch_size=4)):
        loss = log.loss(net(x, scale=2.0).square().mean())
        scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            net.eval()
            log(net(x))
            net.train()
        log(net, optimizer)
        optimizer.zero_grad()


def train_compiled(log):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    fast = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        log.loss(fast(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        log(net)


class Mistake(Exception):
    pass


def seeded():
    """Begin a capture with the same random states each time."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the one that a capture watches
    torch.manual_seed(7)


def diff(a, b):
    with open_run(a) as one, open_run(b) as other:
        return compare_runs(one, other, DiffOptions(), [])


def called_while(work, path, **options):
    """By name, capture's functions that run inside of a guard while something trains."""
    found, depth = {}, threading.local()
    functions = {function.__code__: function for function in _functions()}

    (guarded,) = {owner for owner in _owners() if getattr(owner, "__name__", "") == "Guarded"}

    def enter(self):
        super(guarded, self).__enter__()
        depth.inside = getattr(depth, "inside", 0) + 1

    def leave(self, *error):
        depth.inside -= 1
        return super(guarded, self).__exit__(*error)

    def look(frame, event, _arg):
        code = frame.f_code
        if event == "call" and getattr(depth, "inside", 0) and code in functions:
            found[f"{code.co_filename.removeprefix(CAPTURE)}:{functions[code].__qualname__}"] = functions[code]

    seeded()
    with watched(path, **options), unittest.mock.patch.multiple(guarded, create=True, __enter__=enter, __exit__=leave):
        threading.setprofile(look)
        sys.setprofile(look)
        try:
            trajectory(work)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return found


def _owners():
    """The modules and classes of capture, which have its functions."""
    for module in pkgutil.walk_packages([CAPTURE], "introspect_cli.capture."):  # some load when asked for
        importlib.import_module(module.name)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("introspect_cli.capture")]
    return modules + [value for module in modules for value in vars(module).values() if isinstance(value, type)]


def _functions():
    """Those that another can stand in for: of capture, and without variables of others."""
    for owner in _owners():
        for value in vars(owner).values():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            if isinstance(function, types.FunctionType) and _may_fail(code):
                yield function


def reading(document):
    """The function that reads a document of settings, which is called like it."""
    return (each for each in _functions() if each.__name__ == document and "environment" in each.__code__.co_filename)


def _may_fail(code):
    is_plain = not code.co_freevars and not code.co_flags & inspect.CO_GENERATOR and not code.co_name.startswith("__")
    return is_plain and code.co_filename.startswith(CAPTURE)


PLANTED = []
"""What is called in place of a function."""


@contextlib.contextmanager
def broken(function, after=0):
    """Have a function raise from its call number `after` on, whoever calls it; its calls."""
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    calls = []

    def planted(*args, **kwargs):
        calls.append(code.co_name)
        if len(calls) > after:
            raise Mistake(f"{code.co_name} is broken")
        return original(*args, **kwargs)

    def stands_in(*args, **kwargs):
        from mistakes import PLANTED

        return PLANTED[-1](*args, **kwargs)

    PLANTED.append(planted)
    function.__code__ = stands_in.__code__
    try:
        yield calls
    finally:
        function.__code__ = code
        PLANTED.pop()
