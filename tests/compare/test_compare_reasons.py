"""Every reason a divergence can have, planted in a small training run computed in numpy."""

from dataclasses import replace

import numpy as np
import pytest
from counted import calls_of
from opcapture import compared
from small_runs import F32, MODULES, train
from synthetic import row, write_run
from verbs import verb

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Kind
from introspect_cli.store.run import open_run


@pytest.fixture
def compare(tmp_path):
    """Compare two lists of steps; options and settings by keyword."""

    def run(a, b, *, options=None, settings=({}, {}), modules=(MODULES, MODULES), **about):
        write_run(tmp_path / "a", a, modules=modules[0], settings=settings[0], force=True, **about)
        write_run(tmp_path / "b", b, modules=modules[1], settings=settings[1], force=True, **about)
        with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
            result = compare_runs(one, two, options or DiffOptions())
            if result.first is None and result.structure:  # what is said of causes where no number differs
                result = compare_runs(one, two, replace(options or DiffOptions(), strict=True))
            return result

    return run


ADDED = {"lr": 0.05, "warm": 0.0}
FAULTS = (
    "seed", "batch", "init", "module", "half", "between", "loss", "backward", "stale", "missed", "fresh", "inserted",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_way_round_the_same_place_is_found(compare, fault):
    there, back = compare(train(), train(fault)), compare(train(fault), train())
    assert (there.first.site, there.first.step) == (back.first.site, back.first.step)
    assert there.first.reason == back.first.reason
    assert there.counts.diverged == back.counts.diverged
    assert (there.counts.only_a, there.counts.only_b) == (back.counts.only_b, back.counts.only_a)


def test_all_modes_of_a_module_in_a_step_are_told_where_another_attribute_changes_last(compare):
    def modules(*rows):
        changes = [tuple({"training": training, "eps": eps}.items()) for training, eps in rows]
        return *MODULES, *(replace(MODULES[1], attributes=each, step=1) for each in changes)

    switched = modules(("True", "1"), ("False", "1"), ("False", "2"))
    result = compare(train(), train("module"), modules=(switched, modules(("False", "2"))))
    assert "train, then eval mode in a, eval mode in b" in result.sentence


def test_the_gradients_of_one_call_do_not_rest_on_one_another(compare):
    names = "Net.attention", "Net.query"

    def step(factor):
        forward = [
            row("forward", kind, name, x) for name in names for kind in ("input", "output") for x in [np.ones(3)]
        ]
        given = [row("backward", "grad_input", names[0], factor * np.ones(3), path=path) for path in ("[1]", "[0]")]
        back = [
            row("backward", "grad_output", name, at * np.ones(3)) for name, at in zip(names, (1, factor), strict=True)
        ]
        return [[*forward, row("loss", "loss", "loss", 1.0), back[0], *given, back[1]]]

    result = compare(step(1), step(2), options=DiffOptions(limit=None))
    assert [(one.site.kind.value, one.role.value) for one in result.divergences] == [
        ("grad_input", "origin"), ("grad_input", "origin"), ("grad_output", "propagated"),
    ]  # fmt: skip


@pytest.mark.parametrize("line", ["m.py:3", "m.py:4"], ids=["one line", "another line"])
def test_the_first_draw_that_differs_is_the_first_that_leaves_another_state(compare, line):
    """Where parameters of names that both runs have are drawn the other way round, but alike."""
    drawn = [
        ("s0 kaiming_uniform_ Net.a.weight m.py:1", "s0 kaiming_uniform_ Net.b.weight m.py:2"),
        ("s1 uniform_ Net.b.weight m.py:3", f"s1 uniform_ Net.a.weight {line}"),
        ("s2 normal_ Net.c m.py:5", "s3 normal_ Net.d m.py:6"),
    ]
    settings = [{"beginning": {"events": [f"draw torch {draw}" for draw in side]}} for side in zip(*drawn, strict=True)]
    a, b = (
        [[row("start", "rng", "torch", state), row("start", "param", "Net.c", x * np.ones(3))]]
        for state, x in (("s4", 1), ("s5", 2))
    )
    result = compare(a, b, settings=settings)
    assert result.first.reason == "rng"
    (draws,) = (one for one in result.explains if one.code == "draws-differ")
    assert draws.fields == {
        "a": "uniform_ of Net.b.weight (m.py:3)", "b": f"uniform_ of Net.a.weight ({line})", "before": "1 draw",
    }  # fmt: skip


@pytest.mark.parametrize(("factor", "kind"), [(1, Kind.BATCH), (2, Kind.INPUT)], ids=["is the batch", "is another"])
def test_a_batch_of_one_run_alone_comes_before_the_input_that_it_is(compare, factor, kind):
    batches = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(F32)

    def step(taken, given):
        loaded = [row("data", "batch", "DataLoader", each, call=call) for call, each in enumerate(batches[:taken])]
        return [[*loaded, row("forward", "input", "Net", given), row("forward", "output", "Net", given**2)]]

    for sides in ((1, 2), (2, 1)):
        runs = [step(taken, batches[0] if taken == 1 else factor * batches[1]) for taken in sides]
        assert compare(*runs).first.site.kind is kind


def test_stale_gradients_are_found_through_clipping(compare):
    random = np.random.default_rng(5)
    first, second = random.normal(size=(2, 30, 7)).astype(F32)

    def steps(later):
        return [[row("optimizer", "grad", "Net.w", first)], [row("optimizer", "grad", "Net.w", later)]]

    result = compare(steps(second), steps(F32(0.3) * (second + first)))
    assert "zero_grad is missing or late in b" in result.sentence
    result = compare(steps(F32(0.7) * (second + first)), steps(second))
    assert "zero_grad is missing or late in a" in result.sentence
    unscaled = F32(2.0**-14) * first  # as unscaling left it, beside a gradient that is scaled still
    result = compare(steps(second), steps(second + unscaled))
    assert "zero_grad is missing or late in b" in result.sentence
    for other in (random.normal(size=(30, 7)).astype(F32), unscaled[::-1], F32(2e-7) * second):
        assert "zero_grad is missing" not in compare(steps(second), steps(second + other)).sentence


def test_a_batch_that_comes_again_in_one_run_alone_is_said_to(compare):
    """As where a script makes a new iterator of the loader for each step."""

    def steps(*values):
        return [[row("data", "batch", "DataLoader", np.full(4, value, F32))] for value in values]

    assert "cause: in b it is that of the time before, again" in compare(steps(1, 2), steps(1, 1)).sentence
    assert "again" not in compare(steps(1, 2), steps(1, 3)).sentence


def test_a_back_end_of_attention_explains_what_the_code_around_it_computes(compare):
    """With dropout, each back end draws it in its own way, which no rounding is."""
    runtime = tuple({"runtime": {"flash_sdp": on, "cudnn_deterministic": on}} for on in (True, False))
    result = compare(train(), train("between"), settings=runtime)
    assert result.first.reason == "own_code"
    assert result.sentence.endswith("Likely: flash_sdp True -> False.")


def test_an_optimizers_option_explains_nothing_before_the_optimizer_steps(compare):
    """A gradient that an atomic sum rounds differently was laid to `--lr`, the one argument that differs."""
    command = tuple({"command": {"argv": ["train.py", "--lr", lr]}} for lr in ("0.05", "0.1"))
    before = compare(train(at=0), train("kernel", at=0, lr=0.1), settings=command)
    assert before.first.site.kind is Kind.GRAD
    assert "--lr" not in before.sentence
    assert [change.name for change in before.settings if change.explains] == []
    after = compare(train(), train(lr=0.1), settings=command)
    assert "cause: lr 0.05 -> 0.1. Likely: --lr 0.05 -> 0.1." in after.sentence
    later = compare(train(batches=False), train("module", batches=False, at=1, lr=0.05), settings=command)
    assert "--lr" in later.sentence


def test_a_hyper_parameter_that_one_run_lacks_is_likely_and_no_cause(compare):
    """A new option of an optimizer, 0 in all groups, was the cause on record beside a changed formula."""
    added = [row("optimizer", "hyperparameter", "SGD", value, path=f"[0]['{key}']") for key, value in ADDED.items()]
    other = [[*(each for each in rows if "'lr'" not in str(each)), *added] for rows in train(lr=0.1)]
    result = compare(train(), other)
    assert (result.first.site.kind, result.first.reason) == (Kind.PARAM, "optimizer")
    codes = {one.code for one in result.explains}
    assert "hyperparameter-elsewhere" in codes
    assert "hyperparameter" not in codes
    assert "warm None -> 0" in result.sentence.partition("ikely: ")[2]


def test_of_two_names_for_one_place_that_of_a_comes_first(compare):
    x = np.ones((2, 2), F32)

    def steps(name):
        return [
            [row("start", "param", "Net.stem", x), row("start", "param", name, x), row("forward", "output", "Net", x)]
        ]

    assert compare(steps("Net.head"), steps("Net.classifier")).first.site.fqn == "Net.head"
    assert compare(steps("Net.classifier"), steps("Net.head")).first.site.fqn == "Net.classifier"


def test_a_module_that_is_called_often_is_looked_through_once(tmp_path):
    """A recurrent cell is called thousands of times in a step; of each call that differs it is asked where it began."""

    def work(calls):
        def step(shift):
            inside = (
                ("input", "Net.cell"),
                ("input", "Net.cell.gate"),
                ("output", "Net.cell.gate"),
                ("output", "Net.cell"),
            )
            values = [call + (shift if call else 0.0) for call in range(calls)]
            return [row("forward", "input", "Net", 1.0)] + [
                row("forward", kind, name, np.full(4, value, F32), call=call)
                for call, value in enumerate(values)
                for kind, name in inside
            ]

        for name, shift in (("a", 0.0), ("b", 0.5)):
            write_run(tmp_path / name, [step(shift)], force=True)
        made, result = calls_of(lambda: compared(tmp_path / "a", tmp_path / "b", whole_step=True))
        assert (result.first.site.fqn, result.first.site.call) == ("Net.cell", 1)
        return made

    assert work(300) < 7 * work(60)


def test_equal_records_that_are_nan_throughout_are_counted_beside_the_verdict(compare):
    part, none = np.array([np.nan, 1.0], F32), np.full(2, np.nan, F32)

    def steps(value):
        given = row("forward", "input", "Net", np.ones(2, F32), path="[0]")
        return [[given, row("forward", "output", "Net", value), row("loss", "loss", "", value)]]

    result = compare(steps(none), steps(none))
    assert result.verdict is Verdict.SAME
    assert "of 3 records, NaN throughout in both runs: 2 (the first: the output of Net" in result.sentence
    assert "NaN" not in compare(steps(part), steps(part)).sentence


def test_results_that_are_nan_throughout_do_not_show_that_a_difference_is_harmless(compare):
    none, ones = np.full(2, np.nan, F32), np.ones(2, F32)

    def steps(given, result=none, numbers=()):
        kinds = ("grad", "param", "buffer", "optimizer_state")
        last = [row("optimizer", kind, "Net.a.weight", result) for kind in kinds]
        return [*numbers, [row("forward", "input", "Net.a", given), row("loss", "loss", "", result), *last]]

    manifest = {"observed": [kind.value for kind in Kind]}
    result = compare(steps(ones), steps(ones + 1), manifest=manifest)
    assert (result.verdict, result.first.site.kind) == (Verdict.DIVERGED, Kind.INPUT)
    assert any("NaN throughout in both runs, which hides what comes of it: losses" in line for line in result.evidence)
    numbers = steps(ones, ones), steps(ones + 1, ones)
    assert compare(*numbers, manifest=manifest).verdict is Verdict.SAME
    later = steps(ones, none, numbers[0]), steps(ones + 1, none, numbers[1])
    assert compare(*later, manifest=manifest).verdict is Verdict.SAME


def test_what_an_exception_cut_off_is_no_divergence_by_itself(tmp_path):
    weights = [row("start", "param", "Net.a.weight", np.full(4, value, F32)) for value in (1.0, 2.0)]
    batch, out = row("data", "batch", "DataLoader", np.ones(2, F32)), row("forward", "output", "Net", np.ones(2, F32))
    begins = [weights[0], row("loss", "loss", "", 1.0)]
    ended = {"how": "exception", "exception": "ValueError: late", "remainder": True}
    write_run(tmp_path / "a", [begins, [batch, weights[0], out]])
    write_run(tmp_path / "b", [begins, [weights[1]]], manifest=ended)
    result = compared(tmp_path / "a", tmp_path / "b")
    assert result.sentence.startswith("Run b ended by an exception in step 1 where run a goes on: ValueError: late.")
    assert [origin.divergence.site.fqn for origin in result.origins] == ["Net.a.weight"]
    assert "Independent divergences" in verb("diff", tmp_path / "a", tmp_path / "b").stdout


def test_another_gradient_of_an_input_may_come_from_what_else_uses_that_input(compare):
    def steps(gradient):
        rows = [row("start", "rng", "torch", "0"), row("forward", "input", "Net.a", X, path="[0]")]
        rows += [row("forward", "output", "Net.a", X + 1), row("loss", "loss", "loss", F32(1))]
        return [[*rows, row("backward", "grad_input", "Net.a", gradient, path="[0]")]] * 2

    result = compare(steps(X), steps(-X))
    assert "this module or of what else uses that input" in result.sentence


X = np.random.default_rng(5).normal(size=(6, 8)).astype(F32)


def test_an_evaluation_that_one_run_counts_as_training_is_no_other_random_state(tmp_path):
    def ran(number, call=0, *, loader="DataLoader"):
        rows = [row("data", "batch", loader, X + number, path="[0]")]
        values = ("input", X + number, "[0]"), ("output", X * number, "")
        return rows + [row("forward", kind, "Net", value, call=call, path=path) for kind, value, path in values]

    begins, ends = row("start", "rng", "torch", "0"), row("loss", "loss", "loss", F32(1))
    means = [row("optimizer", "buffer", "Net.norm.mean", X[0] + number) for number in range(2)]
    a = [[row("start", "rng", "torch", "after"), *ran(1), ends, means[0]]]
    b = [[row("start", "rng", "torch", "before"), *ran(7, loader="DataLoader#2"), *ran(1, call=1), ends, means[1]]]
    a, b = ([[begins, *ran(1), *ran(2, 1, loader="DataLoader#2"), ends, means[0]], *steps] for steps in (a, b))
    write_run(tmp_path / "a", a, modules=MODULES, manifest={"passed_over": [[1, 1]]})
    write_run(tmp_path / "b", b, modules=MODULES)
    with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
        result = compare_runs(one, two, DiffOptions())
    assert (result.first.site.kind, result.first.step) == (Kind.BATCH, 1)
    assert "Net runs once in this step of a and twice in b, evaluations of a not counted" in result.sentence
    assert not [change for change in result.structure if "random state" in change.text]


def test_buffers_that_a_step_changed_before_its_evaluation_are_not_called_equal_there(compare):
    def steps(added):
        mean, given = X.mean(axis=0), row("eval", "input", "Net.norm", X, path="[0]")
        begins = [row("start", "rng", "torch", "0"), row("start", "buffer", "Net.norm.mean", mean)]
        ran = [row("forward", "input", "Net.norm", X, path="[0]"), row("forward", "output", "Net.norm", X - mean)]
        out = row("eval", "output", "Net.norm", X - added)
        return [[*begins, *ran, given, out, row("optimizer", "buffer", "Net.norm.mean", mean + F32(added))]] * 2

    assert "its buffers when the step began" in {fact.text for fact in compare(steps(0), steps(1)).rests_on}
