"""Every way a model is run by what is recorded of it: each line of the list in `docs/reference/transformations.md`."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from opcapture import QUICK
from torch import Tensor, nn

import introspect_cli
from introspect_cli.capture.regions.attach import attach, detach
from introspect_cli.capture.run_once import run_once
from introspect_cli.compare.result import Verdict
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind, Status
from introspect_cli.store.run import open_run

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "Net"
DOCS = Path(introspect_cli.__file__).parent.parent / "docs" / "reference" / "transformations.md"


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.fc(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet, self.body, self.head = nn.Linear(4, 6), Part(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.inlet(x))))


def _scripted_and_loaded(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def _saved_whole(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _packaged(model: nn.Module) -> Any:
    from torch.package import PackageExporter, PackageImporter

    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.extern(["introspect_cli.**", "torch.**", "test_transformations"])
        exporter.save_pickle("models", "net.pkl", model)
    buffer.seek(0)
    return PackageImporter(buffer).load_pickle("models", "net.pkl")


def _interpreted(model: nn.Module) -> Any:
    graph = torch.fx.symbolic_trace(model)
    graph.forward = lambda x: torch.fx.Interpreter(graph).run(x)
    return graph


def _traced(model: nn.Module) -> Any:
    state = copy.deepcopy(model.state_dict())
    traced = torch.jit.trace(model, INPUT, check_trace=False)
    traced.load_state_dict(state)  # tracing runs the model, which moves its statistics
    return traced


INPUT = torch.linspace(-1, 1, 20).view(5, 4)

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved_whole,
    "torch.package": _packaged,
    "FX": torch.fx.symbolic_trace,
    "FX interpreter": _interpreted,
    "script": torch.jit.script,
    "script, saved and loaded": _scripted_and_loaded,
    "trace": _traced,
    # what newer releases do by default; the strict way of torch 2.4 takes no model that has hooks itself
    "export": lambda model: torch.export.export(model, (INPUT,), strict=False).module(),
    "compile, kept": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compile, boundary": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}

COLUMNS = {
    "parameters": Kind.PARAM,
    "buffers": Kind.BUFFER,
    "inputs": Kind.INPUT,
    "outputs": Kind.OUTPUT,
    "gradients of parameters": Kind.GRAD,
    "gradients of inputs": Kind.GRAD_INPUT,
    "gradients of outputs": Kind.GRAD_OUTPUT,
}

YES, EDGE = "every module", "boundary"
PYTHON_KEEPS = dict.fromkeys(COLUMNS, YES)
GRAPH_KEEPS = {**PYTHON_KEEPS, "gradients of inputs": EDGE}
"""Inside a graph, taps see the gradient of what they give out; that of an input is summed over uses they cannot see."""

TABLE: dict[str, dict[str, str]] = {
    "eager": PYTHON_KEEPS,
    "deepcopy": PYTHON_KEEPS,
    "pickle": PYTHON_KEEPS,
    "torch.save": PYTHON_KEEPS,
    "torch.package": PYTHON_KEEPS,
    "FX": GRAPH_KEEPS,
    "FX interpreter": GRAPH_KEEPS,
    "script": GRAPH_KEEPS,
    "script, saved and loaded": GRAPH_KEEPS,
    "trace": GRAPH_KEEPS,
    "export": GRAPH_KEEPS,
    "compile, kept": {**GRAPH_KEEPS, "gradients of outputs": EDGE},
    "compile, boundary": {
        **PYTHON_KEEPS,
        "inputs": EDGE,
        "outputs": EDGE,
        "gradients of inputs": EDGE,
        "gradients of outputs": EDGE,
    },
}


@dataclass(frozen=True)
class Seen:
    observed: dict
    unseen: set


def seen(path, model, mode):
    """What one forward and backward pass of a model leaves in a run."""
    options = copy.copy(QUICK)
    object.__setattr__(options, "output", path)
    object.__setattr__(options, "force", True)
    object.__setattr__(options, "compile", mode)
    x = INPUT.clone().requires_grad_()
    run_once(model, NAME, (x,), {}, options, None, backward=True)
    with open_run(path) as run:
        assert run.manifest["failures"] == []
        records = list(run.rank(0).records(0))
    observed = {r.site: r.summary.checksum for r in records if r.summary.status is not Status.NOT_OBSERVED}
    return Seen(observed, {r.site for r in records} - set(observed))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.manual_seed(11)
    model = Net()
    state = copy.deepcopy(model.state_dict())
    return state, seen(tmp_path_factory.mktemp("reference") / "run", model, "boundary").observed


@pytest.fixture(scope="module")
def found(tmp_path_factory, reference):
    """What each way leaves, made once."""
    made = {}

    def of(way):
        if way not in made:
            model = Net()
            model.load_state_dict(reference[0])
            compiled = way.startswith("compile")
            if not compiled:
                attach(model)
            try:
                made[way] = seen(
                    tmp_path_factory.mktemp("ways") / "run",
                    WAYS[way](model),
                    "keep" if way.endswith("kept") else "boundary",
                )
            except RuntimeError:
                if way == "export" and not _is_trained_when_exported():
                    pytest.skip(
                        "this torch runs no backward pass of an exported BatchNorm that trains, without taps too"
                    )
                raise
            torch.compiler.reset()
        return made[way]

    return of


def _is_trained_when_exported():
    """Whether torch itself runs forward and backward what it makes of the model, which has no tap."""
    exported = WAYS["export"](Net())
    try:
        exported(INPUT).sum().backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cell_of_the_table(found, reference, way, column):
    kind, cell = COLUMNS[column], TABLE[way][column]
    expected = {site: value for site, value in reference[1].items() if site.kind is kind}
    if cell == EDGE:
        expected = {site: value for site, value in expected.items() if site.fqn == NAME}
    assert expected
    observed = found(way).observed
    assert {site for site in expected if site not in observed} == set()
    assert {site for site, value in expected.items() if observed[site] != value} == set()


def test_the_list_in_the_documentation_is_the_tested_one():
    section = (
        DOCS.read_text(encoding="utf-8").split("## What is recorded in each way")[1].split("What cannot be recorded")[0]
    )
    listed = {}
    for line in section.splitlines():
        ways, colon, less = line.removeprefix("- ").partition(": ")
        if line.startswith("- ") and colon:
            edges = [] if less == "everything" else less.removeprefix("at the boundary ").split(", ")
            listed |= {way: PYTHON_KEEPS | dict.fromkeys(edges, EDGE) for way in ways.split("; ")}
    assert listed == TABLE


def test_attach_and_detach_leave_nothing_behind():
    model = Net()
    assert attach(model) == 6
    with pytest.raises(UsageError, match="taps already"):
        attach(model)
    detach(model)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with pytest.raises(UsageError, match="before it is scripted"):
        attach(torch.jit.script(model))


# --- compare_transformed


def test_a_faithful_transformation_compares_the_same():
    model = Net()
    result = introspect_cli.compare_transformed(model, torch.fx.symbolic_trace(model), INPUT)
    assert result.verdict is Verdict.SAME
    assert any("Net.body" in note for note in result.notes), "FX keeps no module for the middle of the tree"
    assert introspect_cli.compare_transformed(model, copy.deepcopy(model), INPUT, level="op").verdict is Verdict.SAME


@pytest.mark.parametrize("level", ["module", "op"])
def test_an_unfaithful_one_is_found_where_it_departs(level):
    model = Net()
    graph = torch.fx.symbolic_trace(model)
    for node in graph.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.sigmoid
    graph.recompile()
    result = introspect_cli.compare_transformed(model, graph, INPUT, level=level)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.fqn.startswith("Net.body")
    assert "norm" in result.first.site.fqn, "the first that sees the other activation"


def test_a_wrong_gradient_is_found_where_the_forward_pass_agrees():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.tanh(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Tanh(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Wrong(nn.Module):
        def forward(self, x):
            return Half.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Tanh(), nn.Linear(4, 2))
    other = copy.deepcopy(model)
    other[1] = Wrong()
    result = introspect_cli.compare_transformed(model, other, INPUT)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.phase.value == "backward"
    assert introspect_cli.compare_transformed(model, other, INPUT, backward=False).verdict is Verdict.SAME


def test_the_models_are_left_as_they_were():
    model = Net()
    other = copy.deepcopy(model)
    model(INPUT).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    introspect_cli.compare_transformed(model, other, INPUT)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert all(p.grad is None for p in other.parameters())
    assert torch.equal(state, torch.get_rng_state())
