"""Sentences of a comparison claim only what was seen: each falsehood that was once told, with what is told instead."""

from dataclasses import replace

import numpy as np
import pytest
from small_runs import MODULES, SGD, train
from synthetic import row, summary, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Role, Verdict
from introspect_cli.records import Kind, ModuleInfo
from introspect_cli.render.json import diff_document
from introspect_cli.store.run import open_run

F32 = np.float32
X = np.random.default_rng(3).normal(size=(16, 8)).astype(F32)


@pytest.fixture
def compare(tmp_path):
    """Compare two lists of steps; what `write_run` takes is given to both sides, or as a pair in `both`."""

    def run(a, b, *, options=None, both=({}, {}), **about):
        for name, steps, more_about in (("a", a, both[0]), ("b", b, both[1])):
            write_run(tmp_path / name, steps, force=True, **{"modules": MODULES, **about, **more_about})
        with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
            return compare_runs(one, two, options or DiffOptions())

    return run


def outputs(value):
    return [[row("forward", "input", "Net.act", X * 2, path="[0]"), row("forward", "output", "Net.act", value)]]


ACT = (ModuleInfo("Net", "Net", "model.py:3"), ModuleInfo("Net.act", "GELU", "torch/nn/modules/activation.py:9"))


@pytest.mark.parametrize(("given", "first"), [(X, Kind.OUTPUT), (X + 1, Kind.INPUT)], ids=["renamed", "another"])
def test_a_renamed_argument_of_equal_value_is_not_the_place(compare, given, first):
    def called(name, value, factor):
        steps = outputs(X * factor)
        steps[0].insert(1, row("forward", "input", "Net.act", value, path=f"['{name}']"))
        return steps

    result = compare(called("mask", X, 1), called("attn_mask", given, 2), modules=ACT)
    assert result.first.site.kind is first
    assert result.first.role is Role.ORIGIN
    assert any("['attn_mask']" in change.text for change in result.structure)


class TestRounding:
    def test_small_values_beside_huge_ones_are_not_rounding(self, compare):
        masked = np.where(np.arange(128).reshape(16, 8) % 3 == 0, F32(-1e9), X)
        scaled = np.where(masked < -1e8, masked, masked * F32(2.8))
        assert "rounding" not in compare(outputs(masked), outputs(scaled), modules=ACT).sentence

    def test_masks_of_infinities_have_no_distance(self, compare):
        mask = np.triu(np.full((8, 8), -np.inf, F32), 1)
        result = compare(outputs(mask), outputs(mask.T.copy()), modules=ACT)
        assert "rounding" not in result.sentence
        assert result.first.rel_l2 is None


class TestSettings:
    def test_where_results_go_explains_nothing(self, compare):
        argv = [
            ["-o", f"/x/{run}", "--run-name", run, "--out-dir", run, "--logdir=" + run, f"hydra.run.dir={run}"]
            for run in "ab"
        ]
        both = tuple({"settings": {"command": {"argv": each}, "environment": {"WANDB_NAME": each[1]}}} for each in argv)
        result = compare(train(), train("module"), both=both)
        assert "Likely" not in result.sentence
        assert not any(change.explains for change in result.settings)


