"""Scripts that end in each way a process can."""

from __future__ import annotations

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
