"""Every option of a capture against a comparison: one that narrows what is observed makes no two equal runs diverge."""

from __future__ import annotations

import dataclasses

import click
import pytest
import torch
from neutrality import watched
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.capture import all_probes
from introspect_cli.capture.options.capture_options import CaptureOptions, described
from introspect_cli.capture.options.option import WHAT, Option
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.commands.capture import from_field
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.schedule.rules import Schedule, parse_rule
from introspect_cli.store.read.run import open_run

OPERATORS = {"level": "op", "record": CaptureOptions().record | {Kind.OP_OUTPUT}}
ALTERED = {
    "record": {"record": frozenset({Kind.LOSS, Kind.PARAM})},
    "stats": {"stats": ("shape", "mean")},
    "sketch": {"sketch": False},
    "modules": {"modules": ("*.0",)},
    "level": OPERATORS,
    "ops": {"ops": ("*mm*",)},
    "views": {"views": True},
    "all_dtypes": {"all_dtypes": True},
    "vjp": {"vjp": ("2:0/input[0]",)},
    "jacobian_norm": {"jacobian_norm": ("2:0/input[0]",)},
    "probes": {"probes": 3},
    "exclude": {"exclude": ("*.1",)},
    "max_depth": {"max_depth": 0},
    "steps": {"steps": parse_rule("first(1) | last(1) & when('step == 1')")},
    "until_step": {"until_step": 5},
    "ranks": {"ranks": "0"},
    "max_size": {"max_size": 100_000},
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
    "all_dtypes": OPERATORS,
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


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("name", NARROWING)
def test_a_narrowing_option_is_no_divergence(tmp_path, name, side):
    plain = BASE.get(name, {})
    for run in ("a", "b"):
        with watched(tmp_path / run, **{**plain, **(ALTERED[name] if run == side else {})}):
            train()
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions(), [])
    assert result.verdict is not Verdict.DIVERGED, result.sentence


def test_the_manifest_says_what_each_narrowing_option_was(tmp_path):
    with watched(tmp_path / "run", modules=("*.0",), steps=Schedule.parse("0:2")):
        train()
    with open_run(tmp_path / "run") as run:
        narrowing = run.manifest["narrowing"]
    assert len(narrowing) == len(NARROWING)
    assert (narrowing["modules"], narrowing["steps"], narrowing["eval"]) == (["*.0"], ":2", None)


@dataclasses.dataclass(frozen=True)
class MoreOptions(CaptureOptions):
    """The options, and a throw-away one."""

    thrice: bool = dataclasses.field(
        default=False, metadata={"option": Option(WHAT, ("--thrice/--once",), "Record thrice.", narrows=True)}
    )


def test_an_option_is_a_field():
    [(name, option)] = [(name, option) for name, option in described(MoreOptions) if name == "thrice"]

    @click.command()
    @from_field(name, option, default=False)
    def command(thrice):
        return thrice

    assert command.main(["--thrice"], standalone_mode=False) is True
    assert MoreOptions(thrice=True).to_dict()["thrice"] is True
    assert MoreOptions().narrowing() == {**CaptureOptions().narrowing(), "thrice": False}


class SizeProbe(GuardedProbe):
    name = "size"
    lost = "sizes are"

    def install(self):
        self._patches.watch(torch.Tensor, "square", self._guarded, self._squared)
        super().install()

    def _squared(self, args, _):
        [tensor], recorder = args, self._recorder
        site = Site(Phase.FORWARD, Kind.HYPERPARAMETER, "size")
        recorder.emit(recorder.site(site), tensor.numel() // (0 if tensor.numel() == 1 else 1))


def test_a_new_probe_is_one_class(tmp_path, monkeypatch):
    monkeypatch.setattr(all_probes, "STANDALONE", (*all_probes.STANDALONE, SizeProbe))
    original = torch.Tensor.square
    with watched(tmp_path / "run") as session:
        train()
        torch.ones(1).square()
        torch.ones(2).square()
    assert torch.Tensor.square is original
    with open_run(tmp_path / "run") as run:
        found = [record.summary.text for record in run.rank(0).records(1) if record.site.fqn == "size"]
    assert found == ["2"]
    assert session._guard.failed == {"size"}
    assert session._guard.sentences[0].startswith("sizes are not observed from here on: ZeroDivisionError")


def test_every_field_is_described():
    assert [name for name, _ in described()] == [field.name for field in dataclasses.fields(CaptureOptions)]
    assert all(option.flags and option.help.endswith((".", "].")) for _, option in described())
