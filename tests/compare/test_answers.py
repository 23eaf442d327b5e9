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
from kept_runs import recorder_key

ANSWERS = cases.FIXTURES / "decisions" / "answers.txt"
DIRECTORY = artefacts.ROOT / "decisions"


def test_answers_are_worded_as_they_were(forks):
    questions, _ = decisions.planned(["diff scenes *"])
    chosen = [question for question in questions if zlib.crc32(question.name.encode()) % 3 == 0]
    assert len(chosen) >= 80
    subprocess.run([sys.executable, decisions.__file__, "make", DIRECTORY, "--only", "diff scenes *"], check=True)

    def answer(question):
        done = forks("diff", *question.options, *question.runs, cwd=DIRECTORY / recorder_key())
        return f"== {question.name}\n{re.sub(r'captured-[0-9a-f]+/', '', done.stdout)}"

    with ThreadPoolExecutor(2) as pool:
        said = "\n".join(pool.map(answer, chosen))
    if os.environ.get("INTROSPECT_WRITE_ANSWERS"):
        ANSWERS.write_text(said, encoding="utf-8")
    assert said == ANSWERS.read_text(encoding="utf-8")
