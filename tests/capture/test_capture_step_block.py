"""A step's block of columns: filled whole, used again, never before it is written."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from neutrality import watched
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.capture.recording.step_block import StepBlock
from introspect_cli.schedule.rules import parse_rule
from introspect_cli.store.read.run import open_run
from introspect_cli.store.read.verify import verify_run
from introspect_cli.store.write import run_writer
from introspect_cli.tensors.columns import Columns

STEPS = 12
FILES = ("records.arrow", "index.bin", "sites.arrow", "layouts.arrow", "modules.arrow")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x, scale=1.0):
        return self.last(self.norm(self.first(x)).relu()) * scale


def train():
    """Steps of equal and of other records, with texts, layouts, sizes and missing gradients that come and go."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [torch.randn(4) for _ in range(4 * STEPS - 1)]  # the last batch is smaller
    for step, x in enumerate(DataLoader(data, batch_size=4)):
        if step % 5 == 3:
            net.eval()(x)
            net.train()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step // 3)
        net.last.weight.requires_grad_(step != 6)
        net(
            x.double().float() if step != 8 else x.t().contiguous().t(), scale=float(step > 4)
        ).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 4 != 2)


def captured(path, **options):
    """The files of the run."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the one that a capture watches
    torch.manual_seed(7)
    with watched(path, **options):
        train()
    assert verify_run(path).sound
    with open_run(path) as run:
        assert len(run.rank(0).steps) >= STEPS
    return {name: (path / "rank0" / name).read_bytes() for name in FILES}


@pytest.fixture
def blocks(monkeypatch):
    """Blocks that a step was written from, in order."""
    monkeypatch.setattr(run_writer.os, "urandom", lambda count: bytes(range(count)))  # the runs get one id
    used, complete = [], StepBlock.complete

    def counted(self):
        used.append(self)
        return complete(self)

    monkeypatch.setattr(StepBlock, "complete", counted)
    return used


OPTIONS = {
    "everything": {},
    "checksums": {"stats": (), "sketch": False},
    "operators": {"level": "op"},
    "whole tensors": {"save_tensors": ("=last",)},
    "a condition": {"steps": parse_rule("when('loss < 1e9')")},
    "the first nan": {"until_nan": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_store_is_the_same_to_the_byte_whatever_stood_in_its_columns(tmp_path, monkeypatch, blocks, options):
    """No number of a step before stays, and each array is filled at each record."""
    filled = captured(tmp_path / "filled", **options)
    assert len(blocks) >= STEPS
    fill, soiled = Columns.fill, []

    def over_dirt(self, arena, facts, slots, fixed, texts):
        for array in self.arrays.values():
            array.view(np.uint8)[...] = 0xA5
        self._facts = None  # what is put down once for equal steps was soiled too
        soiled.append(len(slots))
        fill(self, arena, facts, slots, fixed, texts)

    monkeypatch.setattr(Columns, "fill", over_dirt)
    assert captured(tmp_path / "over dirt", **options) == filled
    assert len(soiled) >= STEPS
    assert max(soiled)
