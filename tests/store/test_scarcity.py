"""A process that has run out of something says so: no sound run is damaged, and nothing is called a bug."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest
from synthetic import row, write_run

from introspect_cli.errors import StoreError, scarcity
from introspect_cli.store import files
from introspect_cli.store.run import open_run
from introspect_cli.store.verify import verify_run

FEW_FILES = """
import os, sys
from introspect_cli.cli import main
left, taken = int(sys.argv.pop(1)), []
try:
    main()  # what a verb imports is loaded while it can be
except SystemExit:
    pass
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for fd in taken[:left]:
    os.close(fd)
main()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    steps = [[row("forward", "output", "A", np.ones(3))]] * 2
    return write_run(tmp_path_factory.mktemp("scarce") / "run", steps, settings={"git": {"commit": "a"}}, ranks=3)


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_few_descriptors_are_named_as_such(run, tmp_path, verb):
    script = tmp_path / "few.py"
    script.write_text(FEW_FILES)
    seen = set()
    for left in (0, 4, 30):
        runs = [str(run)] * (2 if verb == "diff" else 1)
        command = f"ulimit -n 64; exec {sys.executable} {script} {left} {verb} {' '.join(runs)}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert "damaged" not in done.stdout + done.stderr
        assert "mistake" not in done.stderr
        assert done.returncode == 0 or "this process may not open more files" in done.stderr, done.stderr
        seen.add(done.returncode)
    assert seen == {0, 2}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_reader_tells_scarcity_from_damage(run, monkeypatch, number):
    def scarce(*_):
        raise OSError(number, "x")

    monkeypatch.setattr(files.Handle, "read", scarce)
    for read in (open_run, verify_run):
        with pytest.raises(StoreError) as caught:
            read(run)
        assert "damaged" not in str(caught.value)
        assert scarcity(OSError(number, "x")) in str(caught.value)


@pytest.mark.parametrize("refused", ["read_file", "names"])
def test_what_the_reader_may_not_read_is_not_called_damaged(run, monkeypatch, refused):
    def closed(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.Folder, refused, closed)
    for read in (open_run, verify_run):
        with pytest.raises(StoreError, match=r"^cannot read .*: permission denied$") as caught:
            read(run)
        assert not isinstance(caught.value, files.DamageError)
