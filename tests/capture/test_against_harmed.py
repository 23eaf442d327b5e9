"""A run that is compared while it is written, and what may befall either process, or the reference, at any instant."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from against import HANGS, TRAIN, ended, pids
from interpreter import PYTHON

from introspect_cli.errors import StoreError
from introspect_cli.store.read.run import open_run
from introspect_cli.store.read.verify import verify_run

pytestmark = pytest.mark.usefixtures("quick_python")

STEPS = 60
OTHER = TRAIN.replace("torch.nn.Linear(4, 1)", "torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))")


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A script, its run, and the run of another model."""
    folder = tmp_path_factory.mktemp("harmed")
    (folder / "train.py").write_text(TRAIN)
    (folder / "other.py").write_text(OTHER)
    for name, script in (("ref", "train.py"), ("another", "other.py")):
        done = forks("capture", "-o", name, "--save-tensors", "*", script, str(STEPS), "-1", "0", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def begun(process, run):
    """Wait until what compares is there."""
    until = time.monotonic() + HANGS
    while not (found := pids(str(run))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    return found[0]


def deleted(_place, reference):
    shutil.rmtree(reference, ignore_errors=True)


def damaged(_place, reference):
    for file in (reference / "rank0").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] + bytes(9) + data[len(data) // 2 + 9 :])


def cut(_place, reference):
    for file in (reference / "rank0").iterdir():
        os.truncate(file, file.stat().st_size // 2)


def newer(_place, reference):
    (reference / "manifest.yaml").write_text("format: 99\nid: 0\n")


def another(place, reference):
    shutil.rmtree(reference, ignore_errors=True)
    shutil.copytree(place / "another", reference)


HARMS = [deleted, damaged, cut, newer, another]


def trained(place, tmp_path, fault, python):
    words = ("--no-packages", "--against", "ref", "--keep-around", "2", "-o", str(tmp_path / "run"))
    shutil.copytree(place / "ref", tmp_path / "ref")
    shutil.copy(place / "train.py", tmp_path)
    return subprocess.Popen(
        [python, "-m", "introspect_cli", "capture", *words, "train.py", str(STEPS), str(fault), "0.01"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def assert_unharmed(process, tmp_path, fault):
    """Training came to its end with all that it computes, one line or two say what became of the comparison."""
    printed, said = process.communicate(timeout=HANGS)
    assert process.returncode == 0, said
    bare = subprocess.run(
        [sys.executable, "train.py", str(STEPS), str(fault), "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed == bare.stdout
    assert "Traceback" not in said
    lines = [
        line for line in said.splitlines() if "against ref:" in line or "at the end" in line or "not compared" in line
    ]
    assert 1 <= len(lines) <= 2, said
    with open_run(tmp_path / "run") as run:
        assert len(run.rank(0)) == STEPS
    assert verify_run(tmp_path / "run").sound
    assert ended(str(tmp_path / "run"))
    return lines


def harmed(place, tmp_path, harm, seed):
    """What is said where the reference is harmed at an instant that the seed chooses; training waits meanwhile."""
    chance = random.Random(seed)
    fault = chance.choice([-1, 3, 30, 55])
    process = trained(place, tmp_path, fault, sys.executable)
    begun(process, tmp_path / "run")
    time.sleep(chance.random() * 2.5 if seed else 0)
    process.send_signal(signal.SIGSTOP)
    harm(place, tmp_path / "ref")
    process.send_signal(signal.SIGCONT)
    return assert_unharmed(process, tmp_path, fault)


@pytest.mark.parametrize("harm", [damaged, another])
def test_a_reference_that_is_harmed_while_the_run_goes_on_costs_its_answer_alone(place, tmp_path, harm):
    harmed(place, tmp_path, harm, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("harm", HARMS)
def test_the_same_at_other_instants(place, tmp_path, harm, seed):
    harmed(place, tmp_path, harm, seed)


def killed(place, tmp_path, seed):
    """Kill training at a random instant, with a divergence that has it write whole tensors; what is left of the run."""
    chance = random.Random(seed)
    process = trained(place, tmp_path, 10, PYTHON)
    begun(process, tmp_path / "run")
    time.sleep(chance.random() * 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert ended(str(tmp_path / "run")), "what compares outlives training"
    try:
        with open_run(tmp_path / "run") as run:
            last = run.last_step
    except StoreError:
        return None
    half = [words for words in verify_run(tmp_path / "run").findings if "tensors" in words]
    assert not half
    return last


def test_training_that_is_killed_leaves_no_process_and_a_sound_run(place, tmp_path):
    killed(place, tmp_path, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 13))
def test_the_same_killed_at_other_instants(place, tmp_path, seed):
    killed(place, tmp_path, seed)


def lost(place, tmp_path, seed):
    """Kill what compares at a random instant."""
    chance = random.Random(seed)
    fault = chance.choice([-1, 5, 40])
    process = trained(place, tmp_path, fault, sys.executable)
    found = begun(process, tmp_path / "run")
    time.sleep(chance.random() * 2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(found, signal.SIGKILL)
    return assert_unharmed(process, tmp_path, fault)


def test_a_comparison_that_is_killed_costs_its_answer_alone(place, tmp_path):
    lost(place, tmp_path, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 9))
def test_the_same_for_a_comparison_killed_at_other_instants(place, tmp_path, seed):
    lost(place, tmp_path, seed)


def test_a_reference_that_goes_on_itself_is_compared_as_far_as_it_is(place, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    reference = subprocess.Popen(
        [PYTHON, "-m", "introspect_cli", "capture", "-q", "-o", "ref", "train.py", str(STEPS), "-1", "0.05"],
        cwd=tmp_path, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + HANGS
        while not (tmp_path / "ref" / "rank0" / "log.bin").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        words = ("--no-packages", "--against", "ref", "-o", str(tmp_path / "run"))
        process = subprocess.Popen(
            [sys.executable, "-m", "introspect_cli", "capture", *words, "train.py", str(STEPS), "30", "0.01"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert_unharmed(process, tmp_path, 30)
    finally:
        reference.kill()
        reference.wait()