class TestStart:
    def test_what_is_looked_at_again_within_a_step_is_not_what_it_begins_with(self, compare):
        steps = train(), train()
        for rows, value in zip(steps, (X, X * 2), strict=True):
            rows[1].insert(6, row("start", "param", "Net.a.weight", value, call=1, module_class="Linear"))
        sentence = compare(*steps).sentence
        assert "the parameter Net.a.weight (call 1) within the step" in sentence
        assert "begins" not in sentence

    def test_what_a_step_changes_between_calls_rests_on_what_was_before_it(self, compare):
        steps = train(), train(), train("batch")
        for rows, value in zip(steps, (X, X * 2, X * 2), strict=True):
            rows[1].insert(6, row("start", "param", "Net.a.weight", value, call=1, module_class="Linear"))
        alone, after = compare(*steps[:2]), compare(*steps[::2])
        assert alone.first.site.kind is Kind.PARAM
        assert "initialisation" not in alone.sentence
        assert "between two steps" not in alone.sentence
        assert after.first.site.kind is Kind.BATCH
        assert len(after.origins) == 1

    def test_a_model_first_seen_later_does_not_differ_before_training(self, compare):
        def steps(value):
            return [[row("forward", "output", "Net", X), SGD], [row("start", "param", "Ema.w", value), SGD]]

        sentence = compare(steps(X), steps(X + 1)).sentence
        assert "when the step begins" in sentence
        assert "before any training" not in sentence
        assert "initialisation" not in sentence

    def test_untouched_in_one_run_and_seeded_in_the_other_is_no_divergence(self, compare):
        def steps(state):
            return [[row("start", "rng", "numpy", state), row("forward", "output", "Net", X)]]

        result = compare(steps("untouched"), steps(np.arange(5)))
        assert result.verdict is Verdict.SAME


class TestNumbers:
    def test_no_distance_of_zero_for_values_that_differ(self, compare):
        one = summary(X)
        two = replace(one, checksum=one.checksum ^ 1)
        document = diff_document(compare(outputs(one), outputs(two), modules=ACT))["first"]
        assert (document["rel_l2"], document["rel_l2_below"]) == (None, 1e-7)


class TestNarrowing:
    @pytest.mark.parametrize(
        ("option", "values", "extra"),
        [
            ("modules", ([], ["Net.a"]), ("forward", "output", "Net.z")),
            ("eval", (None, 1), ("eval", "output", "Net.a")),
            ("of_tomorrow", (1, 2), ("forward", "output", "Net.z")),
        ],
    )
    def test_an_option_on_one_side_never_makes_equal_runs_diverge(self, compare, option, values, extra):
        more = train()
        more[0].append(row(*extra, X, path="(gelu)" if extra[1] == "op_output" else ""))
        both = tuple({"manifest": {"narrowing": {option: value}}} for value in values)
        assert compare(train(), more, both=both).verdict is Verdict.SAME
        assert compare(more, train(), both=both[::-1]).verdict is Verdict.SAME

    def test_equal_options_still_diverge(self, compare):
        more = train()
        more[0].append(row("forward", "output", "Net.z", X))
        both = ({"manifest": {"narrowing": {"modules": []}}},) * 2
        assert compare(train(), more, both=both).verdict is Verdict.SAME
        assert compare(train(), more, both=both, options=DiffOptions(strict=True)).verdict is Verdict.DIVERGED


def loaded(steps, drawn, fault=1.0):
    """Steps in which the loader gives these batches, by step and number, and the model a multiple of the last one."""
    numbers = [batches or {0: step} for step, batches in enumerate(drawn)]
    return [
        [
            *(row("data", "batch", "DataLoader", X + F32(of), path="[0]", call=call) for call, of in batches.items()),
            row("forward", "input", "Net", (X + F32([*batches.values()][-1])) * F32(fault), path="[0]"),
        ]
        for batches, _ in zip(numbers, range(steps), strict=True)
    ]


class TestBatches:
    def test_a_batch_of_one_run_alone_is_not_among_those_that_are_equal(self, compare):
        result = compare(loaded(2, ({}, {}), 2.0), loaded(2, ({}, {0: 1, 1: 2}), 2.0))  # and prepares it
        assert result.first.site.kind.value == "input"
        assert {fact.text for fact in result.rests_on if fact.known == "equal"} == {"the batches that both runs have"}
        assert "which batches it takes" in result.sentence

    def test_a_batch_that_an_evaluation_left_the_number_of_is_compared_with_the_one_it_stands_for(self, compare):
        drawn = ({6: 0}, {6: 1}, {})
        assert compare(loaded(3, ({}, {}, {})), loaded(3, drawn)).verdict is Verdict.SAME
        result = compare(loaded(3, ({}, {}, {})), loaded(3, ({}, {6: 2}, {})))
        assert (result.first.step, result.first.site.kind.value, result.first.only) == (1, "batch", "")
