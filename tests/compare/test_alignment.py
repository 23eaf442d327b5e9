"""Other names, found by values of several steps: copies, chance, rounding, and runs that hold different steps."""

from __future__ import annotations

import numpy as np
import torch
from opcapture import compared
from synthetic import row, write_run
from torch import nn


def renames(result):
    return {(change.a, change.b): change.evidence for change in result.structure if change.change == "renamed"}


class Net(nn.Module):
    """Layers with an activation between them, all under names of one's choosing."""

    def __init__(self, first="inp", act="act", last="head", nudge=0.0):
        super().__init__()
        self.names, self.nudge = (first, act, last), nudge
        self.add_module(first, nn.Linear(4, 8))
        self.add_module(act, nn.GELU())
        self.add_module(last, nn.Linear(8, 3))

    def forward(self, x):
        first, act, last = (getattr(self, name) for name in self.names)
        return last(act(first(x) * (1 + self.nudge)))


def test_a_resumed_run_is_aligned_with_the_steps_it_repeats(tmp_path):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 3)) for _ in range(6)]

    def steps(name, first):
        return [[row("start", "param", f"Net.{name}.weight", each), row("loss", "loss", "loss", each.sum())]
                for each in values[first:]]  # fmt: skip

    write_run(tmp_path / "a", steps("old", 0))
    write_run(tmp_path / "b", steps("new", 3))
    result = compared(tmp_path / "a", tmp_path / "b", offset=3)
    assert ("Net.old", "Net.new") in renames(result), result.sentence


class Attention(nn.Module):
    """Normalises what it is given itself, or is given it normalised."""

    def __init__(self, norm=None):
        super().__init__()
        if norm is not None:
            self.norm = norm
        self.qkv, self.out = nn.Linear(6, 18, bias=False), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x) if hasattr(self, "norm") else x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Feed(nn.Module):
    def __init__(self, *first):
        super().__init__()
        self.net = nn.Sequential(*first, nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 6))

    def forward(self, x):
        return self.net(x)


class PreNorm(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(6), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Layers(nn.Module):
    """A transformer whose layers are normalised by a wrapper, or by themselves, as histories in public have it."""

    def __init__(self, *, wrapped):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            if wrapped:
                blocks = (PreNorm(Attention()), PreNorm(Feed()))
            else:
                blocks = (Attention(nn.LayerNorm(6)), Feed(nn.LayerNorm(6)))
            self.layers.append(nn.ModuleList(blocks))
        self.inp, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.inp(x)[:, None]
        for attention, feed in self.layers:
            x = x + attention(x)
            x = x + feed(x)
        return self.head(x.mean(1))
