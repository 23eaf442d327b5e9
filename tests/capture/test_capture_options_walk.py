"""Every option of a capture against a comparison: one that narrows what is observed makes no two equal runs diverge."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from opcapture import captured, compared
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.capture.options import CaptureOptions, described
from introspect_cli.compare.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule, parse_rule
from introspect_cli.store.run import open_run

OPERATORS = {"level": "op", "record": CaptureOptions().record | {Kind.OP_OUTPUT}}
ALTERED = {
    "record": {"record": frozenset({Kind.LOSS, Kind.PARAM})},
    "stats": {"stats": ("shape", "mean")},
    "sketch": {"sketch": False},
    "modules": {"modules": ("*.0",)},
    "level": OPERATORS,
    "ops": {"ops": ("*mm*",)},
    "views": {"views": True},
    "vjp": {"vjp": ("2:0/input[0]",)},
    "jacobian_norm": {"jacobian_norm": ("2:0/input[0]",)},
    "probes": {"probes": 3},
    "exclude": {"exclude": ("*.1",)},
    "max_depth": {"max_depth": 0},
    "steps": {"steps": parse_rule("first(1) | last(1) & when('step == 1')")},
    "until_step": {"until_step": 5},
    "ranks": {"ranks": "0"},
    "until_nan": {"until_nan": True},
    "eval": {"eval": True},
    "compile": {"compile": "eager"},
    "env": {"env": True},
    "packages": {"packages": True},
    "source": {"source": True},
}
BASE = {
    "ops": OPERATORS,
    "views": OPERATORS,
    "vjp": {"record": CaptureOptions().record | {Kind.OP_OUTPUT}},
    "jacobian_norm": {"record": CaptureOptions().record | {Kind.OP_OUTPUT}},
    "probes": {"record": CaptureOptions().record | {Kind.OP_OUTPUT}, "jacobian_norm": ("2:0/input[0]",)},
}
"""What both captures need for an option to mean anything."""


def train():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.parameters())
    for x in DataLoader(torch.randn(6, 4), batch_size=2):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net.eval()(x)
            net.train()


NARROWING = [name for name, option in described() if option.narrows]


def test_every_option_that_narrows_is_walked():
    assert sorted(NARROWING) == sorted(ALTERED)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The run without an option, but with what it needs to mean anything; each made once."""
    made = {}

    def run(name):
        needed = BASE.get(name, {})
        key = repr(sorted(needed.items(), key=str))
        if key not in made:
            made[key] = captured(tmp_path_factory.mktemp("without") / "run", train, **needed)
        return made[key]

    return run


@pytest.mark.parametrize("name", NARROWING)
def test_a_narrowing_option_is_no_divergence(tmp_path, without, name):
    """Whichever of the two runs has it."""
    narrowed = captured(tmp_path / "run", train, **{**BASE.get(name, {}), **ALTERED[name]})
    for a, b in ((without(name), narrowed), (narrowed, without(name))):
        result = compared(a, b)
        assert result.verdict is not Verdict.DIVERGED, result.sentence


def test_the_manifest_says_what_each_narrowing_option_was(tmp_path):
    captured(tmp_path / "run", train, modules=("*.0",), steps=Schedule.parse("0:2"))
    with open_run(tmp_path / "run") as run:
        narrowing = run.manifest["narrowing"]
    assert len(narrowing) == len(NARROWING)
    assert (narrowing["modules"], narrowing["steps"], narrowing["eval"]) == (["*.0"], ":2", None)


def test_every_field_is_described():
    assert [name for name, _ in described()] == [field.name for field in dataclasses.fields(CaptureOptions)]
    assert all(option.flags and option.help.endswith((".", "].")) for _, option in described())
