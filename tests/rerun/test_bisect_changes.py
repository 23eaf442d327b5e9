"""The changes that make two runs diverge are proven by running variants of the code."""

from __future__ import annotations

import configparser
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from answer_schema import schema
from repositories import introspect

from introspect_cli.compare.result import Verdict
from introspect_cli.rerun.changes.edits import apply_edits, edits_of
from introspect_cli.rerun.changes.search import Attempt, OutOfRunsError, Search

pytestmark = pytest.mark.usefixtures("quick_python")

# The search, with a question in place of runs.


class Asked(Search):
    """Answers of a rule instead of runs."""

    rule = None

    def _make_attempt(self, chosen):
        if self.runs >= self.most:
            raise OutOfRunsError
        self.runs += 1
        said = self.rule({self.elements[place].file[:-3] for place in chosen})
        verdict = {"": Verdict.SAME, "x": Verdict.DIVERGED, "?": Verdict.UNDECIDED}[said]
        return Attempt(verdict, f"is {verdict.value}")


def search(names, rule, most=100, likely=1):
    elements = [change for name in names for change in edits_of(f"{name}.py", "a\n", "b\n")]
    sides, reference = SimpleNamespace(unknown=()), SimpleNamespace(until=3)
    asked = Asked(sides, elements, likely, reference, None, Path("runs"), most, [].append)
    asked.rule = rule
    proof = asked.run()
    return {element.file[:-3] for element in proof.elements}, proof


def test_the_likeliest_change_is_proven_by_two_runs():
    found, proof = search("kabcdefgh", lambda chosen: "x" if "k" in chosen else "")
    assert (found, proof.proven, proof.runs) == ({"k"}, True, 2)
    assert proof.sentence == (
        "of 9 changes in 9 files, one makes them diverge: k.py:1; proven by 2 runs: without it the runs are the same "
        "up to step 3, with it alone they diverge"
    )


def cancelling(chosen):
    return "x" if ("c" in chosen) or (("d" in chosen) != ("g" in chosen)) else ""


def broken_alone(chosen):
    """d and u run only together."""
    return "?" if ("d" in chosen) != ("u" in chosen) else ""


@pytest.mark.parametrize(
    ("names", "rule", "wanted"),
    [
        *((names, cancelling, "c") for names in ("abcdefgh", "dgcabefh", "hgfedcba")),
        ("abcdefgh", lambda chosen: "x" * ({"c", "f"} <= chosen), "cf"),
        ("abcdefgh", lambda chosen: "x" * bool({"b", "g"} & chosen), "bg"),
        ("abcdefgh", lambda chosen: "?" if chosen & {"b", "g"} == {"g"} else "x" * ("b" in chosen), "bg"),
        ("adbkcu", lambda chosen: broken_alone(chosen) or "x" * ("k" in chosen), "k"),
        ("adbcu", lambda chosen: broken_alone(chosen) or "x" * ("d" in chosen), "du"),
    ],
    ids=[
        "beside two that cancel", "in another order", "in a third", "two that only together diverge",
        "two of which each does", "two that need one another", "beside two that do not run alone",
        "two of which none runs alone",
    ],
)  # fmt: skip
def test_what_makes_runs_diverge_is_found(names, rule, wanted):
    found, proof = search(names, rule)
    assert (found, proof.proven) == ({*wanted}, True)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda chosen: "x", "running a again, unchanged, is diverged"),
        (lambda chosen: "?", "or it cannot be run again"),
        (lambda chosen: "", "a with all of b's changes is same"),
    ],
)
def test_a_run_that_does_not_repeat_or_diverge_proves_nothing(rule, said):
    found, proof = search("abc", rule)
    assert (found, proof.proven) == (set(), False)
    assert said in proof.sentence


@pytest.mark.parametrize(("wanted", "most", "runs"), [({"f41"}, 100, 18), ({"f41", "f7"}, 12, 12)])
def test_of_many_changes_one_takes_few_runs_and_no_more_are_made_than_were_allowed(wanted, most, runs):
    names = [f"f{number}" for number in range(64)]
    found, proof = search(names, lambda chosen: "x" * bool(wanted & chosen), most=most, likely=3)
    assert proof.runs <= runs
    if most > runs:
        assert (found, proof.proven) == (wanted, True)
    else:
        assert not proof.proven
        assert "not finished after 12 runs (--max-runs)" in proof.sentence


# Real runs.

MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 4)
        self.b = torch.nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        h = torch.relu(h)
        return self.b(h)
"""

TRAIN = """\
import argparse
import configparser
import json
import sys

import torch

import model

EVERY = 1


