"""A reader believes what is whole, says what is not, and is not led out of the store."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from synthetic import batch, entries_at, row, write_run

from introspect_cli.errors import IntrospectError, StoreError
from introspect_cli.records import ModuleInfo
from introspect_cli.store.format.documents import dump
from introspect_cli.store.format.schemas import ENTRY, HEADER
from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.read.verify import verify_run
from introspect_cli.store.write.run_writer import StoreWriter


def steps(count):
    return [[row("forward", "output", f"A.{n}", np.full(3, n + 10.0 * s)) for n in range(5 + s)] for s in range(count)]


def sentence(error):
    """Every message is one line, names a file and says what to do."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 700
    return text


def read_all(path):
    with open_run(path) as run:
        for rank in run.ranks:
            reader = run.rank(rank)
            for entry in reader.steps:
                list(reader.records(entry.step))
            assert reader.modules is not None
        dict(run.settings)


def refused(path, pattern):
    with pytest.raises(StoreError, match=pattern) as caught:
        read_all(path)
    assert isinstance(caught.value, IntrospectError)
    assert caught.value.exit_code == 2
    return sentence(caught.value)


def test_a_run_that_is_not_there_is_one_sentence(tmp_path):
    assert "there is no run at" in refused(tmp_path / "no", "introspect capture -o")


def test_a_directory_that_is_no_run_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a run: not a directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is not a run: it is empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.py").write_text("x")
    refused(tmp_path / "other", "is not a run: it has no manifest.yaml")
    refused(str(tmp_path / "nul") + "\0", "not a path")
    refused(tmp_path / ("x" * 300), "file name too long")


def test_a_manifest_of_something_else(tmp_path):
    for content in (b"", b"a: 1\n", b"- 1\n", b"format: one\n", b"format: 0\n", b"format: true\n", b"format: -3\n"):
        (tmp_path / "manifest.yaml").write_bytes(content)
        refused(tmp_path, "does not say which format")


def test_a_newer_format_names_the_version_to_install(tmp_path):
    path = write_run(tmp_path / "run", steps(1))
    newer = {"format": 4, "tool": {"name": "introspect", "version": "0.9"}, "new": {"things": [1]}}
    (path / "manifest.yaml").write_bytes(dump(newer, "manifest.yaml", "0" * 32))
    message = refused(path, "install introspect-cli>=0.9")
    assert "was written by introspect 0.9, format 4; this is " in message
    assert "which reads up to format 2" in message
    with pytest.raises(StoreError, match=r"install introspect-cli>=0\.9"):
        verify_run(path)
    for version in ("1; rm -rf /", "\x1b[31m", None, 3, "9" * 100):
        (path / "manifest.yaml").write_bytes(
            dump({"format": 3, "tool": {"version": version}}, "manifest.yaml", "0" * 32)
        )
        assert "install the newest introspect-cli" in refused(path, "a newer introspect, format 3")
    (path / "manifest.yaml").write_bytes(dump({"format": 3, "tool": "x"}, "manifest.yaml", "0" * 32))
    refused(path, "a newer introspect, format 3")


def test_a_newer_index_is_refused(tmp_path):
    path = write_run(tmp_path / "run", steps(1))
    index = path / "rank0" / "index.bin"
    data = bytearray(index.read_bytes())
    fields = list(HEADER.unpack_from(data))
    fields[1] = 3
    data[: HEADER.size] = HEADER.pack(*fields)
    import zlib

    data[HEADER.size - 4 : HEADER.size] = zlib.crc32(data[: HEADER.size - 4]).to_bytes(4, "little")
    index.write_bytes(data)
    refused(path, "format 3; this is")


