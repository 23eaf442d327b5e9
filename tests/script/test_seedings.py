"""What sets a random state, in any step, is on record, and the answer names it instead of draws that nobody made."""

from __future__ import annotations

import random

import pytest
import torch
from logs import documents_of
from opcapture import compared

SCRIPT = """
import random
import torch
from numpy.random import default_rng
from torch import nn
from torch.utils.checkpoint import checkpoint

def noise():
    return float(default_rng(3).normal())

torch.manual_seed(0)
random.seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
kept = torch.get_rng_state()
data = torch.randn(8, 4) + noise()
# here
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    # there
    hidden = checkpoint(net[:2], data, use_reentrant=False)
    # within
    net[2](net[1](hidden)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HERE, THERE, WITHIN = "# here", "# there", "# within"


@pytest.fixture(scope="module")
def answer(tmp_path_factory, forks):
    runs = {}

    def captured(text, *options):
        if (text, options) not in runs:
            folder = tmp_path_factory.mktemp("run")
            (folder / "train.py").write_text(text)
            done = forks("capture", "-q", *options, "-o", "run", "train.py", cwd=folder)
            assert done.returncode == 0, done.stderr
            runs[text, options] = folder / "run"
        return runs[text, options]

    def run(place, text_b, text_a, *options):
        return compared(*(captured(SCRIPT.replace(place, text), *options) for text in (text_a, text_b)))

    return run


@pytest.mark.parametrize(
    ("place", "changed", "said"),
    [
        (HERE, "torch.set_rng_state(kept)", ", in b torch.set_rng_state (train.py:16)"),
        (
            THERE,
            "if step == 1: torch.set_rng_state(kept)",
            "differs, in b torch.set_rng_state (train.py:19).",
        ),
        (THERE, "if step == 2: torch.manual_seed(5)", "differs, in b torch.manual_seed(5) (train.py:19)."),
        (
            WITHIN,
            "if step == 1: torch.manual_seed(5)",
            "differs, in b torch.manual_seed(5) (train.py:21)",
        ),
    ],
)
def test_what_set_a_state_is_named_where_one_run_alone_sets_it(answer, place, changed, said):
    result = answer(place, changed, place)
    assert said in result.sentence
    assert "one run drew" not in result.sentence
    assert result.code.ranked[0].change.place.startswith("train.py:")


def test_a_seed_between_two_recorded_steps_is_named(answer):
    result = answer(THERE, "if step == 1: torch.manual_seed(5)", THERE, "--steps", "::2")
    assert "differs, in b torch.manual_seed(5) (train.py:19)." in result.sentence


def test_runs_that_set_the_same_are_the_same_and_nothing_stays_replaced(answer):
    functions = torch.manual_seed, torch.set_rng_state, random.seed, random.Random.seed
    assert answer(THERE, "torch.manual_seed(step)", "torch.manual_seed(step + 0)").verdict.value == "same"
    assert functions == (torch.manual_seed, torch.set_rng_state, random.seed, random.Random.seed)


def test_one_line_has_all_steps_none_what_checkpointing_restores_and_new_generators_are_on_record(tmp_path, introspect):
    (tmp_path / "train.py").write_text(SCRIPT.replace(THERE, "torch.manual_seed(7)"))
    done = introspect("capture", "-q", "-o", "run", "train.py")
    assert done.returncode == 0, done.stderr
    found = documents_of(tmp_path / "run")
    assert "seed numpy.random.default_rng 3 train.py:9" in found["beginning"]["events"]
    assert found["seedings"] == {"set": ["before 1 2 2 torch.manual_seed 7 train.py:19"]}
