"""The document that scripts build on: its keys are pinned, and it is strict JSON whatever the values."""

import json

import numpy as np
import pytest
import yaml
from small_runs import train
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.render.json import diff_document, to_json, to_yaml
from introspect_cli.store.read.run import open_run

TOP = ["format", "a", "b", "verdict", "sentence", "first", "divergences", "settings", "counts"]
DIVERGENCE = [
    "step",
    "rank",
    "phase",
    "kind",
    "fqn",
    "module_class",
    "call",
    "path",
    "role",
    "reason",
    "a",
    "b",
    "rel_l2",
]
SIDE = ["status", "shape", "dtype", "device", "checksum", "text"]
COUNTS = ["steps_a", "steps_b", "steps_compared", "steps_diverged", "records", "equal", "diverged"]


@pytest.fixture
def document(tmp_path):
    def make(a, b, **options):
        write_run(tmp_path / "a", a, force=True)
        write_run(tmp_path / "b", b, force=True)
        with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
            return diff_document(compare_runs(one, two, DiffOptions(**options)))

    return make


def strict(text):
    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_keys_are_these_and_in_this_order(document):
    found = strict(to_json(document(train(), train("module"))))
    assert list(found)[: len(TOP)] == TOP
    assert found["format"] == 1
    assert found["verdict"] == "diverged"
    assert list(found["first"])[: len(DIVERGENCE)] == DIVERGENCE
    assert found["first"] == found["divergences"][0]
    assert set(SIDE) <= set(found["first"]["a"])
    assert {"mean", "std", "min", "max", "nans", "infs", "l2"} <= set(found["first"]["b"])
    assert list(found["counts"])[: len(COUNTS)] == COUNTS
    assert {"evidence", "candidates", "notes", "suggestions"} <= set(found)


def test_values_of_the_first_divergence(document):
    first = document(train(), train("module"))["first"]
    said = [1, 0, "forward", "output", "Net.a", "Linear", 0, "", "origin", "module"]
    assert [first[name] for name in DIVERGENCE[:10]] == said
    assert (first["a"]["shape"], first["a"]["dtype"], len(first["a"]["checksum"])) == ([6, 8], "float32", 16)
    assert 0 < first["rel_l2"] < 0.02


def test_one_sided_is_null(document):
    first = document(train(), train("inserted"), strict=True)["first"]
    assert first["a"] is None
    assert first["rel_l2"] is None
    assert first["b"]["shape"] == [6, 8]


def test_same_has_no_first(document):
    found = document(train(), train())
    assert (found["verdict"], found["first"], found["divergences"]) == ("same", None, [])


def test_nan_and_infinity_become_null_or_text(document):
    def steps(value):
        return [[row("forward", "output", "Net", np.array(value, np.float32))]]

    found = strict(to_json(document(steps([1, np.nan]), steps([np.inf, np.nan]))))
    assert found["first"]["rel_l2"] is None
    assert (found["first"]["a"]["infs"], found["first"]["b"]["infs"]) == (0, 1)
    everything = strict(to_json(document(steps([np.nan, np.nan]), steps([np.inf, np.inf]), want_map=True)))
    assert everything["first"]["rel_l2"] is None
    one_sided = strict(
        to_json(document(steps([1, 2]), [[row("forward", "output", "Net.b", np.ones(2))]], want_map=True))
    )
    assert "inf" in [value for values in one_sided["map"]["values"] for value in values]


def test_strange_names_are_reported_as_the_reader_gives_them(document):
    name = "Net.[bold]\x1b[31mred\u202e\n"

    def steps(value):
        return [[row("forward", "output", name, np.float32(value))]]

    assert strict(to_json(document(steps(1), steps(2))))["first"]["fqn"] == "Net.[bold]\\x1b[31mred\\u202e\\n"


def test_yaml_says_the_same(document):
    found = document(train(), train("module"), limit=3)
    assert yaml.safe_load(to_yaml(found)) == json.loads(to_json(found))
