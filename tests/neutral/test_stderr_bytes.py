"""Standard error under capture, byte for byte: warnings once a place, what compilers say, errors, what ends a thread.

Each script runs under python and under capture; what both say may differ in nothing but the instant and the process
number with which torch's own log begins a line.
"""

from __future__ import annotations

import re
import sys

import pytest
from outcomes import dedent, outcome
from sweeps import sliced

pytestmark = pytest.mark.usefixtures("quick_python")

HEAD = """
import logging, os, signal, sys, threading, traceback, warnings
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
torch.manual_seed(0)

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def train(model, steps=2, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4, requires_grad=True)).square().mean().backward()
        optimizer.step()
    return optimizer
"""

SCRIPTS = {
    "warnings: deprecations, places further up, filters that change": """
        class Old(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.softmax, self.loss = net(), nn.Softmax(), nn.MSELoss()
                self.recurrent = nn.LSTM(4, 4, num_layers=1, dropout=0.5)
            def forward(self, x):
                out = self.softmax(self.inner(x)) + nn.functional.softmax(self.inner(x))
                self.loss(out, torch.ones(2, 1))
                out.grad
                torch.meshgrid(x[0], x[1])
                warnings.warn("old", DeprecationWarning, stacklevel=2)
                return out
        for _ in range(2):
            model = Old()
            optimizer = train(model)
            torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1).step()
            nn.utils.weight_norm(nn.Linear(2, 2))
            torch.nn.utils.clip_grad_norm_([], 1.0)

        def said(level):
            warnings.warn(f"level {level}", stacklevel=level)
        class Loud(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x * 1
            @staticmethod
            def backward(context, gradient):
                for level in range(1, 7):
                    said(level)
                return gradient
        class Says(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()
            def forward(self, x):
                for level in range(1, 7):
                    said(level)
                x = Loud.apply(self.inner(x))
                x.register_hook(lambda gradient: warnings.warn("in a hook of a tensor", stacklevel=1))
                return x
        model = Says()
        model.register_forward_hook(lambda *_: said(1))
        model.register_full_backward_hook(lambda *_: said(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: said(1))
        train(model, 3, optimizer)

        class Late(nn.Linear):
            def __del__(self):
                print("gone", file=sys.__stderr__)
        late = Late(4, 2)
        train(late)

        def once():
            warnings.warn("a place", stacklevel=1)
        model = nn.Sequential(net(), nn.Softmax())
        for action in ("default", "always", "once", "module", "ignore"):
            warnings.simplefilter(action)
            train(model)
            once(), once()
        warnings.resetwarnings()
        train(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                train(model)
                once()
            except UserWarning as error:
                print("raised", error, file=sys.stderr)
        logging.captureWarnings(True)
        logging.basicConfig()
        warnings.simplefilter("always")
        train(model)
        once()
        warnings.showwarning = lambda message, *_: print("shown:", message, file=sys.stderr)
        logging.captureWarnings(False)
        once()
        print("changes of filters:", __warningregistry__["version"], file=sys.stderr)
        """,
    "what a compiler says": """
        torch._dynamo.config.recompile_limit = 2
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        @torch.compile(backend="eager")
        def step(x):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss
        @torch.compile(backend="eager")
        def watched(x, scale):
            with torch.profiler.record_function("part"):
                return model(x) * scale
        for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
            step(torch.ones(2, 4))
            watched(torch.ones(2, 4), scale).sum().backward()
            watched(torch.ones(2, 4), None if scale > 3 else str(scale) == "x")  if scale < 3 else None
        try:
            torch.compile(lambda x: print(x.sum().item()), backend="eager", fullgraph=True)(torch.ones(2))
        except Exception as error:
            print(type(error).__name__, file=sys.stderr)
        compiled = torch.compile(net(), backend="eager")
        optimizer = train(compiled)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        train(compiled, 2, optimizer)
        """,
    "a stream of its own, and a recursion without end": """
        import io
        real, sys.stderr = sys.stderr, io.StringIO()
        train(nn.Sequential(net(), nn.Softmax()))
        real.write(sys.stderr.getvalue())
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        train(nn.Sequential(net(), nn.LogSoftmax()))
        os.write(2, b"by the descriptor\\n")
        sys.stderr.write("without an end of line")
        def deep(level):
            return deep(level + 1)
        try:
            deep(0)
        except RecursionError:
            traceback.print_exc()
        class Down(nn.Linear):
            def forward(self, x):
                return deep(0)
        try:
            Down(4, 4)(torch.ones(2, 4))
        except RecursionError as error:
            print(error, file=sys.stderr)
        deep(0)
        """,
    "errors in threads, in finalisers and at the end": """
        import atexit
        class Last:
            def __del__(self):
                raise ValueError("in a finaliser")
        def work():
            train(net())
            nn.functional.softmax(torch.ones(3))
            net()(torch.ones(2, 5))
        threads = [threading.Thread(target=work, name=f"worker {number}") for number in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        train(net())
        kept = Last()
        del kept
        left = Last()
        def last():
            nn.Softmax()(torch.ones(3))
            net()(torch.ones(2, 6))
        atexit.register(last)
        logging.getLogger("script").warning("said by logging")
        print(1 / 0)
        """,
}

LOG = re.compile(rb"^([VIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ", re.MULTILINE)
"""How torch's log begins a line: the day, the instant, the process."""


SLICE = (
    "warnings: deprecations, places further up, filters that change",
    "errors in threads, in finalisers and at the end",
)


@pytest.mark.parametrize("name", sliced(SCRIPTS, SLICE))
def test_the_error_stream_is_the_same_to_the_byte(tmp_path, name):
    (tmp_path / "script.py").write_text(HEAD + dedent(SCRIPTS[name]))
    code, out, err = outcome([sys.executable, "script.py"], tmp_path)
    captured = [sys.executable, "-m", "introspect_cli", "capture", "-q", "-o", "run", "script.py"]
    seen = outcome(captured, tmp_path)
    assert LOG.sub(rb"\1 ", seen[2]).decode() == LOG.sub(rb"\1 ", err).decode()
    assert seen[:2] == (code, out)
    assert err.count(b"\n") > 2
    assert (tmp_path / "run" / "rank0" / "log.bin").stat().st_size > 1000
