"""A run that is captured beside a reference, waited for and ended."""

from __future__ import annotations

import time
from pathlib import Path

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
