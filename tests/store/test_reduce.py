"""The ranks of a run put together once, and read like a run of one process."""

from __future__ import annotations

from pathlib import Path

import opcapture
import pytest
from laid_out import CHANGES, write_changed
from verbs import verb

from introspect_cli.compare.result import Verdict
from introspect_cli.health.check import check
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Runs of two layouts with each change, and each put together."""
    folder = write_changed(tmp_path_factory.mktemp("wholes"), layouts=("whole", "shared"))
    for run in sorted(folder.iterdir()):
        assert verb("merge", run, "-o", folder / f"{run.name} together").returncode == 0
    return folder


def answer(result):
    """What an answer says of values."""
    first = result.first and (result.first.step, result.first.site, result.first.role, result.first.reason)
    return result.verdict, result.sentence, first, result.counts


@pytest.mark.parametrize("change", CHANGES)
def test_wholes_compare_as_the_ranks_do(wholes, change):
    for one, two in (("whole", "shared"), ("shared", "whole")):
        a, b = wholes / f"{one} nothing", wholes / f"{two} {change}"
        expected = answer(opcapture.compared(a, b))
        for run in (a, Path(f"{a} together")):
            other = Path(f"{b} together")
            assert answer(opcapture.compared(run, other)) == expected, (one, two, run.name)


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_and_its_wholes_are_the_same(wholes, change):
    run = wholes / f"shared {change}"
    together = Path(f"{run} together")
    result = opcapture.compared(run, together)
    assert (result.first, result.counts.within) == (None, 0), result.sentence
    assert result.verdict is Verdict.SAME, result.sentence
    assert verify_run(together).sound


def test_wholes_are_one_run_that_says_what_it_does_not_have(wholes, introspect):
    path = wholes / "shared copies together"
    with open_run(path) as run:
        assert (run.ranks, run.world_size, run.combined_ranks, run.state) == ((0,), 4, 4, RunState.COMPLETE)
        assert run.endings == []
        assert check(run).checked
    done = introspect("check", str(path))
    assert "what differs between its 4 ranks, which are one here" in done.stdout
    assert introspect("show", "step", "1", str(path)).returncode == 0


def test_of_one_layout_wholes_differ_in_every_bit(wholes):
    a, b = (wholes / f"shared {change} together" for change in ("nothing", "a sample"))
    result = opcapture.compared(a, b)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.step == 1
    assert not any("layouts differ" in note for note in result.notes)


def test_what_cannot_be_put_together_is_refused(tmp_path, wholes, introspect):
    done = introspect("merge", str(wholes / "shared nothing together"), "-o", str(tmp_path / "again"))
    assert done.returncode == 2
    assert "is put together already, of 4 ranks" in done.stderr
    done = introspect("merge", str(wholes / "shared nothing"), "-o", str(wholes / "whole nothing"))
    assert "exists: choose another directory" in done.stderr
    assert not list(tmp_path.iterdir())
