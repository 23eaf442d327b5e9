"""Other cuts of a batch: samples one at a time, under `vmap`, under autocast, after a checkpoint."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, compared
from torch import nn

from introspect_cli.compare.terms.findings import Certainty
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind

LEAN = frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS})
PLACE = "place in the data"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def by_samples(way, factor=1.0):
    net, data, target = model(), torch.randn(8, 4), torch.randn(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss(x, y):
        return (net(x) - y).square().sum() * factor

    def of_parameters(parameters, x, y):
        return (torch.func.functional_call(net, parameters, (x,)) - y).square().sum() * factor

    for _ in range(2):
        optimizer.zero_grad()
        if way == "grad":
            parameters = dict(net.named_parameters())
            per_sample = torch.func.vmap(torch.func.grad(of_parameters), (None, 0, 0))(parameters, data, target)
            for name, parameter in parameters.items():
                parameter.grad = per_sample[name].mean(0)
        elif way == "each":
            for x, y in zip(data, target, strict=True):
                (loss(x, y) / 8).backward()
        else:
            losses = {
                "vmap": lambda: torch.func.vmap(loss)(data, target),
                "loop": lambda: torch.stack([loss(x, y) for x, y in zip(data, target, strict=True)]),
                "batch": lambda: (net(data) - target).square().sum(1) * factor,
            }
            losses[way]().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("runs"), {}

    def captured_once(work, *given, **options):
        key = repr((work, given, options))
        if key not in runs:
            runs[key] = captured(folder / str(len(runs)), lambda: work(*given), **options)
        return runs[key]

    return captured_once


def test_samples_one_at_a_time_are_no_microbatches_of_as_many_samples_as_they_have_features(run):
    result = compared(run(by_samples, "batch"), run(by_samples, "loop"))
    assert result.verdict is Verdict.SAME, result.sentence
    assert "(a: 8 samples at once, b: 8 samples, one at a time)" in result.notes[0]
    wrong = compared(run(by_samples, "batch"), run(by_samples, "loop", 2.0))
    assert (wrong.verdict, wrong.first.site.kind) == (Verdict.DIVERGED, Kind.LOSS)


@pytest.mark.parametrize("options", [{}, {"record": LEAN}], ids=["all", "lean"])
@pytest.mark.parametrize(("a", "b"), [("vmap", "loop"), ("vmap", "batch"), ("grad", "each")])
def test_vmap_over_samples_is_reported_as_no_split_and_nothing_is_said_of_what_it_hides(run, a, b, options):
    result = compared(run(by_samples, a, **options), run(by_samples, b, **options))
    if a == "grad" and options:  # that the sums of gradients agree proves that both took the same batch
        assert "b: 8 microbatches" in result.notes[0]
        return
    assert not any("microbatch" in text or "resumed" in text for text in (result.sentence, *result.notes))
    if result.verdict is Verdict.DIVERGED:  # sums in another order
        assert result.first.site.kind is Kind.GRAD
        assert "Rounding alone can make such a difference." in result.sentence


def halves(micro, dtype=torch.bfloat16):
    net, data = model(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part in data.chunk(micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                output = net(part)
            (output.float().square().mean() / micro).backward()
        optimizer.step()


def test_what_autocast_rounds_gets_its_tolerance_though_no_output_is_on_record(run):
    result = compared(run(halves, 1, record=LEAN), run(halves, 4, record=LEAN))
    assert result.verdict is Verdict.SAME, result.sentence
    assert "may differ by 0.03 of the values, since autocast computes in bfloat16 or float16 in both" in result.notes[0]


def test_autocast_in_one_run_alone_is_the_likely_cause_and_gives_no_tolerance(run):
    for micro in (1, 4):
        result = compared(run(halves, 1, record=LEAN), run(halves, micro, torch.float32, record=LEAN))
        assert result.verdict is Verdict.DIVERGED
        likely = next(cause for cause in result.causes if cause.name.startswith("autocast"))
        assert (likely.name, likely.a, likely.b, likely.certainty) == (
            "autocast",
            "cpu bfloat16",
            "off",
            Certainty.LIKELY,
        )
    assert "autocast" not in " ".join(compared(run(halves, 1), run(halves, 4)).notes)  # outputs tell what is rounded


def resumable(folder, *, micro=1, kept=(), goes_on=False):
    net, source = model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule}
    data = torch.randn(6, 8, 4, generator=source)
    if goes_on:
        state = torch.load(folder / "kept.pt")
        for name in kept:
            parts[name].load_state_dict(state[name])
    for step in range(3 * goes_on, 6):
        if step == 3 and not goes_on:
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "kept.pt")
        optimizer.zero_grad()
        for part in data[step].chunk(micro):
            (net(part).square().mean() / micro).backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("lost", ["", "optimizer", "schedule"])
def test_a_resumed_run_that_cuts_its_batches_otherwise_has_the_list_of_what_was_not_restored(tmp_path, lost):
    whole = captured(tmp_path / "a", lambda: resumable(tmp_path))
    kept = [name for name in ("net", "optimizer", "schedule") if name != lost]
    late = captured(tmp_path / "b", lambda: resumable(tmp_path, micro=2, kept=kept, goes_on=True))
    result = compared(whole, late)
    rates = "learning rates and schedulers"
    expected = {"": set(), "optimizer": {"optimizer state", rates}, "schedule": {rates}}[lost]
    assert {part.part for part in result.resumed.lost} == expected
    assert next(part.text for part in result.resumed.parts if part.part == PLACE) == "a batch is cut differently"
    assert result.verdict is (Verdict.DIVERGED if lost else Verdict.SAME), result.sentence
    if lost == "schedule":  # the rate that differs at that step, not the one that the run began with
        assert ("lr", "0.0025", "0.005") in [(cause.name, cause.a, cause.b) for cause in result.causes]
