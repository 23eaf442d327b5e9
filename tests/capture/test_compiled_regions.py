"""Compiled regions: the same sites as in eager mode, the same numbers or said not to be seen, in the same order."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, compared, records
from sweeps import sliced
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from introspect_cli.compare.result import Verdict
from introspect_cli.records import Kind, Phase, Status

pytestmark = pytest.mark.usefixtures("fresh_compiler")

GRADIENTS = {Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}
RECORDED = GRADIENTS | {Kind.INPUT, Kind.OUTPUT, Kind.PARAM, Kind.GRAD}


def eager(model):
    return model


def with_aot_eager(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def trained(make, build, batch=lambda size: torch.randn(size, 4), sizes=(5, 5)):
    """Train what `make` makes of a new model, on batches of these sizes; the same numbers each time."""

    def work():
        torch.manual_seed(2)
        model = build()
        run = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in sizes:
            optimizer.zero_grad()
            found = run(batch(size))
            found = (found["logits"], found["parts"][0]) if isinstance(found, dict) else found
            sum(part.pow(2).mean() for part in (found if isinstance(found, tuple) else (found,))).backward()
            optimizer.step()

    return work


def by_site(path, step=0):
    return {record.site: record.summary for record in records(path, step)}


# --- of each way to compile a model


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.act, self.back = nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)

    def forward(self, x, scale=1.0):
        return x + self.back(self.act(self.wide(x))) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet, self.body, self.outlet = nn.Linear(4, 6), Inner(), nn.Linear(6, 2)

    def forward(self, x):
        hidden = self.body(self.body(self.inlet(x)), scale=0.5)
        return {"logits": self.outlet(hidden), "parts": (hidden, hidden * 2)}


WAYS = {
    "module": with_aot_eager,
    "method": lambda model: (model.compile(backend="aot_eager", fullgraph=True), model)[1],
    "part": lambda model: (setattr(model, "body", with_aot_eager(model.body)), model)[1],
    "function": lambda model: with_aot_eager(lambda x: model(x)),  # noqa: PLW0108 - a function is meant
    "no backend of its own": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return by_site(captured(tmp_path_factory.mktemp("plain") / "eager", trained(eager, Net)))


def of_uses_inside(site, root):
    """Whether it is the gradient of a region's result that the region itself may use: outside, only other uses tell."""
    return site.kind is Kind.GRAD_OUTPUT and site.fqn == root


@pytest.mark.parametrize("way", WAYS)
def test_kept_regions_have_the_sites_and_the_numbers_of_eager(tmp_path, plain, way):
    kept = by_site(captured(tmp_path / "kept", trained(WAYS[way], Net), compile="keep"))
    # A compiler drops what nobody uses: the second part of the output has no use and no gradient.
    wanted = {site for site in plain if site.kind in RECORDED | {Kind.LOSS} and site.path != "['parts'][1]"}
    assert wanted - set(kept) == set()
    seen = {site for site in wanted if kept[site].status is Status.OBSERVED}
    unequal = {site for site in seen if plain[site].checksum != kept[site].checksum}
    assert {site for site in unequal if not of_uses_inside(site, "Net")} == set()
    assert {site for site in wanted if site.kind not in GRADIENTS and site.path != "['scale']"} <= seen


def test_boundary_changes_nothing_and_says_what_is_hidden(tmp_path):
    found = by_site(captured(tmp_path / "run", trained(with_aot_eager, Net)))
    hidden = {s.fqn: summary.text for s, summary in found.items() if summary.status is Status.NOT_OBSERVED}
    assert set(hidden) == {f"Net.{name}" for name in ("inlet", "body", "body.wide", "body.act", "body.back", "outlet")}
    assert set(hidden.values()) == {"inside Net: compiled, scripted or fused"}