def report(step, loss):
    if step % EVERY == 0:
        print("step", step, "loss", loss)


def batch(data):
    return torch.tensor(data) * torch.randn(4, 3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--name", default="x")
    args = parser.parse_args()
    torch.manual_seed(0)
    net = model.Net()
    with open("data.json") as file:
        data = json.load(file)
    for step in range(4):
        loss = net(batch(data)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= args.lr * parameter.grad
                parameter.grad = None
        report(step, loss.item())
    torch.save(net.state_dict(), "net.pt")


main()
"""

HARMLESS = (
    ("model.py", "h = self.a(x)", "hidden = self.a(x)  # the first layer"),
    ("model.py", "h = torch.relu(h)", "hidden = torch.relu(hidden)"),
    ("model.py", "self.b(h)", "self.b(hidden)"),
    ("train.py", "EVERY = 1", "EVERY = 2\nLEVEL = 3"),
    ("train.py", 'print("step", step, "loss", loss)', 'print(f"{step}: {loss:.3f}")'),
    ("train.py", "data = json.load(file)", "data = json.loads(file.read())"),
    ("train.py", "import sys\n", "import sys  # unused\nimport os\n"),
)


def project(directory, *edits):
    directory.mkdir(exist_ok=True)
    texts = {"model.py": MODEL, "train.py": TRAIN}
    for file, before, after in edits:
        assert before in texts[file]
        texts[file] = texts[file].replace(before, after)
    for name, text in texts.items():
        (directory / name).write_text(text)
    if not (directory / "data.json").exists():
        (directory / "data.json").write_text("[1.0, 0.5, 2.0]")
        os.utime(directory / "data.json", (1e9, 1e9))
    return directory


def state(directory):
    return {
        path.relative_to(directory): (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def first(quick_python, tmp_path_factory):
    """A project and its run: what each test compares with."""
    path = tmp_path_factory.mktemp("first")
    introspect(project(path / "exp1"), "capture", "-q", "-o", "../a", "train.py", code=0)
    return path


def test_two_scratch_directories_without_git(first, tmp_path):
    b = project(tmp_path / "exp2", *HARMLESS, ("model.py", "torch.relu(hidden)", "torch.tanh(hidden)"))
    introspect(b, "capture", "-q", "-o", "../b", "train.py", code=0)
    before = state(first / "exp1"), state(b)
    answer = introspect(tmp_path, "bisect", "--changes", first / "a", "b", code=1)
    assert " ".join(answer.stdout.split()).startswith(
        "Of 5 changes in 2 files, one makes them diverge: model.py:12; proven by 2 runs: without it the runs are the "
        "same up to step 0, with it alone they diverge."
    )
    assert "    - h = torch.relu(h)\n    + hidden = torch.tanh(hidden)\n" in answer.stdout
    assert (state(first / "exp1"), state(b)) == before
    assert not list((tmp_path / "introspect-runs").rglob("*-tree"))

    answer = introspect(tmp_path, "bisect", "--format", "json", "--changes", first / "a", "b", code=1)
    document = json.loads(answer.stdout)
    schema("bisect-changes").validate(document)
    assert document["proven"] is True
    assert [element["place"] for element in document["elements"]] == ["model.py:12"]
    assert document["elements"][0]["b"]["text"] == "hidden = torch.tanh(hidden)"


def test_sources_that_were_edited_since_come_from_the_runs_and_arguments_are_changes_too(first, tmp_path):
    place = first / "exp1"
    project(place, *HARMLESS, ("model.py", "torch.relu(hidden)", "torch.relu(hidden) * 1.0"))
    introspect(place, "capture", "-q", "-o", tmp_path / "b", "train.py", "--lr", "0.2", "--name", "other", code=0)
    project(place)
    answer = introspect(tmp_path, "bisect", "--changes", first / "a", "b", code=1)
    assert "Of 5 changes in 2 files and 2 differing settings, one makes them diverge: --lr; proven by " in answer.stdout
    assert "--lr: - -> 0.2" in answer.stdout


def test_a_configuration_file_in_the_other_directory_is_found(first, tmp_path):
    b = project(tmp_path / "exp2")
    (b / "data.json").write_text("[1.0, 0.5, 2.5]")
    os.utime(b / "data.json", (1e9, 1e9))
    introspect(b, "capture", "-q", "-o", "../b", "--record", "loss,param", "train.py", code=0)
    answer = introspect(tmp_path, "bisect", "--changes", "b", first / "a", code=1)
    said = " ".join(answer.stdout.split())
    assert "one makes them diverge: data.json:1; " in said
    assert "the runs are the same up to step 0, with it alone" in said


def test_a_value_of_a_configuration_file_that_was_edited_between_the_runs_is_the_cause(tmp_path):
    before = "# for the paper\nmodel:\n  scale: 1.0  # of the batch\n  name: old\ntrain: {steps: 4, seed: 0}\n"
    after = before.replace("the paper", "all").replace("1.0  # of", "1.5  # of").replace("old", "new")
    place = project(tmp_path / "exp", *HARMLESS)
    script = (place / "train.py").read_text().replace("import argparse", "import argparse\nimport yaml")
    script = script.replace(
        "torch.manual_seed(0)", 'config = yaml.safe_load(open("conf/c.yaml"))\n    torch.manual_seed(0)'
    )
    (place / "train.py").write_text(script.replace(".mean()", '.mean() * config["model"]["scale"]'))
    (place / "conf").mkdir()
    config = place / "conf" / "c.yaml"
    for name, text in (("a", before), ("b", after)):
        config.write_text(text)
        os.utime(config, (1e9 + len(text), 1e9 + len(text)))
        introspect(place, "capture", "-q", "-o", tmp_path / name, "train.py", code=0)
    held = state(place)
    answer = introspect(tmp_path, "bisect", "--changes", "a", "b", code=1)
    said = " ".join(answer.stdout.split())
    assert said.startswith("Of 2 changes in 1 file, one makes them diverge: conf/c.yaml:3; proven by 2 runs")
    assert "- scale: 1.0 # of the batch + scale: 1.5 # of the batch" in said
    assert state(place) == held


def ini(text):
    read = configparser.ConfigParser()
    read.read_string(text)
    return {name: dict(section) for name, section in read.items()}


def toml(text):
    import tomllib

    return tomllib.loads(text)


READERS = {".json": json.loads, ".yaml": yaml.safe_load, ".toml": toml, ".ini": ini}


@pytest.mark.parametrize(
    ("name", "a", "b", "places"),
    [
        ("c.json", '{"a": 1,\n "b": [1, 2]}', '{"a": 2,\n "b": [1, 3]}', [1, 2]),
        ("c.json", '{"a": 1}', '{"a": 1, "b": 2}', [1]),
        ("c.toml", "x = 1\n[t]\ny = 'a'\n", "x = 2\n[t]\n# why\ny = 'b'\nz = 1\n", [1, 3]),
        ("c.yaml", "a: 1\nb: 2\n", "# nothing\na: 1\nb:   2\n", []),
        ("c.yaml", "a: &x {k: 1}\nb: *x\n", "a: &x {k: 2}\nb: *x\n", [1]),
        ("c.yaml", "a: 1\n", "a: [1\n", None),
        ("c.txt", "a", "b", None),
    ],
)
def test_the_lines_of_a_configuration_file_that_differ(name, a, b, places):
    if name.endswith(".toml") and sys.version_info < (3, 11):
        pytest.skip("no reader of TOML")
    changes = edits_of(name, a, b)

    def applied(*chosen):
        return apply_edits(name, [edit for change in chosen for edit in changes[change]], a, b)

    if places is None:
        assert [change.unit for change in changes] == ["file"]
        assert applied(*changes) == b
        return
    assert [change.place for change in changes] == [f"{name}:{place}" for place in places]
    assert applied() == a
    parsed = READERS[Path(name).suffix]
    assert parsed(applied(*changes)) == parsed(b)
    for change in changes:
        others = [other for other in changes if other is not change]
        assert parsed(applied(*others)) != parsed(a) or not others
        assert parsed(applied(change)) != parsed(a)


def test_a_run_that_fails_before_it_diverges_is_not_bisected(first, tmp_path):
    b = project(tmp_path / "exp2", *HARMLESS, ("model.py", "nn.Linear(4, 2)", "nn.Linear(4, 2, wide=True)"))
    introspect(b, "capture", "-q", "-o", "../b", "train.py", code=1)
    answer = introspect(tmp_path, "bisect", "--changes", first / "a", "b", code=2)
    assert "nothing to bisect: " in answer.stderr
    assert "TypeError: Linear.__init__() got an unexpected" in " ".join(answer.stderr.split())


def test_what_cannot_be_bisected_is_said_in_a_sentence(first):
    assert "nothing to bisect" in introspect(first, "bisect", "--changes", "a", "a", code=2).stderr
    assert "leave 'train.py' out" in introspect(first, "bisect", "--changes", "a", "a", "train.py", code=2).stderr
    assert "say what to bisect" in introspect(first, "bisect", "--changes", "a", "a", "--good", "x", code=2).stderr
