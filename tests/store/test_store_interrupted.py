"""An exception at any line while a step is written: what the run then holds."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import numpy as np
import pytest
from sweeps import sliced
from synthetic import batch, row

import introspect_cli
from introspect_cli.store.frames import LogWriter
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

HERE = str(Path(introspect_cli.__file__).parent / "store")
ROWS = [row("forward", "output", name, np.full(n + 1, 1.5, np.float32)) for n, name in enumerate("abcd")]
STRIDE = 20


class Stop:
    """A trace function that raises at the n-th line of the store's code, once."""

    def __init__(self, after, error):
        self.left = after
        self.came = self.within = False
        self._error = error

    def __call__(self, frame, event, _):
        name = frame.f_code.co_filename
        if not name.startswith(HERE) or frame.f_code.co_name in ("close", "__del__"):
            return None  # python itself passes over what is raised in there
        # python runs no handler between the end of a block and the release of its lock
        if event == "line" and "_lock" not in linecache.getline(name, frame.f_lineno):
            self.left -= 1
            if self.left < 0 and not self.came:
                self.came = True
                raise self._error
        return self

    def around(self, call, *args):
        """Call, traced."""
        self.within = True
        sys.settrace(self)
        try:
            call(*args)
        except self._error:
            assert self.came
        finally:
            sys.settrace(None)
            self.within = False


def written(path, stops):
    """Steps that a run of four says are written, the second of which is stopped; it is sound and whole."""
    steps = []
    with StoreWriter.create(path) as store:
        store.write_manifest({"status": "complete"})
        writer = store.rank(0)
        for step in range(4):
            table = batch(writer, ROWS[: step + 1])
            labels = {"epoch": step} if step else None
            if step == 1:
                stops(writer, step, table, labels)
            else:
                writer.append(step, table, labels)
            if writer.last_step == step:
                steps.append(step)
        assert writer.failure is None
        assert writer.written.rows == sum(step + 1 for step in steps)
    assert writer.written.length == sum(file.stat().st_size for file in Path(writer._log.folder.path).iterdir())
    report = verify_run(path)
    assert report.sound, report
    with open_run(path) as run:
        reader = run.rank(0)
        assert [entry.step for entry in reader.steps] == steps
        for step in steps:
            assert [record.site.fqn for record in reader.records(step)] == list("abcd"[: step + 1])
    return steps


def each_place(tmp_path, error, first, stride):
    """Steps written for every `stride`-th place, until one comes after the end."""
    found = []
    for at in range(first, 100_000, stride):
        stop = Stop(at, error)
        steps = written(tmp_path / f"run{at}", lambda writer, *rest, stop=stop: stop.around(writer.append, *rest))
        if not stop.came:
            assert steps == [0, 1, 2, 3]
            return found
        found.append(steps)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("first", sliced(range(STRIDE), [7]))
def test_an_interrupt_at_any_line_loses_no_step_and_no_name(tmp_path, first):
    """Python's own handler raises anywhere; names that were counted and not written made a whole run unreadable."""
    found = each_place(tmp_path, KeyboardInterrupt, first, STRIDE)
    assert len(found) > 10
    assert all(steps == [0, 1, 2, 3] for steps in found[5 * (first < 5) :])  # before, nothing was begun


@pytest.mark.parametrize("first", sliced(range(STRIDE), [3]))
def test_a_failing_allocation_at_any_line_leaves_the_run_sound(tmp_path, first):
    found = each_place(tmp_path, MemoryError, first, STRIDE)
    assert len(found) > 10
    assert [0, 2, 3] in found


@pytest.mark.parametrize("first", sliced(range(STRIDE), [11]))
def test_an_interrupt_that_comes_twice_leaves_the_run_sound(tmp_path, monkeypatch, first):
    """The second while the step is written once more: then it may be missing, and what follows is whole."""
    undo, now = LogWriter.undo_uncounted, []

    def traced(writer):
        if now and now[0].within and now[0].came:  # the step is being written once more
            sys._getframe(1).f_trace = now[1]
            sys.settrace(now[1])
        undo(writer)

    monkeypatch.setattr(LogWriter, "undo_uncounted", traced)
    twice = 0
    for at in range(first, 10_000, STRIDE):
        now[:] = Stop(at, KeyboardInterrupt), Stop(max(0, at - 20), KeyboardInterrupt)
        written(tmp_path / f"run{at}", lambda writer, *rest: now[0].around(writer.append, *rest))
        twice += now[1].came
        if not now[0].came:
            break
    assert twice > 5


@pytest.mark.parametrize("first", sliced(range(STRIDE), [5]))
def test_an_interrupt_while_steps_are_taken_back_leaves_the_run_sound(tmp_path, first):
    for at in range(first, 10_000, STRIDE // 4):
        stop, path = Stop(at, KeyboardInterrupt), tmp_path / f"run{at}"
        with StoreWriter.create(path) as store:
            store.write_manifest({"status": "complete"})
            writer = store.rank(0)
            for step in range(3):
                writer.append(step, batch(writer, ROWS[: step + 1]), {"epoch": step})
            stop.around(writer.restart)
            kept = [] if writer.last_step is None else [0, 1, 2]
            for step in (3, 4):
                writer.append(step, batch(writer, ROWS), {"epoch": step})
        assert verify_run(path).sound
        with open_run(path) as run:
            assert [entry.step for entry in run.rank(0).steps] == [*kept, 3, 4]
        if not stop.came:
            assert kept == []
            return


def thinned(path, stops):
    """Steps left of seven, of the first five of which two are dropped and something stops that; sound and whole."""
    with StoreWriter.create(path) as store:
        store.write_manifest({"status": "complete"})
        writer = store.rank(0)
        for step in range(7):
            writer.append(step, batch(writer, ROWS[: 1 + step % 4]), {"epoch": step}, expires=True)
            if step == 4:
                stops(writer.thin, [1, 2])
            if step == 5:
                writer.thin([3])
        assert writer.failure is None
    folder = Path(writer._log.folder.path)
    assert writer.written.length == sum(file.stat().st_size for file in folder.iterdir()), list(folder.iterdir())
    report = verify_run(path)
    assert report.sound, report
    with open_run(path) as run:
        reader = run.rank(0)
        steps = [entry.step for entry in reader.steps]
        for step in steps:
            assert [record.site.fqn for record in reader.records(step)] == list("abcd"[: 1 + step % 4])
    return steps


@pytest.mark.parametrize("error", sliced([KeyboardInterrupt, MemoryError], [KeyboardInterrupt]))
@pytest.mark.parametrize("first", sliced(range(STRIDE), [13]))
def test_an_exception_at_any_line_while_steps_are_dropped_leaves_the_run_sound(tmp_path, first, error):
    found = []
    for at in range(first, 10_000, STRIDE):
        stop = Stop(at, error)
        found.append(thinned(tmp_path / f"run{at}", stop.around))
        if not stop.came:
            break
    assert len(found) > 3
    assert {tuple(steps) for steps in found} == {(0, 4, 5, 6), (0, 1, 2, 4, 5, 6)}
    assert found[-1] == [0, 4, 5, 6]
