"""A bug in introspect switches a probe off, is reported once, is recorded, and never reaches the script."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from mistakes import Mistake, broken, diff, seeded, train
from neutrality import Seen, assert_same, trajectory, watched
from torch import nn

from introspect_cli.capture.context import Context
from introspect_cli.capture.naming.names import Names
from introspect_cli.capture.naming.states import ParameterNames
from introspect_cli.capture.probes.built import BuiltProbe
from introspect_cli.capture.probes.data import DataProbe
from introspect_cli.capture.probes.description import Description
from introspect_cli.capture.probes.gradients import GradientProbe
from introspect_cli.capture.probes.loss import LossProbe
from introspect_cli.capture.probes.module_calls import ModuleCalls
from introspect_cli.capture.probes.module_values import ModuleValues
from introspect_cli.capture.probes.optimizers import OptimizerProbe
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.capture.recording.backlog import Backlog
from introspect_cli.capture.recording.recorder import Recorder
from introspect_cli.capture.recording.step_block import StepBlock
from introspect_cli.capture.recording.step_rows import Sites
from introspect_cli.capture.steps.clock import StepClock
from introspect_cli.capture.steps.evaluation import Trained
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.tensors.summarizer import Summarizer
from introspect_cli.tensors.unusual import UnusualTensors

ENTRIES = [
    (ModuleCalls, "_enter"),
    (ModuleCalls, "_leave"),
    (ModuleValues, "arguments"),
    (ModuleCalls, "_phase"),
    (GradientProbe, "watch"),
    (GradientProbe, "clear"),
    (OptimizerProbe, "_note"),
    (OptimizerProbe, "_record_before"),
    (OptimizerProbe, "_record_after"),
    (LossProbe, "_record"),
    (DataProbe, "_record"),
    (BuiltProbe, "_made"),
    (Description, "of"),
    (StateProbe, "_record"),
    (StateProbe, "_tensors_of"),
    (StateProbe, "_changed"),
    (StateProbe, "_site"),
    (StateProbe, "parameters_after"),
    (StateProbe, "buffers_after"),
    (Names, "state"),
    (Names, "registered"),
    (Names, "refresh"),
    (ParameterNames, "of"),
    (Names, "new_modules"),
    (StepClock, "begin"),
    (StepClock, "tick"),
    (StepClock, "built"),
    (StepClock, "outermost_forward"),
    (StepClock, "look_for_unseen_step"),
    (Trained, "is_trained"),
    (Context, "site"),
    (Sites, "number"),
    (Recorder, "tensor"),
    (Recorder, "tensor_at"),
    (Recorder, "value"),
    (Recorder, "tick"),
    (Recorder, "flush"),
    (Backlog, "_append"),
    (Summarizer, "add"),
    (Summarizer, "value"),
    (Summarizer, "end_step"),
    (StepBlock, "complete"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that a capture without a mistake makes."""
    paths = [tmp_path_factory.mktemp("whole") / str(number) for number in range(2)]
    for path in paths:
        seeded()
        with watched(path):
            trajectory(train)
    assert diff(*paths).verdict is Verdict.SAME
    return paths[0]


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(("owner", "name"), ENTRIES, ids=[f"{owner.__name__}.{name}" for owner, name in ENTRIES])
def test_a_mistake_in_a_probe_never_reaches_the_script(tmp_path, monkeypatch, capsys, whole, owner, name, after):
    bare = trajectory(train)
    calls = broken(monkeypatch, owner, name, after)
    seeded()
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("introspect: ")]
    if len(calls) <= after:
        assert not any("Mistake" in line for line in said)
        return
    about = [line for line in said if f"Mistake: {name} is broken" in line]
    assert about, said
    assert len(about) == len(set(about)) <= 6
    manifest = Seen(tmp_path / "run").manifest
    assert any(f"{name} is broken" in sentence for sentence in manifest["not_observed"])
    assert any("Mistake" in detail and "Traceback" in detail for detail in manifest["failures"])
    for other in (whole, tmp_path / "run"):
        result = diff(other, tmp_path / "run")
        assert result.verdict is Verdict.UNDECIDED, result.sentence
        assert result.sentence.startswith("Could not tell: ")
        assert any(f"{name} is broken" in note for note in result.notes)


