"""What ranks on one disk hold alike is stored once, and each rank can still be read, changed and killed alone."""

from __future__ import annotations

import os

import pytest
from laid_out import ALL, SHARED, write

from introspect_cli.store import once
from introspect_cli.store.files import Folder
from introspect_cli.store.launch import Launch
from introspect_cli.store.reader import open_run
from introspect_cli.store.verify import verify_run
from introspect_cli.store.writer import StoreWriter


def places(path, name):
    """The different files that the ranks of a run have under a name."""
    return {(rank / name).stat().st_ino for rank in path.glob("rank*")}


def test_names_that_all_ranks_have_are_stored_once_and_their_records_are_not(tmp_path):
    path = write(tmp_path / "run", 8, ALL)
    assert len(places(path, "sites.arrow")) == len(places(path, "modules.arrow")) == 1
    assert len(places(path, "records.arrow")) == 8
    shared = write(tmp_path / "shared", 8, SHARED)
    assert len(places(shared, "layouts.arrow")) == 8, "each rank has rows of its own"
    for run in (path, shared):
        assert verify_run(run).sound
        with open_run(run) as opened:
            assert [len(opened.rank(rank).sites) for rank in opened.ranks] == [14] * 8


def test_settings_that_are_equal_are_stored_once_and_what_is_written_anew_is_another_file(tmp_path):
    writers = [StoreWriter.create(tmp_path / "run", launch=Launch("0" * 32, "0" * 32, rank, 3)) for rank in range(3)]
    for rank, store in enumerate(writers):
        store.write_settings("packages", {"torch": "2.13"})
        store.write_settings("environment", {"RANK": rank})
    for store in writers[:2]:
        store.close()
    assert len(places(tmp_path / "run", "settings/packages.yaml")) == 2, "rank 2 is still writing"
    writers[2].write_settings("packages", {"torch": "2.14"})
    writers[2].close()
    writers[2].close()
    assert len(places(tmp_path / "run", "settings/environment.yaml")) == 3
    with open_run(tmp_path / "run") as run:
        found = [dict(run.settings_of(rank)) for rank in range(3)]
    torch = ["2.13", "2.13", "2.14"]
    assert found == [{"packages": {"torch": torch[rank]}, "environment": {"RANK": rank}} for rank in range(3)]


@pytest.mark.parametrize("name", ["link", "rename"])
def test_a_rank_that_is_stopped_in_between_or_has_no_links_keeps_its_files(tmp_path, monkeypatch, name):
    does = getattr(os, name)

    def refused(old, new, **more):
        if str(new if name == "rename" else old).endswith(".arrow"):
            raise OSError(1, "not permitted")
        does(old, new, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refused)
        path = write(tmp_path / "run", 2, ALL)
    assert len(places(path, "sites.arrow")) == 2
    assert verify_run(path).sound
    for rank in ("rank1", "rank0"):
        with Folder.at(str(path / rank)) as folder:
            once.keep_once(folder)
    assert len(places(path, "sites.arrow")) == 1


def test_a_file_that_is_not_what_its_digest_says_is_not_linked(tmp_path):
    path = write(tmp_path / "run", 1, ALL)
    before = (path / "rank0/sites.arrow").read_bytes()
    for file in (path / once.EQUAL).iterdir():
        file.unlink()
        file.write_bytes(b"something else")
    with Folder.at(str(path / "rank0")) as rank:
        once.keep_once(rank)
    assert (path / "rank0/sites.arrow").read_bytes() == before
