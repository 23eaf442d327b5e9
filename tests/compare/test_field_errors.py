"""Errors that people trained with are named where their reporters found them, and for the right reason.

`fixtures/field/cases.yaml` has the list, with a link to each report; `pytest -m sweep` runs all of them.
"""

from __future__ import annotations

import ast
import re

import cases
import yaml

FIELD = cases.FIXTURES / "field"
CASES = cases.load_field_cases()


def test_each_bug_has_a_report_and_there_are_enough():
    listed = yaml.safe_load((FIELD / "cases.yaml").read_text(encoding="utf-8"))["cases"]
    assert len({case.name for case in CASES}) == len(listed) >= 30
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
