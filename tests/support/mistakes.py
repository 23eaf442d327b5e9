"""A probe that raises at a chosen place."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.store.read.run import open_run


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


def broken(monkeypatch, owner, name, after):
    """Have a method raise from its call number `after` on; the list of its calls."""
    original, calls = getattr(owner, name), []

    def fails(self, *args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            raise Mistake(f"{name} is broken")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    return calls
