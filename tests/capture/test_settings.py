"""Settings on record beside the steps: of accelerators, of draws before the first step, of loaders that are built."""

from __future__ import annotations

import re

import pytest
import torch
from logs import documents_of, rewrite
from opcapture import captured, compared
from small_runs import MODULES, train
from synthetic import write_run
from torch import nn

import introspect_cli
from introspect_cli.store.frames import STEP


def test_nothing_wakes_a_device(tmp_path):
    captured(tmp_path / "run", lambda: None)
    assert "gpus" not in documents_of(tmp_path / "run")["hardware"]
    assert not torch.cuda.is_initialized()


# --- what seeds and draws before the first step is on record, and the answer names the first of it that differs


def test_of_what_a_deep_model_draws_before_the_first_step_the_first_draws_are_kept(tmp_path):
    with introspect_cli.recording(None, tmp_path / "run", source=False):
        torch.manual_seed(0)
        for _ in range(1200):
            net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    document = documents_of(tmp_path / "run")["beginning"]
    assert "last" not in document
    assert (len(document["events"]), document["left_out"]) == (2200, 1 + 2 * 1200 - 2200)
    assert re.fullmatch(r"seed torch.manual_seed 0 \S+:\d+", document["events"][0])
    assert re.fullmatch(r"draw torch \w+ kaiming_uniform_\(.*\) \S+ \S+", document["events"][-1])


def test_a_draw_into_memory_that_was_used_again_has_no_name(tmp_path):
    """It had that of the parameter that came to lie there, in some repeats and in others not."""
    with introspect_cli.recording(None, tmp_path / "run", source=False):
        for _ in range(5):
            torch.empty(64, 64).normal_()
            nn.Linear(64, 64)
        moved = nn.Linear(8, 8).double()
        net = nn.Linear(64, 64)
        net.bias = nn.Parameter(torch.empty(64).uniform_())
        optimizer = torch.optim.SGD([*net.parameters(), *moved.parameters()], lr=0.1)
        (net(torch.ones(1, 64)).sum() + moved(torch.ones(1, 8).double()).sum()).backward()
        optimizer.step()
    drawn = [event.split()[3:5] for event in documents_of(tmp_path / "run")["beginning"]["events"]]
    assert [name for by, name in drawn if by == "normal_()"] == ["-"] * 5
    named = [name for _, name in drawn if name != "-"]
    assert sorted(named) == ["Linear#2.bias", "Linear#2.weight", "Linear.bias", "Linear.weight"]


@pytest.mark.parametrize("lines", [["seed"], [None], [["draw", 1]], "draw", {"draw": 1}, ["draw torch 0 x"], []])
def test_lines_that_are_no_events_are_passed_over(tmp_path, lines):
    said = []
    for events in (lines, []):
        for name, faults in (("a", ()), ("b", ("init",))):
            about = {"settings": {"beginning": {"events": events if name == "a" else []}}, "force": True}
            write_run(tmp_path / name, train(*faults), modules=MODULES, **about)
        said.append(compared(tmp_path / "a", tmp_path / "b").sentence)
    assert said[0] == said[1]
    assert said[0].startswith("First divergence at step 0: the parameter Net.b.weight")


@pytest.mark.parametrize("drawn", ["torch.randn(())", "random.random()"])
def test_workers_that_draw_instead_of_the_main_process_are_named(tmp_path, introspect, drawn):
    script = f"""
import random, sys, torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((4,), float(index)) + {drawn}

if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(Noisy(), batch_size=2, num_workers=int(sys.argv[1])):
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
"""
    (tmp_path / "train.py").write_text(script)
    for name, workers in (("a", 0), ("b", 2)):
        introspect("capture", "-q", "-o", name, "train.py", workers)
    answer = introspect("diff", "a", "b").stdout.split("\n\n")[0]
    assert "DataLoader (train.py:16): num_workers 0 -> 2" in answer.partition("likely")[2], answer
    assert "prefetch_factor" not in answer


# --- what loaders, schedulers and gradient scalers are built with is on record, and the answer names what differs


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
    (found,) = documents_of(tmp_path / "run")["built"]["loaders"].values()
    assert found["dataset"] == "Rows"
    assert found["sampler"] == "Slots"
    assert found["dataset.many"] == "list of 100,000"
    assert found["dataset.token"] == found["dataset.api_key"] == "<redacted>"
    assert documents_of(tmp_path / "run")["manifest"]["not_observed"] == []


def test_a_step_that_can_be_read_has_its_documents(tmp_path, introspect):
    (tmp_path / "train.py").write_text("""\
import torch
torch.save({"w": torch.ones(2)}, "kept.pt")
torch.load("kept.pt")
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.rand(4, 2)).sum().backward()
    optimizer.step()
""")
    introspect("capture", "-q", "-o", "run", "train.py")
    whole = documents_of(tmp_path / "run")
    seen = []

    def to_the_first_step(frame):
        seen.append(frame.kind)
        return [frame] if STEP not in seen[:-1] else []

    rewrite(tmp_path / "run" / "rank0", to_the_first_step)
    first = documents_of(tmp_path / "run")
    assert first["beginning"]["read"] == ["kept.pt"]
    assert {name for name in whole if first.get(name) != whole[name]} == {"manifest"}
