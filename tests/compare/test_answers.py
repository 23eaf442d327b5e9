"""Whole answers as they are worded: `INTROSPECT_WRITE_ANSWERS=1 pytest -n 0 tests/compare/test_answers.py` writes them.

What is decided is held by `test_decisions.py`; read the difference of the wording before you commit it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import artefacts
import cases
import decisions
import pytest
from kept_runs import recorder_key
from small_runs import MODULES, train
from synthetic import write_run

ANSWERS = cases.FIXTURES / "decisions"


def assert_worded(name, said):
    """Assert that texts by their titles are those of a file, or write it."""
    path, text = ANSWERS / name, "\n".join(f"== {title}\n{each}" for title, each in said)
    if os.environ.get("INTROSPECT_WRITE_ANSWERS"):
        path.write_text(text, encoding="utf-8")
    words, numbers = parted(text)
    kept_words, kept_numbers = parted(path.read_text(encoding="utf-8"))
    assert words == kept_words
    assert numbers == pytest.approx(kept_numbers, rel=1e-3, abs=1e-6)


def parted(text):
    """The words of answers, and their numbers, without those that another processor rounds otherwise.

    These are answers whose first divergence is rounding, counts, tiny distances and checksums.
    """
    text = "".join(one for one in re.split(r"(?m)^(?=== )", text) if not re.search(r"rounding (?:units| *origin)", one))
    counts = r"\d+(?= of them (?:only )?within| more within| divergences? in| not listed)"
    text = re.sub(rf"{counts}|\d(?:\.\d+)?e-(?:0[6-9]|\d\d)|\b[0-9a-f]{{16}}\b", "#", text)
    fraction = r"-?\b\d+\.\d+(?:e[+-]\d+)?\b *"  # with the blanks behind it, of which a cell has fewer or more
    return re.sub(fraction, "# ", text), [float(one) for one in re.findall(fraction, text)]


@pytest.mark.parametrize(
    ("verb", "corpus", "one_of", "more", "file"),
    [
        ("diff", "scenes", 6, (), "answers.txt"),
        ("diff", "scenes", 40, ("-v", "--all", "--map"), "answers-in-full.txt"),
        ("diff", "checkpoints", 1, (), "answers-checkpoints.txt"),
        ("check", "ill", 1, (), "answers-check.txt"),
    ],
)
def test_answers_are_worded_as_they_were(forks, verb, corpus, one_of, more, file):
    questions = decisions.planned([f"{verb} {corpus} *"])[0]
    chosen = [question for question in questions if zlib.crc32(question.name.encode()) % one_of == 0]
    assert len(chosen) >= 5
    made = ["make", artefacts.DECISIONS, "--only", f"{verb} {corpus} *"]
    subprocess.run([sys.executable, decisions.__file__, *made], check=True)

    folder = artefacts.DECISIONS / recorder_key()  # once: python 3.11 parses in no two threads at once

    def answer(question):
        done = forks(verb, *question.options, *more, *question.runs, cwd=folder)
        return question.name, re.sub(r"(?:captured|saved|train_ill)-[0-9a-f]+/?", "", done.stdout)

    with ThreadPoolExecutor(2) as pool:
        assert_worded(file, pool.map(answer, chosen))


VIEWS = ("", "tree", "step 0 --kinds input,batch,rng,hyperparameter", "history Net.a --kinds input", "settings")
"""Of numbers, those that no processor rounds otherwise."""


def test_views_of_a_run_are_worded_as_they_were(tmp_path, introspect):
    manifest = {"argv": ["train.py", "--lr", "1"], "ended": "2026-01-01T00:00:00+00:00", "exception": "ValueError: no"}
    settings = {"runtime": {"torch": "2.13.0", "python": "3.11"}, "environment": {"A\x1b[2J": "1"}, "empty": {}}
    write_run(tmp_path / "run", train(), modules=MODULES, manifest={**manifest, "exit_code": 1}, settings=settings)
    assert_worded("answers-show.txt", ((view, introspect("show", *view.split(), "run").stdout) for view in VIEWS))
