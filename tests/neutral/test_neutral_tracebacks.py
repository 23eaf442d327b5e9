"""What a script prints when something goes wrong in the middle of a model is what python alone prints."""

from __future__ import annotations

import sys

import pytest
from alike import assert_alike, both, script
from sweeps import sliced

pytestmark = pytest.mark.usefixtures("quick_python")

PYTHON = sys.executable
"""One that starts: what prints the whole stack sees no frame of a fork's below its own."""

HEAD = """
import logging, sys, threading, traceback, warnings
import torch
from torch import nn

class Deep(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)

class Fails(nn.Module):
    def forward(self, x):
        warnings.warn("about to fail")
        traceback.print_stack()
        raise ValueError("in the depth")

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), Deep(Deep(Fails())))
"""

BODIES = {
    "uncaught": "net(torch.randn(2, 4))",
    "from": """
try:
    net(torch.randn(2, 4))
except ValueError as error:
    raise RuntimeError("outer") from error
""",
    "exit": "net[1].inner.inner.forward = lambda x: sys.exit('leaving')\nnet(torch.randn(2, 4))",
    "backward": """
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")
Bad.apply(net[0](torch.randn(2, 4))).sum().backward()
""",
    "closure": """
def closure():
    raise KeyError("closure")
torch.optim.LBFGS(net.parameters()).step(closure)
""",
    "thread": """
thread = threading.Thread(target=net, args=(torch.randn(2, 4),))
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("name", sliced(list(BODIES), ("uncaught", "backward", "closure")))
def test_an_uncaught_exception_prints_the_bare_traceback(tmp_path, name):
    python = None if name in ("backward", "closure") else PYTHON
    bare, seen = both(script(tmp_path / "train.py", HEAD + BODIES[name]), tmp_path / "run", python=python)
    assert bare.stdout + bare.stderr
    assert_alike(bare, seen)


CAUGHT = """
def show(name):
    print("##", name, flush=True)
    print("##", name, file=sys.stderr, flush=True)

try:
    net(torch.randn(2, 4))
except ValueError as error:
    show("print_exc")
    traceback.print_exc()
    show("print_exception")
    traceback.print_exception(error)
    show("format_exc")
    print(traceback.format_exc())
    show("extract_tb")
    print([entry.name for entry in traceback.extract_tb(error.__traceback__)])
    show("logging")
    logging.exception("caught", stack_info=True)
show("stack")
traceback.print_stack()
print([entry.name for entry in traceback.extract_stack()])

from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return 1 / index
try:
    print(*DataLoader(Data()))
except ZeroDivisionError:
    show("loader")
    traceback.print_exc()
try:
    torch.randn(2).sum().backward()
except RuntimeError:
    show("no graph")
    traceback.print_exc()

class Warns(nn.Module):
    def forward(self, x):
        warnings.warn("plain")
        warnings.warn("caller", stacklevel=2)
        return x

show("warnings")
Deep(Warns())(torch.ones(2))

class Endless(nn.Module):
    def forward(self, x):
        return self(x)
try:
    Endless()(torch.ones(1))
except RecursionError as error:
    show(type(error).__name__)
"""


def test_caught_and_shown_by_the_script(tmp_path):
    bare, seen = both(script(tmp_path / "train.py", HEAD + CAUGHT), tmp_path / "run", python=PYTHON)
    assert bare.returncode == 0
    assert "## RecursionError" in bare.stdout
    assert_alike(bare, seen)
