"""Which call of a module a tap inside a compiled region belongs to, whatever order the compiler runs it in."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, records
from torch import nn

from introspect_cli.records import Kind, Phase

RECORDED = {Kind.INPUT, Kind.OUTPUT, Kind.PARAM, Kind.GRAD}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.fc, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return x + self.act(self.fc(self.ln(x)))


class GPT(nn.Module):
    """Constants go into modules: positions, a type of token, a start."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos, self.kind = nn.Embedding(11, 8), nn.Embedding(8, 8), nn.Embedding(2, 8)
        self.first, self.block, self.drop = nn.Linear(8, 8), Block(), nn.Dropout(0.0)

    def forward(self, x):
        size = x.shape[1]
        hidden = self.tok(x) + self.pos(torch.arange(size)) + self.kind(torch.zeros(size, dtype=torch.long))
        hidden = hidden + self.first(self.drop(torch.full((size, 8), 0.5)))
        return self.block(self.block(hidden))


def trained(make, sizes):
    def work():
        torch.manual_seed(2)
        model = GPT()
        run = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in sizes:
            loss = run(torch.randint(0, 11, (2, size))).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return work


SHAPES = (6, 6, 4, 5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = captured(tmp_path_factory.mktemp("order") / "eager", trained(lambda model: model, SHAPES))
    return [list(records(path, step)) for step in range(len(SHAPES))]


def wanted(found):
    return {record.site: record for record in found if record.site.kind in RECORDED}


def ordered(found):
    return [
        (record.site.kind, record.site.fqn, record.site.call)
        for record in sorted(found, key=lambda record: record.sequence)
        if record.site.kind in {Kind.INPUT, Kind.OUTPUT} and record.site.phase is Phase.FORWARD
        if record.site.fqn != "GPT"
    ]


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", True),
        ("eager", None),
        *(
            pytest.param(backend, dynamic, marks=pytest.mark.sweep)
            for backend, dynamic in (("eager", True), ("aot_eager", None), ("inductor", None), ("inductor", True))
        ),
    ],
)
def test_constants_that_go_into_modules_shift_no_call(tmp_path, plain, backend, dynamic):
    way = lambda model: torch.compile(model, backend=backend, dynamic=dynamic)  # noqa: E731 - shorter so
    path = captured(tmp_path / "kept", trained(way, SHAPES), compile="keep")
    for step, found in enumerate(plain):
        kept, eager = wanted(records(path, step)), wanted(found)
        assert set(kept) == set(eager)
        assert {site for site in kept if kept[site].summary.status is not eager[site].summary.status} == set()
        assert {site for site in kept if kept[site].summary.layout.shape != eager[site].summary.layout.shape} == set()
        if backend != "inductor":
            assert {s for s in kept if kept[s].summary.checksum != eager[s].summary.checksum} == set()


@pytest.mark.sweep
def test_records_stand_in_the_order_of_the_program(tmp_path, plain):
    """Inductor looks at all inputs of this model after the outputs; what diverges first is told by the order."""
    way = lambda model: torch.compile(model)  # noqa: E731, PLW0108 - asked for under capture, which replaces it
    path = captured(tmp_path / "kept", trained(way, SHAPES[:1]), compile="keep")
    named = {name for _, name, _ in ordered(plain[0])}
    assert named >= {"GPT.pos", "GPT.kind", "GPT.first", "GPT.block.act"}
    assert ordered(records(path, 0)) == ordered(plain[0])


def test_two_graphs_of_one_step_go_on_counting(tmp_path):
    """Two calls of a compiled module in one step, and one of the module itself before them."""

    def work():
        torch.manual_seed(2)
        model = GPT()
        run = torch.compile(model.block, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(2, 8)
            (run(run(model.block.fc(x))) + run(x)).sum().backward()
            optimizer.step()

    path = captured(tmp_path / "kept", work, compile="keep")
    for step in range(2):
        calls = {r.site.call for r in records(path, step) if r.site.fqn.endswith("fc") and r.site.kind is Kind.OUTPUT}
        assert calls == {0, 1, 2, 3}
