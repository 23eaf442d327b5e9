"""The picture and the table of a step's operators, and the commands that make them."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest
import torch
from opcapture import captured
from torch import nn
from verbs import verb

SVG = "{http://www.w3.org/2000/svg}"


class Net(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.factor = factor

    def forward(self, x):
        return torch.tanh(self.fc(x) * self.factor) / x[:, :3]


def trained(x, factor=2.0):
    def work():
        torch.manual_seed(4)
        model = Net(factor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        optimizer.step()

    return work


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    broken = torch.ones(2, 4)
    broken[0, 0] = 0
    made = {"a": trained(torch.ones(2, 4)), "b": trained(torch.ones(2, 4), 3.0), "nan": trained(broken)}
    return {name: captured(place / name, work, level="op") for name, work in made.items()}


@pytest.fixture
def drawn(tmp_path):
    """The picture of a run's operators."""

    def draw(path):
        done = verb("show", "graph", "--no-prune", "-o", tmp_path / "net.svg", path)
        assert done.returncode == 0, done.stdout
        return (tmp_path / "net.svg").read_text(encoding="utf-8")

    return draw


def boxes(svg):
    root = ET.fromstring(svg)
    found = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    return {group.findtext(f"{SVG}title").splitlines()[0]: group.find(f"{SVG}rect").get("style") for group in found}


def test_the_svg_is_well_formed_and_has_a_box_for_each_operator(runs, drawn):
    graph = json.loads(verb("show", "graph", "--no-prune", "--format", "json", runs["a"]).stdout)
    svg = drawn(runs["a"])
    assert len(boxes(svg)) == len(graph["nodes"]) > 8
    assert svg.count("<path") == len(graph["edges"])
    assert "script" not in re.sub(r"<title>.*?</title>|<text.*?</text>", "", svg, flags=re.DOTALL)


def test_boxes_do_not_overlap_and_lie_inside(runs, drawn):
    root = ET.fromstring(drawn(runs["a"]))
    places = [
        tuple(map(float, re.findall(r"-?\d+", group.get("transform"))))
        for group in root.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None
    ]
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(0 <= x <= width - 168 and 0 <= y <= height - 38 for x, y in places)
    for place, (x0, y0) in enumerate(places):
        for x1, y1 in places[place + 1 :]:
            assert abs(x0 - x1) >= 168 or abs(y0 - y1) >= 38


def test_what_is_not_finite_is_red(runs, drawn):
    found = boxes(drawn(runs["nan"]))
    assert found["forward Net: aten.div.Tensor"] == "fill:#d7263d"
    assert found["forward Net.fc: aten.addmm.default"] != "fill:#d7263d"


def test_names_from_strangers_are_escaped(tmp_path, drawn):
    strange = type("<script>alert(1)</script>", (nn.Linear,), {})
    svg = drawn(captured(tmp_path / "strange", lambda: strange(2, 2)(torch.ones(2)).sum().backward(), level="op"))
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg


def test_a_picture_is_an_svg_that_can_be_written(runs, tmp_path):
    assert "is no .svg" in verb("show", "graph", "-o", tmp_path / "x.png", runs["a"]).stderr
    assert "cannot write" in verb("show", "graph", "-o", tmp_path / "no" / "x.svg", runs["a"]).stderr


def test_the_table_has_scale_forward_and_of_the_gradient(runs):
    _, head, *rows = verb("show", "graph", runs["a"]).stdout.splitlines()
    titles = re.split("  +", head)
    for wanted in ("mean|x|", "|mean|", "std", "max|x|", "min|x|", "gradient mean|x|", "line"):
        assert wanted in titles
    cells = re.split("  +", next(row for row in rows if "aten.tanh.default" in row))
    assert cells[titles.index("line")].rpartition(":")[0].endswith("test_graph_render.py")
    assert float(cells[titles.index("gradient mean|x|")]) > 0


def test_show_graph_and_diff_level_op_from_the_command_line(runs, introspect, tmp_path):
    said = introspect("show", "graph", runs["a"])
    assert said.returncode == 0, said.stderr
    assert "aten.tanh.default" in said.stdout
    assert introspect("show", "graph", "-o", "net.svg", runs["a"]).returncode == 0
    assert boxes((tmp_path / "net.svg").read_text(encoding="utf-8"))
    document = json.loads(introspect("show", "graph", "--no-prune", "--format", "json", runs["a"]).stdout)
    assert len(document["nodes"]) == document["total"] > 8
    said = introspect("diff", "--level", "op", "-o", "diff.svg", runs["a"], runs["b"])
    assert said.returncode == 1, said.stderr
    assert "aten.mul.Tensor of Net" in said.stdout
    found = boxes((tmp_path / "diff.svg").read_text(encoding="utf-8"))
    assert found["forward Net: aten.mul.Tensor"] == "fill:#d7263d"
    assert found["forward Net: aten.tanh.default"] == "fill:#f4a259"
    assert found["forward Net.fc: aten.addmm.default"] == "fill:var(--eq,#e8ecef)"
