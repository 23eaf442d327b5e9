"""A script under python and under capture: what it prints on both streams, and how it ends, are the same to the byte.

What both say may differ in nothing but the instant and the process number with which torch's own log begins a line.
"""

from __future__ import annotations

import re
import sys

import pytest
from neutrality import Seen
from outcomes import dedent, outcome
from sweeps import sliced

pytestmark = pytest.mark.usefixtures("quick_python")

PYTHON = sys.executable
"""One that starts: what prints the whole stack sees no frame of a fork's below its own."""

HEAD = """
import logging, os, signal, sys, threading, traceback, warnings
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset
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

class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")

class Numbers(Dataset):
    def __init__(self, wrong=-1):
        self.wrong = wrong
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == self.wrong:
            raise IndexError("no such sample")
        return torch.full((4,), float(index)) + torch.rand(4)

failing = nn.Sequential(nn.Linear(4, 4), Deep(Deep(Fails())))
"""

SCRIPTS = {
    "an error in a model": "train(net())\nfailing(torch.randn(2, 4))",
    "an error that is the cause of another": """
        try:
            failing(torch.randn(2, 4))
        except ValueError as error:
            raise RuntimeError("outer") from error
        """,
    "errors in several models at once, in a thread, and one that leads back to itself": """
        def caught(call):
            try:
                call()
            except Exception as error:
                return error
        thread = threading.Thread(target=failing, args=(torch.randn(2, 4),))
        thread.start()
        thread.join()
        backward = Bad.apply(net()(torch.randn(2, 4))).sum().backward
        errors = [caught(lambda: failing(torch.randn(2, 4))), caught(backward)]
        errors[0].__context__, errors[1].__context__ = errors[1], errors[0]
        if sys.version_info < (3, 11):
            raise errors[0]
        raise ExceptionGroup("several", errors)
        """,
    "an error in a backward pass": "train(net())\nBad.apply(net()(torch.randn(2, 4))).sum().backward()",
    "an error in a closure": """
        def closure():
            raise KeyError("closure")
        torch.optim.LBFGS(net().parameters()).step(closure)
        """,
    "an exit in a model": """
        train(net())
        failing[1].inner.inner.forward = lambda x: sys.exit("leaving")
        failing(torch.randn(2, 4))
        """,
    "an interrupt in a model": """
        train(net())
        failing[1].inner.inner.forward = lambda x: os.kill(os.getpid(), signal.SIGINT)
        failing(torch.randn(2, 4))
        """,
    "an allocation that fails": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
        try:
            torch.empty(2**40, dtype=torch.uint8)
        except RuntimeError as error:
            print(type(error).__name__)
        train(net())
        """,
    "stand-ins for modules, which raise where anything is asked of them": """
        class Lazy(type(sys)):
            def __getattribute__(self, name):
                raise SystemExit(name)
        class Stand:
            def __getattr__(self, name):
                raise SystemExit(name)
        sys.modules |= {"lazy": Lazy("lazy"), "stand": Stand(), "none": None}
        train(net())
        del sys.modules["lazy"], sys.modules["stand"]
        print("trained")
        """,
    "errors that are caught and shown": """
        net = failing
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
""",
    "errors in the workers of a loader": """
        if __name__ == "__main__":
            train(net())
            for context in ("spawn", "fork"):
                try:
                    for batch in DataLoader(Numbers(wrong=2), num_workers=1, multiprocessing_context=context):
                        print(batch.shape)
                except IndexError as error:
                    print(error)
        """,
    "workers that are spawned and stay": """
        if __name__ == "__main__":
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = DataLoader(
                Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
            )
            for batch in [*loader, *loader]:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())
            print(model[0].weight.tolist(), torch.rand(1).item())
        """,
    "a child that is forked in the middle of training goes on bare": """
        model = net()
        for step in range(3):
            optimizer = train(model, 1)
            if step == 1:
                child = os.fork()
                if not child:
                    code = 1
                    try:
                        train(model, 1, optimizer)
                        code = 7 if nn.Module.__call__.__module__ == "torch.nn.modules.module" else 8
                    finally:
                        os._exit(code)
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            print([parameter.tolist() for parameter in model.parameters()])
        """,
    **{
        f"children that train a shared model ({method})": f"""
        def work(rank, model):
            torch.manual_seed(rank)
            train(model, 3)

        if __name__ == "__main__":
            torch.set_num_threads(1)
            model = net()
            train(model, 1)
            model.zero_grad()
            model.share_memory()
            for rank in range(2):
                child = mp.get_context({method!r}).Process(target=work, args=(rank, model))
                child.start()
                child.join()
                print("child", child.exitcode)
            print(model[0].weight.tolist())
        """
        for method in ("fork", "spawn")
    },
    "tensors and models that are sent to another process": """
        def work(queue, answers):
            model, x = queue.get()
            answers.put(model(x).sum().item())

        if __name__ == "__main__":
            model, x = net(), torch.randn(2, 4, requires_grad=True)
            model(x).sum().backward()
            context = mp.get_context("spawn")
            queue, answers = context.Queue(), context.Queue()
            child = context.Process(target=work, args=(queue, answers))
            child.start()
            queue.put((model, x))
            print(answers.get())
            child.join()
        """,
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
WHOLE_STACK = (
    "errors in several models at once, in a thread, and one that leads back to itself",
    "an error in a model",
    "an error that is the cause of another",
    "errors that are caught and shown",
)
"""Those that print more of the stack than their own."""
BARE_CHILDREN = {"a child that is forked in the middle of training goes on bare": "child 7", "children that": "child 0"}
"""What children print of themselves."""
SWEPT = (
    "an error that is the cause of another",
    "errors in the workers of a loader",
    "children that train a shared model (spawn)",
    "tensors and models that are sent to another process",
    "what a compiler says",
    "a stream of its own, and a recursion without end",
    "an exit in a model",
    "children that train a shared model (fork)",
    "an error in a closure",
)
OPTIONS = {"an error in a backward pass": ("--level", "op")}
LOG = re.compile(rb"^([VIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ |(?<=^  \[Previous line repeated )\d+", re.MULTILINE)
"""How torch's log begins a line (the day, the instant, the process), and how deep a recursion was."""


@pytest.mark.parametrize("name", sliced(SCRIPTS, [name for name in SCRIPTS if name not in SWEPT]))
def test_a_script_prints_and_ends_as_under_python(tmp_path, name):
    (tmp_path / "script.py").write_text(HEAD + dedent(SCRIPTS[name]))
    python = PYTHON if name in WHOLE_STACK else sys.executable
    code, out, err = outcome([python, "script.py"], tmp_path)
    capture = [python, "-m", "introspect_cli", "capture", "-q", "-o", "run", *OPTIONS.get(name, ())]
    seen = outcome([*capture, "script.py"], tmp_path)
    assert LOG.sub(rb"\1 ", seen[2]).decode() == LOG.sub(rb"\1 ", err).decode()
    assert seen[:2] == (code, out)
    assert out + err
    for start, printed in BARE_CHILDREN.items():
        assert not name.startswith(start) or printed in out.decode()
    assert Seen(tmp_path / "run").steps
