"""However a capturing process ends, it ends as the script would, and every step it finished can be read."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from opcapture import compared
from survival import ENVIRONMENT, HEAD, capture
from sweeps import sliced

from introspect_cli.compare.result import Verdict
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run

pytestmark = pytest.mark.usefixtures("quick_python")


ENDINGS = {
    "_exit": ("os._exit(7)", 7),
    "segfault": ("ctypes.string_at(0)", -signal.SIGSEGV),
    "abort": ("os.abort()", -signal.SIGABRT),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(9)", -signal.SIGTERM),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "interrupted": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "exit": ("sys.exit(5)", 5),
    "exception": ("net(1)", 1),
    "handled": ("signal.signal(signal.SIGTERM, lambda *a: sys.exit(9)); os.kill(os.getpid(), signal.SIGTERM)", 9),
}
OF_ITSELF = ("interrupted", "exit", "exception", "handled")
"""Endings in which the interpreter goes on long enough for the run to be closed."""


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    """An undisturbed run of two more steps than the head has."""
    folder = tmp_path_factory.mktemp("five")
    (folder / "train.py").write_text(HEAD + "train(2)")
    process = capture(folder / "train.py", folder / "run")
    process.communicate()
    assert process.returncode == 0
    return folder / "run"


def assert_compared(path, whole, note):
    """Assert that a diff with an undisturbed run compares what is there, and says where it ends."""
    result = compared(path, whole)
    with open_run(path) as a, open_run(whole) as b:
        common = min(len(a.rank(0)), len(b.rank(0)))
    assert result.verdict is Verdict.UNDECIDED, result.sentence
    assert f"equal up to and including step {common - 1}, where run" in result.sentence
    assert result.counts.steps_compared == common
    assert any(note in said for said in result.notes), result.notes


@pytest.mark.parametrize("name", sliced(ENDINGS, ("_exit", "killed", "interrupted", "exit", "handled")))
def test_a_captured_script_ends_as_the_bare_one(tmp_path, five_steps, name):
    body, code = ENDINGS[name]
    (tmp_path / "train.py").write_text(HEAD + body)
    process = capture(tmp_path / "train.py", tmp_path / "run")
    out, err = process.communicate()
    assert process.returncode == code, err.decode()
    assert out == b"three\n"
    assert b"introspect" not in err
    with open_run(tmp_path / "run") as run:
        reader = run.rank(0)
        assert [entry.step for entry in reader.steps][:3] == [0, 1, 2]
        assert all(len(list(reader.records(step))) > 20 for step in range(3))
        assert run.state is (RunState.COMPLETE if name in OF_ITSELF else RunState.INTERRUPTED)
        if name in OF_ITSELF:
            assert run.manifest["exit_code"] == code
    if name not in OF_ITSELF:
        assert_compared(tmp_path / "run", five_steps, "interrupted: it holds up to and including step 2")


STEPS = 60
STEPPING = f"""
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters())
print("ready", flush=True)
for step in range({STEPS}):
    loss = net(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, flush=True)
"""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""What is sent; most are the one that a process cannot notice."""


def begun(forks, folder, run):
    """A capture that has come as far as its first step, and what it prints."""
    ours, theirs = os.pipe()
    words = ["-m", "introspect_cli", "capture", "-q", "--no-packages", "-o", run, "train.py"]
    with open(os.devnull, "r+b") as none:
        process = forks.start(words, {}, folder, none.fileno(), theirs, none.fileno())
    os.close(theirs)
    printed = os.fdopen(ours, "rb")
    assert printed.readline() == b"ready\n"
    return process, printed


def digests(path):
    """Number and digest of every step of a run, each read and checked."""
    with open_run(path) as run:
        if not run.ranks:
            return []
        reader = run.rank(0)
        for entry in reader.steps:
            list(reader.records(entry.step))
        return [(entry.step, entry.digest) for entry in reader.steps]


