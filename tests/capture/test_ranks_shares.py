"""What libraries do to a loss: ranks divide it by the samples of all, and positions have one embedding for all."""

from __future__ import annotations

import pytest
from artefacts import LEAN, launched
from launches import DISTRIBUTED, SCRIPT

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

RUNS = {"single": (1,), "ddp": (2,), "once": (2, "once")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    return launched(folder, RUNS, options=LEAN, script=SCRIPT.parent / "shares.py")


@pytest.mark.parametrize(("a", "b", "large"), [("single", "ddp", "a"), ("ddp", "single", "b")])
def test_a_loss_that_is_divided_by_the_samples_of_all_ranks_is_no_difference(runs, a, b, large):
    with open_run(runs / a) as one, open_run(runs / b) as two:
        result = compare_runs(one, two, DiffOptions())
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.counts.steps_compared == 3
    assert any(
        note.startswith(f"The output Model['loss'] of run {large} is 2 x that of the other") for note in result.notes
    ), result.notes


def test_gradients_of_what_all_ranks_have_are_added_up(runs):
    """An embedding of positions comes out alike on all ranks; its gradient is the sum over their samples."""
    with open_run(runs / "single") as one, open_run(runs / "ddp") as two:
        whole = WholeReader(str(two.path), [two.rank(rank) for rank in two.ranks])
        found = [
            {r.site.fqn: r.summary for r in reader.records(0) if r.site.kind is Kind.GRAD_OUTPUT}["Model.pos"]
            for reader in (one.rank(0), whole)
        ]
    assert found[1].text == "gradients of several ranks, added up"
    assert found[1].layout.shape == found[0].layout.shape
    # each rank's loss is a mean over its own half of the samples
    assert found[1].sketch == pytest.approx([2 * value for value in found[0].sketch], rel=1e-4, abs=1e-6)
