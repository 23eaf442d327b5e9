"""Scripts that end in each way a process can, under capture."""

from __future__ import annotations

import os
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

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
"""How such a script begins."""


def capture(script, run):
    """Start a capture of the script as the command."""
    command = [sys.executable, "-m", "introspect_cli", "capture", "-q", "--no-packages", "-o", str(run), str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
