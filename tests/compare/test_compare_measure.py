"""Distances: from sketches, exactly from stored tensors, in units of rounding, and as factors."""

import numpy as np
import pytest
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.store.run import open_run


@pytest.mark.parametrize("change", ["noise", "element", "column", "scale"])
def test_sketched_distances_are_near_the_true_ones(tmp_path, change):
    random = np.random.default_rng(3)
    ratios = []
    for run in range(5):
        a = random.normal(size=(64, 32)).astype(np.float32)
        b = a.copy()
        if change == "noise":
            b += random.normal(size=a.shape).astype(np.float32) * np.float32(1e-3)
        elif change == "element":
            b[3, 4] += 1
        elif change == "column":
            b[:, 7] = 0
        else:
            b *= np.float32(1.01)
        write_run(tmp_path / f"a{run}", [[row("forward", "output", "Net", a)]])
        write_run(tmp_path / f"b{run}", [[row("forward", "output", "Net", b)]])
        with open_run(tmp_path / f"a{run}") as one, open_run(tmp_path / f"b{run}") as two:
            found = compare_runs(one, two, DiffOptions()).first
        true = np.linalg.norm(a.astype(float) - b) / max(np.linalg.norm(a), np.linalg.norm(b))
        ratios.append(found.rel_l2 / true)
        assert not found.exact
    assert 0.7 < np.median(ratios) < 1.4