def test_taps_cause_no_break_and_no_compilation_of_their_own_and_go_with_the_capture(tmp_path):
    sizes, seen, models = (5, 5, 6, 7, 9), [], []
    original = torch.compile

    def make(model):
        models.append(model)
        return with_aot_eager(model)

    for mode in ("boundary", "keep"):
        torch.compiler.reset()
        counters.clear()
        captured(tmp_path / mode, trained(make, Net, sizes=sizes), compile=mode)
        seen.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert seen[0] == seen[1]
    assert seen[1][1] == {}
    steps = [{s for s in by_site(tmp_path / "keep", step) if s.phase is Phase.FORWARD} for step in range(len(sizes))]
    assert all(sites == steps[0] for sites in steps)
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in models[-1].modules())
    assert torch.compile is original


# --- of each sort of model


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Residual(Pair):
    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        return hidden + self.b(hidden) * hidden


class Twice(Pair):
    """One module, called twice with the same value and once with another."""

    def forward(self, x):
        hidden = self.a(x).sin()
        return self.b(hidden) + self.b(hidden) * 2 + self.b(self.b(hidden))


class Returns(Pair):
    """Returns what it goes on to use, and what one of its modules was given."""

    def forward(self, x):
        hidden = self.a(x)
        wide = hidden * 3
        return self.b(wide) + hidden, hidden, wide


class Writes(Pair):
    """Writes to a value, by an operator and through a view, after a module was given it."""

    def forward(self, x):
        hidden = self.a(x) * 1
        more = self.b(hidden)
        other = more * 2
        other.mul_(hidden)
        other[0] = 0
        other.view(-1).add_(1)
        return self.b(other) + more


class InPlace(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(0.0, inplace=True))


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.LayerNorm(4))


class Views(Pair):
    """Modules are given views of what came in, and of each other's results."""

    def forward(self, x):
        turned = self.a(x.view(-1, 4)).t()
        return self.b(turned.t()) + turned.t()[:, :1]