def problem_of(path, whole, printed, sent, code):
    """What is wrong with a run that was killed after it had printed so many steps; "" if nothing is."""
    kept = digests(path)
    ended = [step for step in kept if step in whole]
    if len(kept) < printed:
        return f"{printed} steps had ended and {len(kept)} are kept"
    if len(kept) > len(ended) + (sent == signal.SIGINT):  # an interrupt lets the capture write the step it was in
        return "a step is not what it is in the undisturbed run"
    if [step for step, _ in kept] != list(range(len(kept))):
        return "steps are missing in between"
    if code not in (-sent, 0) and not (sent == signal.SIGINT and code in (130, 1)):
        return f"the exit code is {code}"
    with open_run(path) as run:
        finished = run.state is RunState.COMPLETE and len(kept) == len(whole)  # killed while python cleaned up
        if code == -signal.SIGKILL and run.state is not RunState.INTERRUPTED and not finished:
            return f"the run is called {run.state.value}"
    report = verify_run(path)
    return "" if report.sound else f"verify: {'; '.join(map(str, report.findings))}"


def test_a_run_killed_at_any_instant_can_be_read(tmp_path, forks):
    """It has every step whose end was printed, or one more, each as in an undisturbed run, and none by half."""
    (tmp_path / "train.py").write_text(STEPPING)
    process, printed = begun(forks, tmp_path, "whole")
    began = time.monotonic()
    printed.read()
    seconds = time.monotonic() - began
    assert process.wait() == 0
    whole = digests(tmp_path / "whole")
    assert len(whole) == STEPS
    problems, between = [], 0
    for number in range(10):
        chance = random.Random(number)
        sent, after = chance.choice(SIGNALS), chance.uniform(0, seconds)
        process, printed = begun(forks, tmp_path, f"run{number}")
        time.sleep(after)
        with contextlib.suppress(BrokenPipeError):  # it has ended before
            process.send(sent)
        steps = len(printed.read().splitlines())
        between += 0 < steps < STEPS
        found = problem_of(tmp_path / f"run{number}", whole, steps, sent, process.wait())
        problems += [(number, sent, after, steps, found)] if found else []
    assert problems == []
    assert between, "no kill came in between"


def run_script(tmp_path, body, *options):
    (tmp_path / "train.py").write_text(HEAD + body)
    command = [sys.executable, "-m", "introspect_cli", "capture", "-o", "run", *options, "train.py"]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_a_removed_directory_ends_the_run_and_not_the_script(tmp_path):
    """The files stay open, so recording goes on unseen; what needs the directory says once that it is gone."""
    out = run_script(tmp_path, "shutil.rmtree('run'); train(3); print('done'); sys.exit(4)")
    assert out.returncode == 4
    assert out.stdout == "three\ndone\n"
    said = [line for line in out.stderr.splitlines() if line]
    assert all(line.startswith("introspect: ") for line in said)
    assert 1 <= len(said) <= 2
    assert "Traceback" not in out.stderr


def test_a_disk_that_fills_up_ends_the_run_and_not_the_script(tmp_path, five_steps):
    """Writes fail from some size on; the script goes on, the loss is told once, the steps before it are whole."""

    body = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    out = run_script(tmp_path, f"{body}train(60); print('done'); sys.exit(4)")
    assert out.returncode == 4, out.stderr
    assert out.stdout == "three\ndone\n"
    lines = out.stderr.splitlines()
    assert len(lines) == 2, out.stderr
    assert "the script goes on, the run ends here" in lines[0]
    said = re.search(r"(\d+) steps up to step (\d+) can be read in run; then the store was lost", lines[1])
    assert said, lines[1]
    with open_run(tmp_path / "run") as run:
        steps = run.rank(0).steps
        assert 0 < len(steps) < 63
        assert (int(said[1]), int(said[2])) == (len(steps), steps[-1].step)
        assert all(len(list(run.rank(0).records(entry.step))) > 20 for entry in steps)
    assert_compared(tmp_path / "run", five_steps, "could not see everything: cannot write to")


def test_reading_while_it_is_written(tmp_path):
    (tmp_path / "train.py").write_text(HEAD + "print('go', flush=True)\nsys.stdin.read()\n")
    command = [sys.executable, "-m", "introspect_cli", "capture", "-q", "-o", "run", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.RUNNING
        assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2]
    second = run_script(tmp_path, "")
    assert second.returncode == 2
    assert "is being written by another capture" in second.stderr
    process.communicate(b"")
    assert process.returncode == 0
    shutil.rmtree(tmp_path / "run")
    assert os.listdir(tmp_path) == ["train.py"]
