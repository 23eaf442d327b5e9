"""A writer never overwrites, never shares, and its failures end the recording and nothing else."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from synthetic import batch, row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.records import Kind, Layout, Phase, Site, SiteInfo
from introspect_cli.store import run_writer
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import Launch, StoreWriter
from introspect_cli.store.verify import verify_run

STEP = [row("forward", "output", f"A.{n}", np.full(3, float(n))) for n in range(20)]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_a_run_is_never_replaced(tmp_path, force):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="not \\(only\\) a run"):
        StoreWriter.create(tmp_path / "precious", force=force)
    path = write_run(tmp_path / "run", [STEP])
    (path / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match=r"'notes\.txt'"):
        StoreWriter.create(path, force=True)
    with pytest.raises(StoreError, match="is a file"):
        StoreWriter.create(tmp_path / "precious" / "thesis.tex", force=force)
    (tmp_path / "other" / "tensors").mkdir(parents=True)
    with pytest.raises(StoreError, match="no manifest"):
        StoreWriter.create(tmp_path / "other", force=True)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "x"


def test_a_run_being_written_is_refused_with_force_too(tmp_path):
    with StoreWriter.create(tmp_path / "run"):
        for force in (False, True):
            with pytest.raises(StoreError, match="being written by another capture"):
                StoreWriter.create(tmp_path / "run", force=force)


def test_of_many_started_at_once_one_wins(tmp_path):
    won, lost = [], []
    barrier = threading.Barrier(8)

    def start():
        barrier.wait()
        try:
            won.append(StoreWriter.create(tmp_path / "run", force=True))
        except StoreError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    won[0].close()


def test_an_empty_directory_and_missing_parents_are_used(tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "empty", [STEP])
    write_run(tmp_path / "a" / "b" / "c", [STEP])
    assert verify_run(tmp_path / "a" / "b" / "c").sound


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a directory; choose another directory"):
        StoreWriter.create(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match="cannot make a run at /proc/run"):
        StoreWriter.create(Path("/proc/run"))


def test_a_script_that_changes_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = StoreWriter.create(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writer = store.rank(0)
    writer.append(0, batch(writer, STEP))
    store.write_settings("env", {"A": 1})
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").sound
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", "A", "a.b", "x" * 65])
def test_names_of_settings_stay_inside(tmp_path, name):
    with StoreWriter.create(tmp_path / "run") as store, pytest.raises(ValueError, match="cannot name"):
        store.write_settings(name, {})


def test_steps_rise_and_numbers_are_ones_given_out(tmp_path):
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        appended = batch(writer, STEP)
        writer.append(3, appended)
        with pytest.raises(ValueError, match="after step 3"):
            writer.append(3, appended)
        other = batch(writer, STEP)
        other.site[0] = 1000
        with pytest.raises(ValueError, match="never given a number"):
            writer.append(4, other)
        writer.append(5, appended)
        store.write_manifest({"status": "complete"})
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == [3, 5]


def test_sites_are_numbered_once_from_many_threads(tmp_path):
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        sites = [Site(Phase.FORWARD, Kind.OUTPUT, f"m{n}") for n in range(300)]
        seen: list[list[int]] = []
        barrier = threading.Barrier(6)

        def work():
            barrier.wait()
            seen.append([writer.site(site, SiteInfo()) for site in sites])
            writer.layout(Layout((1,), "float32"))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.append(0, batch(writer, STEP))
        store.write_manifest({"status": "complete"})
    assert all(numbers == seen[0] for numbers in seen)
    assert sorted(seen[0]) == list(range(300))
    with open_run(tmp_path / "run") as run:
        table = run.rank(0).sites
        assert [table[number][0] for number in seen[0]] == sites


def test_settings_that_another_thread_writes_meanwhile_take_no_step_away(tmp_path):
    """What is being written is not torn: nobody else may take it back."""
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        done = threading.Event()

        def note():
            while not done.is_set():
                store.write_settings("one", {"text": "x" * 100_000})

        thread = threading.Thread(target=note)
        thread.start()
        for step in range(200):
            writer.append(step, batch(writer, STEP))
        done.set()
        thread.join()
        store.write_manifest({"status": "complete"})
    assert verify_run(tmp_path / "run").sound
    with open_run(tmp_path / "run") as run:
        assert [entry.step for entry in run.rank(0).steps] == list(range(200))


def append_until_it_fails(writer):
    for step in range(3, 100):
        writer.append(step, batch(writer, STEP))


@pytest.mark.parametrize("room", [1, 100, 1500, 2000, 3000, 5000])
def test_a_file_that_cannot_grow_ends_the_store_at_the_step_before(tmp_path, room):
    store = StoreWriter.create(tmp_path / "run")
    writer = store.rank(0)
    for step in range(3):
        writer.append(step, batch(writer, STEP))
    heard = []
    handled = signal.signal(signal.SIGXFSZ, lambda number, _: heard.append(number))  # as a script may
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "run/rank0/log.bin").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
    try:
        with pytest.raises(StoreError) as caught:
            append_until_it_fails(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handled)
    assert heard == []
    message = str(caught.value)
    assert "file too large; the store ends at step " in message
    writer.append(9, batch(writer, STEP))
    store.write_manifest({"status": "complete"})
    store.close()
    with open_run(tmp_path / "run") as run:
        assert f"ends at step {run.last_step}" in message
        assert run.state is RunState.INTERRUPTED
        for entry in run.rank(0).steps:
            assert len(run.rank(0).read(entry.step)) == len(STEP)


def test_a_directory_removed_while_writing(tmp_path):
    store = StoreWriter.create(tmp_path / "run")
    writer = store.rank(0)
    writer.append(0, batch(writer, STEP))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match="its files were removed") as caught:
        writer.append(1, batch(writer, STEP))
    assert writer.failure == str(caught.value)
    writer.append(2, batch(writer, STEP))  # told once
    for write in (
        lambda: store.write_manifest({}),
        lambda: store.write_settings("env", {}),
        lambda: store.save_tensor(1, memoryview(b"abcd"), "float32", (1,)),
        lambda: store.rank(1),
    ):
        with pytest.raises(StoreError, match="cannot write"):
            write()
    store.close()
    assert not (tmp_path / "run").exists()


def test_a_forked_child_writes_nothing(tmp_path):
    store = StoreWriter.create(tmp_path / "run")
    writer = store.rank(0)
    writer.append(0, batch(writer, STEP))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            writer.append(1, batch(writer, STEP))
        except StoreError:
            store.abandon()
            store.abandon()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.RUNNING
    writer.append(1, batch(writer, STEP))
    store.write_manifest({"status": "complete"})
    store.close()
    store.close()
    assert verify_run(tmp_path / "run").counts["steps"] == 2


def test_the_lock_goes_with_the_process(tmp_path):
    code = "import os,sys; from pathlib import Path; from introspect_cli.store.run_writer import StoreWriter;"
    code += "StoreWriter.create(Path(sys.argv[1])).rank(0); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.INTERRUPTED
    StoreWriter.create(tmp_path / "run", force=True).close()


def open_descriptors():
    return {link.name for link in Path("/proc/self/fd").iterdir() if link.exists()}


def test_nothing_stays_open(tmp_path):
    before = open_descriptors()
    path = write_run(tmp_path / "run", [STEP], settings={"a": 1}, ranks=3)
    write_run(path, [STEP], force=True)
    with pytest.raises(StoreError):
        StoreWriter.create(path)
    with open_run(path) as run:
        run.rank(0).read(0)
        dict(run.settings)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("where", "limit", "message"),
    [
        ("frames.LIMIT_FRAMES", 8, "more steps than a store holds"),
        ("rank_writer.LIMIT_BATCH", 8000, "one step has more records than a store holds"),
        ("rank_writer.LIMIT_NAMES", 4000, "more names than a store holds"),
    ],
)
def test_a_store_that_reaches_a_limit_ends_there_and_is_read(tmp_path, monkeypatch, where, limit, message):
    store = StoreWriter.create(tmp_path / "run")
    writer = store.rank(0)
    for step in range(3):
        writer.append(step, batch(writer, STEP))
    monkeypatch.setattr(f"introspect_cli.store.{where}", limit)
    many = [row("forward", "output", f"B.{n}", float(n)) for n in range(100)]
    with pytest.raises(StoreError, match=message):
        writer.append(3, batch(writer, many))
    store.close()
    with open_run(tmp_path / "run") as run:
        assert run.last_step == 2
        assert [len(run.rank(0).read(step)) for step in range(3)] == [len(STEP)] * 3
    assert verify_run(tmp_path / "run").sound


def test_a_rank_that_looked_too_early_does_not_remove_what_another_of_its_launch_has_begun(tmp_path, monkeypatch):
    def write(rank, launch):
        StoreWriter.create(tmp_path / "run", force=True, launch=Launch(launch * 32, launch, rank, 2)).close()

    write(0, "1")
    remove = run_writer.refuse_or_remove

    def removed_later(path, **how):
        monkeypatch.setattr(run_writer, "refuse_or_remove", remove)
        write(0, "2")
        remove(path, **how)

    monkeypatch.setattr(run_writer, "refuse_or_remove", removed_later)
    write(1, "2")
    assert {"rank0", "rank1"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_a_full_disk_has_room_for_what_ended_the_run(tmp_path, monkeypatch):
    real, is_full = os.pwritev, []

    def taken():
        """Bytes of files without a name that this process has open: room that was kept."""
        total = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the descriptor of this very listing
                name = str(file.readlink())
                total += file.stat().st_blocks * 512 if str(tmp_path) in name and name.endswith("(deleted)") else 0
        return total

    def write(*given):
        if is_full and taken():
            raise OSError(28, "No space left on device")
        return real(*given)

    monkeypatch.setattr(os, "pwritev", write)
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        writer.append(0, batch(writer, STEP))
        assert taken() >= 1 << 15
        is_full.append(True)
        with pytest.raises(StoreError, match="no space left on device; the store ends at step 0"):
            writer.append(1, batch(writer, STEP))
        store.write_manifest({"status": "interrupted", "failures": [writer.failure]})
    with open_run(tmp_path / "run") as run:
        assert (run.state, run.last_step) == (RunState.INTERRUPTED, 0)
        assert "no space left" in run.manifest["failures"][0]