def test_steps_before_the_mistake_are_kept(tmp_path, monkeypatch):
    original = ModuleCalls._leave

    def fails(self, *args):
        if self._recorder.step >= 1:
            raise Mistake
        return original(self, *args)

    monkeypatch.setattr(ModuleCalls, "_leave", fails)
    with watched(tmp_path / "run"):
        trajectory(train)
    monkeypatch.undo()
    seen = Seen(tmp_path / "run")
    assert seen.of("output", "Model.last", step=0)
    assert not seen.of("output", "Model.last", step=2)
    assert seen.of("grad", "Model.last.weight", step=2)  # the other probes go on


def test_value_that_cannot_be_summarised_is_one_gap(tmp_path, monkeypatch):
    class Refuses(torch.Tensor):
        pass

    original = UnusualTensors._add

    def special(self, tensor):
        if isinstance(tensor, Refuses):
            raise Mistake("no")
        return original(self, tensor)

    monkeypatch.setattr(UnusualTensors, "_add", special)
    net = nn.Sequential(nn.Identity(), nn.Linear(8, 1))
    with watched(tmp_path / "run") as session:
        net(torch.randn(2, 8).as_subclass(Refuses))
    assert session._guard.details == []
    assert "Mistake: no" in Seen(tmp_path / "run").unseen()["Sequential.0"]


def test_values_of_the_script_that_misbehave(tmp_path):
    """Objects whose repr, length, comparison, iteration or attributes raise."""

    class Hostile:
        def __repr__(self):
            raise Mistake

        __str__ = __len__ = __iter__ = __bool__ = __eq__ = __getattr__ = __repr__
        __hash__ = None

    class HostileDict(dict):
        def items(self):
            raise Mistake

    class HostileNumber(float):
        def __repr__(self):
            raise Mistake

    class Takes(nn.Module):
        def forward(self, *args, **kwargs):
            return kwargs.get("x", args[0])

    class OddOptimizer(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.param_groups[0]["odd"] = object()

    net = Takes()
    with watched(tmp_path / "run") as session:
        x = torch.randn(2)
        for value in (Hostile(), [Hostile()], HostileDict(a=x), HostileNumber(3), {"k": Hostile()}, object, print):
            assert net(value) is value
            assert net(1, x=value) is value
        linear = nn.Linear(2, 1)
        optimizer = OddOptimizer(linear.parameters())
        linear(x).sum().backward()
        optimizer.step()
    assert session._guard.details == []


def test_python_without_the_bug_is_not_blamed(tmp_path):
    """An exception of the script's own passes through the probes and switches nothing off."""

    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    with watched(tmp_path / "run") as session:
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                Raises()(torch.ones(1))
        nn.Linear(1, 1)(torch.ones(1))
    assert session._guard.sentences == []
    assert Seen(tmp_path / "run").of("output", "Linear")


def test_whole_command_with_a_broken_probe(tmp_path):
    """From outside: one line on stderr, the script's own output and code, and the sentence in the run."""
    (tmp_path / "train.py").write_text(
        "import sys, torch\nnet = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(2):\n    net(torch.ones(2)).sum().backward()\n    opt.step()\n    print('step')\nsys.exit(3)\n"
    )
    (tmp_path / "broken.py").write_text(
        "import sys\nfrom introspect_cli.capture.probes import module_calls\n"
        "def fails(*args):\n    raise ZeroDivisionError('planted')\n"
        "module_calls.ModuleCalls._leave = fails\n"
        "from introspect_cli.cli import main\nsys.argv = ['introspect', 'capture', '-o', 'run', 'train.py']\nmain()\n"
    )
    out = subprocess.run([sys.executable, "broken.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert out.returncode == 3
    assert out.stdout == "step\nstep\n"
    assert out.stderr.count("ZeroDivisionError: planted") == 1
    assert out.stderr.count("\n") == 2
    assert any("planted" in sentence for sentence in Seen(tmp_path / "run").manifest["not_observed"])
