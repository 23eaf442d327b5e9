"""The ranks of a run put together once, and read like a run of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import opcapture
import pytest
from laid_out import ALL, CHANGES, SHARED, write, write_changed

from introspect_cli import engine
from introspect_cli.compare.result import Verdict
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.health.check import check
from introspect_cli.store import reduce
from introspect_cli.store.reader import RunState, open_run
from introspect_cli.store.verify import verify_run


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Runs of two layouts with each change, and each put together."""
    folder = write_changed(tmp_path_factory.mktemp("wholes"), layouts=("whole", "shared"))
    for run in sorted(folder.iterdir()):
        reduce.reduce_run(run, folder / f"{run.name} together", engine.Here().run)
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
        for own in (a, Path(f"{a} together")):
            other = Path(f"{b} together")
            assert answer(opcapture.compared(own, other)) == expected, (one, two, own.name)


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
        assert (run.ranks, run.world_size, run.whole_of, run.state) == ((0,), 4, 4, RunState.COMPLETE)
        assert run.endings == []
        assert check(run).checked
    done = introspect("check", str(path))
    assert "what differs between its 4 ranks, which are one here" in done.stdout
    assert introspect("show", str(path), "--step", "1").returncode == 0


def test_of_one_layout_wholes_differ_in_every_bit(wholes):
    a, b = (wholes / f"shared {change} together" for change in ("nothing", "a sample"))
    result = opcapture.compared(a, b)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.step == 1
    assert not any("layouts differ" in note for note in result.notes)


def test_what_cannot_be_put_together_is_refused(tmp_path, wholes, introspect):
    done = introspect("merge", "--whole", str(wholes / "shared nothing together"), "-o", str(tmp_path / "again"))
    assert done.returncode == 2
    assert "is put together already, of 4 ranks" in done.stderr
    done = introspect("merge", "--whole", str(wholes / "shared nothing"), "-o", str(wholes / "whole nothing"))
    assert "exists: choose another directory" in done.stderr
    done = introspect("merge", str(wholes / "shared nothing"), "-o", str(tmp_path / "x"), "--engine", "processes:2")
    assert "--engine says where --whole puts ranks together" in done.stderr
    assert not list(tmp_path.iterdir())


# --- where it runs


def test_an_engine_is_named_or_refused(monkeypatch):
    monkeypatch.setattr(engine, "_PATIENCE", "300ms")
    for text in ("threads", "processes:0", "dask:", "dask"):
        with pytest.raises(UsageError, match="there is no engine"):
            engine.engine_of(text)
    with (
        pytest.raises(UsageError, match="there is no Dask scheduler at tcp:"),
        engine.engine_of("dask:tcp://127.0.0.1:9"),
    ):
        pass


def square(number):
    if number == 13:
        raise StoreError("rank13/records.arrow is damaged")
    return number * number


def die(mark):
    """End this process, the first time."""
    if Path(mark).exists():
        return "alive"
    Path(mark).touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def plus(one, two):
    return one + two


def test_a_pool_of_processes_gives_results_in_order_and_names_what_it_cannot_read(tmp_path):
    with engine.engine_of("processes:2") as pool:
        assert list(pool.run(square, range(10))) == [number**2 for number in range(10)]
        assert pool.total(square, range(10), plus) == 285
        with pytest.raises(StoreError, match=r"rank13/records\.arrow is damaged"):
            list(pool.run(square, range(20)))
        with pytest.raises(StoreError, match="a process of the pool was killed"):
            list(pool.run(die, [str(tmp_path / "mark")]))


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    import dask

    with (
        dask.config.set({"distributed.worker.daemon": False, "distributed.worker.preload": []}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as local,
    ):
        yield local.scheduler_address


def test_a_cluster_puts_ranks_together_as_this_process_does(tmp_path, cluster, introspect):
    run = write(tmp_path / "run", 4, SHARED, steps=40)
    other = write(tmp_path / "other", 4, ALL, steps=40)
    for name, options in (("here", ()), ("there", ("--engine", f"dask:{cluster}"))):
        done = introspect("merge", "--whole", str(run), "-o", str(tmp_path / name), *options)
        assert done.returncode == 0, done.stderr
    for name in ("records.arrow", "sites.arrow", "layouts.arrow"):
        assert (tmp_path / "here/rank0" / name).read_bytes() == (tmp_path / "there/rank0" / name).read_bytes()
    assert opcapture.compared(tmp_path / "there", other).verdict is Verdict.SAME


def test_a_worker_that_dies_is_replaced_and_one_that_cannot_read_names_the_file(tmp_path, cluster):
    with engine.engine_of(f"dask:{cluster}") as dask:
        assert dask.total(square, range(10), plus) == 285
        assert list(dask.run(die, [str(tmp_path / "mark")])) == ["alive"]
        for call in (lambda: list(dask.run(square, range(20))), lambda: dask.total(square, range(20), plus)):
            with pytest.raises(StoreError, match=r"rank13/records\.arrow is damaged"):
                call()
    run = write(tmp_path / "run", 2, ALL, steps=20)
    records = bytearray((run / "rank1/records.arrow").read_bytes())
    records[-500] ^= 1
    (run / "rank1/records.arrow").write_bytes(records)
    with engine.engine_of(f"dask:{cluster}") as dask, pytest.raises(StoreError, match=r"rank1/records\.arrow"):
        reduce.reduce_run(run, tmp_path / "whole", dask.run)
    assert not (tmp_path / "whole").exists()
