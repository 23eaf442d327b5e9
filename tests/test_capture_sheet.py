"""A step that the kernels put straight into the store's message, against one that comes as a table."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from neutrality import watched
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.capture.backlog import Backlog
from introspect_cli.capture.sheet import Sheet
from introspect_cli.store import writer
from introspect_cli.store.reader import open_run
from introspect_cli.store.verify import verify_run
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.summarizer import Summarizer

pytestmark = pytest.mark.skipif(KERNELS is None, reason="the compiled kernels fill them")

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
    """The files of the run, and how many steps were put into a sheet."""
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
def sheets(monkeypatch):
    """Sheets that a step was written from, in order."""
    monkeypatch.setattr(writer.os, "urandom", lambda count: bytes(range(count)))  # the runs get one id
    used, complete = [], Sheet.complete

    def counted(self, *given):
        used.append(self)
        return complete(self, *given)

    monkeypatch.setattr(Sheet, "complete", counted)
    return used


OPTIONS = {"everything": {}, "checksums": {"stats": (), "sketch": False}, "operators": {"level": "op"}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_store_is_the_same_to_the_byte_without_sheets(tmp_path, monkeypatch, sheets, options):
    filled = captured(tmp_path / "filled", **options)
    assert len(sheets) >= STEPS
    sheets.clear()
    monkeypatch.setattr(Summarizer, "target", lambda *_: None)
    assert captured(tmp_path / "tables", **options) == filled
    assert not sheets


TABLES = {
    "whole tensors": {"save_tensors": ("=last",)},
    "each sample": {"per_sample": True},
    "a condition": {"when": "loss < 1e9"},
    "the first nan": {"until_nan": True},
    "medians": {"stats": ("med",)},
}


@pytest.mark.parametrize("options", TABLES.values(), ids=TABLES)
def test_what_is_looked_at_before_it_is_written_comes_as_a_table(tmp_path, monkeypatch, sheets, options):
    tables, append = [], Backlog._append

    def counted(self, ended, table):
        tables.append(table)
        append(self, ended, table)

    monkeypatch.setattr(Backlog, "_append", counted)
    captured(tmp_path / "run", **options)
    assert sum(table is not None for table in tables) >= STEPS - 1
    assert len(sheets) == sum(table is None for table in tables)


def test_a_sheet_that_is_not_written_yet_is_no_later_steps(tmp_path, monkeypatch, sheets):
    """An interrupt keeps a step from being written: it is written with the next, from its own sheet."""
    append, stopped = Backlog._append, []

    def interrupted(self, ended, table):
        if ended.step == 9 and not stopped:
            stopped.append(ended)
            raise KeyboardInterrupt
        append(self, ended, table)

    whole = captured(tmp_path / "whole")
    sheets.clear()
    monkeypatch.setattr(Backlog, "_append", interrupted)
    write = Backlog.write

    def caught(self, keep):
        try:
            write(self, keep)
        except KeyboardInterrupt:
            assert stopped

    monkeypatch.setattr(Backlog, "write", caught)
    assert captured(tmp_path / "run") == whole
    assert stopped
    assert sheets[9].form.rows == sheets[10].form.rows
    assert sheets[9] is not sheets[10]
    assert sheets[1] is sheets[2]
