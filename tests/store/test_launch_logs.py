"""Ranks of a launch leave a log each, which holds their documents."""

from __future__ import annotations

import shutil

import pytest
from laid_out import ALL, SHARED, write
from verbs import verb

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.errors import StoreError
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import Launch, StoreWriter
from introspect_cli.store.verify import verify_run

PACKAGES = {f"package-{number}": "2.13" for number in range(100)}


def files(path):
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def launched(path, ranks):
    return [StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, ranks)) for rank in range(ranks)]


def settled(path, ranks=3, steps=1):
    """A launch whose ranks have their settings alike, but for one."""
    for rank, store in enumerate(launched(path, ranks)):
        with store:
            store.write_settings("packages", PACKAGES)
            store.write_settings("environment", {"RANK": rank})
            store.write_manifest({"status": "complete", "rank": rank, "steps": 0})
    return path


def test_a_launch_leaves_one_file_a_rank_and_few_beside_them(tmp_path):
    path = write(tmp_path / "run", 8, ALL)
    assert files(path) == ["manifest.json", *(f"rank{rank}/log.bin" for rank in range(8))]
    assert verify_run(path).sound
    with open_run(path) as opened:
        assert opened.state is RunState.COMPLETE
        assert [len(opened.rank(rank).sites) for rank in opened.ranks] == [14] * 8


def test_settings_stay_each_ranks_and_what_is_written_anew_counts(tmp_path):
    path, writers = tmp_path / "run", launched(tmp_path / "run", 3)
    for rank, store in enumerate(writers):
        store.write_settings("packages", {"torch": "2.13"})
        store.write_settings("environment", {"RANK": rank})
    for store in writers[:2]:
        store.close()
    for again in range(3):
        with open_run(path) as run:
            assert run.state is RunState.RUNNING if not again else RunState.INTERRUPTED
            found = [dict(run.settings_of(rank)) for rank in range(3)]
        torch = ["2.13", "2.13", f"2.1{3 + again}"]
        assert found == [{"packages": {"torch": torch[rank]}, "environment": {"RANK": rank}} for rank in range(3)]
        writers[2].write_settings("packages", {"torch": f"2.1{4 + again}"})
        writers[2].close()  # what comes after the end counts, too
    assert verify_run(path).sound


def test_a_rank_is_written_once_and_by_one(tmp_path):
    launch = Launch("0" * 32, "0" * 32, 0, 1)
    with StoreWriter.create(tmp_path / "run", launch=launch):
        for force in (False, True):
            with pytest.raises(StoreError, match="is being written by another capture"):
                StoreWriter.create(tmp_path / "run", launch=launch, force=force)
    with pytest.raises(StoreError, match="holds a run already"):
        StoreWriter.create(tmp_path / "run", launch=launch)
    StoreWriter.create(tmp_path / "run", launch=launch, force=True).close()


def test_a_launch_is_packed_and_copied_together(tmp_path):
    for name, path in (("alike", write(tmp_path / "alike", 4, ALL)), ("settled", settled(tmp_path / "settled", 4))):
        parts = [tmp_path / f"{name} on {machine}" for machine in range(2)]
        for machine, part in enumerate(parts):
            shutil.copytree(path, part)
            for rank in range(4):
                if rank // 2 != machine:
                    shutil.rmtree(part / f"rank{rank}")
        for part in parts:
            shutil.copytree(part, tmp_path / f"{name} merged", dirs_exist_ok=True)
        assert verb("pack", path, "-o", tmp_path / f"{name}.zip").returncode == 0
        with open_run(path) as one:
            for other in (f"{name} merged", f"{name}.zip"):
                assert verify_run(tmp_path / other).sound
                with open_run(tmp_path / other) as two:
                    assert two.state is RunState.COMPLETE
                    assert [dict(two.settings_of(rank)) for rank in two.ranks] == [
                        dict(one.settings_of(rank)) for rank in one.ranks
                    ]
                    if name == "alike":
                        assert compare_runs(one, two, DiffOptions()).verdict is Verdict.SAME


def test_ranks_read_a_table_that_they_have_alike_once(tmp_path):
    for hows, tables in ((ALL, 1), (SHARED, 1)):
        with open_run(write(tmp_path / str(hows[0]), 4, hows)) as run:
            assert len({id(run.rank(rank).sites) for rank in run.ranks}) == tables
