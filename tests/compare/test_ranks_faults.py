"""Faults that ranks can have, each planted in small trainings: what `check` says of a run alone, `diff` beside another.

All runs come from two launches; a fault that needs no second run is told by `check`, and whatever changes a number by
`diff`, against one process (`1`) and against a sound run of the same layout (`n`).
"""

from __future__ import annotations

import pytest
from artefacts import artefact
from launches import DISTRIBUTED, SCRIPT, finish, lacks, needs, together

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.health.check import check
from introspect_cli.health.equal import peers_of
from introspect_cli.render.blocks import Table
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.store.read.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

ALONE = ("hand-none",)
TWO = (
    "ddp-autocast", "ddp-batchnorm", "ddp-none", "ddp-none~collectives", "ddp-same-samples", "hand-none",
    "hand-none~collectives", "hand-rate", "hand-sum", "hand-tf32", "tp-none",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    return artefact("faults", made)


def made(folder):
    for world, every in ((1, ALONE), (2, TWO)):
        wanted = [case for case in every if not lacks(case)]
        said = finish(together(folder, world, folder / str(world), *wanted, script=SCRIPT.parent / "faults.py"))
        missing = [case for case in wanted if not (folder / str(world) / case / "manifest.yaml").exists()]
        assert not missing, (missing, said)


@pytest.mark.parametrize(("case", "rule"), [("tp-none", "summed-gradients")])
def test_a_rule_about_scaled_gradients_that_lacks_records_says_with_which_option_it_has_them(runs, case, rule):
    needs(case)
    with open_run(runs / "2" / case) as run:
        result = check(run)
    assert rule not in result.checked
    assert "capture --record default" in dict(result.unseen)[rule]


@pytest.mark.parametrize("case", ["hand-none~collectives", "ddp-none~collectives"])
def test_gradients_that_are_averaged_are_checked_and_found_sound(runs, case):
    with open_run(runs / "2" / case) as run:
        result = check(run)
    assert "summed-gradients" in result.checked
    assert result.findings == ()


@pytest.mark.parametrize("backwards", [False, True])
def test_one_rank_that_computes_in_another_precision_is_no_other_order_of_sums(runs, backwards):
    with open_run(runs / "1" / "hand-none") as a, open_run(runs / "2" / "ddp-autocast") as b:
        result = compare_runs(*((b, a) if backwards else (a, b)), DiffOptions())
    assert result.first.site.fqn == "Net.extra"
    assert "bfloat16" in result.sentence
    assert "another precision: " in result.sentence


def test_the_first_divergence_is_that_of_the_rank_where_it_began(runs):
    """What rank 1's learning rate does arrives on rank 0 with the next reduction."""
    with open_run(runs / "2" / "hand-none") as a, open_run(runs / "2" / "hand-rate") as b:
        result = compare_runs(a, b, DiffOptions())
    assert [(found.rank, found.step) for found in result.candidates] == [(1, 0), (0, 1)]


def test_a_layer_that_one_run_alone_has_is_no_other_layout(runs):
    with open_run(runs / "2" / "ddp-none") as a, open_run(runs / "2" / "ddp-batchnorm") as b:
        result = compare_runs(a, b, DiffOptions())
    assert [found.rank for found in result.candidates] == [0, 1]
    assert not any("layouts differ" in note for note in result.notes), result.notes


@pytest.mark.parametrize("grouped", [True, False])
def test_the_first_of_each_rank_stand_in_one_table_the_first_one_first(runs, grouped):
    with open_run(runs / "2" / "hand-none") as a, open_run(runs / "2" / "hand-rate") as b:
        result = compare_runs(a, b, DiffOptions())
    tables = [block for block in diff_blocks(result, grouped=grouped) if isinstance(block, Table)]
    places = [[row[:2] for row in table.rows] for table in tables if table.columns[1].title == "rank"]
    assert places[0] == [("0", "1"), ("1", "0")]
    rows = [row for table in tables for row in table.rows]
    assert len(rows) == len(set(rows))
    assert sum(row == rows[0] for row in rows) == 1
    assert len(places) == 1 if grouped else len(places) == 2


def test_a_setting_that_one_rank_alone_has_is_noted(runs):
    """A rate leaves no trace where gradients are zero, and the settings of a run are those of its first rank."""
    said = {}
    for case in ("hand-rate", "hand-tf32", "hand-sum"):
        with open_run(runs / "2" / "hand-none") as a, open_run(runs / "2" / case) as b:
            said[case] = [note for note in compare_runs(a, b, DiffOptions()).notes if note.startswith("On rank")]
    assert said["hand-rate"] == ["On rank 1 alone a setting differs: lr 0.01 -> 0.02 (optimizers)."]
    assert any("float32_matmul_precision highest -> high" in note for note in said["hand-tf32"])
    assert not said["hand-sum"]


@pytest.mark.parametrize(
    ("sharing", "peers"),
    [
        ([{0, 1}], []),
        ([{0, 2}, {1, 3}], [[0, 1], [2, 3]]),
        ([{0, 1, 2}, {0, 1, 3}, {0, 2, 3}, {1, 2, 3}], []),  # as HSDP has it, whose ranks know their row and column
        ([], [[0, 1, 2, 3]]),
    ],
)
def test_peers_are_given_the_same_samples(sharing, peers):
    numbers = range(2 if sharing == [{0, 1}] else 4)
    assert peers_of(numbers, [frozenset(group) for group in sharing]) == peers
