"""`capture --against`: a run is compared while it is written, and training notices nothing of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from interpreter import PYTHON
from sweeps import sliced

from introspect_cli.api import recording
from introspect_cli.capture.background import BackgroundProcess
from introspect_cli.store.run import open_run
from introspect_cli.store.verify import verify_run

pytestmark = pytest.mark.usefixtures("quick_python")


HANGS = 900.0
"""Seconds after which something waits for ever, however busy the machine is."""


TRAIN = """\
import random, sys, time, torch
steps, fault, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
random.seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(steps):
    batch = torch.randn(8, 4)
    if step == fault:
        batch = batch * 2
    loss = net(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(pause * (min(1.15**step, 100) if steps > 100 else 1))  # it is ended meanwhile, on a busy machine too
print(step, loss.item(), random.random(), torch.rand(1).item())
"""


def pids(text):
    """Processes that compare a run of that name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"introspect_cli.commands.live" in words and text.encode() in words and b"trap" not in words:
            found.append(int(folder.name))
    return found


def ended(text):
    """Whether no process compares that run any more, at most after a while."""
    until = time.monotonic() + HANGS
    while pids(text):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A script, its run of 40 steps, one whose sixth batch is another, and the run of another model."""
    folder = tmp_path_factory.mktemp("against")
    (folder / "train.py").write_text(TRAIN)
    (folder / "other.py").write_text(TRAIN.replace("nn.Linear(4, 1)", "nn.Sequential(torch.nn.Linear(4, 1))"))
    for name, script, fault in (("ref", "train.py", -1), ("noise", "train.py", 5), ("another", "other.py", -1)):
        done = forks("capture", "-o", name, "--save-tensors", "*", script, "40", str(fault), "0", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_training_is_the_same_to_the_bit_and_the_first_divergence_is_said_when_it_happens(place, introspect, tmp_path):
    words = ("train.py", "40", "5", "0")
    bare = introspect("capture", "-o", tmp_path / "bare", *words, cwd=place)
    done = introspect("capture", "--against", "ref", "-o", tmp_path / "run", *words, cwd=place)
    assert (done.returncode, done.stdout) == (0, bare.stdout), done.stderr
    with open_run(tmp_path / "bare") as one, open_run(tmp_path / "run") as two:
        assert one.rank(0).entries["digest"].tobytes() == two.rank(0).entries["digest"].tobytes()
        assert "against" not in two.manifest["options"]
    assert "introspect: against ref: First divergence at step 5: the input [0] of Linear" in done.stderr
    assert "introspect: against ref, at the end: " in done.stderr
    assert ended(str(tmp_path))


def test_stop_ends_the_script_there_with_the_status_of_diff(place, introspect, tmp_path):
    words = ("--stop", "--against", "ref", "-o", tmp_path / "run", "train.py", "4000", "3", "0.02")
    done = introspect("capture", *words, cwd=place)
    assert done.returncode == 1, done.stderr
    assert "(--stop)" in done.stderr
    assert done.stdout == ""  # the script's last line was not reached
    with open_run(tmp_path / "run") as run:
        assert 3 < len(run.rank(0)) < 4000
    assert "at its first divergence (--stop)" in introspect("runs", tmp_path).stdout


EVALUATED = """\
import time, torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
with torch.no_grad():
    for _ in range(8):
        net(torch.ones(2, 4)), time.sleep(PAUSE)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = net(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_an_evaluation_before_training_which_is_taken_back_is_no_divergence(introspect, tmp_path):
    for name, pause in (("quick", "0"), ("slow", "0.3")):
        (tmp_path / f"{name}.py").write_text(EVALUATED.replace("PAUSE", pause))
    assert introspect("capture", "-o", "ref", "quick.py").returncode == 0
    done = introspect("capture", "--stop", "--against", "ref", "-o", "run", "slow.py")
    assert "First divergence" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ("--kinds 'output,loss' --modules Linear", 1, "First divergence at step 5: the output of Linear"),
        ("--noise noise", 0, "within"),
        ("--steps 300:", 2, "not compared with ref any further: "),
    ],
)
def test_it_is_asked_with_the_options_of_diff(place, introspect, tmp_path, asked, code, said):
    words = ("--diff", asked, "--stop", "--against", "ref", "-o", tmp_path / "run", "train.py", "40", "5", "0")
    done = introspect("capture", *words, cwd=place)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


RESUMED = """\
import sys, time, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
begin = 0
if len(sys.argv) > 1:
    kept = torch.load("kept.pt")
    net.load_state_dict(kept["net"])
    begin = 8
    if sys.argv[1] == "whole":
        optimizer.load_state_dict(kept["optimizer"])
for step in range(begin, 20):
    torch.manual_seed(step)
    loss = net(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.1 if begin else 0)
    if step == 7:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "kept.pt")
"""


def test_a_resumed_run_is_compared_from_where_it_goes_on(introspect, tmp_path):
    (tmp_path / "train.py").write_text(RESUMED)
    assert introspect("capture", "-o", "ref", "train.py").returncode == 0
    for asked, code in (("whole", 0), ("part", 1)):
        done = introspect("capture", "--stop", "--against", "ref", "-o", asked, "train.py", asked)
        assert done.returncode == code, done.stderr
        answer = introspect("diff", "ref", asked, "--format", "json")
        assert answer.returncode == code
        answer = json.loads(answer.stdout)
        assert any("(--offset 8)" in note for note in answer["notes"])
        assert f"against ref{'' if code else ', at the end'}: {answer['sentence']}\n" in done.stderr
        assert done.stderr.count("against ref") == 1 + code


