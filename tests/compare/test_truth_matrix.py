"""Every planted fault, in every configuration: the place is right where it was recorded, and no claim is false.

An ordinary run takes a slice; `pytest -m sweep` and `benchmarks/localization.py --matrix` take all of it.
"""

from __future__ import annotations

import copy

import artefacts
import cases
import claims
import configurations
import matrix
import pytest

from introspect_cli.store.read.run import open_run

CASES = {case.name: case for case in cases.load_cases()}
CONFIGURATIONS = {one.name: one for one in configurations.CONFIGURATIONS}
SLICE = ("gpt-layernorm-eps", "gpt-lr", "gpt-residual-inplace")
REDUCED = [
    name for name, one in CONFIGURATIONS.items() if not (one.capture or one.capture_a or one.capture_b or one.scripts)
]
ALL = matrix.chosen(CASES.values())


@pytest.fixture(scope="module")
def captures(forks):
    return artefacts.captures(forks)


def judged(case, configuration, captures):
    cell = matrix.judge(CASES[case], CONFIGURATIONS[configuration], captures)
    return [] if cell.outcome not in {"wrong", "cannot run"} else [*cell.why, cell.sentence]


@pytest.mark.parametrize("case", SLICE)
@pytest.mark.parametrize("configuration", REDUCED)
def test_what_is_said_of_lean_runs_is_true(case, configuration, captures):
    assert judged(case, configuration, captures) == []


@pytest.mark.parametrize("configuration", ["steps-2:", "every-3"])
def test_what_is_said_of_sampled_runs_is_true(configuration, captures):
    assert judged("gpt-clip", configuration, captures) == []


@pytest.mark.parametrize(
    ("case", "configuration"),
    [
        ("rollback-to-other-weights", "lean"),  # "no optimizer steps", where hyper-parameters were not recorded
        ("rollback-in-one-run", "modules-b"),  # "its parameters are equal", where b alone recorded them again
        ("checkpointed-drop-path", "everything"),  # "the random state is equal", where b alone draws
        ("gpt-dropout", "modules-a"),  # "drew random numbers in b and not in a", where a was told to leave it out
        ("gpt-dropout", "modules-b"),  # "the random state is equal", without saying of which module
        ("resume-fresh-optimizer", "every-3"),  # what the step begins with comes before what it leaves
    ],
)
def test_what_the_matrix_once_found_false_is_true(case, configuration, captures):
    assert judged(case, configuration, captures) == []


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "configuration"), ALL, ids=[f"{case.name}-{one.name}" for case, one in ALL])
def test_what_is_said_is_true_everywhere(case, configuration, captures):
    cell = matrix.judge(case, configuration, captures)
    assert cell.outcome in {"right", "first seen", "silent", "cannot run"}, [*cell.why, cell.sentence]


def records(path):
    """What a run says, but for when it was made: steps of sites and what was kept of each."""
    with open_run(path) as run:
        reader = run.rank(0)
        found = {
            entry.step: [(record.site, record.info, record.summary) for record in reader.records(entry.step)]
            for entry in reader.steps
        }
        return (
            found,
            run.manifest["observed"],
            run.manifest["options"],
            run.manifest["narrowing"],
            set(run.settings),
            {site for site, _ in reader.sites},
        )


@pytest.mark.parametrize(
    "reduction",
    [
        configurations.Reduction(record=configurations.LEAN),
        configurations.Reduction(record=("output", "loss")),
        configurations.Reduction(measured=False),
    ],
    ids=["lean", "outputs", "checksums"],
)
def test_a_reduced_run_is_what_a_capture_so_reported_leaves(reduction, captures, tmp_path):
    side = CASES["gpt-lr"].a
    said = captures.path(cases.Side(side.script, side.args, options=reduction.options))
    reduced = configurations.reduce(captures.path(side), tmp_path / "run", reduction)
    real, made = records(said), records(reduced)
    assert repr(made[0]) == repr(real[0])  # NaN is not itself, and reads the same
    assert sorted(made[1]) == sorted(real[1])
    for asked, reduced_to in ((real[2], made[2]), (real[3], made[3])):
        assert {**reduced_to, "record": 0, "stats": 0} == {**asked, "record": 0, "stats": 0}
    assert made[4:] == real[4:]


@pytest.fixture(scope="module")
def said(captures):
    """Two lean runs that differ, and what is said of them."""
    case = CASES["gpt-layernorm-eps"]
    paths = [matrix.run_of(case, letter, CONFIGURATIONS["lean"], captures) for letter in "ab"]
    answer = cases.compare(*paths, captures.run)
    with open_run(paths[0]) as a, open_run(paths[1]) as b:
        yield answer, claims.Books(a, b)


@pytest.mark.parametrize(
    "sentence",
    [
        "The loss differs while every module output before it is equal.",
        "All inputs are equal.",
        "Random states at the start of the step agree.",
        "The forward pass agrees in this step.",
        "The parameters of GPT.blocks.0 are equal after step 7.",
        "The loss was not recorded.",
    ],
)
def test_a_false_sentence_is_noticed(sentence, said):
    answer, books = said
    assert claims.false_claims({**answer, "sentence": "", "evidence": [sentence]}, books) != []


@pytest.mark.parametrize(
    "sentence",
    [
        "Inputs were not recorded, so the origin is not known.",
        "The gradients differ, and 3 parameters before step 0 agree within tolerance.",
        "Loss code.",
    ],
)
def test_a_true_sentence_passes_the_check_of_claims(sentence, said):
    answer, books = said
    assert claims.false_claims({**answer, "sentence": "", "evidence": [sentence]}, books) == []


def test_a_false_place_verdict_or_setting_is_noticed(said):
    answer, books = said
    answer = {**answer, "sentence": "", "evidence": []}
    assert claims.false_claims(answer, books) == []
    later = copy.deepcopy(answer)
    later["first"] |= {"phase": "optimizer", "kind": "param", "fqn": "GPT.ln_f.bias", "path": "", "call": 0}
    unseen = {**answer, "first": {**answer["first"], "step": 99}}
    same = {**answer, "verdict": "same", "first": None}
    setting = {**answer, "settings": [{**answer["settings"][0], "a": "1", "b": "1"}]}
    for wrong in (later, unseen, same, setting):
        assert claims.false_claims(wrong, books) != []


def test_the_matrix_is_wide_enough():
    assert len(CONFIGURATIONS) >= 12 + 1
    assert {case.name for case, _ in ALL} == {
        case.name for case in CASES.values() if case.expect and not case.a.options
    }
    assert "all" in matrix.table([(CONFIGURATIONS["lean"], matrix.Cell("right"))]).splitlines()[-1]
