"""A project of a training script and a model."""

import pytest

MODEL = """
import torch
API_KEY = "hunter2-is-long"


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
"""


TRAIN = """
import torch
from model import Net

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def project(tmp_path, introspect):
    """Capture the script with these files, into a run of a name."""

    def capture(name, *options, model=MODEL, train=TRAIN, more=None):
        home = tmp_path / f"{name}-project"
        for file, text in {"model.py": model, "train.py": train, **(more or {})}.items():
            (home / file).parent.mkdir(exist_ok=True)
            (home / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        introspect("capture", "-q", "--force", *options, "-o", tmp_path / name, "train.py", cwd=home)
        return tmp_path / name

    return capture