@pytest.mark.parametrize("complete", [True, False])
def test_every_cut_of_the_index_is_a_prefix(tmp_path, complete):
    whole = write_run(tmp_path / "run", steps(4), complete=complete)
    data = (whole / "rank0" / "index.bin").read_bytes()
    expected = [entry.digest for entry in open_run(whole).rank(0).steps]
    begin = entries_at(data)
    for cut in range(len(data)):
        (whole / "rank0" / "index.bin").write_bytes(data[:cut])
        with open_run(whole) as run:
            reader = run.rank(0)
            assert run.state is RunState.INTERRUPTED
            entries = max(0, (cut - begin) // ENTRY.itemsize)
            assert [entry.digest for entry in reader.steps] == expected[:entries]
            for entry in reader.steps:
                assert len(list(reader.records(entry.step))) == entry.rows


def test_streams_ahead_of_the_index_are_not_read(tmp_path):
    path = write_run(tmp_path / "run", steps(3), complete=False, modules=[ModuleInfo("A", "A")])
    before = dump_of(path)
    for name in ("sites", "layouts", "modules", "records"):
        with (path / "rank0" / f"{name}.arrow").open("ab") as file:
            file.write(os.urandom(37))
    assert dump_of(path) == before
    assert verify_run(path).sound


def dump_of(path):
    with open_run(path) as run:
        out = []
        for rank in run.ranks:
            reader = run.rank(rank)
            out.append([list(reader.records(entry.step)) for entry in reader.steps])
            out.append(reader.modules)
        return repr((out, dict(run.settings), run.last_step))


def test_an_index_ahead_of_the_records_is_cut_unless_it_ended(tmp_path):
    path = write_run(tmp_path / "run", steps(3), complete=False)
    records = path / "rank0" / "records.arrow"
    records.write_bytes(records.read_bytes()[:-1])
    with open_run(path) as run:
        assert run.last_step == 1
    path = write_run(tmp_path / "ended", steps(3))
    records = path / "rank0" / "records.arrow"
    records.write_bytes(records.read_bytes()[:-20])
    refused(path, "ends before step 2, which the index names")


DAMAGE = {
    "a middle entry": ("index.bin", -2 * ENTRY.itemsize - 5, "entry 1 was altered; the 1 before it are sound"),
    "the header": ("index.bin", 20, "its header was altered"),
    "the columns": ("index.bin", 100, "what it says of columns was altered"),
    "the magic": ("index.bin", 2, "it is not an index"),
    "records": ("records.arrow", 2500, "the records of step 0 are not those that were indexed"),
    "the schema": ("records.arrow", 100, "its columns are not those that its index names"),
    "sites": ("sites.arrow", 1200, "its bytes are not those that were indexed"),
    "layouts": ("layouts.arrow", 500, "its bytes are not those that were indexed"),
    "modules": ("modules.arrow", 800, "its bytes are not those that were indexed"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(tmp_path, what):
    name, at, pattern = DAMAGE[what]
    path = write_run(tmp_path / "run", steps(3), modules=[ModuleInfo("A", "A")])
    file = path / "rank0" / name
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    message = refused(path, re.escape(pattern))
    assert str(file) in message
    assert "`introspect verify`" in message
    report = verify_run(path)
    assert any(pattern in finding for finding in report.findings)


@pytest.mark.parametrize("name", ["index.bin", "records.arrow", "sites.arrow", "layouts.arrow", "modules.arrow"])
def test_a_missing_file_is_never_taken_for_a_complete_run(tmp_path, name):
    path = write_run(tmp_path / "run", steps(3), modules=[ModuleInfo("A", "A")])
    (path / "rank0" / name).unlink()
    assert not verify_run(path).sound
    if name == "index.bin":
        with open_run(path) as run:
            assert run.state is RunState.INTERRUPTED
            assert run.rank(0).steps == ()
    else:
        refused(path, "it is missing")


LINKS = ["manifest.yaml", "settings", "settings/env.yaml", "rank0", "rank0/index.bin", "rank0/records.arrow", ".lock"]


@pytest.mark.parametrize("name", LINKS)
def test_links_are_not_followed(tmp_path, name):
    path = write_run(tmp_path / "run", steps(2), settings={"env": {"A": 1}})
    shutil.move(path / name, tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    refused(path, "symbolic link|a link or a file")
    assert not verify_run(path).sound


@pytest.mark.parametrize(
    "name", ["manifest.yaml", "settings/env.yaml", "rank0/index.bin", "rank0/sites.arrow", ".lock"]
)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_only_regular_files_are_read(tmp_path, name, kind):
    path = write_run(tmp_path / "run", steps(2), settings={"env": {"A": 1}})
    (path / name).unlink()
    if kind == "fifo":
        os.mkfifo(path / name)
    elif kind == "directory":
        (path / name).mkdir()
    else:
        try:
            os.mknod(path / name, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
        except PermissionError:
            pytest.skip("devices cannot be made here")
    begin = time.process_time()
    refused(path, "is damaged: ")
    assert time.process_time() - begin < 5


def test_a_link_to_a_run_is_followed(tmp_path):
    path = write_run(tmp_path / "run", steps(2))
    (tmp_path / "latest").symlink_to(path)
    with open_run(tmp_path / "latest") as run:
        assert run.last_step == 1


def test_files_of_another_run_are_distinguished(tmp_path):
    settings = {"env": {"A": 1}}
    a = write_run(tmp_path / "a", steps(2), settings=settings, ranks=2)
    for name in ("rank0", "settings", "manifest.yaml", "rank0/sites.arrow", "rank0/index.bin"):
        b = write_run(tmp_path / "b", steps(3), settings=settings, ranks=2, force=True)
        if (b / name).is_dir():
            shutil.rmtree(b / name)
            shutil.copytree(a / name, b / name)
        else:
            shutil.copy(a / name, b / name)
        refused(b, "is damaged: ")
        assert not verify_run(b).sound
    b = write_run(tmp_path / "b", steps(3), ranks=2, force=True)
    shutil.rmtree(b / "rank0")
    (b / "rank1").rename(b / "rank0")
    refused(b, "it is the index of rank 1")


def test_huge_files_are_refused_quickly(tmp_path):
    path = write_run(tmp_path / "run", steps(2), settings={"env": {"A": 1}})
    for name in ("manifest.yaml", "settings/env.yaml", "rank0/index.bin"):
        kept = (path / name).read_bytes()
        os.truncate(path / name, 1 << 40)
        begin = time.process_time()
        refused(path, "is damaged: it is larger than")
        assert time.process_time() - begin < 5
        (path / name).write_bytes(kept)
    os.truncate(path / "rank0/records.arrow", 1 << 40)
    os.truncate(path / "rank0/sites.arrow", 1 << 40)
    with open_run(path) as run:  # what follows the indexed bytes is not read
        assert run.last_step == 1
        assert len(run.rank(0).sites) == 6
    assert len(verify_run(path).findings) == 2


def test_a_run_can_be_read_while_it_is_written(tmp_path):
    """A reader beside a writer sees whole steps only, ever more of them, and each as it was written."""
    count = 300
    written = threading.Event()
    store = StoreWriter.create(tmp_path / "run")
    writer = store.rank(0)

    def write():
        for step in range(count):
            rows = [row("forward", "output", f"A.{step}.{n}", float(step + n)) for n in range(3)]
            writer.append(step, batch(writer, rows))
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while not written.is_set():
        with open_run(tmp_path / "run") as run:
            assert run.state is RunState.RUNNING
            reader = run.rank(0)
            assert len(reader) >= seen
            seen = len(reader)
            for entry in reader.steps[-3:]:
                records = list(reader.records(entry.step))
                assert [r.site.fqn for r in records] == [f"A.{entry.step}.{n}" for n in range(3)]
    thread.join()
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.RUNNING
        assert run.last_step == count - 1
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").records == 3 * count


def test_a_run_that_ends_while_it_is_opened_is_never_called_interrupted(tmp_path):
    for number in range(40):
        store = StoreWriter.create(tmp_path / str(number))
        writer = store.rank(0)
        writer.append(0, batch(writer, steps(1)[0]))

        def finish(store=store):
            store.write_manifest({"status": "complete"})
            store.close()

        thread = threading.Thread(target=finish)
        thread.start()
        states = []
        while not states or thread.is_alive():
            with open_run(tmp_path / str(number)) as run:
                states.append(run.state)
        thread.join()
        assert RunState.INTERRUPTED not in states


def test_a_run_opened_early_stays_as_it_was(tmp_path):
    store = StoreWriter.create(tmp_path / "run")
    writer = store.rank(0)
    writer.append(0, batch(writer, steps(1)[0]))
    with open_run(tmp_path / "run") as run:
        writer.append(1, batch(writer, [row("forward", "output", "new", 1.0)]))
        assert run.last_step == 0
        assert len(run.rank(0).sites) == 5
        assert len(run.rank(0).read(0)) == 5
    store.close()


def test_a_run_replaced_while_it_is_read(tmp_path):
    path = write_run(tmp_path / "run", steps(2))
    with open_run(path) as run:
        assert len(run.rank(0).read(0)) == 5
        write_run(path, [[row("loss", "loss", "loss", 1.0)]], force=True)
        assert len(run.rank(0).read(1)) == 6
        with pytest.raises(StoreError, match="missing"):
            len(run.rank(0).sites)


def test_a_store_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    path = write_run(tmp_path / "run", steps(2))
    (path / "rank0/records.arrow").chmod(0)
    refused(path, "permission denied")


def test_opening_many_steps_is_quick(tmp_path):
    one = [row("loss", "loss", "loss", 1.0)]
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        appended = batch(writer, one)
        for step in range(10_000):
            writer.append(step, appended)
    begin = time.process_time()
    with open_run(tmp_path / "run") as run:
        assert len(run.rank(0)) == 10_000
    assert time.process_time() - begin < 20  # 0.015 s; the bound is for reading every step, not for a busy machine


def test_a_path_may_be_given_as_text(tmp_path):
    path = write_run(tmp_path / "run", steps(1))
    with open_run(str(path)) as run:
        assert run.path == Path(path)
