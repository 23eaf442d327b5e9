"""What is written is what is read."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic import COUNTS, NUMBERS, row, summary, write_run

from introspect_cli.records import SKETCH_SIZE, Kind, Layout, ModuleInfo, Phase, Site, SiteInfo, Status, Summary
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run
from introspect_cli.texts import clean

NAMES = st.text(max_size=20)
SITES = st.builds(Site, st.sampled_from(Phase), st.sampled_from(Kind), NAMES, st.integers(0, 2**32 - 1), NAMES)
INFOS = st.builds(SiteInfo, NAMES, NAMES, NAMES)
LAYOUTS = st.builds(Layout, st.lists(st.integers(0, 2**15), max_size=4).map(tuple), NAMES, NAMES, NAMES)
SUMMARIES = st.builds(
    Summary,
    st.sampled_from(Status),
    LAYOUTS,
    st.integers(0, 2**64 - 1),
    st.dictionaries(
        st.sampled_from(NUMBERS).filter(lambda name: name not in {"skew", "kurt"}),
        st.floats(0, allow_nan=False, allow_infinity=False),
    ),
    st.just(()),
    NAMES,
)
STEPS = st.lists(st.lists(st.tuples(SITES, INFOS, SUMMARIES), max_size=6, unique_by=lambda r: r[0]), max_size=4)


def read(path):
    with open_run(path) as run:
        return [list(run.rank(0).records(step.step)) for step in run.rank(0).steps]


@settings(max_examples=25)
@example([])
@example([[], [row("loss", "loss", "loss", summary(1.0))], []])
@given(STEPS)
def test_records_come_back_as_they_were(steps):
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder) / "run", steps)
        back = read(path)
        assert [len(step) for step in back] == [len(step) for step in steps]
        with open_run(path) as run:
            assert (run.last_step, run.state) == (len(steps) - 1 if steps else None, RunState.COMPLETE)
        for step, records in zip(steps, back, strict=True):
            for position, ((site, _, summary), record) in enumerate(zip(step, records, strict=True)):
                assert record.site == replace(site, fqn=clean(site.fqn), path=clean(site.path))
                assert record.sequence == position
                assert record.summary.status == summary.status
                texts = {name: clean(getattr(summary.layout, name)) for name in ("dtype", "device", "strides")}
                assert record.summary.layout == replace(summary.layout, **texts)
                assert record.summary.checksum == summary.checksum
                assert record.summary.text == clean(summary.text)
                assert {name: record.summary.stats[name] for name in summary.stats} == summary.stats
        assert verify_run(path).sound


@pytest.mark.parametrize(
    ("stats", "sketch", "sorted_stats"),
    [(True, True, ("mode", "med")), (True, False, ("med",)), (False, True, ()), (False, False, ("mode",))],
)
def test_optional_columns_come_back(tmp_path, stats, sketch, sorted_stats):
    values = Summary(
        Status.OBSERVED, Layout((2,), "float32"), 5, {"nans": 0, "mean": 1.5, "med": 1.25, "mode": 1.0}, (1.0,) * 16
    )
    path = write_run(
        tmp_path / "run",
        [[row("forward", "output", "A", values)]],
        stats=stats,
        sketch=sketch,
        sorted_stats=sorted_stats,
    )
    with open_run(path) as run:
        batch = run.rank(0).read(0)
        assert list(batch.counts) == (list(COUNTS) if stats else [])
        assert set(batch.floats) == (set(NUMBERS) if stats else set()) | set(sorted_stats)
        assert (batch.sketch is not None) == sketch
        record = next(run.rank(0).records(0))
        columns = run.rank(0).frames.columns
    assert record.summary.sketch == ((1.0,) * SKETCH_SIZE if sketch else ())
    assert ("mean" in record.summary.stats) == stats
    assert ("med" in record.summary.stats) == ("med" in sorted_stats)
    names = {column.name for column in columns}
    assert ({"mean", "sketch", "med", "mode"} & names) == {*["mean"] * stats, *["sketch"] * sketch, *sorted_stats}


def test_statistics_follow_their_definitions(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(999) * 3 + 2
    values[:3] = [np.nan, np.inf, -np.inf]
    finite = values[np.isfinite(values)]
    path = write_run(tmp_path / "run", [[row("forward", "output", "A", values)]])
    stats = read(path)[0][0].summary.stats
    expected = {
        "nans": 1,
        "infs": 2,
        "posinfs": 1,
        "neginfs": 1,
        "std": finite.std(),
        "uvar": finite.var(ddof=1),
        "l2": np.linalg.norm(finite),
        "absmax": np.abs(finite).max(),
        "absmean": abs(finite.mean()),
    }
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value, rel=1e-9), name


def test_what_is_absent_is_left_out(tmp_path):
    path = write_run(
        tmp_path / "run",
        [
            [
                row("data", "batch", "D", None),
                row("loss", "loss", "loss", 2.5),
                row("forward", "output", "A", np.zeros(0)),
            ]
        ],
    )
    missing, value, empty = (record.summary for record in read(path)[0])
    assert (missing.status, missing.stats, missing.sketch) == (Status.NOT_OBSERVED, {}, ())
    assert (value.status, value.stats, value.text) == (Status.VALUE, {}, "2.5")
    assert empty.stats == {"nans": 0, "posinfs": 0, "neginfs": 0, "zeros": 0, "infs": 0}
    constant = summary(np.ones(5))
    assert "skew" not in constant.stats


def test_strange_names_come_back_harmless_and_keep_their_keys(tmp_path):
    names = ["a\nb", "\x1b[31m", "<b>", "[bold]", "\0", "é中\U0001f600", "../..", "x" * 5000]
    steps = [[row("forward", "output", name, 1.0, path=name, module_class=name) for name in names]]
    path = write_run(tmp_path / "run", steps)
    assert [record.site.fqn for record in read(path)[0]] == [clean(name) for name in names]
    assert [record.info.module_class for record in read(path)[0]] == [clean(name) for name in names]
    assert verify_run(path).sound


def test_modules_layouts_and_several_ranks(tmp_path):
    modules = [ModuleInfo("GPT", "GPT", "m.py:3", ("a", "b"), (), ("x=y",)), ModuleInfo("GPT.l", "Linear")]
    steps = [[row("forward", "output", "GPT", np.ones(3))], [row("forward", "input", "GPT", np.ones((2, 2)))]]
    path = write_run(tmp_path / "run", steps, modules=modules, ranks=3, numbers=[4, 9])
    with open_run(path) as run:
        assert run.ranks == (0, 1, 2)
        assert run.last_step == 9
        assert run.state is RunState.COMPLETE
        for rank in run.ranks:
            reader = run.rank(rank)
            assert reader.modules == modules
            assert [layout.shape for layout in reader.layouts] == [(3,), (2, 2)]
            assert [entry.step for entry in reader.steps] == [4, 9]
            assert 9 in reader
            assert 5 not in reader
            with pytest.raises(KeyError):
                reader.read(5)


def test_lone_surrogates_are_written_readably(tmp_path):
    path = write_run(
        tmp_path / "run", [[row("forward", "output", "a\udc80", "v\udcff")]], settings={"env": {"A": "\udc80"}}
    )
    record = read(path)[0][0]
    assert record.site.fqn == "a\\udc80"
    assert verify_run(path).sound
    with open_run(path) as run:
        assert run.settings["env"] == {"A": "\\udc80"}


def test_long_texts_are_cut(tmp_path):
    path = write_run(tmp_path / "run", [[row("data", "batch", "D", "x" * 10_000)]])
    assert len(read(path)[0][0].summary.text) == 4096
