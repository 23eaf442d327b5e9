"""The tables of a store: their columns, and how many rows a run gives them."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured
from synthetic import row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.store import columns
from introspect_cli.store.columns import (
    Column,
    record_columns,
)
from introspect_cli.store.log import LAYOUTS, MODULES, SITES
from introspect_cli.store.run import open_run


def test_columns_of_another_version_are_refused(tmp_path, monkeypatch):
    schema = (*record_columns(), Column("colour", "<u4"))
    monkeypatch.setattr(columns, "record_columns", lambda **_: schema)
    path = write_run(tmp_path / "run", [[row("forward", "output", "A", 1.5)]])
    monkeypatch.undo()
    with pytest.raises(StoreError, match="its columns are not those that this version writes: install the newest"):
        open_run(path)


def test_modules_made_anew_each_step_give_no_new_names(tmp_path):
    def work(steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            head = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
            optimizer.zero_grad()
            head(model(torch.randn(2, 4))).square().mean().backward()
            optimizer.step()

    sizes = []
    for steps in (3, 12):
        with open_run(captured(tmp_path / str(steps), lambda steps=steps: work(steps))) as run:
            heads = run.rank(0).frames.heads
            sizes.append([int(heads["length"][heads["kind"] == kind].sum()) for kind in (SITES, LAYOUTS, MODULES)])
    assert sizes[0] == sizes[1]