def test_a_pack_at_a_url_and_a_golden_run_are_references_too(place, introspect, tmp_path, web_server):
    url = web_server
    assert introspect("pack", "ref", "-o", tmp_path / "ref.zip", cwd=place).returncode == 0
    words = ("-o", tmp_path / "golden", "--steps", "6", "train.py", "6", "-1", "0")
    assert introspect("golden", "save", *words, cwd=place).returncode == 0
    words = ("capture", "--stop", "--force", "-o", tmp_path / "run", "--against")
    for reference in (f"{url}/ref.zip", tmp_path / "golden"):
        done = introspect(*words, reference, "train.py", "40", "2", "0", cwd=place)
        assert done.returncode == 1, done.stderr
        assert "First divergence at step 2" in done.stderr
    done = introspect(*words, f"{url}/none.zip", "train.py", "4", "2", "0", cwd=place)
    assert done.returncode == 2, done.stderr
    assert (
        f"not compared with {url}/none.zip any further: there is no run at {url}/none.zip: check the URL\n"
        in done.stderr
    )


def test_a_comparison_that_falls_behind_holds_nothing_back(place, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(BackgroundProcess, "patience", HANGS)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(steps):
        began = time.monotonic()
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
        return time.monotonic() - began

    settings = {"against": str(place / "ref"), "diff": "--rtol 1e9", "quiet": False, "source": False}
    with recording(net, tmp_path / "run", **settings):
        while not (found := pids(str(tmp_path / "run"))):
            train(1)
        os.kill(found[0], signal.SIGSTOP)  # one that is slow
        try:
            assert train(100) < 20, "training waited for it"
        finally:
            os.kill(found[0], signal.SIGCONT)
    assert "at the end" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--against", "nowhere"), "there is no run at nowhere to compare with"),
        (("--stop",), "name a run with --against"),
        (("--diff", "--kinds loss"), "name a run with --against"),
        (("--against", "ref", "--diff", "--kinds nothing"), "nothing"),
        (
            ("--against", "ref", "--diff", "--no-such loss"),
            "that change the answer of `introspect diff`: No such option",
        ),
        (("--against", "ref", "--diff", "--map"), "that change the answer of `introspect diff`"),
        (("--against", "ref", "--diff", "other"), "that change the answer of `introspect diff`"),
        (("--against", "ref", "--diff", "'"), "--diff ': no closing quotation"),
        (("--against", "ref", "-o", "ref"), "ref is the run to compare with: name another directory"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(place, introspect, words, said):
    done = introspect("capture", *words, "train.py", "1", "-1", "0", cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# --- whatever befalls either process, or the reference, at any instant

STEPS = 40


def begun(process, run):
    """Wait until what compares is there."""
    while not (found := pids(str(run))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return found[0]


def deleted(_place, reference):
    shutil.rmtree(reference, ignore_errors=True)


def damaged(_place, reference):
    for file in (reference / "rank0").glob("*.bin"):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] + bytes(9) + data[len(data) // 2 + 9 :])


def cut(_place, reference):
    for file in (reference / "rank0").glob("*.bin"):
        os.truncate(file, file.stat().st_size // 2)


def newer(_place, reference):
    (reference / "manifest.json").write_text('{"format": 99}')


def another(place, reference):
    shutil.rmtree(reference, ignore_errors=True)
    shutil.copytree(place / "another", reference)


HARMS = [(harm, seed) for harm in (deleted, damaged, cut, newer, another) for seed in range(6)]


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


@pytest.mark.parametrize(("harm", "seed"), sliced(HARMS, [(deleted, 0), (damaged, 0), (another, 0)]))
def test_a_reference_that_is_harmed_while_the_run_goes_on_costs_its_answer_alone(place, tmp_path, harm, seed):
    """At an instant that the seed chooses; training waits meanwhile."""
    chance = random.Random(seed)
    fault = chance.choice([-1, 3, 20, 35])
    process = trained(place, tmp_path, fault, sys.executable)
    begun(process, tmp_path / "run")
    time.sleep(chance.random() * 2.5 if seed else 0)
    process.send_signal(signal.SIGSTOP)
    harm(place, tmp_path / "ref")
    process.send_signal(signal.SIGCONT)
    assert_unharmed(process, tmp_path, fault)


@pytest.mark.parametrize("seed", sliced(range(13), [0]))
def test_training_that_is_killed_leaves_no_process_and_a_sound_run(place, tmp_path, seed):
    """At a random instant, with a divergence that has it write whole tensors."""
    chance = random.Random(seed)
    process = trained(place, tmp_path, 10, PYTHON)
    begun(process, tmp_path / "run")
    time.sleep(chance.random() * 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert ended(str(tmp_path / "run")), "what compares outlives training"
    assert verify_run(tmp_path / "run").sound


@pytest.mark.parametrize("seed", sliced(range(9), [0]))
def test_a_comparison_that_is_killed_costs_its_answer_alone(place, tmp_path, seed):
    chance = random.Random(seed)
    fault = chance.choice([-1, 5, 30])
    process = trained(place, tmp_path, fault, sys.executable)
    found = begun(process, tmp_path / "run")
    time.sleep(chance.random() * 2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(found, signal.SIGKILL)
    assert_unharmed(process, tmp_path, fault)


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
