"""Work on many ranks, wherever it runs: every verb says there what it says here."""

from __future__ import annotations

import json
import os
import pickle
import signal

import pytest
from laid_out import ALL, FLOWS, SHARED, STATES, copy, exchanged, write
from logs import recorded
from verbs import verb

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.errors import StoreError
from introspect_cli.health import check as health
from introspect_cli.render.json import check_document, diff_document
from introspect_cli.store.run import open_run
from introspect_cli.workers import at_work

CHANGED = {
    "nothing": None,
    "copies": exchanged((1, 2)),
    "a sample": copy(FLOWS[1]),
    "all": lambda step, rank, site, record: record.__setitem__(1, record[1] ^ 1) if site == STATES[2] else None,
}


def afar(work, tasks):
    """Workers: tasks and results are sent away."""
    for task in tasks:
        yield pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(task)))))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of four ranks, of two layouts, with each change."""
    folder = tmp_path_factory.mktemp("workers")
    for layout, how in (("whole", ALL), ("shared", SHARED)):
        for change, changed in CHANGED.items():
            write(folder / f"{layout} {change}", 4, how, changed=changed)
    return folder


def compared(a, b, work=None, **options):
    with open_run(a) as one, open_run(b) as two:
        return compare_runs(one, two, DiffOptions(**options), (), work)


@pytest.mark.parametrize(
    ("layout", "change"), [("whole", "nothing"), ("whole", "all"), ("shared", "copies"), ("shared", "a sample")]
)
def test_ranks_compared_elsewhere_give_the_same_answer(runs, layout, change):
    a, b = runs / "whole nothing", runs / f"{layout} {change}"
    for options in ({"limit": 12}, {"want_map": True, "whole_step": True}):
        here = diff_document(compared(a, b, **options))
        assert diff_document(compared(a, b, afar, **options)) == here


def test_without_workers_runs_of_very_many_ranks_are_opened_once(tmp_path, monkeypatch):
    """From object storage, each opening is several requests a rank."""
    a, b = (write(tmp_path / name, 66, ALL, steps=2, lean=True) for name in "ab")
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **more: opened.append(path) or real(path, *args, **more))
    with open_run(a) as one, open_run(b) as two:
        before = len(opened)
        assert compare_runs(one, two, DiffOptions()).verdict.value == "same"
    assert "manifest.json" not in opened[before:]


def test_of_very_many_ranks_the_first_step_is_listed_of_the_rank_that_diverges_first(runs, tmp_path):
    few = compared(runs / "whole nothing", runs / "whole all", whole_step=True)
    assert {divergence.rank for divergence in few.divergences} == {0, 1, 2, 3}
    a, b = (
        write(tmp_path / change, 66, ALL, steps=2, lean=True, changed=CHANGED[change]) for change in ("nothing", "all")
    )
    for options in ({"limit": 12}, {"whole_step": True}):
        result = compared(a, b, afar, **options)
        assert diff_document(result) == diff_document(compared(a, b, **options))
    assert {divergence.rank for divergence in result.divergences} == {0}
    assert (result.first.site, result.first.step, result.first.rank) == (few.first.site, few.first.step, 0)
    assert result.counts.diverged == 66 * 2


@pytest.mark.parametrize("change", CHANGED)
def test_rules_say_elsewhere_what_they_say_here(runs, change):
    with open_run(runs / f"shared {change}") as run:
        here = check_document(health.check(run))
        assert check_document(health.check(run, work=afar)) == here


def square(number):
    if number == 13:
        raise StoreError("rank13/log.bin is damaged")
    return number * number


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_give_results_in_order_and_name_what_they_cannot_read():
    with at_work(2) as work:
        assert list(work(square, range(10))) == [number**2 for number in range(10)]
        with pytest.raises(StoreError, match=r"rank13/log\.bin is damaged"):
            list(work(square, range(20)))
        with pytest.raises(StoreError, match="a worker was killed"):
            list(work(die, [0]))


def test_every_verb_answers_with_workers_as_without(tmp_path, runs, introspect):
    a, b, other = (str(runs / name) for name in ("whole nothing", "whole copies", "shared copies"))
    there = "--workers", "2"
    for words in (("diff", a, b), ("diff", a, other), ("check", b), ("check", "--copies", b)):
        one, two = (introspect(*words, "--format", "json", *more) for more in ((), there))
        assert (two.returncode, json.loads(two.stdout)) == (one.returncode, json.loads(one.stdout)), words
    for place, more in (("here", ()), ("there", there)):
        done = introspect("merge", other, "-o", str(tmp_path / place / "merge"), *more)
        assert done.returncode == 0, done.stderr
    merged = [tmp_path / at / "merge" for at in ("here", "there")]
    assert recorded(merged[0] / "rank0") == recorded(merged[1] / "rank0")


def test_a_worker_that_cannot_read_names_the_file_and_nothing_is_left(tmp_path):
    run = write(tmp_path / "run", 2, ALL, steps=20)
    records = bytearray((run / "rank1/log.bin").read_bytes())
    records[-500] ^= 1
    (run / "rank1/log.bin").write_bytes(records)
    assert "rank1/log.bin" in verb("merge", run, "-o", tmp_path / "whole", "--workers", "2").stderr
    assert not (tmp_path / "whole").exists()
