"""A store grows by columns: old stores stay readable, and what a reader does not know is kept or passed over."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from opcapture import captured
from synthetic import row, write_run

from introspect_cli.cli import introspect
from introspect_cli.errors import StoreError
from introspect_cli.records import Kind, ModuleInfo
from introspect_cli.statistics import STATISTICS, Statistic
from introspect_cli.store.format import schemas
from introspect_cli.store.format.batch import StepBatch, short_texts
from introspect_cli.store.format.columns import (
    Column,
    Lists,
    Malformed,
    Message,
    Texts,
    column_of,
    decode_rows,
    encode_rows,
    sparse_texts,
    texts,
)
from introspect_cli.store.format.log import LAYOUTS, MODULES, SITES
from introspect_cli.store.format.schemas import LIMIT_TEXT, STATISTIC, Columns, parse_columns, record_columns
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


ROWS = Columns(record_columns())


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"[]",
        b"{" * 5000,
        b'{"records":1,"sites":1,"layouts":1,"modules":1}',
        replace(ROWS, records=ROWS.records[1:]).described(),
        replace(ROWS, records=(*ROWS.records, ROWS.records[0])).described(),
        replace(ROWS, records=(*ROWS.records, Column("given", "list<i4>"))).described(),
        replace(ROWS, records=(*ROWS.records, Column("sketch", "<f4"))).described(),
        replace(ROWS, sites=(*ROWS.sites, Column("x", "<f8", role=STATISTIC))).described(),
        replace(ROWS, records=(*ROWS.records, Column("x", "utf8", role=STATISTIC))).described(),
        replace(ROWS, records=(*ROWS.records, Column("Bad Name", "<f8"))).described(),
        replace(ROWS, modules=ROWS.modules[1:]).described(),
        ROWS.described().replace(b'"nans","int64"', b'"nans","float64"'),
        ROWS.described().replace(b"float32[16]", b"float32[99999]"),
    ],
)
def test_descriptions_that_no_version_writes_are_refused(description):
    with pytest.raises(Malformed):
        parse_columns(description)


def test_what_operators_were_given_is_data(tmp_path):
    path = captured(tmp_path / "run", train, level="op")
    with open_run(path) as run:
        reader = run.rank(0)
        records = list(reader.records(1))
        numbers = dict(enumerate(reader.sites))
    (made,) = [record for record in records if record.site.path == "aten.addmm.default"]
    written = [numbers[number][0].kind if number >= 0 else None for number in made.given.inputs]
    assert written == [Kind.PARAM, None, Kind.PARAM]
    assert all(not record.summary.text for record in records if record.site.kind is Kind.OP_OUTPUT)
    assert all(record.given is None for record in records if record.site.kind is not Kind.OP_OUTPUT)
    backward = [record for record in records if record.given and record.given.forward >= 0]
    assert {numbers[record.given.forward][0].path for record in backward} >= {"aten.addmm.default"}


def test_attributes_of_modules_and_their_changes(tmp_path):
    first = ModuleInfo("A.drop", "Dropout", attributes=(("p", "0.1"), ("training", "True")))
    later = replace(first, attributes=(("p", "0.2"), ("training", "True")), step=3)
    path = write_run(tmp_path / "run", [[row("forward", "output", "A", 1.5)]], modules=[first, later])
    with open_run(path) as run:
        assert run.rank(0).modules == [first]
        assert run.rank(0).module_rows == [first, later]


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


# --- bodies

SCHEMA = (
    *record_columns(operators=True),
    Column("after", "|u1"),
    Column("vector", "vector", 3),
    Column("words", "list<utf8>"),
)


def random_column(column, rows, random):
    if column.type == "utf8":
        return texts(["x" * number for number in random.integers(0, 9, rows)])
    if column.type == "list<utf8>":
        return column_of(column, [["ab"] * number for number in random.integers(0, 3, rows)])
    if column.type.startswith("list<"):
        return column_of(column, [[number] * number for number in random.integers(0, 3, rows)])
    if column.type == "vector":
        return random.standard_normal((rows, column.width)).astype("<f4")
    return random.integers(0, 100, rows).astype(column.type)


def plain(columns):
    return {
        name: column.tolist() if isinstance(column, (Texts, Lists)) else np.asarray(column).tolist()
        for name, column in columns.items()
    }


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33])
def test_a_body_is_that_of_its_columns_in_every_step(rows):
    """Columns of fixed size are filled in where they lie, or put there; others stay, or change, or change in length."""
    random, message = np.random.default_rng(rows), Message(SCHEMA, rows)
    with pytest.raises(ValueError, match="the column given was not filled in"):
        message.pieces()
    columns = {column.name: random_column(column, rows, random) for column in SCHEMA}
    for name, column in columns.items():
        message.put(name, column)
    for column in SCHEMA:
        columns[column.name] = made = random_column(column, rows, random)
        if column.name in message.columns:
            message.columns[column.name][:] = made
        else:
            message.put(column.name, made)
        data = b"".join(message.pieces())
        assert data == encode_rows(SCHEMA, columns)
        assert plain(decode_rows(SCHEMA, memoryview(data), rows)) == plain(columns)
    assert set(message.columns) == {column.name for column in record_columns()} - {"text"}
    assert "words" in message
    for cut in range(0, len(data), 5):
        with pytest.raises(Malformed):
            decode_rows(SCHEMA, memoryview(data)[:cut], rows)
    for other in (SCHEMA[:-1], (*SCHEMA, Column("more", "<u4"))) if rows else ():
        with pytest.raises(Malformed):
            decode_rows(other, memoryview(data), rows)


def test_what_has_not_changed_is_not_encoded_again_and_the_largest_is_known(monkeypatch):
    message, encoded = Message(record_columns(operators=True), 2), []
    monkeypatch.setattr(
        "introspect_cli.store.format.columns.encoded_column", lambda column, _: encoded.append(column.name)
    )
    same = {"text": sparse_texts(2, {1: "a"}), "given": column_of(Column("given", "list<i4>"), [[], [5]])}
    for _ in range(3):
        for name, column in same.items():
            message.put(name, column)
    message.put("text", Texts(same["text"].offsets, b"b"))
    assert encoded == ["text", "given", "text"]
    message.put("site", np.array([4, 9], np.uint32))
    assert (message.largest("site"), message.largest("layout"), Message(SCHEMA, 0).largest("site")) == (9, 0, -1)
    message.put("site", np.array([0, 1], np.uint32))
    assert message.largest("site") == 1


def test_texts_are_cut_where_they_are_longer_than_a_store_holds():
    long = "é" * (LIMIT_TEXT + 1)
    fits = texts(["", "x" * LIMIT_TEXT])
    assert short_texts(fits, 2) is fits
    for given in (["", long], texts(["", long])):
        assert short_texts(given, 2).tolist() == ["", long[:-1]]
    assert short_texts((), 2).tolist() == short_texts(["", ""], 2).tolist() == ["", ""]
