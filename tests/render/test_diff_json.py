"""The document that scripts build on: its keys are pinned, and it is strict JSON whatever the values."""

import json

import numpy as np
import pytest
import yaml
from small_runs import train
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.render.json import diff_document, to_json, to_yaml
from introspect_cli.store.run import open_run


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


def test_yaml_says_the_same(document):
    found = document(train(), train("module"), limit=3)
    assert yaml.safe_load(to_yaml(found)) == json.loads(to_json(found))
