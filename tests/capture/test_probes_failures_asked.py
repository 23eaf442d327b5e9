"""The same for what is watched on request, and for what writes the run: no bug in introspect reaches the script."""

import pytest
import torch
from mistakes import Mistake, broken, diff, seeded, train
from neutrality import assert_same, trajectory, watched
from torch import nn

from introspect_cli.capture.environment import redact, settings, sources
from introspect_cli.capture.frames import Places
from introspect_cli.capture.ops.calls import Calls
from introspect_cli.capture.ops.mode import OpMode
from introspect_cli.capture.ops.probe import OpProbe
from introspect_cli.capture.ops.schema import Operators
from introspect_cli.capture.ops.values import Writers
from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.capture.probes.rng import RngProbe
from introspect_cli.capture.probes.vjp import VjpProbe
from introspect_cli.capture.regions.compile import CompileProbe
from introspect_cli.capture.regions.operators import CompiledOps
from introspect_cli.capture.regions.probe import TapProbe
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.errors import StoreError
from introspect_cli.records import Kind
from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.write.rank_writer import RankWriter
from introspect_cli.store.write.run_writer import StoreWriter


def train_compiled(log):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    fast = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        log.loss(fast(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        log(net)


OPS = {"level": "op"}
VJP = {"vjp": ("Model.last:Model.body",)}
TAP = {"compile": "keep"}
INSIDE = OPS | TAP | {"record": CaptureOptions().record | {Kind.OP_OUTPUT}}

ASKED = [
    (Places, "is_introspects", OPS, train),
    (Places, "line", OPS, train),
    (OpProbe, "_begin", OPS, train),
    (OpMode, "enter_stack", OPS, train),
    (OpProbe, "_root", OPS, train),
    (OpProbe, "_ticked", OPS, train),
    (Calls, "of", OPS, train),
    (Writers, "wrote", OPS, train),
    (Operators, "_learn", OPS, train),
    (OpProbe, "_write_results", OPS, train),
    (OpProbe, "_new_site", OPS, train),
    (RngProbe, "_record", {}, train),
    (RngProbe, "_new_site", {}, train),
    (VjpProbe, "_passing", VJP, train),
    (VjpProbe, "_ticked", VJP, train),
    (TapProbe, "_forward", TAP, train_compiled),
    (TapProbe, "_gradient", TAP, train_compiled),
    (TapProbe, "_call", TAP, train_compiled),
    (TapProbe, "_ticked", TAP, train_compiled),
    (CompileProbe, "tap", TAP, train_compiled),
    (CompiledOps, "put_in", INSIDE, train_compiled),
    (CompiledOps, "take_look", INSIDE, train_compiled),
    (CompiledOps, "end_graph", INSIDE, train_compiled),
    (RankWriter, "site", {}, train),
    (RankWriter, "layout", {}, train),
    (RankWriter, "append", {}, train),
    (RankWriter, "modules", {}, train),
    (StoreWriter, "write_settings", {}, train),
]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    ("owner", "name", "options", "work"), ASKED, ids=[f"{owner.__name__}.{name}" for owner, name, _, _ in ASKED]
)
def test_mistake_in_what_is_asked_for(tmp_path, monkeypatch, capsys, owner, name, options, work, after):
    bare = trajectory(work)
    calls = broken(monkeypatch, owner, name, after)
    seeded()
    with watched(tmp_path / "run", quiet=False, **options):
        seen = trajectory(work)
    monkeypatch.undo()
    assert_same(bare, seen)
    assert calls
    if len(calls) > after:
        said = [line for line in capsys.readouterr().err.splitlines() if f"{name} is broken" in line]
        assert len(said) == len(set(said))
        assert 1 <= len(said) <= 6
        result = diff(tmp_path / "run", tmp_path / "run")
        assert result.verdict is Verdict.UNDECIDED, result.sentence


@pytest.mark.parametrize("name", ["runtime", "hardware", "packages", "environment"])
def test_settings_that_cannot_be_read(tmp_path, monkeypatch, capsys, name):
    bare = trajectory(train)

    def fails(*args, **kwargs):
        raise Mistake(f"{name} is broken")

    owner = {"environment": redact, "packages": sources}.get(name, settings)
    monkeypatch.setattr(owner, name, fails)
    with watched(tmp_path / "run", quiet=False, env=True, packages=True):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if f"{name} is broken" in line]
    assert len(said) == 1
    assert said[0].startswith(f"introspect: {name} settings are not observed")
    with open_run(tmp_path / "run") as run:
        assert name not in run.settings
        assert {"runtime", "hardware", "packages", "environment"} - run.settings.keys() == {name}
        assert run.state is RunState.COMPLETE


@pytest.mark.parametrize(
    ("owner", "name"), [(RankWriter, "close"), (RankWriter, "_finish"), (StoreWriter, "_close_ranks")]
)
def test_mistake_at_the_very_end(tmp_path, monkeypatch, capsys, owner, name):
    """What fails when all is written is told, and costs none of it."""
    bare = trajectory(train)

    def fails(self):
        raise Mistake(f"{name} is broken")

    monkeypatch.setattr(owner, name, fails)
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    assert sum(f"{name} is broken" in line for line in capsys.readouterr().err.splitlines()) >= 1
    with open_run(tmp_path / "run") as run:
        assert run.state is not RunState.COMPLETE
        assert len(run.rank(0).steps) == 3


@pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("name", ["append", "modules"])
def test_a_store_that_fails_ends_the_run_and_not_the_script(tmp_path, monkeypatch, capsys, name, error):
    """A store that cannot be written is told once, and ends; the script does not notice."""
    bare = trajectory(train)
    original, calls = getattr(RankWriter, name), []

    def fails(self, *args):
        calls.append(name)
        if len(calls) > 1:
            raise error
        return original(self, *args)

    monkeypatch.setattr(RankWriter, name, fails)
    seeded()
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("introspect: ")]
    assert 1 <= len(said) <= 3
    assert len(said) == len(set(said))
