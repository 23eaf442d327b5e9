"""What loaders, schedulers and gradient scalers are built with is on record, and the answer names what differs."""

from __future__ import annotations

import pytest
import yaml

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

told = sys.argv[1] if len(sys.argv) > 1 else ""
SETTINGS = dict(drop_last=False, shuffle=False, noise=0.0, warm=2, step_size=2, init_scale=4.0, evaluated=3)
SETTINGS.update(eval(open(told).read()) if told else {})

class Words(Dataset):
    def __init__(self, count, noise):
        self.rows, self.noise = torch.randn(count, 4), noise
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index] * (1 + self.noise)

torch.manual_seed(0)
loader = DataLoader(
    Words(10, SETTINGS["noise"]), batch_size=4, shuffle=SETTINGS["shuffle"], drop_last=SETTINGS["drop_last"],
    generator=torch.Generator().manual_seed(3),
)
evaluated = DataLoader(Words(6, 0.0), batch_size=SETTINGS["evaluated"])
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
warm = SETTINGS["warm"]
schedulers = [
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm)),
    torch.optim.lr_scheduler.StepLR(optimizer, SETTINGS["step_size"]),
]
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[2])
scaler = torch.amp.GradScaler("cpu", init_scale=SETTINGS["init_scale"])
for epoch in range(2):
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    with torch.no_grad():
        for x in evaluated:
            net(x)
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory, forks):
    """Runs by what they were told, each made once."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "train.py").write_text(SCRIPT)
    made = {}

    def capture(said, *options):
        key = said, options
        if key not in made:
            made[key] = folder / f"run{len(made)}"
            (folder / "told").write_text(said)
            run = forks(
                "capture", "-q", *options, "-o", made[key].name, "train.py", *(["told"] if said else ()), cwd=folder
            )
            assert run.returncode == 0, run.stderr
        return str(made[key])

    return capture


CAUSES = [
    ("dict(drop_last=True)", "DataLoader (train.py:20): drop_last False -> True"),
    ("dict(shuffle=True)", "DataLoader (train.py:20): sampler SequentialSampler -> RandomSampler"),
    ("dict(noise=0.5)", "DataLoader (train.py:20): dataset.noise 0 -> 0.5"),
    ("dict(warm=4)", "LambdaLR (train.py:29): lr_lambdas[0].warm 2 -> 4"),
    ("dict(step_size=3)", "StepLR (train.py:30): step_size 2 -> 3"),
    ("dict(init_scale=6.0)", "GradScaler (train.py:33): init_scale 4 -> 6"),
]


@pytest.mark.parametrize(("said", "cause"), CAUSES)
def test_the_argument_that_differs_is_the_likely_cause(captured, introspect, said, cause):
    answer = introspect("diff", captured(""), captured(said)).stdout
    assert cause in answer.partition("  likely")[2].splitlines()[0]


def test_equal_runs_have_no_setting_that_differs(captured, introspect):
    again = introspect("diff", captured(""), captured("", "--seed", "7"), "--settings").stdout
    assert "DataLoader" not in again
    assert "LR" not in again


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
