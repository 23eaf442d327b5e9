"""A script that closes descriptors of others finds nothing of introspect in its files, and its run is whole."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from synthetic import batch, row

from introspect_cli.errors import StoreError
from introspect_cli.store.files import Folder
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

DAEMON = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
files = []
for step in range(4):
    if step == 1:
        os.closerange(3, 100)
        files = [open(f"mine{number}", "w+") for number in range(30)]
        for file in files:
            file.write("mine")
            file.flush()
    model(torch.randn(3, 4)).square().mean().backward()
for file in files:
    file.write(" still")
    file.close()
"""


def test_a_daemon_keeps_its_files_and_its_run(tmp_path):
    (tmp_path / "train.py").write_text(DAEMON)
    command = [sys.executable, "-m", "introspect_cli", "capture", "--no-packages", "-o", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert {(tmp_path / f"mine{number}").read_text() for number in range(30)} == {"mine still"}
    assert verify_run(tmp_path / "run").findings == ()
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.COMPLETE
        assert [entry.step for entry in run.rank(0).steps][:4] == [0, 1, 2, 3]


def test_a_script_gets_the_numbers_that_it_would_get_alone(tmp_path):
    (tmp_path / "train.py").write_text("import os; print(os.dup(0), os.open('mine', os.O_CREAT), os.pipe())")
    alone = [sys.executable, "train.py"]
    captured = [sys.executable, "-m", "introspect_cli", "capture", "-q", "--no-packages", "-o", "run", "train.py"]
    said = [
        subprocess.run(each, cwd=tmp_path, capture_output=True, text=True, check=True) for each in (alone, captured)
    ]
    assert said[0].stdout == said[1].stdout != ""


def rows(step):
    return [row("forward", "output", f"A.{step}", np.full(4, float(step)))]


@pytest.fixture
def store(tmp_path):
    writer = StoreWriter.create(tmp_path / "run")
    yield writer
    writer.abandon()


def taken(store, tmp_path):
    """Every descriptor of the store closed, and its number given to a file of the script."""
    [log] = store._logs
    handles = [log.folder, log._file]
    numbers = sorted(handle.fd for handle in handles)
    found = {}
    for number in numbers:
        opened = os.open(tmp_path / f"script{number}", os.O_RDWR | os.O_CREAT)
        found[number] = os.dup2(opened, number)
        os.close(opened)
    return found


def test_nothing_is_written_to_or_closed_that_is_not_ours(store, tmp_path):
    writer = store.rank(0)
    writer.append(0, batch(writer, rows(0)))
    files = taken(store, tmp_path)
    assert list(files) == list(files.values())
    writer.append(1, batch(writer, rows(1)))
    store.write_manifest({"status": "complete"})
    store.close()
    for number in files:
        assert os.fstat(number).st_size == 0
        os.close(number)
    assert verify_run(tmp_path / "run").findings == ()
    with open_run(tmp_path / "run") as run:
        assert (run.state, run.last_step) == (RunState.COMPLETE, 1)


def test_a_run_that_was_moved_too_ends_with_a_sentence(store, tmp_path):
    writer = store.rank(0)
    writer.append(0, batch(writer, rows(0)))
    files = taken(store, tmp_path)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="the store ends at step 0"):
        writer.append(1, batch(writer, rows(1)))
    store.abandon()
    assert all(os.fstat(number).st_size == 0 for number in files)
    for number in files:
        os.close(number)
    with open_run(tmp_path / "elsewhere") as run:
        assert run.last_step == 0


def test_another_file_at_the_path_is_not_taken_for_ours(tmp_path):
    folder = Folder.at(str(tmp_path))
    number = folder.fd
    os.close(number)
    (tmp_path / "other").mkdir()
    opened = os.open(tmp_path / "other", os.O_RDONLY)
    again = os.dup2(opened, number)
    os.close(opened)
    assert folder.reopen_if_closed().fd != number
    folder.close()
    os.fstat(again)
    os.close(again)


def test_durable_stores_force_each_step_to_disk(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", lambda fd: forced.append(os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]))
    for durable in (False, True):
        with StoreWriter.create(tmp_path / f"run{durable}", durable=durable) as store:
            writer = store.rank(0)
            forced.clear()
            writer.append(0, batch(writer, rows(0)))
            writer.append(1, batch(writer, rows(0)))
            assert forced == ["log.bin"] * 2 * durable
