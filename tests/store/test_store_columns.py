"""The tables of a store: their columns, and how many rows a run gives them."""

from __future__ import annotations

import pytest
from synthetic import row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.store import columns
from introspect_cli.store.columns import Column, record_columns
from introspect_cli.store.run import open_run


def test_columns_of_another_version_are_refused(tmp_path, monkeypatch):
    schema = (*record_columns(), Column("colour", "<u4"))
    monkeypatch.setattr(columns, "record_columns", lambda **_: schema)
    path = write_run(tmp_path / "run", [[row("forward", "output", "A", 1.5)]])
    monkeypatch.undo()
    with pytest.raises(StoreError, match="its columns are not those that this version writes: install the newest"):
        open_run(path)
