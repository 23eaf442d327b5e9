"""A single changed operator is found at that operator, forward or backward, with the line that ran it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml
from opcapture import captured

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.store.read.run import open_run

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SCRIPT = FIXTURES / "ops" / "train_ops.py"
CASES = yaml.safe_load((FIXTURES / "cases_ops.yaml").read_text(encoding="utf-8"))["pairs"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_ops", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_ops"] = module
    spec.loader.exec_module(module)
    yield module
    module.library._destroy()
    del sys.modules["train_ops"]


def run(script, path, fault):
    def work():
        before, sys.argv = sys.argv, ["train_ops.py", "--steps", "1", "--fault", fault]
        try:
            script.main()
        finally:
            sys.argv = before

    return captured(path, work, level="op")


@pytest.fixture(scope="module")
def plain(script, tmp_path_factory):
    return run(script, tmp_path_factory.mktemp("plain") / "run", "none")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_changed_operator_is_the_first_divergence(script, plain, tmp_path, case):
    with open_run(plain) as a, open_run(run(script, tmp_path / "run", case["name"])) as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.DIVERGED
    first = result.first
    found = {
        "phase": first.site.phase.value,
        "kind": first.site.kind.value,
        "fqn": first.site.fqn,
        "path": first.site.path,
        "call": first.site.call,
        "role": first.role.value,
        "reason": first.reason,
    }
    assert found == case["expect"]
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    number = first.source.rpartition(":")[2]
    assert (lines[int(number) - 1].strip() if number else "") == case["line"]
    assert first.source in result.sentence


def test_every_fault_of_the_script_is_a_case_and_there_are_enough(script):
    assert {case["name"] for case in CASES} == set(script.FAULTS)
    assert len(CASES) >= 20


def test_the_same_script_twice_is_the_same(script, plain, tmp_path):
    with open_run(plain) as a, open_run(run(script, tmp_path / "run", "none")) as b:
        assert compare_runs(a, b, DiffOptions()).verdict is Verdict.SAME
