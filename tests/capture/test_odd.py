"""Which of many ranks has other copies than the rest, by the last step that all have."""

from __future__ import annotations

import json

from laid_out import ALL, ROWS, STATES, TWICE, WHOLE, write
from verbs import verb

from introspect_cli.store.run import open_run


def other(*names, step=1, sites=(STATES[0],)):
    """Some ranks have another copy of some sites, from a step on."""

    def changed(now, rank, site, record):
        if now >= step and rank in names and site in sites:
            record[1] ^= 1 + rank

    return changed


def checked(path, *words):
    return json.loads(verb("check", "--copies", "--format", "json", *words, path).stdout)


def test_the_odd_rank_is_named_with_its_device_and_the_step(tmp_path, introspect):
    path = write(tmp_path / "run", 8, ALL, changed=other(5, sites=(STATES[0], STATES[4])))
    done = introspect("check", "--copies", str(path))
    assert done.returncode == 1, done.stderr
    assert "from step 1 on rank 5's parameter Net.a differs from that of 7 ranks with equal copies (cpu)" in done.stdout
    assert "also grad Net.b" in done.stdout
    two = checked(write(tmp_path / "two", 8, ALL, changed=other(2, 6, step=2)))
    assert [(finding["rank"], finding["step"]) for finding in two["findings"]] == [(2, 2), (6, 2)]


def test_what_no_majority_has_is_not_called_equal(tmp_path):
    halves = [TWICE] * 7 + [WHOLE]
    result = checked(write(tmp_path / "halves", 4, halves, changed=other(3)))
    assert (result["findings"], result["checked"]) == ([], [])
    assert result["not_observed"] == [{"rule": "copies-differ", "needs": "a value that most ranks have of 1 share"}]
    experts = checked(write(tmp_path / "experts", 4, ALL, changed=other(0, 1, 2, 3, step=0)))
    assert "without a value that most ranks have 1 of 3 shares" in experts["notes"][0]


def test_a_part_is_compared_with_copies_of_the_same_part(tmp_path):
    rows = checked(write(tmp_path / "rows", 4, [ROWS] * 7 + [WHOLE], changed=other(3)))
    assert rows["findings"] == []
    halves = checked(write(tmp_path / "halves", 8, [TWICE] * 7 + [WHOLE], changed=other(6)))
    assert [finding["rank"] for finding in halves["findings"]] == [6]
    assert "differs from that of 3 ranks" in halves["findings"][0]["evidence"]


def test_a_rank_that_ended_early_is_not_odd_and_one_without_parameters_is_not_passed_over(tmp_path):
    path = write(tmp_path / "run", 4, ALL, changed=lambda step, rank, *_: step > 1 and rank == 3)
    assert checked(path)["findings"] == []
    path = write(tmp_path / "batches", 4, ALL, changed=lambda _, rank, site, record: rank == 1 and site in STATES)
    result = checked(path)
    assert (result["checked"], result["findings"]) == ([], [])
    assert "several ranks with parameters" in result["not_observed"][0]["needs"]


def test_it_runs_in_a_pool_and_only_as_asked(tmp_path, introspect):
    path = write(tmp_path / "run", 8, ALL, changed=other(5))
    assert checked(path, "--workers", "2") == checked(path)
    with open_run(path, only=(1, 3)) as run:
        assert run.ranks == (1, 3)
    assert introspect("check", str(path), "--copies", "--rule", "lost-rank").returncode == 2
