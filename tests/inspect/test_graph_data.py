"""The dataflow of a step as data: nodes, edges, pruning, marks of a comparison."""

from __future__ import annotations

import copy

import pytest
import torch
from opcapture import captured
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.errors import UsageError
from introspect_cli.inspect.data_flow import graph_of, prune
from introspect_cli.records import Phase
from introspect_cli.render.graph import mark_ops
from introspect_cli.store.run import open_run


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class Deep(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        x = x * 2
        for layer in self.layers:
            x = layer(x)
        return x.flip(0).clone().exp()


def trained(model):
    def work():
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    return work


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    torch.manual_seed(0)
    model = Deep()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[2].fc.weight[0, 0] += 1
    place = tmp_path_factory.mktemp("runs")
    return [captured(place / name, trained(one), level="op") for name, one in (("a", model), ("b", other))]


@pytest.fixture
def graph(runs):
    with open_run(runs[0]) as run:
        return graph_of(run)


def named(graph):
    return {node.number: f"{node.record.site.phase.value} {node.record.site.fqn} {node.name}" for node in graph.nodes}


def test_edges_lead_from_what_wrote_a_value_to_what_was_given_it(graph):
    names = named(graph)
    edges = {(names[start], names[end]) for start, end in graph.edges}
    tanh, add = "forward Deep.layers.0 aten.tanh.default", "forward Deep.layers.0 aten.add.Tensor"
    assert ("forward Deep.layers.0.fc aten.addmm.default", tanh) in edges
    assert (tanh, add) in edges
    assert ("forward Deep aten.mul.Tensor", add) in edges
    assert (tanh, "backward Deep.layers.0 aten.tanh_backward.default") in edges
    order = {node.number: place for place, node in enumerate(graph.nodes)}
    assert all(order[start] < order[end] for start, end in graph.edges)


def test_operators_that_leave_the_scale_are_pruned_and_their_neighbours_joined(graph):
    pruned = prune(graph)
    names, all_names = set(named(pruned).values()), set(named(graph).values())
    assert all_names - names >= {"forward Deep aten.flip.default", "forward Deep aten.clone.default"}
    assert "forward Deep.layers.3 aten.add.Tensor" in names, "several inputs"
    by_number = named(pruned)
    edges = {(by_number[start], by_number[end]) for start, end in pruned.edges}
    assert ("forward Deep.layers.3 aten.add.Tensor", "forward Deep aten.exp.default") in edges
    assert pruned.total == len(graph.nodes)


def test_an_operator_with_a_parameter_has_several_inputs_and_stays(tmp_path):
    class Gains(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return ((x.exp() * self.gain) * 1.0).tanh()

    with open_run(captured(tmp_path / "run", trained(Gains()), level="op")) as run:
        whole = graph_of(run)
    forward = [node for node in whole.nodes if node.record.site.phase is Phase.FORWARD]
    assert [node.inputs for node in forward] == [1, 2, 1, 1]
    kept = [node.record.site.call for node in prune(whole).nodes if node in forward and "mul" in node.name]
    assert kept == [0], "the product with a number leaves the scale and goes, that with a parameter stays"


def test_the_middle_of_repeated_layers_is_pruned(graph):
    names = set(named(prune(graph)).values())
    assert "forward Deep.layers.0.fc aten.addmm.default" in names
    assert "forward Deep.layers.3.fc aten.addmm.default" in names
    assert not [name for name in names if ".layers.1" in name or ".layers.2" in name]


def test_targets_are_named_by_globs(graph):
    pruned = prune(graph, ("*.fc",), repeating=True)
    assert {node.record.site.fqn.rpartition(".")[2] for node in pruned.nodes} == {"fc"}
    names = named(pruned)
    assert ("forward Deep.layers.0.fc aten.addmm.default", "forward Deep.layers.1.fc aten.addmm.default") in {
        (names[start], names[end]) for start, end in pruned.edges
    }


def test_a_comparison_marks_its_origin_and_pruning_keeps_it(runs):
    with open_run(runs[0]) as a, open_run(runs[1]) as b:
        result = compare_runs(a, b, DiffOptions(limit=None))
        graph = prune(mark_ops(graph_of(a), result))
    states = {(node.record.site.phase, node.record.site.fqn, node.name): node.state for node in graph.nodes}
    assert states[Phase.FORWARD, "Deep.layers.0", "aten.tanh.default"] == "equal"
    assert states[Phase.FORWARD, "Deep.layers.2.fc", "aten.addmm.default"] in {"origin", "diverged"}
    assert states[Phase.FORWARD, "Deep.layers.3", "aten.add.Tensor"] == "diverged"


def test_a_run_without_operators_says_what_to_do(tmp_path):
    path = captured(tmp_path / "run", trained(Deep()))
    with open_run(path) as run, pytest.raises(UsageError, match="--level op"):
        graph_of(run)
    with open_run(path) as run, pytest.raises(UsageError, match="no step 9"):
        graph_of(run, 9)
