"""Kill a capturing run at random instants, and read what is left.

A run that is killed must keep every step whose end it reached, say which one is the last, and never show half a step
as a whole one. Here a small training script prints a line after every step, a capture of it is killed at a random
instant, and the store is read: the steps in it must be as many as the lines that came out (or one more: the step is
written before the line is printed), each equal to the same step of an undisturbed run, and `verify` must find nothing.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.capture.session import run_capture
from introspect_cli.errors import StoreError
from introspect_cli.script.target import Target
from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.read.verify import verify_run

SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters())
print("ready", flush=True)
for step in range({steps}):
    loss = net(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, flush=True)
"""
HEAD = """
import ctypes, os, shutil, signal, sys
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(net.parameters())
def train(steps):
    for _ in range(steps):
        net(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
train(3)
print("three", flush=True)
"""
"""How a script begins that ends in one of the ways a process can."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""What is sent; most kills are the one that a process cannot notice."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


NOTHING_SAID = 70
"""The exit code of a fork whose capture neither ended nor was interrupted."""


@dataclass(frozen=True)
class Kill:
    """One kill and what was left.

    Attributes:
        signal: what was sent.
        after: seconds after the script was ready.
        printed: steps that the script said it had ended.
        kept: steps in the store.
        problem: "" where all was as promised.
    """

    signal: int
    after: float
    printed: int
    kept: int
    problem: str


class Forked:
    """A capture in a fork of this process, which has imported everything already: what most kills are done on."""

    def __init__(self, script: Path, run: Path) -> None:
        ours, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(ours)
            _run_and_end(script, run, theirs)
        os.close(theirs)
        self.stdout = os.fdopen(ours, "rb")

    def wait(self) -> int:
        """The exit code, minus the signal where one ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run_and_end(script: Path, run: Path, out: int) -> NoReturn:
    """In the child: what the command does, and no way back into the parent's code."""
    code = NOTHING_SAID
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        options = CaptureOptions(output=run, packages=False, quiet=True)
        run_capture(Target(script=str(script)), options)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code)


def capture(script: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start a capture of the script as the command."""
    command = [sys.executable, "-m", "introspect_cli", "capture", "-q", "--no-packages", "-o", str(run), str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)


def digests(run: Path) -> list[tuple[int, bytes]]:
    """Number and digest of every step of a run, each read and checked.

    Raises:
        StoreError: something in it is damaged.
    """
    with open_run(run) as opened:
        reader = opened.rank(0) if opened.ranks else None
        if reader is None:
            return []
        for entry in reader.steps:
            batch = reader.read(entry.step)
            reader.record(batch, len(batch) - 1, entry.step)
        return [(entry.step, entry.digest) for entry in reader.steps]


def _chosen(number: int, seconds: float) -> tuple[int, float]:
    """A signal and when to send it; the generator is gone before the capture looks for those that variables hold."""
    chance = random.Random(number)
    return chance.choice(SIGNALS), chance.uniform(0, seconds)


def kill_once(folder: Path, number: int, script: Path, whole: list[tuple[int, bytes]], seconds: float) -> Kill:
    """Start a capture, kill it at a random instant, and look at what is left."""
    sent, after = _chosen(number, seconds)
    run = folder / f"run{number}"
    process = Forked(script, run)
    process.stdout.readline()
    time.sleep(after)
    os.kill(process.pid, sent)
    printed = len(process.stdout.read().splitlines())
    process.stdout.close()
    code = process.wait()
    try:
        kept = digests(run)
        problem = judge(run, kept, whole, printed, sent, code)
    except StoreError as error:
        kept, problem = [], str(error)
    return Kill(sent, after, printed, len(kept), problem)


def judge(
    run: Path, kept: list[tuple[int, bytes]], whole: list[tuple[int, bytes]], printed: int, sent: int, code: int
) -> str:
    """What is wrong with a run that was killed; "" if nothing is."""
    if len(kept) < printed:
        return f"{printed} steps had ended and {len(kept)} are kept"
    ended = [step for step in kept if step in whole]
    if len(kept) > len(ended) + (sent == signal.SIGINT):  # an interrupt lets the capture write the step it was in
        return "a step is not what it is in the undisturbed run"
    if [step for step, _ in kept] != list(range(len(kept))):
        return "steps are missing in between"
    interrupted = (130, 1, *([NOTHING_SAID] if len(kept) == len(whole) else ()))  # or between its end and the process's
    if code not in (-sent, 0) and not (sent == signal.SIGINT and code in interrupted):
        return f"the exit code is {code}"
    with open_run(run) as opened:
        finished = opened.state is RunState.COMPLETE and len(kept) == len(whole)  # killed while python cleaned up
        if code == -signal.SIGKILL and opened.state is not RunState.INTERRUPTED and not finished:
            return f"the run is called {opened.state.value}"
    report = verify_run(run)
    return "" if report.sound else f"verify: {'; '.join(map(str, report.findings))}"


def warm_up() -> None:
    """Import and compile what every fork would have to."""
    import torch

    from introspect_cli.tensors.summarizer import Summarizer

    summarizer = Summarizer()
    for dtype in (torch.float32, torch.uint8, torch.int64):
        summarizer.add(torch.ones(4, 4, dtype=dtype))
    summarizer.end_step().finish()
    summarizer.close()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()  # the first optimizer of a process imports the compiler


def survive(folder: Path, kills: int, *, steps: int = 200) -> list[Kill]:
    """Kill that many captures."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(steps=steps))
    warm_up()
    process = Forked(script, folder / "whole")
    process.stdout.readline()
    began = time.monotonic()
    process.stdout.read()
    process.stdout.close()
    code = process.wait()
    assert code == 0, f"the undisturbed run ended with {code}"
    seconds = time.monotonic() - began
    whole = digests(folder / "whole")
    assert len(whole) == steps
    return [kill_once(folder, number, script, whole, seconds) for number in range(kills)]
