"""Planted faults are found where they are, and equal runs are called equal."""

from __future__ import annotations

import ast
import re

import artefacts
import cases
import pytest
import torch
import yaml

CASES = cases.load_cases()
FIELD = cases.FIXTURES / "field"
"""Errors that people trained with; its `cases.yaml` has a link to each report."""


@pytest.fixture(scope="session")
def captures(forks):
    def run(*words, env=()):  # what python reads as it starts is for a process of its own
        return cases.introspect(*words, env=env) if env else forks(*words)

    return artefacts.captures(run)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_first_divergence_on_a_gpu_is_where_the_fault_is(captures):
    on_a_gpu = cases.load_cases(cases.FIXTURES / "cases_gpu.yaml")
    wrong = {case.name: cases.judge(case, captures) for case in on_a_gpu}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_there_are_enough_cases():
    planted = [case for case in CASES if case.expect]
    assert len(planted) >= 80
    assert len(CASES) - len(planted) >= 40
    assert sum(case.in_slice for case in CASES) >= 20
    assert len({case.name for case in CASES}) == len(CASES)


def test_each_bug_has_a_report_and_there_are_enough():
    listed = yaml.safe_load((FIELD / "cases.yaml").read_text(encoding="utf-8"))["cases"]
    assert len({case.name for case in cases.load_field_cases()}) == len(listed) >= 30
    assert all(entry["report"].startswith("https://") and entry["found"] for entry in listed)
    page = (cases.FIXTURES.parent / "benchmarks" / "results" / "field-errors.md").read_text(encoding="utf-8")
    assert f"{len(listed)} such errors " in page
    assert set(re.findall(r"https://[^)]+", page)) <= {entry["report"] for entry in listed}
    for script in ("language.py", "images.py"):
        tree = ast.parse((FIELD / script).read_text(encoding="utf-8"))
        assigned = {
            node.targets[0].id: node.value
            for node in tree.body
            if hasattr(node, "targets") and hasattr(node.targets[0], "id")
        }
        bugs = ast.literal_eval(assigned["BUGS"])
        assert {entry["bug"] for entry in listed if entry["script"] == script} == set(bugs) - {"none"}
