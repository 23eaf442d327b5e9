"""Faults that ranks can have: what is said beside the decisions, which `test_decisions.py` asks."""

from __future__ import annotations

import pytest
from artefacts import decided
from launches import DISTRIBUTED
from opcapture import compared
from verbs import verb

from introspect_cli.health.check import check
from introspect_cli.store.run import open_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]


def test_a_rule_about_scaled_gradients_that_lacks_records_says_with_which_option_it_has_them():
    with open_run(*decided("faults", "2/tp-none")) as run:
        result = check(run)
    assert "summed-gradients" not in result.checked
    assert "capture --record default" in dict(result.unseen)["summed-gradients"]


def test_the_first_of_each_rank_stand_in_one_table_the_first_one_first():
    runs = decided("faults", "2/hand-none", "2/hand-rate")
    rows = [line.split()[:2] for line in verb("diff", *runs).stdout.splitlines()]
    head = rows.index(["step", "rank"])
    assert rows[head + 1 :] == [["0", "1"], ["1", "0"]]
    rows = [line.split()[:4] for line in verb("diff", "--limit", "12", *runs).stdout.splitlines()]
    assert rows.count(["0", "1", "optimizer", "Net.tok.weight"]) == 1


def test_settings_are_those_of_the_rank_that_diverges():
    result = compared(*decided("faults", "2/hand-none", "2/hand-rate"))
    assert result.first.rank == 1
    assert (result.settings[0].name, result.settings[0].a, result.settings[0].b) == ("lr", "0.01", "0.02")
