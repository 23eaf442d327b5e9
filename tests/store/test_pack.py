"""A run as one file: packed, read by every verb in its place, fetched, and refused where it is not one."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile

import numpy as np
import pytest
from synthetic import row, write_run
from verbs import verb

from introspect_cli.errors import StoreError
from introspect_cli.store.run import open_run


def pair(tmp_path):
    for name, shift in (("a", 0.0), ("b", 1.0)):
        steps = [[row("forward", "output", "Net", np.array([1.0 + shift * (n > 1)]))] for n in range(4)]
        write_run(tmp_path / name, steps)


def test_every_verb_reads_a_pack_as_the_run(introspect, tmp_path):
    pair(tmp_path)
    done = introspect("pack", "a")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote a.introspect.zip (")
    assert introspect("pack", "b", "-o", "b.zip").returncode == 0
    direct, packed = introspect("diff", "a", "b"), introspect("diff", "a.introspect.zip", "b.zip")
    assert (packed.returncode, packed.stdout) == (1, direct.stdout)
    for words in (["show", "b.zip"], ["check", "b.zip"], ["verify", "b.zip"], ["report", "b.zip", "-o", "b.html"]):
        assert introspect(*words).returncode == 0, words
    listed = introspect("runs", tmp_path)
    assert "a.introspect.zip" in listed.stdout, listed.stderr


def test_two_packs_of_a_run_are_the_same_file(tmp_path):
    pair(tmp_path)
    for name in ("one.zip", "two.zip"):
        assert verb("pack", tmp_path / "a", "-o", tmp_path / name).returncode == 0
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_what_is_unpacked_goes_when_the_run_is_closed(tmp_path, monkeypatch):
    pair(tmp_path)
    assert verb("pack", tmp_path / "a", "-o", tmp_path / "a.zip").returncode == 0
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "room"))
    for url in (tmp_path / "a.zip", f"file://{tmp_path / 'a.zip'}"):
        with open_run(url) as run:
            assert run.last_step == 3
            assert len(list((tmp_path / "room").iterdir())) == 1
        assert not list((tmp_path / "room").iterdir())


def test_a_pack_that_is_there_stays(introspect, tmp_path):
    pair(tmp_path)
    (tmp_path / "a.zip").write_text("mine")
    done = introspect("pack", "a", "-o", "a.zip")
    assert done.returncode == 2
    assert "a.zip exists" in done.stderr
    assert (tmp_path / "a.zip").read_text() == "mine"


@pytest.mark.parametrize("name", ["../evil.yaml", "/etc/evil.yaml", "rank0/../../log.bin", "run.py"])
def test_names_that_no_run_has_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as made:
        made.writestr("manifest.json", "{}")
        made.writestr(name, "owned")
    with pytest.raises(StoreError, match="is not a packed run"):
        open_run(tmp_path / "evil.zip")


def test_what_claims_far_too_much_is_not_unpacked(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("manifest.json", "{}")
        made.writestr("rank0/log.bin", bytes(300_000_000))
    (tmp_path / "bomb.zip").write_bytes(packed.getvalue())
    with pytest.raises(StoreError, match="far more than a run of its size can"):
        open_run(tmp_path / "bomb.zip")


def test_a_damaged_pack_is_a_sentence(tmp_path):
    pair(tmp_path)
    assert verb("pack", tmp_path / "a", "-o", tmp_path / "a.zip").returncode == 0
    whole = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-100])
    with pytest.raises(StoreError, match="is a damaged pack"):
        open_run(tmp_path / "cut.zip")
    spoilt = bytearray(whole)
    spoilt[len(whole) // 3] ^= 0xFF
    (tmp_path / "spoilt.zip").write_bytes(spoilt)
    with pytest.raises(StoreError), open_run(tmp_path / "spoilt.zip") as run:
        list(run.rank(0).records(0))


def test_a_url_is_fetched_and_that_is_told(tmp_path, capsys, web_server):
    pair(tmp_path)
    assert verb("pack", tmp_path / "a", "-o", tmp_path / "a.zip").returncode == 0
    for url in (f"file://{tmp_path}", web_server):
        with open_run(f"{url}/a.zip") as run:
            assert run.last_step == 3
            assert str(run.path) == f"{url}/a.zip"
        said = capsys.readouterr().err
        assert f"introspect: fetching {url}/a.zip" in said
        with pytest.raises(StoreError, match="there is no run at"):
            open_run(f"{url}/nothing.zip")
    with pytest.raises(StoreError, match=r"cannot reach http://.*Connect call failed"):
        open_run("http://127.0.0.1:9/a.zip")
    with pytest.raises(StoreError, match="cannot reach"):
        open_run("nonsense://x/y.zip")
    with pytest.raises(StoreError, match="cannot reach"):
        open_run("github://x")  # which asks for more than a name


def test_a_pipe_is_no_pack_and_nobody_waits_for_its_writer(introspect, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = introspect("show", "pipe")
    assert (done.returncode, done.stderr.count("is not a run: not a directory")) == (2, 1)


def test_runs_directories_ignore_themselves_in_git(tmp_path):
    write_run(tmp_path / "introspect-runs" / "a", [])
    write_run(tmp_path / "elsewhere" / "a", [])
    assert (tmp_path / "introspect-runs" / ".gitignore").read_text().splitlines()[-1] == "*"
    assert not (tmp_path / "elsewhere" / ".gitignore").exists()
