"""A store grows by columns: old stores stay readable, and what a reader does not know is kept or passed over."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from opcapture import captured
from synthetic import row, write_run

from introspect_cli.cli import introspect
from introspect_cli.errors import StoreError
from introspect_cli.records import Kind
from introspect_cli.statistics import STATISTICS, Statistic
from introspect_cli.store.format import schemas
from introspect_cli.store.format.batch import StepBatch
from introspect_cli.store.format.columns import (
    Column,
)
from introspect_cli.store.format.log import LAYOUTS, MODULES, SITES
from introspect_cli.store.format.schemas import record_columns
from introspect_cli.store.read.run import open_run
from introspect_cli.store.read.verify import verify_run
from introspect_cli.tensors.columns import Columns as Filled


def train(rate=0.1):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def with_peak(tmp_path_factory):
    """A run captured by a version that has one more statistic."""
    fill = Filled.fill

    def fill_with_peak(self, *given):
        fill(self, *given)
        if "peak" in self.arrays:
            self.arrays["peak"][:] = np.maximum(-self.arrays["min"], self.arrays["max"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STATISTICS, "peak", Statistic("<f8"))
        patch.setattr(Filled, "fill", fill_with_peak)
        return captured(tmp_path_factory.mktemp("peak") / "run", train)


def outputs(path):
    with open_run(path) as run:
        return [record for record in run.rank(0).records(1) if record.site.kind is Kind.OUTPUT]


def test_a_run_may_have_more_statistics(with_peak):
    (record,) = outputs(with_peak)
    assert record.summary.stats["peak"] == record.summary.stats["absmax"]
    assert verify_run(with_peak).sound


def test_a_statistic_that_is_not_known_is_kept_and_shown(with_peak, tmp_path):
    """Outside of the fixture this version has never heard of it."""
    assert "peak" not in STATISTICS
    done = CliRunner().invoke(introspect, ["show", "history", "Linear", str(with_peak), "--stat", "peak"])
    assert done.exit_code == 0, done.output
    assert "peak" in done.output
    done = CliRunner().invoke(introspect, ["export", str(with_peak), "--format", "csv", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rows = [row for row in exported(tmp_path / "out") if row["peak"]]
    assert rows
    assert all(float(row["peak"]) == float(row["absmax"]) for row in rows)


def exported(path):
    """The rows of the one table of an export as CSV, by column."""
    (table,) = path.rglob("*.csv")
    with table.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture
def without_var(tmp_path):
    """A run of a version that kept no variance."""
    every = dict(STATISTICS)
    del STATISTICS["var"]
    try:
        return write_run(tmp_path / "run", [[row("forward", "output", "A", np.arange(4.0))]])
    finally:  # in their order, which is that of columns
        STATISTICS.clear()
        STATISTICS.update(every)


def test_a_statistic_that_is_missing_is_absent_and_never_0(without_var):
    with open_run(without_var) as run:
        batch = run.rank(0).read(0)
        (record,) = run.rank(0).records(0)
    assert np.isnan(batch.floats["var"]).all()
    assert record.summary.stats["mean"] == 1.5
    assert not {"var", "std", "uvar", "l2"} & record.summary.stats.keys()
    for verb in (["show", "step", "0"], ["check"], ["diff", str(without_var)]):
        done = CliRunner().invoke(introspect, [*verb, str(without_var)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output


def written_with(monkeypatch, path, *columns):
    """A run whose records have more columns than this version writes."""
    schema = (*record_columns(), *columns)
    monkeypatch.setattr(schemas, "record_columns", lambda **_: schema)
    all_columns = StepBatch.columns

    def more(self, schema):
        return {column.name: np.zeros(len(self), column.type) for column in columns} | all_columns(self, schema)

    monkeypatch.setattr(StepBatch, "columns", more)
    write_run(path, [[row("forward", "output", "A", 1.5)]])
    monkeypatch.undo()
    return path


def test_a_column_that_is_not_known_is_passed_over(tmp_path, monkeypatch):
    path = written_with(monkeypatch, tmp_path / "run", Column("colour", "<u4"))
    with open_run(path) as run:
        (record,) = run.rank(0).records(0)
    assert record.summary.text == "1.5"
    assert "colour" not in record.summary.stats
    assert verify_run(path).sound


def test_a_column_that_is_needed_and_not_known_is_refused(tmp_path, monkeypatch):
    path = written_with(monkeypatch, tmp_path / "run", Column("piece", "<u4", role="needed"))
    with pytest.raises(StoreError, match="'piece', which this version does not know and cannot leave out: install"):
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
