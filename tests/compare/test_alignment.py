"""Other names, found by values of several steps: copies, chance, rounding, and runs that hold different steps."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from opcapture import captured, compared
from synthetic import row, write_run
from torch import nn
from torch.nn import functional as F

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule


def renames(result):
    return {(change.a, change.b): change.evidence for change in result.structure if change.change == "renamed"}


class Two(nn.Module):
    """A layer and its copy, which gets no gradient, under names of one's choosing."""

    def __init__(self, learns, follows):
        super().__init__()
        layer = nn.Linear(4, 3)
        names = sorted((learns, follows))  # registered in the order of names
        for name in names:
            self.add_module(name, copy.deepcopy(layer))
        self.names = (learns, follows)

    def forward(self, x):
        learns, follows = (getattr(self, name) for name in self.names)
        return learns(x) - 0.9 * follows(x).detach()


class Net(nn.Module):
    """Layers with an activation between them, all under names of one's choosing."""

    def __init__(self, first="inp", act="act", last="head", nudge=0.0):
        super().__init__()
        self.names, self.nudge = (first, act, last), nudge
        self.add_module(first, nn.Linear(4, 8))
        self.add_module(act, nn.GELU())
        self.add_module(last, nn.Linear(8, 3))

    def forward(self, x):
        first, act, last = (getattr(self, name) for name in self.names)
        return last(act(first(x) * (1 + self.nudge)))


def fit(build, *, steps=4, rate=0.05, validate=False):
    def work():
        torch.manual_seed(0)
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        source = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x, y = torch.randn(5, 4, generator=source), torch.randint(3, (5,), generator=source)
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if validate:
                net.eval()
                with torch.no_grad():
                    net(x)
                net.train()

    return work


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model with these names, captured once with these options."""
    directory = tmp_path_factory.mktemp("runs")
    known = {}

    def find(*names, rate=0.05, validate=False, nudge=0.0, **options):
        key = repr((names, rate, validate, nudge, sorted(options.items(), key=repr)))
        if key not in known:
            work = fit(lambda: Net(*names, nudge=nudge), rate=rate, validate=validate)
            known[key] = captured(directory / str(len(known)), work, **options)
        return known[key]

    return find


NEW = ("stem", "bend", "out")


def test_copies_that_are_equal_at_first_are_distinguished_by_later_steps(tmp_path):
    """Their outputs are equal in step 0; only from step 1 on does training part them."""
    lean = {"record": frozenset({Kind.OUTPUT, Kind.LOSS})}
    a = captured(tmp_path / "a", fit(lambda: Two("online", "target")), **lean)
    b = captured(tmp_path / "b", fit(lambda: Two("student", "mentor")), **lean)
    result = compared(a, b)
    assert set(renames(result)) == {("Two.online", "Two.student"), ("Two.target", "Two.mentor")}
    assert "in steps 0, 1 and 3" in renames(result)["Two.online", "Two.student"]


def test_what_was_equal_by_chance_is_no_rename(tmp_path):
    """Equal in step 0 and not in step 1, in which all that has kept its name agrees."""
    rng = np.random.default_rng(0)
    start, kept = rng.normal(size=(3, 3)), [rng.normal(size=(3, 3)) for _ in range(2)]

    def steps(name, later):
        return [
            [
                row("start", "param", f"Net.{name}.weight", value),
                row("start", "param", "Net.kept.weight", each),
                row("loss", "loss", "loss", each.sum()),
            ]
            for value, each in zip((start, later), kept, strict=True)
        ]

    write_run(tmp_path / "a", steps("red", rng.normal(size=(3, 3))))
    write_run(tmp_path / "b", steps("blue", rng.normal(size=(3, 3))))
    result = compared(tmp_path / "a", tmp_path / "b")
    assert {change.change for change in result.structure} == {"only"}


def test_a_rename_stands_where_the_numbers_part_later(run):
    """Nothing agrees in step 1: that says nothing against a name."""
    result = compared(run(), run(*NEW, rate=0.06))
    assert result.verdict is Verdict.DIVERGED
    assert (result.first.site.kind, result.first.reason) == (Kind.PARAM, "optimizer")
    assert dict(renames(result).keys()) == {
        "Net.inp": "Net.stem", "Net.act": "Net.bend", "Net.head": "Net.out",
    }  # fmt: skip
    assert all(text.endswith("equal in step 0") for text in renames(result).values())


@pytest.mark.parametrize("record", [("param",), ("output", "loss"), ("param", "grad"), None])
@pytest.mark.parametrize("every", ["::", "::2", "1::2"])
def test_other_names_are_found_in_what_both_runs_hold(run, record, every):
    """One run holds every step, or those of a schedule; with or without evaluation in between."""
    kinds = {} if record is None else {"record": frozenset(map(Kind, record))}
    sampled = {} if every == "::" else {"steps": Schedule.parse(every)}
    result = compared(run(**kinds, **sampled), run(*NEW, validate=record is None, **kinds))
    found = renames(result)
    if record != ("output", "loss"):
        assert {("Net.inp", "Net.stem"), ("Net.head", "Net.out")} <= set(found), result.sentence
    if record is None or "output" in record:
        assert ("Net.act", "Net.bend") in found
    assert result.verdict is Verdict.SAME, result.sentence


def test_a_resumed_run_is_aligned_with_the_steps_it_repeats(tmp_path):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 3)) for _ in range(6)]

    def steps(name, first):
        return [[row("start", "param", f"Net.{name}.weight", each), row("loss", "loss", "loss", each.sum())]
                for each in values[first:]]  # fmt: skip

    write_run(tmp_path / "a", steps("old", 0))
    write_run(tmp_path / "b", steps("new", 3))
    result = compared(tmp_path / "a", tmp_path / "b", offset=3)
    assert ("Net.old", "Net.new") in renames(result), result.sentence


class Attention(nn.Module):
    """Normalises what it is given itself, or is given it normalised."""

    def __init__(self, norm=None):
        super().__init__()
        if norm is not None:
            self.norm = norm
        self.qkv, self.out = nn.Linear(6, 18, bias=False), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x) if hasattr(self, "norm") else x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Feed(nn.Module):
    def __init__(self, *first):
        super().__init__()
        self.net = nn.Sequential(*first, nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 6))

    def forward(self, x):
        return self.net(x)


class PreNorm(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(6), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Layers(nn.Module):
    """A transformer whose layers are normalised by a wrapper, or by themselves, as histories in public have it."""

    def __init__(self, *, wrapped):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            if wrapped:
                blocks = (PreNorm(Attention()), PreNorm(Feed()))
            else:
                blocks = (Attention(nn.LayerNorm(6)), Feed(nn.LayerNorm(6)))
            self.layers.append(nn.ModuleList(blocks))
        self.inp, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.inp(x)[:, None]
        for attention, feed in self.layers:
            x = x + attention(x)
            x = x + feed(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("back", [False, True])
def test_a_norm_that_moves_from_a_wrapper_into_what_it_wraps_changes_no_number(tmp_path, back):
    """The wrapper's name is that of what it wrapped now: both are there in both runs, and mean another module."""
    runs = [captured(tmp_path / str(each), fit(lambda each=each: Layers(wrapped=each))) for each in (not back, back)]
    result = compared(*runs)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.counts.records > 0
