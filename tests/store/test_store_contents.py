"""Stores that are valid in form and hostile in content: no verb ends in a traceback or lets a control code through."""

from __future__ import annotations

import csv
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from store_contents import attack, build, control, problem, written
from synthetic import row, write_run

from introspect_cli.records import Layout, ModuleInfo, Status, Summary
from introspect_cli.store.run import open_run
from introspect_cli.store.verify import verify_run
from introspect_cli.texts import bounded, shallow

CODES = "\x1b[31m\x7f\x9b2J\u202e\n\0"


@pytest.fixture(scope="module")
def worker():
    """A process of its own: what other tests have used of memory is not what verbs use."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("seed", range(6))
def test_hostile_contents_end_in_a_sentence(worker, seed):
    assert worker.submit(attack, seed, most=3).result() == []


def test_a_table_has_the_rows_of_the_run_and_nothing_beside_them(tmp_path):
    """pyarrow's writer left two bytes of an earlier row behind a row of 13,544, so that the next began with NUL."""
    build(tmp_path / "a", 11439)
    assert problem(["export", str(tmp_path / "a"), "--format", "csv", "-o", str(tmp_path / "out")]) is None
    with (tmp_path / "out" / "records.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    with open_run(tmp_path / "a") as run:
        readers = [run.rank(rank) for rank in run.ranks]
        records = [each for reader in readers for entry in reader.steps for each in reader.records(entry.step)]
    rows = [(str(each.step), each.site.fqn, each.summary.text) for each in records]
    assert sorted((row["step"], row["fqn"], row["text"]) for row in found) == sorted(rows)
    means = [each.summary.stats.get("mean", math.nan) for each in records]
    assert sorted(row["mean"] for row in found) == sorted("" if math.isnan(mean) else repr(mean) for mean in means)


def test_counts_beyond_what_a_float_holds_are_exported(tmp_path):
    build(tmp_path / "a", 1199)
    assert problem(["export", str(tmp_path / "a"), "--format", "csv", "-o", str(tmp_path / "out")]) is None


def test_a_learning_rate_that_is_no_number_is_not_published(tmp_path):
    for name in ("a", "b"):
        build(tmp_path / name, 30129, other=name == "b")
    assert problem(["publish", str(tmp_path / "a"), str(tmp_path / "b")]) is None


def test_a_run_that_goes_on_at_a_step_that_the_other_lacks_is_compared(tmp_path):
    for name in ("a", "b"):
        build(tmp_path / name, 1823, other=name == "b")
    arguments = ["diff", str(tmp_path / "b"), str(tmp_path / "a"), "--offset", "1", "--rename", "GPT=X"]
    assert problem(arguments) is None


@pytest.mark.sweep
@pytest.mark.parametrize("hundred", range(10))
def test_many_hostile_contents_end_in_a_sentence(hundred):
    assert [wrong for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred) for wrong in attack(seed)] == []


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """Two runs that differ, with control codes in every text of their records, names and documents."""
    paths = []
    for name, number in (("a", 1.0), ("b", 2.0)):
        layout = Layout((3,), f"float{CODES}32", f"cpu{CODES}", f"strided{CODES}")
        whole = Summary(Status.OBSERVED, layout, int(number), {"mean": number, "var": 1.0, "min": 0.0, "max": 3.0})
        rows = [
            row("forward", "input", f"A{CODES}", np.ones(3), path=f"['{CODES}']", module_class=f"Linear{CODES}"),
            row("forward", "output", f"A{CODES}", whole, path=f"['{CODES}']", module_class=f"Linear{CODES}"),
            row("optimizer", "hyperparameter", "SGD", Summary(Status.VALUE, Layout((), "python.str"), 1, text=CODES)),
        ]
        modules = [ModuleInfo(f"A{CODES}", CODES, CODES, (CODES,), (CODES,), (f"x={CODES}",), ((CODES, CODES),))]
        settings = {"environment": {f"KEY{CODES}": f"value{CODES}{name}"}, "git": {"commit": CODES, "dirty": name}}
        place = tmp_path_factory.mktemp("coded") / name
        paths.append(write_run(place, [rows], modules=modules, settings=settings, manifest={"script": CODES}))
    return [str(path) for path in paths]


VERBS = [
    tuple(line.split())
    for line in (
        "diff -v --all", "diff --format json", "show step 0", "show tree", "show settings", "show history *",
        "check", "report", "export csv", "export jsonl", "export yaml", "export json-tree", "verify",
    )
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_code_of_a_name_reaches_a_terminal_or_a_file(coded, tmp_path, verb):
    """Texts were cleaned one by one by who showed them: those in the columns of dtype, device and path were not."""
    a, b = coded
    name, *rest = verb
    if name == "export":
        rest = ["--format", *rest, "-o", str(tmp_path / "out")]
    if name == "report":
        rest = ["-o", str(tmp_path / "out.html")]
    both = [a, b] if name in {"diff", "report"} else [a]
    assert problem([name, *rest, *both]) is None
    assert written(tmp_path) is None


def test_the_reader_gives_harmless_texts(coded):
    with open_run(coded[0]) as run:
        reader = run.rank(0)
        everything = repr((run.manifest, dict(run.settings), reader.modules, reader.layouts, list(reader.records(0))))
    assert control(everything) == ""
    assert "\\x1b[31m" in everything.replace("\\\\", "\\")
    assert verify_run(coded[0]).sound  # keys are of the texts as they are stored


def test_a_path_nested_thousands_deep(tmp_path):
    rows = [row("forward", "output", "A", np.ones(3), path="[0]" * 5000 + end) for end in ("", "[1]")]
    path = write_run(tmp_path / "run", [rows])
    for form in ("yaml", "json-tree"):
        assert problem(["export", str(path), "--format", form, "-o", str(tmp_path / form)]) is None
    assert problem(["show", "tree", str(path)]) is None
    with open_run(path) as run:
        paths = {record.site.path for record in run.rank(0).records(0)}
    assert len(paths) == 2
    assert all(len(each) < 300 for each in paths)


def test_texts_that_differ_only_beyond_the_limit_still_differ():
    assert bounded("a" * 100 + "b", 100) != bounded("a" * 100 + "c", 100)
    assert shallow("[0]" * 100) != shallow("[0]" * 101)
    assert shallow("['a'][0].b") == "['a'][0].b"


def test_a_module_without_a_name_is_not_its_own_child(tmp_path):
    """It was, and looking for renamed modules took all memory there is."""
    paths = []
    for name in "ab":
        modules = [ModuleInfo("", "A"), ModuleInfo("0", "A"), ModuleInfo(name, "A")]
        rows = [row("forward", "output", f"{name}{number}", np.ones(3)) for number in range(2)]
        paths.append(str(write_run(tmp_path / name, [rows], modules=modules)))
    assert problem(["diff", *paths]) is None
    assert problem(["show", "tree", paths[0]]) is None


def test_a_manifest_of_other_types_than_a_capture_writes(tmp_path):
    rows = [row("forward", "output", "A", np.ones(3))]
    wrong = dict.fromkeys(("argv", "children", "failures", "not_observed", "observed", "narrowing", "options"), 0.5)
    odd = {"manifest": wrong | {"steps": float("nan"), "exit_code": float("inf"), "started": [], "script": {}}}
    paths = [str(write_run(tmp_path / name, [rows], **odd)) for name in "ab"]
    for verb in ("show", "diff", "check", "runs"):
        both = [str(tmp_path)] if verb == "runs" else paths[: 1 + (verb == "diff")]
        assert problem([verb, *both]) is None
        if verb != "check":
            assert problem([verb, *both, "--format", "json"]) is None