class Passes(Pair):
    """A module that returns what it was given."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x):
        hidden = self.same(self.a(x))
        return self.b(self.same(hidden)) * hidden


class Breaks(Pair):
    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.b(hidden) + hidden


class Recomputes(Pair):
    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        return checkpoint(self.b, hidden, use_reentrant=False) + hidden


class Frozen(Pair):
    def forward(self, x):
        with torch.no_grad():
            seen = self.a(x)
        return self.b(seen.detach() + self.a(x))


MODELS = (Residual, Twice, Returns, Writes, InPlace, Normalised, Views, Passes, Breaks, Recomputes, Frozen)
PLACED = [(build, inside) for build in MODELS for inside in (False, True) if not (inside and build is Returns)]
"""Each model as a whole and as a part of another; the results of one are no one tensor."""
KEPT = [(build, inside) for build, inside in PLACED if not inside or build in (Twice, InPlace, Breaks)]


def in_part(build):
    """A larger model that has it in its middle."""
    return lambda: nn.Sequential(nn.Linear(4, 4), build(), nn.Linear(4, 4))


@pytest.mark.parametrize("backend", sliced(["aot_eager", "eager"], ["aot_eager"]))
@pytest.mark.parametrize(("build", "inside"), sliced(PLACED, KEPT))
def test_values_are_those_of_eager_mode_and_gradients_are_said_not_to_be_seen(tmp_path, build, inside, backend):
    def make(model):
        if not inside:
            return torch.compile(model, backend=backend)
        model[1] = torch.compile(model[1], backend=backend)
        return model

    model = in_part(build) if inside else build
    plain = by_site(captured(tmp_path / "eager", trained(eager, model)), 1)
    kept = by_site(captured(tmp_path / "kept", trained(make, model), compile="keep"), 1)
    seen = {site for site, summary in kept.items() if summary.status is Status.OBSERVED}
    unequal = {site for site in seen & set(plain) if kept[site].checksum != plain[site].checksum}
    assert {site for site in unequal if not of_uses_inside(site, "Returns")} == set()
    forward = {site for site in plain if site.phase is Phase.FORWARD and site.kind in (Kind.INPUT, Kind.OUTPUT)}
    assert forward <= seen
    assert {site for site in plain if site.kind in GRADIENTS} <= set(kept)
    if build is not Returns and not inside:  # without choosing kinds
        assert compared(tmp_path / "eager", tmp_path / "kept").verdict is Verdict.SAME


def test_what_a_region_writes_to_is_not_said_to_be_the_same(tmp_path):
    for name, make, options in (("eager", eager, {}), ("kept", with_aot_eager, {"compile": "keep"})):
        captured(tmp_path / name, trained(make, Writes), **options)
    result, strict = (compared(tmp_path / "eager", tmp_path / "kept", strict=each) for each in (False, True))
    assert strict.verdict is Verdict.UNDECIDED
    assert strict.counts.not_observed > 0
    assert result.verdict is Verdict.SAME, "by its results, all of which were seen"
    assert "Not compared: " in result.sentence


# --- which call of a module a tap belongs to, whatever order the compiler runs it in


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


SHAPES = (6, 6, 4, 5)


def of_gpt(make, sizes=SHAPES):
    return trained(make, GPT, lambda size: torch.randint(0, 11, (2, size)), sizes)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("order") / "eager", of_gpt(eager))


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", True),
        *(
            pytest.param(backend, dynamic, marks=pytest.mark.sweep)
            for backend in ("eager", "aot_eager", "inductor")
            for dynamic in (None, True)
            if (backend, dynamic) != ("aot_eager", True)
        ),
    ],
)
def test_constants_that_go_into_modules_shift_no_call(tmp_path, gpt, backend, dynamic):
    way = lambda model: torch.compile(model, backend=backend, dynamic=dynamic)  # noqa: E731 - shorter so
    path = captured(tmp_path / "kept", of_gpt(way), compile="keep")
    for step in range(len(SHAPES)):
        kept, plain = (
            {
                site: (summary.status, summary.layout.shape, summary.checksum if backend != "inductor" else 0)
                for site, summary in by_site(run, step).items()
                if site.kind in RECORDED - GRADIENTS
            }
            for run in (path, gpt)
        )
        assert kept == plain


def in_order(path):
    """Modules inside the model whose inputs and outputs are on record, in order."""
    return [
        (record.site.kind, record.site.fqn, record.site.call)
        for record in sorted(records(path, 0), key=lambda record: record.sequence)
        if record.site.kind in {Kind.INPUT, Kind.OUTPUT}
        if record.site.phase is Phase.FORWARD and record.site.fqn != "GPT"
    ]


@pytest.mark.sweep
def test_records_stand_in_the_order_of_the_program(tmp_path, gpt):
    """Inductor looks at all inputs of this model after the outputs; what diverges first is told by the order."""
    way = lambda model: torch.compile(model)  # noqa: E731, PLW0108 - asked for under capture, which replaces it
    path = captured(tmp_path / "kept", of_gpt(way, SHAPES[:1]), compile="keep")
    assert {name for _, name, _ in in_order(gpt)} >= {"GPT.pos", "GPT.kind", "GPT.first", "GPT.block.act"}
    assert in_order(path) == in_order(gpt)


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


def wrong_backend():
    """A compiler whose decomposition of GELU is another function."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def gelu(x, *, approximate="none"):
        return torch.nn.functional.hardswish(x) if approximate == "none" else x

    compiler = lambda graph, _inputs: make_boxed_func(graph.forward)  # noqa: E731
    return aot_autograd(fw_compiler=compiler, decompositions={torch.ops.aten.gelu.default: gelu})


def test_a_wrong_decomposition_is_found_at_the_first_module_that_runs_it(tmp_path, gpt):
    way = lambda model: torch.compile(model, backend=wrong_backend())  # noqa: E731
    first = compared(gpt, captured(tmp_path / "wrong", of_gpt(way), compile="keep")).first
    assert (first.site.fqn, first.site.kind, first.step) == ("GPT.block.act", Kind.OUTPUT, 0)
    assert first.role.value == "origin"


@pytest.mark.sweep
def test_inductor_is_the_same_or_apart_by_rounding(tmp_path, gpt):
    inductor = captured(tmp_path / "kept", of_gpt(lambda model: torch.compile(model)), compile="keep")  # noqa: PLW0108 - as above
    exact, near = compared(gpt, inductor), compared(gpt, inductor, rtol=1e-4, atol=1e-6)
    assert exact.verdict is Verdict.SAME or "Rounding alone" in exact.sentence, exact.sentence
    assert near.verdict is Verdict.SAME, near.sentence
