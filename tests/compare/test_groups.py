"""More than two runs: groups that agree, and the odd one out."""

import json

import pytest
from small_runs import MODULES, train
from synthetic import write_run
from verbs import verb

FAULTS = {"module": ("module",), "again": ("module",), "loss": ("loss",), "inserted": ("inserted",)}
RUNS = {"a": (), "b": (), "c": (), **FAULTS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for name, faults in RUNS.items():
        write_run(directory / name, train(*faults), modules=MODULES)
    write_run(directory / "short", train(steps=2), modules=MODULES)
    return directory


def grouped(runs, *names):
    return json.loads(verb("diff", "--format", "json", *(runs / name for name in names)).stdout)


def test_the_odd_one_out_is_named_with_its_step(runs):
    found = grouped(runs, "module", "a", "b", "c")
    assert [len(group) for group in found["groups"]] == [3, 1]
    assert found["sentence"] == f"{runs / 'module'} is the odd one out: it diverges at step 1; the other 3 runs agree."
    assert found["differences"][0]["sentence"].startswith("First divergence at step 1: the output of Net.a")
    assert found["verdict"] == "diverged"


def test_runs_that_diverge_alike_are_one_group(runs):
    found = grouped(runs, "a", "module", "loss", "again", "b")
    assert [[path.rpartition("/")[2] for path in group] for group in found["groups"]] == [
        ["a", "b"],
        ["module", "again"],
        ["loss"],
    ]
    assert found["sentence"] == "The 5 runs form 3 groups with the same numbers: 2 runs, 2 runs and 1 run."


def test_runs_of_which_none_agrees_with_another_are_groups_of_one(runs):
    assert grouped(runs, "a", "b", "module", "loss")["sentence"] == (
        "The 4 runs form 3 groups with the same numbers: 2 runs, 1 run and 1 run."
    )
    assert grouped(runs, "a", "module", "short")["sentence"] == (
        "The 3 runs form 3 groups with the same numbers: 1 run, 1 run and 1 run, as far as could be told."
    )


def test_another_structure_with_the_same_numbers_is_in_the_group(runs):
    found = grouped(runs, "a", "inserted", "b")
    assert (found["verdict"], len(found["groups"])) == ("same", 1)
    assert found["sentence"] == "All 3 runs have the same numbers."


def test_a_run_that_ends_early_is_in_no_group_and_said_to_be_undecided(runs):
    found = grouped(runs, "a", "b", "short")
    assert found["verdict"] == "undecided"
    assert found["sentence"] == (
        "The 3 runs form 2 groups with the same numbers: 2 runs and 1 run, as far as could be told."
    )


def test_a_run_named_twice_is_refused(runs):
    assert "named twice" in verb("diff", runs / "a", runs / "b", runs / "a").stderr


def test_the_command_groups_more_than_two_runs(introspect, runs):
    answer = introspect("diff", runs / "a", runs / "b", runs / "module")
    assert answer.returncode == 1
    assert "is the odd one out" in " ".join(answer.stdout.split())
    assert "Group 2, 1 run:" in answer.stdout
    answer = introspect("diff", runs / "a", runs / "b", runs / "c", "--format", "json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout)["groups"] == [[str(runs / name) for name in "abc"]]
    answer = introspect("diff", runs / "a", runs / "b", runs / "c", "--map")
    assert answer.returncode == 2
    assert "name two" in answer.stderr
