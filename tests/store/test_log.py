"""A log: what is whole is read, what is not is named, and nobody is led out of the store or misled by one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import store_attacks
from logs import rewrite, without
from store_attacks import answer, build, clumsy_problem, forged, forged_problem
from synthetic import batch, row, write_run

from introspect_cli.errors import IntrospectError, StoreError
from introspect_cli.records import Kind, Layout, ModuleInfo, Phase, Site, SiteInfo
from introspect_cli.store.documents import dump
from introspect_cli.store.files import HEADS, LOG
from introspect_cli.store.frames import COLUMNS, HEAD, LAYOUTS, MODULES, SITES, START, STEP, begin_log
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.store.verify import verify_run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "store-format.md"
COUNT = os.environ.get("INTROSPECT_TEST_MUTATIONS", "300")


def steps(count):
    return [[row("forward", "output", f"A.{n}", np.full(3, n + 10.0 * s)) for n in range(5 + s)] for s in range(count)]


def content(path):
    with open_run(path) as run:
        ranks = [run.rank(rank) for rank in run.ranks]
        read = [([list(reader.records(entry.step)) for entry in reader.steps], reader.modules) for reader in ranks]
        return repr((read, dict(run.settings), run.last_step))


def refused(path, pattern):
    """Every message is one line of a person's length."""
    with pytest.raises(StoreError, match=pattern) as caught:
        content(path)
    assert isinstance(caught.value, IntrospectError)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


NO_RUNS = {
    "no": (lambda place: None, "there is no run at .*introspect capture -o"),
    "file": (lambda place: place.write_text("x"), "is not a run: not a directory"),
    "empty": (lambda place: place.mkdir(), "is not a run: it has no manifest.json"),
    "nul\0": (lambda place: None, "embedded null"),
    "x" * 300: (lambda place: None, "file name too long"),
}


@pytest.mark.parametrize("name", NO_RUNS, ids=["nothing", "a file", "empty", "no path", "a long name"])
def test_what_is_no_run_is_one_sentence(tmp_path, name):
    make, pattern = NO_RUNS[name]
    make(tmp_path / name)
    refused(str(tmp_path / name), pattern)


def test_a_manifest_of_something_else_or_of_a_newer_version(tmp_path):
    for text in (b"null", b'{"a": 1}', b"[1]", b'{"format": "one"}', b'{"format": 0}', b'{"format": true}'):
        (tmp_path / "manifest.json").write_bytes(text)
        refused(tmp_path, "does not say which format")
    (tmp_path / "manifest.json").write_bytes(dump({"format": 4}))
    refused(tmp_path, "a newer introspect, format 4.*install the newest introspect-cli")
    path = write_run(tmp_path / "run", steps(1))
    log = path / "rank0" / LOG
    data = log.read_bytes()
    start = bytearray(begin_log(0, data[16:32]))
    start[8] = 3
    log.write_bytes(forged({"rank0/log.bin": bytes(start) + data[START.size :]})["rank0/log.bin"])
    refused(path, "format 3: install")


@pytest.mark.parametrize("complete", [True, False])
def test_every_cut_of_a_log_is_a_prefix(tmp_path, complete):
    path = write_run(tmp_path / "run", steps(4), complete=complete, modules=[ModuleInfo("A", "A")])
    log = path / "rank0" / LOG
    data = log.read_bytes()
    with open_run(path) as run:
        entries = run.rank(0).steps
    for cut in range(0, len(data), 29):
        log.write_bytes(data[:cut])
        with open_run(path) as run:
            reader = run.rank(0)
            assert run.state is RunState.INTERRUPTED
            assert reader.steps == tuple(entry for entry in entries if entry.offset + entry.length <= cut)
            assert all(len(list(reader.records(entry.step))) == entry.rows for entry in reader.steps)


def test_what_follows_the_last_whole_frame_is_not_read(tmp_path):
    path = write_run(tmp_path / "run", steps(3), complete=False)
    before = content(path)
    for rest in (bytes(37), bytes(5000), (path / "rank0" / LOG).read_bytes()[64:128]):
        data = (path / "rank0" / LOG).read_bytes()
        with (path / "rank0" / LOG).open("ab") as file:
            file.write(rest[: HEAD.size - 1] if any(rest) else rest)
        assert content(path) == before
        assert verify_run(path).sound
        (path / "rank0" / LOG).write_bytes(data)


