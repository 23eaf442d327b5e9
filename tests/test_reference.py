"""The reference is made from the code, and real answers fit the schema that is shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import reference
from synthetic import write_run
from test_report import step_rows

from introspect_cli.compare.reasons.base import reasons

ROOT = Path(__file__).resolve().parent.parent

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


def test_generated_pages_say_what_the_code_says():
    stale = [path.name for path, text in reference.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `python docs/reference.py`"


def test_the_reference_is_made_without_torch():
    command = (
        "import sys; sys.path.insert(0, 'docs'); import reference; reference.pages(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


def test_every_reason_says_what_it_means():
    assert [reason.word for reason in reasons() if not reason.meaning.endswith(".")] == []


def test_every_environment_variable_that_is_read_is_explained():
    assert reference.variables_read() == reference.VARIABLES.keys()


@pytest.fixture(scope="module")
def strict():
    """The schema as it is shipped, but for a key that it does not have, which no schema of a tolerant reader minds."""
    schema = json.loads(files("introspect_cli.render").joinpath("assets/diff.schema.json").read_text(encoding="utf-8"))
    for place in (schema, *schema["$defs"].values()):
        if "properties" in place:
            place.setdefault("additionalProperties", False)
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(schema)
    return validator(schema)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ([("0.1", "1"), ("0.1", "1")], []),
        ([("0.1", "1"), ("0.2", "1")], ["--all", "--map"]),
        ([("0.1", "1"), ("0.1", "1.00001")], ["--rtol", "1e-7", "-v"]),
        ([("0.1", "1"), ("0.1", "nan")], ["--noise", "run0"]),
    ],
    ids=["equal", "another rate", "rounding", "not a number"],
)
def test_the_json_of_a_comparison_fits_its_schema(strict, introspect, tmp_path, settings, options):
    (tmp_path / "train.py").write_text(SCRIPT)
    for number, arguments in enumerate(settings):
        done = introspect("capture", "--no-packages", "-o", f"run{number}", "train.py", *arguments)
        assert done.returncode == 0, done.stderr
    done = introspect("diff", "run0", "run1", "--format", "json", *options)
    strict.validate(json.loads(done.stdout))


def test_the_json_of_a_run_that_lacks_records_fits_the_schema(strict, introspect, tmp_path):
    write_run(tmp_path / "a", [step_rows(0), step_rows(1)])
    write_run(tmp_path / "b", [step_rows(0)])
    done = introspect("diff", "a", "b", "--format", "json")
    assert done.returncode == 2, done.stderr
    strict.validate(json.loads(done.stdout))


def test_a_document_of_another_shape_does_not_fit(strict):
    with pytest.raises(Exception, match="required property"):
        strict.validate({"format": 1})
