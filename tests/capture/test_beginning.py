"""What seeds and draws before the first step is on record, and the answer names the first of it that differs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

import introspect_cli
from introspect_cli.capture.probes import early_draws
from introspect_cli.compare.settings.beginning import _events


def test_of_a_deep_model_the_first_draws_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(early_draws, "MAX_EVENTS", 8)
    net = None
    with introspect_cli.recording(None, tmp_path / "run"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    document = yaml.safe_load((tmp_path / "run/settings/beginning.yaml").read_text())
    assert len(document["events"]) == 8
    assert document["left_out"] == 13
    assert re.fullmatch(r"seed torch.manual_seed 0 \S+:\d+", document["events"][0])
    assert re.fullmatch(r"draw torch \w+ kaiming_uniform_\(.*\) Sequential.3.weight \S+", document["events"][-1])


def begun(events):
    """A run whose document of what drew before the first step has these events."""
    return SimpleNamespace(settings_of=lambda _rank: SimpleNamespace(document={"beginning": {"events": events}}.get))


@pytest.mark.parametrize("lines", [["seed"], [None], [["draw", 1]], "draw", {"draw": 1}, ["draw torch 0 x"], []])
def test_lines_that_are_no_events_are_passed_over(lines):
    assert not _events(begun(lines), 0, "")


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
