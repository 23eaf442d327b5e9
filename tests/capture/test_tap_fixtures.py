"""Three training scripts, eager against compiled: the same, or off by rounding; a wrong decomposition is found."""

from __future__ import annotations

import pytest
from opcapture import compared
from taps import run, wrong_backend

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["train_cnn", "train_gpt"])
def test_eager_and_compiled_are_the_same(tmp_path, monkeypatch, name):
    eager = run(tmp_path / "eager", monkeypatch, name)
    same = compared(eager, run(tmp_path / "same", monkeypatch, name, backend="aot_eager"))
    assert same.verdict is Verdict.SAME, same.sentence


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["train_cnn", "train_gpt"])
def test_eager_and_inductor_are_the_same_or_apart_by_rounding(tmp_path, monkeypatch, name):
    eager = run(tmp_path / "eager", monkeypatch, name)
    inductor = run(tmp_path / "inductor", monkeypatch, name, backend="inductor")
    exact = compared(eager, inductor)
    assert exact.verdict is Verdict.SAME or "rounding" in exact.sentence, exact.sentence
    near = compared(eager, inductor, rtol=1e-4, atol=1e-6)
    assert near.verdict is Verdict.SAME, near.sentence
    assert near.counts.records > 100


def test_a_wrong_decomposition_is_found_in_the_first_block_that_runs_it(tmp_path, monkeypatch):
    eager = run(tmp_path / "eager", monkeypatch, "train_gpt")
    wrong = run(tmp_path / "wrong", monkeypatch, "train_gpt", backend=wrong_backend())
    first = compared(eager, wrong).first
    assert (first.site.fqn, first.site.kind, first.step) == ("GPT.blocks.0.mlp.act", Kind.OUTPUT, 0)
    assert first.role.value == "origin"
