"""What is decided of planted faults is what was decided before; the frozen set covers all of them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import artefacts
import cases
import claims
import configurations
import decisions
import kept_runs
import pytest
import yaml

from introspect_cli.store.run import open_run

_ALSO = """
gpt-data-seed gpt-decay-biases gpt-misses-parameter gpt-frozen-positions gpt-clip gpt-grad-hook gpt-extra-draw
gpt-bf16-matmul gpt-init-scale gpt-label-smoothing cnn-labels-shifted cnn-momentum-buffer cnn-conv-double cnn-nan-step
lstm-optimizer gan-generator-skipped lbfgs-weighted accum-clip-each-micro-batch accum-fp32-by-environment
accum-mask-missing workers-count rnn-extra-call outputs-keyword outputs-unused-head distill-head-overwritten
checkpointed-rng-not-preserved checkpointed-backward-twice byhand-lr children-lr unseeded-numpy library-upgrade
ways-own-call ways-once-more ways-in-turn ways-outermost ways-by-name rollback-to-other-weights
images-average-without-buffers language-norms-decayed language-evaluated-in-train lstm-hidden-kept
"""
_SLICE = [case.name for case in [*cases.load_cases(), *cases.load_field_cases()] if case.in_slice]
_PLANTED = [*_SLICE, *_ALSO.split()]
RANKS = ("single", "ddp", "ddp-one", "ddp-rolled", "fsdp2", "hsdp", "tp", "zero1", "1f1b", "ep")
ASKED = {
    "planted": [f"{verb} everything {name}{end}" for name in _PLANTED for verb, end in (("diff", ""), ("check", " *"))],
    "reduced": [f"diff {one} {name}" for name in _SLICE[::4] for one in ("lean*", "outputs", "checksums", "state")],
    "selected": [f"diff {one} {name}" for name in (*_SLICE[1::3], "gpt-weight-decay") for one in ("diff-*", "rtol-*")],
    "operators": ["diff everything op-[a-h]*"],
    "scenes": ["diff scenes *"],
    "refactorings": [
        f"diff refactorings * {model}-*" for model in ("mlp", "residual", "conv", "recurrent", "tied", "indirect")
    ],
    "splits": ["* splits *"],
    "unseen": ["diff * same-train_compiled-steps-3-mode-script"],
    **{
        name: [f"* {name} *"]
        for name in ("resumed", "loaded", "engines", "checkpoints", "ports", "ill", "attention", "precision")
    },
    "kernels": ["diff kernels eager-12 *", "diff kernels eager compiled", "diff kernels trainer *"],
    "ranks": [
        *(f"* ranks *{name}" for name in RANKS),
        "* ranks *accumulated",
        "diff ranks manual *",
        *(f"check layouts {name}" for name in ("fsdp2-unshard", "manual-one")),  # which tests read
    ],
    "faults": ["* faults *"],
}
"""The questions of every run of the tests: what needs few runs of each corpus. The sweep asks all."""
RULES = {"accepted": [], "merged": {}, "rules_gone": {}, "settings_gone": {}}
DIRECTORY = artefacts.DECISIONS


def run(*words):
    command = [sys.executable, decisions.__file__, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def asked(folder, globs):
    """The rows of these questions, asked of runs that are made once for each state of the code that records."""
    chosen = [word for glob in globs for word in ("--only", glob)]
    for words in (("make", DIRECTORY), ("ask", DIRECTORY, "-o", folder / "now.jsonl", "--claims")):
        done = run(*words, *chosen)
        assert done.returncode == 0, done.stdout + done.stderr
    kept_runs.forget(DIRECTORY)
    return folder / "now.jsonl"


@pytest.mark.longest
@pytest.mark.launch
def test_decisions_are_those_that_were_frozen_or_accepted_and_no_claim_is_false(tmp_path):
    done = run("compare", asked(tmp_path, [glob for globs in ASKED.values() for glob in globs]))
    assert done.returncode == 0, done.stdout
    assert " 0 not frozen" in done.stdout


@pytest.mark.sweep
def test_every_decision_is_the_one_that_was_frozen_or_accepted(tmp_path):
    done = run("compare", asked(tmp_path, ["*"]))
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return asked(
        tmp_path_factory.mktemp("decisions"), ["diff * gpt-lr", "diff refactorings changed mlp-*", "* ill loss-nan"]
    )


@pytest.mark.parametrize(
    ("category", "column", "value"),
    [
        ("verdict", "verdict", "same"),
        ("place", "fqn", "GPT.elsewhere"),
        ("role", "role", "propagated"),
        ("cause", "reason", "rng"),
        ("setting", "settings", []),
        ("finding", "findings", []),
        ("statement", "statements", ["train.py:1"]),
    ],
)
def test_another_decision_is_a_mistake_of_its_category(rows, tmp_path, capsys, category, column, value):
    changed = decisions.read_rows(rows)
    name = next(name for name, row in changed.items() if row.get(column) not in (None, value))
    changed[name] = {**changed[name], column: value}
    decisions.write_rows(tmp_path / "other.jsonl", changed)
    kept = (decisions.KEPT / file for file in ("frozen.jsonl.gz", "accepted.yaml", "should_be.yaml"))
    assert decisions.compare(tmp_path / "other.jsonl", *kept, shown=10) == 1
    printed = capsys.readouterr().out
    assert f"MISTAKE: {category}: {column} of {name}\n" in printed
    assert "1 rows have differences that nobody accepted" in printed


WAS = {"verdict": "diverged", "reason": "module", "findings": [["deaf", 1], ["loss-nan", 2]]}


@pytest.mark.parametrize(
    ("now", "corrected", "rules", "states"),
    [
        ({**WAS, "reason": "code"}, [], {}, ["MISTAKE"]),
        ({**WAS, "reason": "code"}, [], {"merged": {"module": "code"}}, []),
        ({**WAS, "reason": "code"}, [{"reason": "code"}], {}, ["set right"]),
        (WAS, [{"reason": "code"}], {}, ["known to be false"]),
        ({**WAS, "reason": "draw"}, [{"reason": "code"}], {}, ["MISTAKE"]),
        ({**WAS, "findings": [["loss-nan", 2]]}, [], {}, ["MISTAKE"]),
        ({**WAS, "findings": [["loss-nan", 2]]}, [], {"rules_gone": {"deaf": "rare"}}, []),
        (
            {**WAS, "reason": "code"},
            [],
            {"accepted": [{"questions": "diff *", "what": "cause", "was": "module", "is": "code", "why": "so"}]},
            ["accepted: so"],
        ),
        (
            {**WAS, "reason": "code"},
            [],
            {"accepted": [{"questions": "diff *", "what": "cause", "is": "draw", "why": "so"}]},
            ["MISTAKE"],
        ),
    ],
)
def test_what_is_accepted_and_what_was_false_is_no_mistake(now, corrected, rules, states):
    found = decisions.differences("diff x", now, WAS, corrected, {**RULES, **rules})
    assert [state for _, _, state, _ in found] == states


def test_every_question_is_frozen_or_says_what_it_should_be():
    questions, _ = decisions.planned()
    right = yaml.safe_load((decisions.KEPT / "should_be.yaml").read_text(encoding="utf-8"))
    told = {name for entry in right for name in entry["questions"].split(" | ")}
    frozen = decisions.read_rows(decisions.KEPT / "frozen.jsonl.gz")
    assert [question.name for question in questions if question.name not in frozen.keys() | told] == []
    assert len(frozen) > 6000
    assert len({json.dumps(row) for row in frozen.values()}) > 1000


# --- reduced runs, and claims


@pytest.fixture(scope="module")
def captures(tmp_path_factory, forks):
    return cases.Captures(tmp_path_factory.mktemp("captures"), forks)


CASES = {case.name: case for case in cases.load_cases()}


def records(path):
    """What a run says, but for when it was made: steps of sites and what was kept of each."""
    with open_run(path) as run:
        reader = run.rank(0)
        found = {
            entry.step: [(record.site, record.info, record.summary) for record in reader.records(entry.step)]
            for entry in reader.steps
        }
        about = [run.manifest[name] for name in ("observed", "options", "narrowing")]
        return found, *about, set(run.settings), {site for site, _ in reader.sites}


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
    lean = captures.path(cases.Side(side.script, side.args, options=reduction.options))
    reduced = configurations.reduce(captures.path(side), tmp_path / "run", reduction)
    real, made = records(lean), records(reduced)
    assert repr(made[0]) == repr(real[0])  # NaN is not itself, and reads the same
    assert sorted(made[1]) == sorted(real[1])
    for asked, reduced_to in zip(real[2:4], made[2:4], strict=True):
        assert {**reduced_to, "record": 0, "stats": 0} == {**asked, "record": 0, "stats": 0}
    assert made[4:] == real[4:]


@pytest.fixture(scope="module")
def answer(captures):
    """Two runs that differ, and what `diff` answers."""
    case = CASES["gpt-layernorm-eps"]
    a, b = captures.pair(case)
    with open_run(a) as one, open_run(b) as two:
        yield cases.compare(a, b, captures.run), claims.Books(one, two)


@pytest.mark.parametrize(
    ("thing", "known", "stands"),
    [
        ("inputs", "equal", True),
        ("random_at_start", "equal", True),
        ("parameters", "equal", True),
        ("the parameters of GPT.ln_f", "equal", True),
        ("its inputs", "equal", True),
        ("inputs", "different", False),
        ("batches", "equal", False),  # of this kind nothing stands before the divergence that both recorded
        ("loss", "equal", False),
    ],
)
def test_what_a_divergence_rests_on_is_derived_again(answer, thing, known, stands):
    document, books = answer
    told = {**document, "rests_on": [{"thing": thing, "known": known, "of": None}]}
    assert (claims.false_claims(told, books) == []) is stands


def test_a_false_place_verdict_or_setting_is_noticed(answer):
    document, books = answer
    assert claims.false_claims(document, books) == []
    later = copy.deepcopy(document)
    later["first"] |= {"phase": "optimizer", "kind": "param", "fqn": "GPT.ln_f.bias", "path": "", "call": 0}
    unseen = {**document, "first": {**document["first"], "step": 99}}
    same = {**document, "verdict": "same", "first": None}
    setting = {**document, "settings": [{**document["settings"][0], "a": "1", "b": "1"}]}
    for wrong in (later, unseen, same, setting):
        assert claims.false_claims(wrong, books) != []
