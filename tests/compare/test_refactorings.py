"""Refactorings of ten models are told as the same, changes that look like refactorings as diverged, at their place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from artefacts import artefact
from opcapture import captured
from sweeps import sliced

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.store.read.run import open_run

_FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "refactorings"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"refactorings_{name}", _FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MODELS, EDITS, OWN = _load("models"), _load("edits"), _load("own_edits")


@pytest.fixture(scope="module")
def run():
    """A run of a model after edits."""

    def find(model, name="plain", edits=()):
        text = MODELS.program(model, *edits)

        def made(folder):
            scope = {}
            exec(compile(text, f"{model}.py", "exec"), scope)
            captured(folder / f"{model}-{name}", scope["train"])

        return artefact("refactored", made) / f"{model}-{name}"

    return find


def answer(run, model, name, edits):
    with open_run(run(model)) as a, open_run(run(model, name, edits)) as b:
        return compare_runs(a, b, DiffOptions())


def _by_name(general, special):
    """The cases by name, and those of every run: each model's own, and three models of each general one."""
    cases = {f"{case[0]}-{case[1]}": case for case in general + special}
    models = list(EDITS.FIRST)
    names = list(dict.fromkeys(case[1] for case in general))
    taken = {f"{models[(2 * i + j) % len(models)]}-{name}" for i, name in enumerate(names) for j in (0, 3, 6)}
    return cases, sliced(list(cases), taken | {f"{case[0]}-{case[1]}" for case in special})


SAME, SAME_NAMES = _by_name(EDITS.SAME, OWN.SAME)
CHANGED, CHANGED_NAMES = _by_name(EDITS.CHANGED, OWN.CHANGED)
WITHOUT_A_TRACE = {
    "another-model-beside",  # what only runs before training, without gradients, is evaluation
    "blocks-as-a-sequential",  # which is called under the name that the list has
    "experts-called-first",  # in the order that they had
}


@pytest.mark.parametrize("case", SAME_NAMES)
def test_a_refactoring_changes_no_number(run, case):
    model, name, edits = SAME[case]
    result = answer(run, model, name, edits)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.structure or name in WITHOUT_A_TRACE


@pytest.mark.parametrize("case", CHANGED_NAMES)
def test_a_change_is_named_at_its_place(run, case):
    model, name, edits, kind, fqn = CHANGED[case]
    result = answer(run, model, name, edits)
    assert result.verdict is Verdict.DIVERGED
    site = result.first.site
    assert (site.kind.value, site.fqn) == (kind, fqn), result.sentence


def test_there_are_forty_of_each_in_every_run_and_ten_models_in_each():
    for cases, names in ((SAME, SAME_NAMES), (CHANGED, CHANGED_NAMES)):
        ordinary = [name for name in names if isinstance(name, str)]
        assert len(ordinary) >= 40
        assert len({cases[name][0] for name in ordinary}) == 10
