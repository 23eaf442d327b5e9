"""The one divergence that `docs/understanding/how-it-works.md` follows through all passes is what the passes do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.store.run import open_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/understanding/how-it-works.md").read_text(encoding="utf-8")
COLUMNS = (1, 2, 3, 6, 0)
"""Equal, within tolerance, different, only in b, absent: the states of rows that the page counts."""


@pytest.fixture(scope="module")
def followed(forks, tmp_path_factory):
    """How many rows of the first step are in each state after each pass, and the answer."""
    place = tmp_path_factory.mktemp("runs")
    script = ROOT / "fixtures/train_gpt.py"
    for name, lean, fault in (("a", ["--record", "param,grad,loss,batch"], "none"), ("b", [], "gelu-tanh")):
        done = forks("capture", "-q", *lean, "-o", name, script, "--steps", "2", "--fault", fault, cwd=place)
        assert done.returncode == 0, done.stderr
    seen = []

    def watch(frame, event, done):
        table = done[0] if isinstance(done, tuple) and done else done
        if event == "return" and hasattr(table, "state") and hasattr(table, "row_a"):
            counts = [int(np.sum(table.state == state)) for state in COLUMNS]
            seen.append((frame.f_code.co_name, counts, frame.f_back.f_code))

    with open_run(place / "a") as a, open_run(place / "b") as b:
        sys.setprofile(watch)
        try:
            result = compare_runs(a, b, DiffOptions(rtol=1e-5))
        finally:
            sys.setprofile(None)
    first = next(number for number, (name, *_) in enumerate(seen) if name == "pair")
    calls = seen[first][2]  # what calls one pass after another
    passes = [one for one in seen[first:] if one[2] is calls]
    return [(name, counts) for name, counts, _ in passes], result


def written():
    """What the page says that each pass leaves, in their order."""
    rows = re.findall(r"^\| `(\w+)` \|((?: \d* ?\|){5})$", PAGE, re.MULTILINE)
    return [(name, [int(cell.strip() or 0) for cell in cells.split("|")[:5]]) for name, cells in rows]


def test_the_page_lists_every_pass_in_its_order(followed):
    rows = re.findall(r"^\| `(\w+)` \| [a-z]", PAGE, re.MULTILINE)
    passes = list(dict.fromkeys(name for name, _ in followed[0]))
    assert rows[rows.index("pair") :][: len(passes)] == passes
    assert [name for name, _ in written()] == passes


def test_the_example_counts_what_the_passes_leave(followed):
    assert followed[0][: len(written())] == written()


def test_the_example_is_answered_as_the_page_says(followed, introspect):
    answer = next(block for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "ln2" in block)
    printed = introspect("diff", "--rtol", "1e-5", followed[1].a, followed[1].b).stdout
    said, wanted = (re.sub(r"\d\.\de-\d+", "#", " ".join(text.split())) for text in (printed, answer))
    assert said[: len(wanted)] == wanted
