"""`show tree`: nested inputs and outputs by path, to any depth, with the classes of what holds them, and a limit."""

from __future__ import annotations

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
from introspect_cli.inspect.module_tree import module_tree
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


def test_classes_are_kept_once_a_run_and_equal_runs_stay_equal(run, tmp_path):
    document = yaml.safe_load((run / "settings" / "nested.yaml").read_text(encoding="utf-8"))
    assert document["Model"]["output"][""] == "Result"
    assert set(document) == {"Model", "Model.layer"}
    again = captured(tmp_path / "again", work)
    with open_run(run) as a, open_run(again) as b:
        assert compare_runs(a, b, DiffOptions()).verdict is Verdict.SAME
