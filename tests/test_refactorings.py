"""Refactorings of five models are told as the same, changes that look like refactorings as diverged, at their place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from opcapture import captured

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.result import Verdict
from introspect_cli.store.reader import open_run

_FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "refactorings"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"refactorings_{name}", _FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MODELS, EDITS = _load("models"), _load("edits")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model after edits, captured once; the one without any is shared."""
    directory = tmp_path_factory.mktemp("refactorings")

    def find(model, name="plain", edits=()):
        path = directory / f"{model}-{name}"
        if not path.exists():
            scope = {}
            exec(compile(MODELS.program(model, *edits), f"{model}.py", "exec"), scope)
            captured(path, scope["train"])
        return path

    return find


def answer(run, model, name, edits):
    with open_run(run(model)) as a, open_run(run(model, name, edits)) as b:
        return compare_runs(a, b, DiffOptions())


def _ids(cases):
    return [f"{case[0]}-{case[1]}" for case in cases]


@pytest.mark.parametrize(("model", "name", "edits"), EDITS.SAME, ids=_ids(EDITS.SAME))
def test_a_refactoring_changes_no_number(run, model, name, edits):
    result = answer(run, model, name, edits)
    assert result.verdict is Verdict.SAME, result.sentence
    unrecorded = {"another-model-beside"}  # what only runs before training, without gradients, is evaluation
    assert result.structure or name == "blocks-as-a-sequential" or name in unrecorded


@pytest.mark.parametrize(("model", "name", "edits", "kind", "fqn"), EDITS.CHANGED, ids=_ids(EDITS.CHANGED))
def test_a_change_is_named_at_its_place(run, model, name, edits, kind, fqn):
    result = answer(run, model, name, edits)
    assert result.verdict is Verdict.DIVERGED
    site = result.first.site
    assert (site.kind.value, site.fqn) == (kind, fqn or site.fqn), result.sentence


def test_there_are_forty_of_each():
    assert len(EDITS.SAME) >= 40
    assert len(EDITS.CHANGED) >= 40
