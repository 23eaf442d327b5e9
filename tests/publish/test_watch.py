"""`introspect watch`: a run while it goes on, on a terminal, in a pipe, once."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest
from synthetic import batch, row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter


def steps(*values):
    return [[row("loss", "loss", "loss", value), row("optimizer", "grad", "Net.weight", value)] for value in values]


@pytest.fixture
def runs(tmp_path):
    """Two runs of six steps; the second differs from its fourth on."""
    home = tmp_path / "introspect-runs"
    write_run(home / "a", steps(6.0, 5.0, 4.0, 3.0, 2.0, 1.0), manifest={"started": "2026-06-15T12:00:00+00:00"})
    late = {"started": "2026-06-15T12:00:10+00:00", "ended": "2026-06-15T12:00:13+00:00"}
    write_run(home / "b", steps(6.0, 5.0, 4.0, 9.0, 2.0, 1.0), manifest=late)
    return home


def test_a_run_is_shown_once_with_its_curves_rate_and_findings(runs, introspect):
    done = introspect("watch", "--once")
    assert done.returncode == 0, done.stderr
    assert "introspect: the last run is introspect-runs/b\n" in done.stderr
    assert "introspect-runs/b  complete, step 5\n" in done.stdout
    assert "loss  1 at step 5, 1 to 9\n" in done.stdout
    assert "check: " in done.stdout


@pytest.mark.parametrize(("other", "code"), [("a", 1), ("b", 0)])
def test_the_distance_to_a_reference_is_shown_with_the_status_of_diff(runs, introspect, other, code):
    done = introspect("watch", runs / "b", "--against", runs / other, "--once")
    assert done.returncode == code, done.stderr
    assert f"against {runs / other}: {'First divergence at step 3' if code else 'The runs are the same'}" in done.stdout


def test_the_reference_is_compared_as_diff_would(runs, introspect):
    words = ("watch", runs / "b", "--against", runs / "a", "--once")
    assert introspect(*words, "--steps", ":3").returncode == 0
    assert introspect(*words, "--kinds", "grad").returncode == 1
    assert introspect(*words, "--atol", "100").returncode == 0
    alone = introspect("watch", runs / "b", "--atol", "1", "--once")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "name a run with --against" in alone.stderr


def test_a_run_that_goes_on_is_not_said_to_end_nor_to_be_healthy_before_there_is_a_step(runs, introspect):
    with StoreWriter.create(runs / "part") as store:
        store.write_manifest({"status": "running"})
        said = introspect("watch", runs / "part", "--once").stdout
        assert "running, no step yet\n" in said
        assert "check: no rule has the data it needs yet" in said
        writer = store.rank(0)
        for number, rows in enumerate(steps(6.0, 5.0)):
            writer.append(number, batch(writer, rows))
        said = introspect("watch", runs / "part", "--against", runs / "a", "--once").stdout
    assert f"against {runs / 'a'}: no divergence so far: 4 records of 2 steps agree" in said
    assert "ends" not in said


def test_runs_marks_those_that_go_on(tmp_path, introspect):
    with StoreWriter.create(tmp_path / "introspect-runs" / "now") as store:
        store.write_manifest({"status": "running"})
        assert re.search(r"introspect-runs/now .*running", introspect("runs").stdout)


TRAIN = """\
import os, time, torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    while step == 9 and not os.path.exists("shown"):
        time.sleep(0.05)
    loss = net(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def on_a_terminal(*words, cwd, seen=None, **variables):
    """What a command draws on a terminal of 80 columns, and its exit status; `seen` is called with it as it grows."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "introspect_cli", *words],
        cwd=cwd, stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **variables},
    )  # fmt: skip
    os.close(follower)
    drawn = b""
    while True:
        try:
            piece = os.read(leader, 1 << 16)
        except OSError:  # how a terminal says that nobody writes to it any more
            break
        if not piece:
            break
        drawn += piece
        if seen is not None:
            seen(drawn)
    os.close(leader)
    return drawn.decode(), process.wait()


def test_the_screen_is_drawn_anew_and_the_command_ends_with_the_run(tmp_path, introspect):
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("capture", "-q", "-o", "run", "train.py")
    training = threading.Thread(target=introspect, args=words)
    training.start()
    while not (tmp_path / "run" / "rank0" / "log.bin").exists():
        assert training.is_alive()
        time.sleep(0.01)

    def seen(drawn):
        if b"running, " in drawn:  # training waits for that before its last steps
            (tmp_path / "shown").touch()

    drawn, code = on_a_terminal("watch", "run", cwd=tmp_path, seen=seen, NO_COLOR="1")
    (tmp_path / "shown").touch()
    training.join()
    assert code == 0, drawn
    assert "running, " in drawn
    assert "complete, step 11" in drawn
    assert "\x1b[1A" in drawn, "nothing was drawn over"
    assert not re.search(r"\x1b\[[0-9;]*3[0-9](;|m)", drawn), "colours were drawn despite NO_COLOR"


def test_what_is_wider_than_the_terminal_is_wrapped_and_not_cut(runs):
    with open_run(runs / "a") as one, open_run(runs / "b") as two:
        sentence = compare_runs(one, two, DiffOptions()).sentence
    drawn, code = on_a_terminal("watch", "b", "--against", "a", cwd=runs, NO_COLOR="1")
    assert code == 1, drawn
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).splitlines()
    assert sentence in " ".join(" ".join(rows).split())
    assert max(map(len, rows)) <= 80


def test_a_pipe_gets_a_line_for_each_look_and_the_screen_at_the_end(runs, introspect):
    done = introspect("watch", "b", cwd=runs)
    assert done.stdout.startswith("b  complete, step 5")
    assert "\x1b" not in done.stdout
