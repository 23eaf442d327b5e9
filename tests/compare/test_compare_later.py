"""Steps after the first divergence are counted as long as that takes seconds; then the answer says where it stopped."""

from __future__ import annotations

import pytest
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.store.run import open_run

STEPS, FROM = 10, 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of which one layer's output differs from step 3 on."""
    folder = tmp_path_factory.mktemp("later")

    def steps(by):
        return [
            [row("forward", "output", f"Net.{name}", step + by * (name == 1 and step >= FROM)) for name in range(4)]
            for step in range(STEPS)
        ]

    return [write_run(folder / name, steps(by)) for name, by in (("a", 0.0), ("b", 0.5))]


def compared(runs, **options):
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        return compare_runs(a, b, DiffOptions(**options))


def test_what_is_not_opened_is_neither_counted_nor_called_equal(runs):
    whole, part = compared(runs), compared(runs, later=16)
    assert (whole.counts.steps_compared, whole.counts.steps_diverged, whole.notes) == (STEPS, STEPS - FROM, ())
    assert part.counts.steps_compared == FROM + 3  # the first, and 8 records each of two more
    assert (part.counts.steps_diverged, part.counts.records, part.counts.equal) == (3, 4 * 6, 4 * 6 - 3)
    assert (part.counts.steps_a, part.counts.steps_b) == (STEPS, STEPS)
    assert part.notes == (
        f"{STEPS - FROM - 3} later steps were not compared: the first divergence does not depend on them (see --map).",
    )
    assert (part.first, part.sentence, part.verdict) == (whole.first, whole.sentence, whole.verdict)


@pytest.mark.parametrize("asked", [{"want_map": True}, {"limit": None}])
def test_all_steps_are_compared_where_all_are_asked_for(runs, asked):
    assert compared(runs, later=0, **asked).counts == compared(runs, **asked).counts
