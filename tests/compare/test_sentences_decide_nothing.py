"""No decision reads a sentence: with every fragment of one replaced by a placeholder, the answers stay as they are."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
import subprocess
import sys
import zlib

import cases
import frozen
import harvest
import matrix
import placeholders
import pytest
from artefacts import launched

from introspect_cli.compare.terms.options import DiffOptions

CASES = {case.name: case for case in cases.load_cases()}
CHOSEN = (
    "gpt-no-zero-grad",  # a stale gradient, which the random state says nothing of
    "gpt-decay-biases",  # groups of an optimizer
    "gpt-layernorm-eps",  # a module's own computation
    "gpt-residual-inplace",  # its forward code
    "gpt-dropout",  # random states and draws
    "amp-head-fp32",
)
RANKS = {"single": (1, "single"), "both": (2, "ddp"), "apart": (2, "ddp --fault unreduced")}
"""Runs of the same training on one rank and on two, and one whose copies are not equal."""


def run(*words):
    command = [sys.executable, frozen.__file__, *map(str, words), "--jobs", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def answers(tmp_path_factory, forks):
    """Runs, and what `diff` and `check` say of them, kept as `benchmarks/frozen.py` keeps it."""
    folder = tmp_path_factory.mktemp("frozen")
    captures = cases.Captures(folder / "runs", forks)
    captures.directory.mkdir()
    pairs = {}
    for name in CHOSEN:
        for one in frozen.configurations_of(CASES[name]):
            options = harvest.words_of(DiffOptions(**one.diff)) or []
            pairs[f"{name}-{one.name}"] = (
                options,
                [matrix.run_of(CASES[name], letter, one, captures) for letter in "ab"],
            )
    launched(folder, {name: (world, *words.split(), "--steps", "2") for name, (world, words) in RANKS.items()})
    pairs |= {name: ([], [folder / "both", folder / name]) for name in RANKS}
    pairs["ranks"] = ["--ranks", "all"], [folder / "both", folder / "apart"]
    questions = []
    for name, (options, runs) in pairs.items():
        a, b = (str(path.relative_to(folder)) for path in runs)
        questions.append(frozen.Question("matrix", name, ("diff", "--format", "json", *options, a, b)))
        if "everything" in name or name in RANKS:
            questions.append(frozen.Question("matrix", name, ("check", "--format", "json", b)))
    frozen.write_questions(folder / "matrix.jsonl", questions)
    done = run("freeze", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_sentence_decides_anything_or_is_read_to_make_another(answers):
    done = run("check", answers, "--placeholders", "--shown", "1000")
    compared = re.search(r"(\d+) answers compared, 0 differ, 0 not frozen", done.stdout)
    assert compared, done.stdout + done.stderr
    assert int(compared[1]) > 60
    assert re.search(r"^0 of them in what was decided", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 0, done.stdout


def test_another_answer_is_noticed(answers, tmp_path):
    with sqlite3.connect(answers / "matrix.sqlite") as kept:
        key, answer = kept.execute("select key, answer from answers where answer is not null").fetchone()
        changed = zlib.decompress(answer).decode().replace('"format": 1', '"format": 2')
        kept.execute("update answers set answer = ? where key = ?", (zlib.compress(changed.encode()), key))
    try:
        done = run("check", answers, "--only", json.loads(key)[1])
    finally:
        with sqlite3.connect(answers / "matrix.sqlite") as kept:
            kept.execute("update answers set answer = ? where key = ?", (answer, key))
    assert done.returncode == 1
    assert '+  "format": 1' in done.stdout
    assert ", 1 differ, 0 not frozen" in done.stdout


SOURCE = '''
"""A docstring of the module."""
import re

PATTERN = re.compile("no fragment")
TEXT = "its inputs"

def told(name: "not this one", n: int = 3) -> "nor this":
    """Another docstring."""
    if name.startswith("its inputs") or name.startswith(TEXT):
        return "a question was put to a sentence"
    return f"{TEXT} of {name!r:>4} are {n:.2f} x {'a'}.{n}"
'''


def test_every_occurrence_of_a_fragment_is_a_placeholder_of_its_own():
    fragments = placeholders.Fragments()
    tree = placeholders.replaced(ast.parse(SOURCE), fragments)
    space = {placeholders.MARK: fragments.mark}
    exec(compile(tree, "source", "exec", dont_inherit=True), space)
    assert space["__doc__"] is None or "docstring" in space["__doc__"]
    assert space["told"].__doc__ == "Another docstring."
    assert space["PATTERN"].pattern == "no fragment"
    said = space["told"](space["TEXT"])
    assert "inputs" not in said
    assert " of " not in said
    assert fragments.restored(said) == f"its inputs of {'⟦0⟧'!r:>4} are 3.00 x a.3".replace("⟦0⟧", "its inputs")


def test_what_was_decided_is_all_but_sentences():
    document = {"verdict": "diverged", "sentence": "So.", "first": {"role": "origin", "a": {"text": "so"}}, "notes": []}
    assert placeholders.decided(document) == {"verdict": "diverged", "first": {"role": "origin", "a": {}}}
