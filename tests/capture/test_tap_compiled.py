"""`--compile keep|eager|boundary`: the same sites as in eager, inside compiled regions."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, records
from torch import nn

from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.read.run import open_run


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


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def trained(make, sizes=(5,), build=Net):
    """Train what `make` makes of a new model; the same numbers each time."""

    def work():
        torch.manual_seed(2)
        model = build()
        run = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in sizes:
            out = run(torch.randn(size, 4))
            optimizer.zero_grad()
            (out["logits"].pow(2).mean() + out["parts"][0].sum()).backward()
            optimizer.step()

    return work


def by_site(path, step=0):
    return {record.site: record.summary for record in records(path, step)}


WAYS = {
    "module": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "method": lambda model: (model.compile(backend="aot_eager", fullgraph=True), model)[1],
    "part": lambda model: (
        setattr(model, "body", torch.compile(model.body, backend="aot_eager", fullgraph=True)),
        model,
    )[1],
    "function": lambda model: torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True),  # noqa: PLW0108 - a function is meant
    "no backend of its own": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_kept_regions_have_the_sites_and_the_numbers_of_eager(tmp_path, way):
    plain = by_site(captured(tmp_path / "eager", trained(lambda model: model)))
    kept = by_site(captured(tmp_path / "kept", trained(WAYS[way]), compile="keep"))
    inside = {Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.PARAM, Kind.GRAD, Kind.LOSS}
    wanted = {site for site in plain if site.kind in inside}
    # A compiler drops what nobody uses: the second part of the output has no use and no gradient.
    dropped = {site for site in wanted if site.path == "['parts'][1]"}
    lost = wanted - dropped - set(kept)
    assert lost == set()
    seen = {s for s in wanted - dropped if kept[s].status is Status.OBSERVED}
    assert {s for s in wanted if s.kind in {Kind.OUTPUT, Kind.PARAM, Kind.GRAD, Kind.LOSS}} - dropped <= seen
    of_uses_outside = {s for s in wanted if s.kind is Kind.GRAD_OUTPUT and s.fqn == "Net" and "['parts']" in s.path}
    unequal = {s for s in seen - of_uses_outside if plain[s].checksum != kept[s].checksum}
    assert unequal == set()


def test_a_module_called_twice_keeps_its_calls_apart(tmp_path):
    kept = by_site(captured(tmp_path / "kept", trained(WAYS["module"]), compile="keep"))
    plain = by_site(captured(tmp_path / "eager", trained(lambda model: model)))
    calls, expected = (
        {s.call: x.checksum for s, x in found.items() if (s.kind, s.fqn) == (Kind.OUTPUT, "Net.body.act")}
        for found in (kept, plain)
    )
    assert len(set(calls.values())) == 2
    assert calls == expected


def test_boundary_changes_nothing_and_says_what_is_hidden(tmp_path):
    found = by_site(captured(tmp_path / "run", trained(WAYS["module"])))
    hidden = {s.fqn: summary.text for s, summary in found.items() if summary.status is Status.NOT_OBSERVED}
    assert set(hidden) == {f"Net.{name}" for name in ("inlet", "body", "body.wide", "body.act", "body.back", "outlet")}
    assert set(hidden.values()) == {"inside compiled Net"}


def test_a_torch_that_cannot_run_regions_as_python_records_their_boundary_and_says_so(tmp_path, monkeypatch):
    boundary = by_site(captured(tmp_path / "boundary", trained(WAYS["module"]), level="op"))
    torch.compiler.reset()
    monkeypatch.delattr(torch.compiler, "set_stance")
    old = by_site(captured(tmp_path / "old", trained(WAYS["module"]), level="op", compile="eager"))
    assert {s: x.checksum for s, x in old.items()} == {s: x.checksum for s, x in boundary.items()}
    with open_run(tmp_path / "old") as run:
        assert run.manifest["notes"] == []
        assert [text for text in run.manifest["not_observed"] if "needs torch 2.6" in text]


def test_taps_cause_no_break_and_no_compilation_of_their_own(tmp_path):
    from torch._dynamo.utils import counters

    sizes = (5, 5, 6, 7, 9)
    seen = []
    for mode in ("boundary", "keep"):
        torch.compiler.reset()
        counters.clear()
        make = lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)  # noqa: E731
        captured(tmp_path / mode, trained(make, sizes), compile=mode)
        seen.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert seen[0] == seen[1]
    assert seen[1][1] == {}
    steps = [{s for s in by_site(tmp_path / "keep", step) if s.phase is Phase.FORWARD} for step in range(len(sizes))]
    assert all(sites == steps[0] for sites in steps)


def test_inductor_differs_by_no_more_than_rounding(tmp_path):
    make = lambda model: torch.compile(model, fullgraph=True)  # noqa: E731
    kept = by_site(captured(tmp_path / "kept", trained(make), compile="keep"))
    plain = by_site(captured(tmp_path / "plain", trained(lambda model: model)))
    outputs = [s for s in plain if s.kind is Kind.OUTPUT and "['parts']" not in s.path]
    assert len(outputs) > 5
    for site in outputs:
        assert kept[site].stats["amean"] == pytest.approx(plain[site].stats["amean"], rel=1e-4), site


def test_hooks_are_gone_when_the_capture_is_over(tmp_path):
    kept = []

    def make(model):
        kept.append(model)
        return torch.compile(model, backend="aot_eager")

    original = torch.compile
    captured(tmp_path / "kept", trained(make), compile="keep")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in kept[0].modules())
    assert torch.compile is original
