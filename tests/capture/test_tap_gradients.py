"""Values inside compiled regions are those of eager mode; of gradients inside it is said that they are not seen."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, records
from sweeps import sliced
from torch import nn
from torch.utils.checkpoint import checkpoint

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.read.run import open_run

GRADIENTS = {Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


def training(build, steps=2, **settings):
    """A function that trains a model, compiled or not, the whole or its inside."""

    def work():
        torch.manual_seed(4)
        outer = nn.Sequential(nn.Linear(4, 4), build(), nn.Linear(4, 4)) if settings.pop("inside", False) else build()
        if settings:
            if isinstance(outer, nn.Sequential) and type(outer) is nn.Sequential:
                outer[1] = torch.compile(outer[1], **settings)
            else:
                outer = torch.compile(outer, **settings)
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            found = outer(torch.randn(6, 4))
            parts = found if isinstance(found, tuple) else (found,)
            sum(part.pow(2).mean() for part in parts).backward()
            optimizer.step()

    return work


def by_site(path, step=1):
    return {record.site: record.summary for record in records(path, step)}


@pytest.mark.parametrize("backend", sliced(["aot_eager", "eager"], ["aot_eager"]))
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("build", MODELS)
def test_values_are_those_of_eager_mode_and_gradients_are_said_not_to_be_seen(tmp_path, build, inside, backend):
    if inside and build is Returns:
        pytest.skip("its results are no one tensor")
    plain = by_site(captured(tmp_path / "eager", training(build, inside=inside)))
    kept = by_site(captured(tmp_path / "kept", training(build, inside=inside, backend=backend), compile="keep"))
    seen = {site for site, summary in kept.items() if summary.status is Status.OBSERVED}
    unequal = {site for site in seen & set(plain) if kept[site].checksum != plain[site].checksum}
    assert {site for site in unequal if site.fqn != "Returns" or site.kind is not Kind.GRAD_OUTPUT} == set(), (
        "of a result that a region itself goes on to use, the gradient is that of its uses outside"
    )
    forward = {site for site in plain if site.phase is Phase.FORWARD and site.kind in (Kind.INPUT, Kind.OUTPUT)}
    assert forward <= seen
    assert {site for site in plain if site.kind in GRADIENTS} <= set(kept)


@pytest.mark.parametrize("build", sliced([Residual, Returns, Twice, Normalised, Passes, InPlace], [Residual, Passes]))
def test_eager_and_kept_compare_the_same_without_choosing_kinds(tmp_path, build):
    eager = captured(tmp_path / "eager", training(build))
    kept = captured(tmp_path / "kept", training(build, backend="aot_eager"), compile="keep")
    with open_run(eager) as a, open_run(kept) as b:
        assert compare_runs(a, b, DiffOptions()).verdict is Verdict.SAME
