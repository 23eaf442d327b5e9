"""Training scripts under python and under capture: the same numbers, tracebacks and warnings come out."""

from __future__ import annotations

import sys

import pytest
from outcomes import dedent, outcome
from sweeps import sliced

pytestmark = pytest.mark.usefixtures("quick_python")

TRAINS = """
import copy, io, os, pickle, random, sys
os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Linear(width, 2)

    def forward(self, x, *, scale=1.0):
        return {"logits": self.head(self.body(x)) * scale}

class Last(nn.Module):
    def forward(self, found):
        return {"logits": nn.functional.softmax(found["logits"])}

def train(net=None, steps=3):
    torch.manual_seed(0)
    net = net if net is not None else Net()
    data = TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step, (x, y) in enumerate(DataLoader(data, batch_size=6, shuffle=True)):
        if step == steps:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x, scale=2.0)["logits"], y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item().hex())
    return net
"""

SCRIPTS = {
    "numbers": """
        random.seed(1); np.random.seed(1)
        net = train()
        for name, value in net.state_dict().items():
            print(name, value.double().sum().item().hex())
        print(random.random(), np.random.rand(), torch.rand(1).item(), torch.get_num_threads(), torch.is_grad_enabled())
        print(net)
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
        x = torch.ones(3, 4)
        print([model.eval()(x)["logits"].sum().item().hex() for model in (net, again, other)])
        print(sorted(vars(net)), [len(vars(net)[name]) for name in sorted(vars(net)) if "hooks" in name])
        """,
    "an error in a forward": """
        class Broken(nn.Module):
            def forward(self, x):
                return x @ x
        train(nn.Sequential(Net(), Broken()))
        """,
    "a wrong shape": """
        net = train()
        net(torch.ones(3, 5))
        """,
    "an error in a backward": """
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, grad):
                raise ValueError("in a backward")
        net = train()
        Fails.apply(net(torch.ones(3, 4))["logits"]).sum().backward()
        """,
    "no graph to go back": """
        train()
        try:
            torch.autograd.grad(torch.ones(1), torch.ones(1))
        except RuntimeError as error:
            print(error)
        torch.ones(1).sum().backward()
        """,
    "an interrupt in a forward": """
        import signal
        class Slow(nn.Module):
            def forward(self, x):
                os.kill(os.getpid(), signal.SIGINT)
                return x
        train()
        Slow()(torch.ones(1))
        """,
    "an exit in a closure": """
        train()
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.LBFGS([weight])
        def closure():
            sys.exit(6)
        optimizer.step(closure)
        """,
    "warnings": """
        net = train()
        nn.functional.mse_loss(net(torch.ones(3, 4))["logits"], torch.ones(3, 1))
        nn.MSELoss()(torch.ones(3, 4), torch.ones(3, 1))
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 1)
        scheduler.step()
        net(torch.ones(3, 4))["logits"].grad
        nn.Softmax()(torch.ones(2, 2))
        """,
    "a warning that comes once": """
        import warnings
        def said(count):
            for _ in range(count):
                warnings.warn("of the script", stacklevel=1)
                nn.functional.softmax(torch.ones(3))
        said(2)
        net = train(nn.Sequential(Net(), Last()))
        said(2)
        train(net)
        print(sorted(key[0] for key in __warningregistry__ if key != "version"))
        """,
    "an error in a worker": """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                if index == 2:
                    raise IndexError("no such sample")
                return torch.tensor(index)
        if __name__ == "__main__":
            train()
            for context in ("spawn", "fork"):
                try:
                    for batch in DataLoader(Data(), num_workers=1, multiprocessing_context=context):
                        print(batch)
                except IndexError as error:
                    print(error)
            for batch in DataLoader(Data()):
                print(batch)
        """,
}


SLICE = ("an error in a forward", "a warning that comes once")


@pytest.mark.parametrize("name", sliced(SCRIPTS, SLICE))
def test_a_script_with_torch_runs_as_under_python(tmp_path, name):
    (tmp_path / "script.py").write_text(TRAINS + dedent(SCRIPTS[name]))
    run = tmp_path / "run"
    expected = outcome([sys.executable, "script.py"], tmp_path)
    captured = [sys.executable, "-m", "introspect_cli", "capture", "-q", "-o", str(run), "script.py"]
    assert outcome(captured, tmp_path) == expected
    assert (run / "rank0" / "log.bin").stat().st_size > 1000