DAMAGE = {
    "the magic": (lambda at: 2, "it is not a log"),
    "the beginning": (lambda at: 20, "its beginning was altered"),
    "a head": (lambda at: at[STEP] + 9, "its frame 5 was altered"),
    "records": (lambda at: at[STEP] + 500, "the records of step 0 are not those that were written"),
    "sites": (lambda at: at[SITES] + 100, "a frame of kind SITE at byte"),
    "layouts": (lambda at: at[LAYOUTS] + 70, "a frame of kind LAYO at byte"),
    "modules": (lambda at: at[MODULES] + 70, "a frame of kind MODU at byte"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(tmp_path, what):
    place, pattern = DAMAGE[what]
    path = write_run(tmp_path / "run", steps(3), modules=[ModuleInfo("A", "A")])
    with open_run(path) as run:
        frames = run.rank(0).frames
        at = {kind: int(frames.begins[frames.numbers_of(kind)[0]]) for kind in (STEP, SITES, LAYOUTS, MODULES)}
    data = bytearray((path / "rank0" / LOG).read_bytes())
    data[place(at)] ^= 0x10
    (path / "rank0" / LOG).write_bytes(data)
    message = refused(path, re.escape(pattern) if what != "a head" else "its frame . was altered")
    assert str(path / "rank0" / LOG) in message
    assert "`introspect verify`" in message
    assert not verify_run(path).sound


def test_heads_beside_a_log_are_believed_where_they_fit_and_may_be_missing(tmp_path):
    path = write_run(tmp_path / "run", [[row("loss", "loss", "loss", float(step))] for step in range(300)])
    heads, before = path / "rank0" / HEADS, content(path)
    kept = heads.read_bytes()
    shorter = write_run(tmp_path / "shorter", [[row("loss", "loss", "loss", 1.0)]] * 280)
    for data in (kept[:-1], kept[:40] + b"x" + kept[41:], b"", (shorter / "rank0" / HEADS).read_bytes(), None):
        heads.unlink() if data is None else heads.write_bytes(data)
        assert content(path) == before
    with open_run(path) as run:
        last = run.rank(0).steps[-1].offset
    with (path / "rank0" / LOG).open("r+b") as file:  # a log that is shorter than what its heads say
        file.truncate(last + 1)
    heads.write_bytes(kept)
    with open_run(path) as run:
        assert (run.state, run.last_step) == (RunState.INTERRUPTED, 298)


LINKS = ["manifest.json", "rank0", "rank0/log.bin"]


@pytest.mark.parametrize("name", LINKS)
def test_links_are_not_followed(tmp_path, name):
    path = write_run(tmp_path / "run", steps(2), settings={"env": {"A": 1}})
    shutil.move(path / name, tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    refused(path, "symbolic link|a link or a file")
    assert not verify_run(path).sound
    (tmp_path / "latest").symlink_to(write_run(tmp_path / "whole", steps(2)))
    assert content(tmp_path / "latest") == content(str(tmp_path / "whole")), "a person named the link"


@pytest.mark.parametrize("name", [LINKS[0], LINKS[2]])
@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_only_regular_files_are_read(tmp_path, name, kind):
    path = write_run(tmp_path / "run", steps(2), settings={"env": {"A": 1}})
    (path / name).unlink()
    if kind == "device":
        try:
            os.mknod(path / name, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
        except PermissionError:
            pytest.skip("devices cannot be made here")
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(path / name)
    begin = time.process_time()
    refused(path, "is damaged: ")
    assert time.process_time() - begin < 5


def test_files_of_another_run_or_rank_and_huge_ones_are_refused(tmp_path):
    settings = {"env": {"A": 1}}
    a = write_run(tmp_path / "a", steps(2), settings=settings, ranks=2)
    for name in ("rank0", "manifest.json"):
        b = write_run(tmp_path / "b", steps(3), settings=settings, ranks=2, force=True)
        (shutil.rmtree if (b / name).is_dir() else os.unlink)(b / name)
        (shutil.copytree if (a / name).is_dir() else shutil.copy)(a / name, b / name)
        refused(b, "is damaged: ")
        assert not verify_run(b).sound
    b = write_run(tmp_path / "b", steps(3), ranks=2, force=True)
    shutil.rmtree(b / "rank0")
    (b / "rank1").rename(b / "rank0")
    refused(b, "it is the log of rank 1")
    kept = (a / "manifest.json").read_bytes()
    os.truncate(a / "manifest.json", 1 << 40)
    refused(a, "is damaged: it is larger than")
    (a / "manifest.json").write_bytes(kept)
    before = content(a)
    os.truncate(a / "rank0" / LOG, 1 << 40)
    assert content(a) == before, "what follows the last frame is not read"


def test_a_log_that_is_gone_is_never_taken_for_a_complete_run(tmp_path):
    path = write_run(tmp_path / "run", steps(3))
    (path / "rank0" / LOG).unlink()
    assert not verify_run(path).sound
    with open_run(path) as run:
        assert (run.state, run.rank(0).steps) == (RunState.INTERRUPTED, ())


# --- beside a writer


def test_a_run_can_be_read_while_it_is_written(tmp_path):
    """A reader beside a writer sees whole steps only, ever more of them, and each as it was written."""
    count, written = 300, threading.Event()
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
                found = [record.site.fqn for record in reader.records(entry.step)]
                assert found == [f"A.{entry.step}.{n}" for n in range(3)]
    thread.join()
    with open_run(tmp_path / "run") as run:
        writer.append(count, batch(writer, [row("forward", "output", "new", 1.0)]))
        assert (run.state, run.last_step) == (RunState.RUNNING, count - 1), "as it was when it was opened"
        assert len(run.rank(0).sites) == 3 * count
    store.write_manifest({"status": "complete"})
    store.close()
    assert verify_run(tmp_path / "run").counts["records"] == 3 * count + 1


def test_a_run_that_ends_while_it_is_opened_is_never_called_interrupted(tmp_path):
    for number in range(15):
        store = StoreWriter.create(tmp_path / str(number))
        writer = store.rank(0)
        writer.append(0, batch(writer, steps(1)[0]))

        def finish(store=store):
            store.write_manifest({"status": "complete"})
            store.close()

        thread, states = threading.Thread(target=finish), []
        thread.start()
        while not states or thread.is_alive():
            with open_run(tmp_path / str(number)) as run:
                states.append(run.state)
        thread.join()
        assert RunState.INTERRUPTED not in states


def test_a_run_replaced_while_it_is_read_stays_as_it_was(tmp_path):
    path = write_run(tmp_path / "run", steps(2))
    with open_run(path) as run:
        write_run(path, [[row("loss", "loss", "loss", 1.0)]], force=True)
        assert [len(run.rank(0).read(step)) for step in (0, 1)] == [5, 6]
        assert len(run.rank(0).sites) == 6


def test_a_store_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    path = write_run(tmp_path / "run", steps(2))
    (path / "rank0" / LOG).chmod(0)
    refused(path, "permission denied")


@pytest.mark.parametrize("has_heads", [True, False])
def test_opening_many_steps_is_quick(tmp_path, has_heads):
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        appended = batch(writer, [row("loss", "loss", "loss", 1.0)])
        for step in range(3000):
            writer.append(step, appended)
    if not has_heads:
        (tmp_path / "run" / "rank0" / HEADS).unlink()
    begin = time.process_time()
    with open_run(tmp_path / "run") as run:
        assert len(run.rank(0)) == 3000
    assert time.process_time() - begin < 6  # 0.01 s; the bound is for reading every step


# --- attacks


def test_a_mutated_store_never_misleads():
    """In a process of its own, so that its memory can be measured."""
    command = [sys.executable, store_attacks.__file__, COUNT, "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{COUNT} mutations in \d+ s: 0 problems\n", done.stdout), done.stdout


def test_a_kill_at_any_instant_loses_no_whole_step():
    """In a process of its own, which forks: the test process may have threads."""
    script = Path(store_attacks.__file__).with_name("store_kills.py")
    done = subprocess.run([sys.executable, script, "20", "7"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    match = re.fullmatch(r"(\d+) kills inside writes, 20 at random instants: 0 problems\n", done.stdout)
    assert match, done.stdout
    assert int(match[1]) > 50


def test_the_attacks_would_notice_and_forging_changes_nothing(tmp_path):
    files = build(tmp_path / "run")
    assert forged(files) == files
    before = answer(tmp_path / "run")
    assert clumsy_problem(before, tmp_path / "run") is None
    build(tmp_path / "other", shift=1.0)
    assert clumsy_problem(before, tmp_path / "other") == "another manifest, setting or tensor was read"
    state, fixed, ranks = before
    changed = {0: ranks[0], 1: (ranks[1][0], ranks[1][1][1:])}
    assert clumsy_problem((state, fixed, changed), tmp_path / "run") == "other records were read"
    longer = {0: ranks[0], 1: (ranks[1][0], [*ranks[1][1], ranks[1][1][0]])}
    assert clumsy_problem((state, fixed, longer), tmp_path / "run") == "a run that lost steps is called complete"


def test_a_run_of_an_earlier_version_with_a_row_for_each_record_is_read(tmp_path):
    path = write_run(tmp_path / "run", steps(3))
    before = content(path)

    def earlier(frame):
        body = b"".join(frame.body)
        if frame.kind == COLUMNS:
            body = body.replace(b'["value","uint32"],', b"").rstrip()
        elif frame.kind == STEP:  # of each column four bytes a row, filled up to 8
            size = -(-frame.rows // 2) * 8
            body = body[: 2 * size] + body[3 * size :]
        return [frame._replace(body=[body])]

    rewrite(path / "rank0", earlier)
    assert content(path) == before


def numbered(column, value):
    def change(frame):
        data = bytearray(b"".join(frame.body))
        # of five rows, each column filled up to 8 bytes
        at = {"site": 0, "value": 48, "layout": 72, "status": 96}[column]
        data[at : at + len(value)] = value
        return [frame._replace(body=[bytes(data)])] if frame.kind == STEP else [frame]

    return change


FORGED = {
    "a site": (numbered("site", b"\xff\xff\xff\x7f"), "names a site, layout or status that is not there"),
    "a layout": (numbered("layout", b"\xff\xff\xff\x7f"), "names a site, layout or status that is not there"),
    "a value": (numbered("value", b"\xff\xff\xff\x7f"), "is cut short"),
    "a status": (numbered("status", b"\x09"), "names a site, layout or status that is not there"),
    "rows": (lambda frame: [frame._replace(rows=frame.rows + 9)], "is cut short|has another length|out of order"),
    "no sites": (without(SITES), "names a site, layout or status that is not there"),
    "length": (
        lambda frame: [frame._replace(body=[*frame.body, bytes(8)])],
        "another length|cannot be|that this version writes",
    ),
    "a kind": (lambda frame: [frame._replace(kind=b"EVIL")], "of a kind that no version writes"),
    "order": (lambda frame: [frame._replace(step=9 - frame.step)], "its steps do not rise"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_log_is_refused_by_what_it_means(tmp_path, what):
    change, pattern = FORGED[what]
    path = write_run(tmp_path / "run", [steps(1)[0]] * 2)
    rewrite(path / "rank0", change)
    refused(path, pattern)
    assert forged_problem(path) is None


def test_a_shape_of_many_dimensions_is_refused(tmp_path):
    with StoreWriter.create(tmp_path / "run") as store:
        writer = store.rank(0)
        writer.layout(Layout((1,) * 5000, "float32"))
        writer.site(Site(Phase.LOSS, Kind.LOSS, "x"), SiteInfo())
    with open_run(tmp_path / "run") as run, pytest.raises(StoreError, match="it is no table of names"):
        len(run.rank(0).layouts)


def test_the_reader_of_the_page_gives_what_the_package_gives(tmp_path):
    """It needs numpy alone."""
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "reader.py").write_text(code)
    rows = [
        row("forward", "output", f"Net.{name}", np.full(3, at + 0.5), path="['é']") for at, name in enumerate("abc")
    ]
    path = write_run(tmp_path / "run", [rows[:1], rows[:2], rows, []])

    def said():
        command = [sys.executable, "-I", "reader.py", str(path)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    with open_run(path) as run:
        records = [record for step in run.rank(0).entries["step"].tolist() for record in run.rank(0).records(step)]
        within = run.rank(0).entry(2).offset
    assert said().stdout.splitlines() == [
        f"{each.step} {site.kind.value} {site.fqn} {site.call} {site.path} {each.summary.checksum:016x}"
        for each in records
        for site in [each.site]
    ]
    damaged = bytearray((path / "rank0" / LOG).read_bytes())
    damaged[within] ^= 1
    (path / "rank0" / LOG).write_bytes(damaged)
    assert "is damaged" in said().stderr
