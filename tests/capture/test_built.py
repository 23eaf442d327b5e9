"""What loaders, schedulers and gradient scalers are built with is on record, and the answer names what differs."""

from __future__ import annotations

import yaml

HOSTILE = """
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

class Meta(type):
    def __getattr__(cls, name):
        print("asked the class for", name)
        raise AttributeError(name)

class Rows(Dataset, metaclass=Meta):
    def __init__(self):
        self.token = "hf_abcdefghijklmnopqrstuvwxyz"
        self.api_key = "12345"
        self.me = self
        self.deep = [[[[[[1]]]]]]
        self.many = list(range(100_000))
        self.number = 10 ** 5000
    def __len__(self):
        print("length")
        return 4
    def __getattr__(self, name):
        print("asked for", name)
        raise AttributeError(name)
    def __repr__(self):
        print("repr")
        return "rows"
    @property
    def __class__(self):
        print("class")
        return int
    def __eq__(self, other):
        print("eq")
        return True
    def __hash__(self):
        print("hash")
        return 1
    def __getitem__(self, index):
        return torch.ones(2)

class Slots(Sampler):
    __slots__ = ("size",)
    def __init__(self):
        self.size = 4
    def __iter__(self):
        return iter(range(4))
    def __len__(self):
        print("sampler's length")
        return 4

net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for number in range(70):
    for x in DataLoader(Rows(), sampler=Slots(), batch_size=2):
        net(x).sum().backward()
        optimizer.step()
print(DataLoader.__init__.__qualname__, torch.optim.lr_scheduler.LRScheduler.__init__.__name__)
"""


def test_nothing_of_the_script_runs_to_describe_its_objects(tmp_path, introspect, forks):
    (tmp_path / "train.py").write_text(HOSTILE)
    bare = forks.python("train.py", cwd=tmp_path)
    run = introspect("capture", "-q", "-o", "run", "train.py")
    assert (run.stdout, run.stderr) == (bare.stdout, bare.stderr)
    (found,) = yaml.safe_load((tmp_path / "run/settings/built.yaml").read_text())["loaders"].values()
    assert found["dataset"] == "Rows"
    assert found["sampler"] == "Slots"
    assert found["dataset.many"] == "list of 100,000"
    assert found["dataset.token"] == found["dataset.api_key"] == "<redacted>"
    assert "not_observed: []" in (tmp_path / "run/manifest.yaml").read_text()
