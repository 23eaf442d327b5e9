"""`show tree`: nested inputs and outputs by path, to any depth, with the classes of what holds them, and a limit."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from opcapture import captured
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.inspect.module_tree import module_tree, pieces
from introspect_cli.store.read.run import open_run


class State(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    cache: Any = None


class ModelOutput(OrderedDict):
    """What a library's outputs are: a dictionary with attributes."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, state, *, extra):
        new = State(self.fc(state.hidden), state.cell + extra["scale"])
        return ModelOutput(state=new, seen=[new.hidden] * 5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        state, cache = State(x, x), []
        for _ in range(2):
            given = self.layer(state, extra={"scale": torch.ones(())})
            state = given["state"]
            cache.append({"key": (state.hidden, {"deep": [{"deeper": state.cell}]})})
        return Result(state.hidden, cache)


def work(steps=2):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 3)).logits.sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("nested") / "run", work)


def values(path, fqn, **options):
    with open_run(path) as opened:
        rows = {row.info.fqn: row for row in module_tree(opened, **options)}
    return [(row.depth, row.name, row.value_class, row.folded) for row in rows[fqn].values]


def test_every_level_has_its_class_and_every_leaf_its_place(run):
    assert values(run, "Model") == [
        (1, "output", "Result", 0),
        (2, ".logits", "", 0),
        (2, ".cache", "list", 0),
        (3, "[0]", "dict", 0),
        (4, "['key']", "tuple", 0),
        (5, "[0]", "", 0),
        (5, "[1]", "dict", 0),
        (6, "['deep']", "list", 0),
        (7, "[0]", "dict", 0),
        (8, "['deeper']", "", 0),
        (3, "[1]", "dict", 0),
        *[(4, "['key']", "tuple", 0), (5, "[0]", "", 0), (5, "[1]", "dict", 0)],
        *[(6, "['deep']", "list", 0), (7, "[0]", "dict", 0), (8, "['deeper']", "", 0)],
    ]


def test_inputs_are_there_too_and_neighbours_that_look_alike_are_folded(run):
    assert values(run, "Model.layer") == [
        (1, "input", "", 0),
        (2, "[0]", "State", 0),
        (3, ".hidden", "", 0),
        (3, ".cell", "", 0),
        (2, "['extra']", "dict", 0),
        (3, "['scale']", "", 0),
        (1, "output", "ModelOutput", 0),
        (2, "['state']", "State", 0),
        (3, ".hidden", "", 0),
        (3, ".cell", "", 0),
        (2, "['seen']", "list", 0),
        (3, "[0]", "", 3),
        (3, "[4]", "", 0),
    ]
    assert values(run, "Model.layer.fc") == [], "what is no more than a tensor needs no tree"


def test_a_limit_counts_modules_and_values_alike(run):
    assert [row[:2] for row in values(run, "Model", depth=2)] == [(1, "output"), (2, ".logits"), (2, ".cache")]
    assert [row[:2] for row in values(run, "Model.layer", depth=2)] == [(1, "input"), (1, "output")]
    with open_run(run) as opened:
        assert [row.info.fqn for row in module_tree(opened, depth=1)] == ["Model", "Model.layer"]
        assert [row.info.fqn for row in module_tree(opened, depth=0)] == ["Model"]


def test_a_run_that_tells_no_classes_shows_the_form_of_the_keys(run, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(run, old)
    (old / "settings" / "nested.yaml").unlink()
    found = values(old, "Model")
    assert found[0] == (1, "output", "(object)", 0)
    assert [row[2] for row in found[2:5]] == ["(sequence)", "(mapping)", "(sequence)"]


def test_classes_are_kept_once_a_run_and_equal_runs_stay_equal(run, tmp_path):
    document = yaml.safe_load((run / "settings" / "nested.yaml").read_text(encoding="utf-8"))
    assert document["Model"]["output"][""] == "Result"
    assert set(document) == {"Model", "Model.layer"}
    again = captured(tmp_path / "again", work)
    with open_run(run) as a, open_run(again) as b:
        assert compare_runs(a, b, DiffOptions()).verdict is Verdict.SAME


def test_shown_as_a_tree_and_as_json(introspect, run):
    said = introspect("show", "tree", run, "--depth", "3").stdout
    lines = [line.rstrip() for line in said.splitlines()]
    place = next(index for index, line in enumerate(lines) if line.split()[:2] == ["output", "Result"])
    assert lines[place + 1].split()[0] == ".logits"
    assert "2x3" in lines[place + 1]
    assert lines[place + 2].split() == [".cache", "list"]
    assert len(lines[place + 2]) - len(lines[place + 2].lstrip()) > len(lines[place]) - len(lines[place].lstrip())
    assert any("3 more like it" in line for line in introspect("show", "tree", run).stdout.splitlines())
    found = json.loads(introspect("show", "tree", run, "--format", "json").stdout)
    (layer,) = [module for module in found["modules"] if module["fqn"] == "Model.layer"]
    assert {value["side"] for value in layer["values"]} == {"input", "output"}
    refused = introspect("show", run, "--depth", "1")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_path_is_cut_into_its_pieces():
    assert pieces("[0]['a[.]b'].c[<key>]") == ["[0]", "['a[.]b']", ".c", "[<key>]"]
    assert pieces("") == []
    assert pieces("nonsense") == ["nonsense"]
    assert len(pieces("[0]" * 1000)) == 33
