"""The reference is made from the code, and real answers fit the schema that is shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import reference
from answer_schema import schema
from pages import step_rows
from synthetic import write_run

from introspect_cli.records import Kind

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
for _ in range(3):
    loss = net(torch.ones(2, 4)).mean() * float(sys.argv[2])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_generated_pages_say_what_the_code_says_and_are_made_without_torch():
    command = """
import sys; sys.path.insert(0, "docs"); import reference
print([path.name for path, text in reference.pages().items() if path.read_text(encoding="utf-8") != text])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", "run `python docs/reference.py`"


def test_every_reason_says_what_it_means():
    rows = [line for line in reference.reasons_page().splitlines() if line.startswith("- `")]
    assert len(rows) > 20
    assert [row for row in rows if not re.fullmatch(r"- `\w+`: \S.*\.", row)] == []


def test_every_environment_variable_that_is_read_is_explained():
    assert reference.variables_read() == reference.VARIABLES.keys()


def test_every_kind_has_a_row_on_the_page_about_captures():
    page = (ROOT / "docs/reference/capture.md").read_text(encoding="utf-8")
    assert [kind.value for kind in Kind if f"`{kind.value}`" not in page] == []


@pytest.fixture(scope="module")
def strict():
    return schema("diff")


@pytest.fixture(scope="module")
def captured(tmp_path_factory, forks):
    """A run of the script with these arguments, captured when it is first asked for."""
    folder = tmp_path_factory.mktemp("captured")
    (folder / "train.py").write_text(SCRIPT)

    @cache
    def run(*arguments):
        path = folder / f"run {' '.join(arguments).replace('*', '')}"
        options = [word for word in arguments if word.startswith("--")]
        words = ["--no-packages", "-o", path.name, *options, "train.py", *arguments[len(options) :]]
        done = forks("capture", *words, cwd=folder, env=())
        assert done.returncode == 0, done.stderr
        return path

    return run


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ([("0.1", "1"), ("0.1", "1")], []),
        ([("0.1", "1"), ("0.2", "1")], ["--all", "--map"]),
        ([("0.1", "1"), ("0.1", "1.00001")], ["--rtol", "1e-7", "-v"]),
        ([("0.1", "1"), ("0.1", "nan")], ["--noise", "run 0.1 1"]),
    ],
    ids=["equal", "another rate", "rounding", "not a number"],
)
def test_the_json_of_a_comparison_fits_its_schema(strict, captured, introspect, settings, options):
    runs = [captured(*setting) for setting in settings]
    done = introspect("diff", *runs, "--format", "json", *options, cwd=runs[0].parent)
    strict.validate(json.loads(done.stdout))


def test_the_json_of_a_run_that_lacks_records_fits_the_schema(strict, introspect, tmp_path):
    write_run(tmp_path / "a", [step_rows(0), step_rows(1)])
    write_run(tmp_path / "b", [step_rows(0)])
    done = introspect("diff", "a", "b", "--format", "json")
    assert done.returncode == 2, done.stderr
    strict.validate(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("check", ["check", "a"], 0),
        ("show", ["show", "a"], 0),
        ("runs", ["runs", "."], 0),
        ("groups", ["diff", "a", "b", "c"], 1),
        ("diff", ["diff", "two ranks", "other ranks"], 1),
        ("diff", ["diff", "a", "later"], 2),  # no step in common
        ("show-tree", ["show", "tree", "a"], 0),
        ("show-step", ["show", "step", "1", "a"], 0),
        ("show-settings", ["show", "settings", "a"], 0),
        ("rules", ["check", "--list"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_json_of_every_verb_that_has_a_schema_fits_it(introspect, tmp_path, name, words, code):
    write_run(tmp_path / "a", [step_rows(0), step_rows(1)])
    write_run(tmp_path / "b", [step_rows(0), step_rows(1)])
    write_run(tmp_path / "c", [step_rows(0), step_rows(0)])
    write_run(tmp_path / "two ranks", [step_rows(0), step_rows(1)], ranks=2)
    write_run(tmp_path / "other ranks", [step_rows(0), step_rows(1, shift=1.0)], ranks=2)
    write_run(tmp_path / "later", [step_rows(0)], first_step=9)
    done = introspect(*words, "--format", "json")
    assert done.returncode == code, done.stdout + done.stderr
    schema(name).validate(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("show-tree", ["tree"]),
        ("show-step", ["step", "1"]),
        ("show-history", ["history", "*"]),
        ("show-values", ["values", "0"]),
        ("show-graph", ["graph"]),
        ("show-settings", ["settings"]),
    ],
)
def test_the_json_of_every_view_of_show_fits_its_schema(introspect, captured, name, words):
    run = captured("--save-tensors=*", "--level=op", "0.1", "1")
    done = introspect("show", *words, "--format", "json", run)
    assert done.returncode == 0, done.stderr
    schema(name).validate(json.loads(done.stdout))


def test_a_document_of_another_shape_does_not_fit(strict):
    with pytest.raises(Exception, match="required property"):
        strict.validate({"format": 1})
