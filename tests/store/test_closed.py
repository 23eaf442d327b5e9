"""A rank that has ended leaves few files, can still be read, changed and killed, and shares what others have alike."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial

import pytest
from laid_out import ALL, SHARED, write

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import Folder
from introspect_cli.store.ranks.merge import merge
from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.read.verify import verify_run
from introspect_cli.store.remote.pack import pack
from introspect_cli.store.write import closing
from introspect_cli.store.write.launch import Launch
from introspect_cli.store.write.run_writer import StoreWriter


def files(path):
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def launched(path, ranks):
    return [StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, ranks)) for rank in range(ranks)]


def test_a_launch_leaves_two_files_a_rank_and_few_beside_them(tmp_path):
    path = write(tmp_path / "run", 8, ALL)
    assert [len(files(rank)) for rank in path.glob("rank*")] == [2] * 8
    assert [name.partition("-")[0] for name in files(path / "shared")] == [
        f"{name}.arrow" for name in ("layouts", "modules", "sites")
    ]
    cut = write(tmp_path / "cut", 8, SHARED)
    assert len(files(cut)) == 1 + 2 * 8 + 3, "little layouts that differ stay with their ranks"
    for run in (path, cut):
        assert verify_run(run).sound
        with open_run(run) as opened:
            assert opened.state is RunState.COMPLETE
            assert [len(opened.rank(rank).sites) for rank in opened.ranks] == [14] * 8


def test_settings_stay_each_ranks_and_what_is_written_anew_counts(tmp_path):
    path, writers = tmp_path / "run", launched(tmp_path / "run", 3)
    for rank, store in enumerate(writers):
        store.write_settings("packages", {"torch": "2.13"})
        store.write_settings("environment", {"RANK": rank})
    for store in writers[:2]:
        store.close()
    assert "rank2/settings/packages.yaml" in files(path), "rank 2 is still writing"
    writers[2].write_settings("packages", {"torch": "2.14"})
    for again in range(2):
        writers[2].close()
        assert files(path / "rank2") == ["closed.bin"]
        with open_run(path) as run:
            found = [dict(run.settings_of(rank)) for rank in range(3)]
        torch = ["2.13", "2.13", f"2.1{4 + again}"]
        assert found == [{"packages": {"torch": torch[rank]}, "environment": {"RANK": rank}} for rank in range(3)]
        writers[2].write_settings("packages", {"torch": "2.15"})


class Stopped(BaseException):
    """What stands for a kill: nothing catches it."""


def test_a_rank_that_is_stopped_between_any_two_calls_keeps_all_that_it_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(closing, "close_rank", lambda _: None)
    monkeypatch.setattr("introspect_cli.store.write.run_writer.close_rank", lambda _: None)
    before = write(tmp_path / "before", 2, ALL, steps=2)
    monkeypatch.undo()
    assert "rank1/index.bin" in files(before)
    names = ("open", "write", "rename", "unlink", "rmdir", "mkdir", "fsync")
    calls, stopped = 0, True
    with open_run(before) as one:
        while stopped:
            run = tmp_path / "run"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(before, run)
            left, stopped = calls, False

            def call(does, *given, **more):
                nonlocal left, stopped
                left -= 1
                if left < 0:
                    stopped = True
                    raise Stopped
                return does(*given, **more)

            with monkeypatch.context() as patch, Folder.at(str(run / "rank1")) as folder:
                for name in names:
                    patch.setattr(os, name, partial(call, getattr(os, name)))
                with suppress(Stopped):
                    closing.close_rank(folder)
            calls += 1
            with open_run(run) as two:
                assert two.state is RunState.COMPLETE, calls
                result = compare_runs(one, two, DiffOptions())
            assert (result.verdict, result.counts.records) == (Verdict.SAME, 2 * 2 * 14), calls
            assert not verify_run(run).findings, calls
    assert calls > 30
    assert files(run / "rank1") == ["closed.bin", "records.arrow"]


def test_a_launch_that_has_ended_is_packed_and_merged_with_what_its_ranks_share(tmp_path):
    path = write(tmp_path / "run", 4, ALL)
    for machine in range(2):
        shutil.copytree(path, tmp_path / f"on{machine}")
        for rank in range(4):
            if rank // 2 != machine:
                shutil.rmtree(tmp_path / f"on{machine}" / f"rank{rank}")
    merge([tmp_path / "on0", tmp_path / "on1"], tmp_path / "merged")
    pack(path, tmp_path / "packed.zip")
    with open_run(path) as one:
        for other in ("merged", "packed.zip"):
            assert verify_run(tmp_path / other).sound
            with open_run(tmp_path / other) as two:
                assert two.state is RunState.COMPLETE
                assert compare_runs(one, two, DiffOptions()).verdict is Verdict.SAME


def everything(path):
    with open_run(path) as run:
        return [(run.rank(rank).sites, run.rank(rank).totals) for rank in run.ranks]


def altered(path, change):
    path.write_bytes(change(path.read_bytes()))


HARMS = {
    "cut": (lambda run: altered(run / "rank0/closed.bin", lambda data: data[:9]), "damaged: it is not what a rank"),
    "table": (
        lambda run: altered(run / "rank0/closed.bin", lambda data: data[:30] + b"x" + data[31:]),
        "closed.bin is damaged: its table was altered",
    ),
    "short": (lambda run: altered(run / "rank0/closed.bin", lambda data: data[:-9]), "its table cannot be read"),
    "content": (lambda run: altered(run / "rank0/closed.bin", lambda data: data[:-9] + bytes(9)), "is damaged"),
    "shared": (lambda run: shutil.rmtree(run / "shared"), "shared/sites.arrow-.* which it names, is missing"),
    "other": (
        lambda run: [altered(file, lambda data: data[::-1]) for file in (run / "shared").iterdir()],
        "its bytes are not those that were indexed",
    ),
}


@pytest.mark.parametrize("name", HARMS)
def test_what_was_harmed_is_named(tmp_path, name):
    harm, words = HARMS[name]
    run = write(tmp_path / "run", 2, ALL)
    harm(run)
    with pytest.raises(StoreError, match=words):
        everything(run)
    assert not verify_run(run).sound


@pytest.mark.parametrize("name", ["../../x.yaml", "records.arrow", "tensors/0.safetensors"])
@pytest.mark.parametrize("where", [[0, 4], [-1, 4], [0, 1 << 40], [0.5, 1], "../../etc/passwd", None])
def test_no_table_leads_out_of_a_run(tmp_path, name, where):
    run = write(tmp_path / "run", 1, ALL)
    with Folder.at(str(run / "rank0")) as folder:
        closing._write(folder, {}, {})
        data = (run / "rank0/closed.bin").read_bytes()
        text = closing.json.dumps({name: where, "index.bin": where}).encode()
        header = closing.BUNDLE_HEADER.pack(data[:8], 2, closing.zlib.crc32(text), len(text))
        (run / "rank0/closed.bin").write_bytes(header + text + bytes(100))
    with pytest.raises(StoreError, match="its table cannot be read"):
        open_run(run)
