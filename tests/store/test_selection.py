"""One grammar of selection for every verb; what selects nothing is an error, never an answer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_runs import MODULES, train
from synthetic import row, write_run

from introspect_cli.errors import UsageError
from introspect_cli.records import Kind, ModuleInfo
from introspect_cli.schedule.rules import Schedule
from introspect_cli.selection import (
    check_selection,
    did_you_mean,
    matches,
    near_module,
    parse_kinds,
    read_selection,
    selects,
)
from introspect_cli.store.run import open_run

NAMES = (
    "GPT", "GPT.wte.weight", "GPT.blocks.0", "GPT.blocks.0.attn", "GPT.blocks.0.attn.weight", "GPT.blocks.1.attn",
    "GPT.blocks.10", "GPT.head",
)  # fmt: skip


@pytest.mark.parametrize(
    ("glob", "selected"),
    [
        ("blocks.0", {"GPT.blocks.0", "GPT.blocks.0.attn", "GPT.blocks.0.attn.weight"}),
        ("GPT.blocks.0", {"GPT.blocks.0", "GPT.blocks.0.attn", "GPT.blocks.0.attn.weight"}),
        ("*.attn", {"GPT.blocks.0.attn", "GPT.blocks.0.attn.weight", "GPT.blocks.1.attn"}),
        ("blocks.1", {"GPT.blocks.1.attn"}),
        ("GPT", set(NAMES)),
        ("Head", set()),
        ("block", set()),
    ],
)
def test_a_glob_selects_a_module_and_all_that_is_inside(glob, selected):
    assert {name for name in NAMES if selects(name, (glob,))} == selected


def test_a_name_alone_means_that_name_alone():
    assert matches("GPT.head", "head")
    assert not matches("GPT.head.weight", "head")


@pytest.mark.parametrize("digits", ["1_0", "+3", "٣", "-1", "1.0", "0x1", "９", "1e1"])
def test_one_grammar_of_numbers(digits):
    for read in (Schedule.parse, lambda text: read_selection(ranks=text), lambda text: Schedule.parse(f"0:{text}")):
        with pytest.raises(UsageError):
            read(digits)


def test_names_that_are_close_are_offered():
    assert did_you_mean("grd", ["grad", "input"]) == "; did you mean grad?"
    assert did_you_mean("zzz", ["grad"]) == ""
    assert near_module("Net.hed", ["Net.head", "Net.body"]) == "; did you mean Net.head?"
    assert near_module("hed", ["Net.head", "Net.body"]) == "; did you mean head?"
    assert near_module("Net.hed", NAMES) == "; did you mean head?"
    assert near_module("*.atn", NAMES) == "; did you mean *.attn?"


def test_kinds_are_read_alike_everywhere():
    assert parse_kinds(["grad, loss", "op_output"]) == {Kind.GRAD, Kind.LOSS, Kind.OP_OUTPUT}
    assert parse_kinds(["all"]) == set(Kind)
    with pytest.raises(UsageError, match="no kind is given"):
        parse_kinds([""])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    write_run(home / "a", train(), modules=MODULES)
    write_run(home / "b", train("module"), modules=MODULES)
    return home


NOTHING = [
    (("--modules", "Net.nrom"), "no module matches Net.nrom; did you mean Net.norm?"),
    (("--modules", "Net.a,Net.nrom"), "no module matches Net.nrom; did you mean Net.norm?"),
    (("--kinds", "op_output"), "no op_output was recorded in"),
    (("--kinds", "grads"), "unknown kind 'grads'; did you mean grad?"),
]
STEPS = [
    (("--steps", "9"), "no step of 9 is in"),
    (("--steps", "0,9:12"), "no step of 9:12 is in"),
    (("--steps", "1_0"), "'1_0' in the schedule '1_0' is not a step"),
    (("--ranks", "3"), "no rank 3 is in"),
]


@pytest.mark.parametrize(("words", "sentence"), [*NOTHING, *STEPS], ids=" ".join)
@pytest.mark.parametrize("verb", ["diff", "export", "show", "report"])
def test_what_selects_nothing_is_an_error(introspect, runs, tmp_path, verb, words, sentence):
    if verb == "show" and words[0] not in ("--kinds", "--modules"):
        pytest.skip("show takes one step and one rank")
    rest = {
        "diff": ["a", "b"],
        "export": ["a", "--format", "jsonl", "-o", tmp_path / "out"],
        "show": ["step", "1", "a"],
        "report": ["a", "b", "-o", tmp_path / "out"],
    }
    done = introspect(verb, *rest[verb], *words, cwd=runs)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr
    assert not done.stdout
    assert not (tmp_path / "out").exists()


def test_operators_that_nobody_recorded_are_not_the_same(introspect, runs):
    done = introspect("diff", "a", "a", "--level", "op", cwd=runs)
    assert done.returncode == 2
    assert "no op_output was recorded in either run: capture with --level op" in done.stderr


def test_record_and_kinds_are_one_option(introspect, runs):
    for option in ("--kinds", "--record"):
        done = introspect("diff", "a", "b", option, "grad", cwd=runs)
        assert done.returncode == 1, done.stderr
    assert "--record, --kinds" in introspect("capture", "--help").stdout


def test_a_name_that_one_run_alone_has_is_selected(tmp_path):
    value = np.arange(6, dtype=np.float32)
    write_run(tmp_path / "a", [[row("forward", "output", "Net", value)]])
    write_run(tmp_path / "b", [[row("forward", "output", "Net", value), row("forward", "output", "Net.new", value)]])
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        check_selection(read_selection(modules=["new"]), (a, b))
        with pytest.raises(UsageError, match="no module matches new"):
            check_selection(read_selection(modules=["new"]), (a,))
        check_selection(read_selection(modules=["fresh"]), (a, b), lambda name: name.replace("Net", "Net.fresh"))


def test_a_module_without_records_is_still_a_module(tmp_path):
    rows = [[row("forward", "output", "Net", np.ones(3, np.float32))]]
    write_run(tmp_path / "a", rows, modules=[ModuleInfo("Net", "Net"), ModuleInfo("Net.idle", "Linear")])
    with open_run(tmp_path / "a") as run:
        check_selection(read_selection(modules=["idle"]), (run,))


@pytest.mark.parametrize("glob", ["a", "Net.a", "*.a"])
def test_diff_show_and_export_select_the_same(introspect, runs, tmp_path, glob):
    shown = introspect("show", "step", "1", "a", "--modules", glob, "--format", "json", cwd=runs)
    names = {record["fqn"] for record in json.loads(shown.stdout)["records"]}
    assert names == {"Net.a", "Net.a.weight"}
    words = ("--format", "jsonl", "-o", tmp_path / "out", "--modules", glob)
    assert introspect("export", "a", *words, cwd=runs).returncode == 0
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert {json.loads(line)["fqn"] for line in lines} == names
    diff = introspect("diff", "a", "b", "--modules", glob, "--all", "--format", "json", cwd=runs)
    found = json.loads(diff.stdout)
    assert {divergence["fqn"] for divergence in found["divergences"]} <= names
    assert found["counts"]["records"] == len(lines)


def test_a_report_is_narrowed_like_a_diff(introspect, runs, tmp_path):
    page = tmp_path / "page.html"
    assert introspect("report", "a", "--modules", "a", "-o", page, cwd=runs).returncode == 2
    assert not page.exists()
    assert introspect("report", "a", "b", "--modules", "b", "-o", page, cwd=runs).returncode == 0
    diff = json.loads(introspect("diff", "a", "b", "--modules", "b", "--format", "json", cwd=runs).stdout)
    assert f"{diff['counts']['records']} records of 4 steps compared" in page.read_text()
