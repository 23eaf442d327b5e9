"""The dataflow of a step as data: nodes, edges, pruning, marks of a comparison."""

from __future__ import annotations

import copy
import json
from xml.etree import ElementTree as ET

import pytest
import torch
from opcapture import captured
from torch import nn
from verbs import verb

SVG = "{http://www.w3.org/2000/svg}"


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


def graph_of(path, *options):
    return json.loads(verb("show", "graph", "--format", "json", *options, path).stdout)


@pytest.fixture
def graph(runs):
    return graph_of(runs[0], "--no-prune")


def name_of(node):
    record = node["record"]
    return f"{record['phase']} {record['fqn']} {record['path']}"


def named(graph):
    return {node["number"]: name_of(node) for node in graph["nodes"]}


def edges_of(graph):
    names = named(graph)
    return {(names[start], names[end]) for start, end in graph["edges"]}


def test_edges_lead_from_what_wrote_a_value_to_what_was_given_it(graph):
    edges = edges_of(graph)
    tanh, add = "forward Deep.layers.0 aten.tanh.default", "forward Deep.layers.0 aten.add.Tensor"
    assert ("forward Deep.layers.0.fc aten.addmm.default", tanh) in edges
    assert (tanh, add) in edges
    assert ("forward Deep aten.mul.Tensor", add) in edges
    assert (tanh, "backward Deep.layers.0 aten.tanh_backward.default") in edges
    order = {node["number"]: place for place, node in enumerate(graph["nodes"])}
    assert all(order[start] < order[end] for start, end in graph["edges"])


def test_operators_that_leave_the_scale_are_pruned_and_their_neighbours_joined(runs, graph):
    pruned = graph_of(runs[0])
    names, all_names = set(named(pruned).values()), set(named(graph).values())
    assert all_names - names >= {"forward Deep aten.flip.default", "forward Deep aten.clone.default"}
    assert "forward Deep.layers.3 aten.add.Tensor" in names, "several inputs"
    assert ("forward Deep.layers.3 aten.add.Tensor", "forward Deep aten.exp.default") in edges_of(pruned)
    assert pruned["total"] == len(graph["nodes"])


def test_an_operator_with_a_parameter_has_several_inputs_and_stays(tmp_path):
    class Gains(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return ((x.exp() * self.gain) * 1.0).tanh()

    path = captured(tmp_path / "run", trained(Gains()), level="op")
    forward = [node for node in graph_of(path, "--no-prune")["nodes"] if node["record"]["phase"] == "forward"]
    assert [node["inputs"] for node in forward] == [1, 2, 1, 1]
    kept = [
        node["record"]["call"] for node in graph_of(path)["nodes"] if name_of(node).startswith("forward Gains aten.mul")
    ]
    assert kept == [0], "the product with a number leaves the scale and goes, that with a parameter stays"


def test_the_middle_of_repeated_layers_is_pruned(runs):
    names = set(named(graph_of(runs[0])).values())
    assert "forward Deep.layers.0.fc aten.addmm.default" in names
    assert "forward Deep.layers.3.fc aten.addmm.default" in names
    assert not [name for name in names if ".layers.1" in name or ".layers.2" in name]


def test_targets_are_named_by_globs(runs):
    pruned = graph_of(runs[0], "--no-prune", "--target", "*.fc")
    assert {node["record"]["fqn"].rpartition(".")[2] for node in pruned["nodes"]} == {"fc"}
    joined = "forward Deep.layers.0.fc aten.addmm.default", "forward Deep.layers.1.fc aten.addmm.default"
    assert joined in edges_of(pruned)


def test_a_comparison_marks_its_origin_and_pruning_keeps_it(runs, tmp_path):
    assert verb("diff", "--level", "op", "-o", tmp_path / "marked.svg", *runs).returncode == 1
    root = ET.fromstring((tmp_path / "marked.svg").read_text(encoding="utf-8"))
    groups = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    fills = {g.findtext(f"{SVG}title").splitlines()[0]: g.find(f"{SVG}rect").get("style") for g in groups}
    assert fills["forward Deep.layers.0: aten.tanh.default"] == "fill:var(--eq,#e8ecef)"
    assert fills["forward Deep.layers.2.fc: aten.addmm.default"] in {"fill:#d7263d", "fill:#f4a259"}
    assert fills["forward Deep.layers.3: aten.add.Tensor"] == "fill:#f4a259"


def test_a_run_without_operators_says_what_to_do(tmp_path):
    path = captured(tmp_path / "run", trained(Deep()))
    assert "--level op" in verb("show", "graph", path).stderr
    assert "no step 9" in verb("show", "graph", "--step", "9", path).stderr
