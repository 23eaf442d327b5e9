"""Other names, found by values of several steps: copies, chance, rounding, and runs that hold different steps."""

from __future__ import annotations

import numpy as np
from opcapture import compared
from synthetic import row, write_run


def renames(result):
    return {(change.a, change.b): change.evidence for change in result.structure if change.change == "renamed"}


def test_a_resumed_run_is_aligned_with_the_steps_it_repeats(tmp_path):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 3)) for _ in range(6)]

    def steps(name, first):
        return [[row("start", "param", f"Net.{name}.weight", each), row("loss", "loss", "loss", each.sum())]
                for each in values[first:]]  # fmt: skip

    write_run(tmp_path / "a", steps("old", 0))
    write_run(tmp_path / "b", steps("new", 3))
    result = compared(tmp_path / "a", tmp_path / "b", offset=3)
    assert ("Net.old", "Net.new") in renames(result), result.sentence
