"""Sentences of a comparison claim only what was seen: each falsehood that was once told, with what is told instead."""

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from neutrality import watched
from small_runs import MODULES, SGD, train
from synthetic import row, site, summary, write_run
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.evidence import Evidence, Known, Thing
from introspect_cli.compare.terms.findings import Certainty
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Role, Verdict
from introspect_cli.compare.terms.words import thing
from introspect_cli.records import Kind, Layout, ModuleInfo, Phase, SiteInfo, Status
from introspect_cli.render.plain import divergence_document
from introspect_cli.store.read.run import open_run
from introspect_cli.sums import source_digest

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


def lean(steps, *kinds):
    """A run of which only some kinds were recorded."""
    wanted = {Kind(kind) for kind in (*kinds, "hyperparameter")}
    return [[entry for entry in rows if entry[0].kind in wanted] for rows in steps]


@pytest.mark.parametrize(
    ("fault", "kinds", "left", "lacks"),
    [
        ("scaled", ("param", "grad"), "clipping", "the forward pass, the loss, the backward pass"),
        ("loss", ("param", "grad", "loss"), "loss-code", "module outputs before it"),
        ("module", ("output", "loss"), "code", "its inputs, its parameters"),
        ("buffer", ("buffer",), "momentum", "the inputs of Net.norm"),
        ("missed", ("param",), "optimizer", "its gradient"),
        ("backward", ("grad_input",), "backward-through", "the forward pass, the loss"),
    ],
)
def test_what_was_not_recorded_is_never_called_equal(compare, fault, kinds, left, lacks):
    result = compare(lean(train(), *kinds), lean(train(fault), *kinds))
    assert (result.first.role, result.first.reason) == (Role.PROPAGATED, "gap")
    assert any(line.startswith("Not recorded:") and lacks in line for line in result.evidence)
    assert not any(lacks in line for line in result.evidence if line.startswith("Equal:"))
    assert {left, "not-recorded"} <= {one.code for one in result.explains}
    assert all(one.certainty is not Certainty.PROVED for one in result.explains)
    assert not any(text.startswith("Equal") and lacks in text for text in result.evidence)


def test_a_state_that_one_run_did_not_record_did_not_start_afresh(compare):
    kinds = ("param", "grad", "loss", "batch", "rng")
    result = compare(lean(train(), *kinds), lean(train(lr=0.06), *kinds, "optimizer_state"))
    assert "afresh" not in result.sentence
    assert "lr 0.05 -> 0.06" in result.sentence


def test_between_sampled_steps_no_more_is_said_than_between_which(compare):
    def sampled(*faults):
        rows = train(*faults, steps=4, at=1)
        found = [entry for entry in rows[2] if entry[0].kind is Kind.PARAM]
        again = [(site("start", "param", each.fqn), info, value) for each, info, value in found]
        return [rows[0], [*again, *rows[3]]]

    result = compare(sampled(), sampled("scaled"), numbers=[0, 3])
    assert (result.first.step, result.first.reason, result.first.role) == (3, "gap", Role.PROPAGATED)
    assert "no step between can be compared: the runs diverged by step 3" in " ".join(result.evidence)
    assert "outside of an optimizer step" not in result.sentence


def test_within_tolerance_is_not_called_equal_and_the_optimizer_may_amplify_it(compare):
    def steps(grad, value):
        said = row("optimizer", "hyperparameter", "AdamW", 0.1, path="[0]['lr']")
        return [
            [
                row("start", "param", "Net.a.weight", X),
                said,
                row("optimizer", "grad", "Net.a.weight", grad),
                row("optimizer", "param", "Net.a.weight", value),
            ]
        ]

    tolerant = DiffOptions(rtol=1e-5)
    result = compare(steps(X, X + 1), steps(X * F32(1 + 5e-7), X * F32(0.5)), options=tolerant)
    assert result.first.site.kind is Kind.PARAM
    assert "its gradient is within tolerance" in result.sentence
    assert "gradient and" not in result.sentence
    assert "amplified by AdamW" in result.sentence
    assert any("the gradient of Net.a.weight in step 0" in text for text in result.evidence)


def outputs(value):
    return [[row("forward", "input", "Net.act", X * 2, path="[0]"), row("forward", "output", "Net.act", value)]]


ACT = (ModuleInfo("Net", "Net", "model.py:3"), ModuleInfo("Net.act", "GELU", "torch/nn/modules/activation.py:9"))


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

    def test_as_small_as_rounding_and_no_more_where_nothing_rounds_differently(self, compare):
        result = compare(outputs(X), outputs(X * F32(1 + 2.5e-7)), modules=ACT)
        assert "Rounding alone can make such a difference." in result.sentence
        assert "its code, its options, train/eval mode, the kernel" in result.sentence
        assert "thread" not in result.sentence

    def test_threads_are_named_before_a_changed_script(self, compare):
        settings = tuple({"runtime": {"threads": n}, "sources": {"train.py": str(n)}} for n in (1, 2))
        both = tuple({"settings": each} for each in settings)
        result = compare(outputs(X), outputs(X * F32(1 + 2.5e-7)), modules=ACT, both=both)
        assert result.sentence.count("threads 1 -> 2") == 1
        assert (result.settings[0].name, result.settings[0].explains) == ("threads", True)
        assert "Likely: threads 1 -> 2." in result.sentence

    def test_bfloat16_is_not_named_where_there_is_none(self, compare):
        noise = X * (1 + F32(2e-3) * np.sign(X[::-1]))
        assert "bfloat16" not in compare(outputs(X), outputs(noise), modules=ACT).sentence


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

    def test_the_file_of_the_blamed_module_leads(self, compare):
        both = tuple(
            {"settings": {"sources": {"zoo.py": run, "model.py": run}, "command": {"argv": ["--exp", run]}}}
            for run in "ab"
        )
        modules = (*MODULES[:1], ModuleInfo("Net.a", "Linear", "model.py:42", ("weight",)), *MODULES[2:])
        result = compare(train(), train("module"), both=both, modules=modules)
        assert result.settings[0].name == "model.py"
        assert "Likely: model.py changed" in result.sentence

    def test_the_changed_line_of_the_class_is_reported_where_both_commits_are_known(
        self, compare, tmp_path, monkeypatch
    ):
        work = tmp_path / "work"
        work.mkdir()
        monkeypatch.chdir(work)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run([*git, "init", "-q"], check=True)
        commits, digests = [], []
        for factor in (2, 3):
            Path("model.py").write_text(
                f"import torch\n\nclass Linear:\n    def forward(self, x):\n        return x / {factor}\n"
            )
            subprocess.run([*git, "add", "."], check=True)
            subprocess.run([*git, "commit", "-qm", "x"], check=True)
            digests.append(source_digest(Path("model.py").read_bytes()))
            commits.append(subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip())
        modules = (*MODULES[:1], ModuleInfo("Net.a", "Linear", "model.py:3", ("weight",)), *MODULES[2:])
        both = tuple(
            {"settings": {"sources": {"model.py": digest}, "git": {"commit": commit, "dirty": False}}}
            for commit, digest in zip(commits, digests, strict=True)
        )
        said = "model.py:5 (Linear.forward)"
        assert said in compare(train(), train("module"), both=both, modules=modules).sentence
        both[1]["settings"]["sources"] = {"model.py": "0" * 16}  # what ran was not what was committed
        assert "line 5" not in compare(train(), train("module"), both=both, modules=modules).sentence
        both[1]["settings"] = {"sources": {"model.py": digests[1]}, "git": {"commit": "--help", "dirty": False}}
        assert "line 5" not in compare(train(), train("module"), both=both, modules=modules).sentence


class TestStructure:
    def test_gradients_cleared_before_the_step_are_not_called_unreachable(self, compare):
        def without_gradients(steps):
            return [[entry for entry in rows if entry[0].kind is not Kind.GRAD] for rows in steps]

        kinds = {"manifest": {"observed": [kind.value for kind in Kind]}}
        result = compare(train(), without_gradients(train()), **kinds)
        assert (result.first.site.kind, result.first.reason) == (Kind.GRAD, "structure")
        assert "in b it is frozen (requires_grad), was cleared between" in result.sentence
        assert "no gradient reaches" not in result.sentence

    def test_optimizers_in_another_order(self, compare):
        def steps(*order):
            rows = [row("start", "param", "Net.a.weight", X), row("backward", "grad_output", "Net", X)]
            rows += [row("optimizer", "hyperparameter", name, 0.1, path="[0]['lr']") for name in order]
            return [[*rows, *([row("optimizer", "grad", "Net.a.weight", X)] if order[0] == "SGD" else [])]]

        result = compare(steps("SGD", "Adam"), steps("Adam", "SGD"))
        assert "the optimizers step in a different order (SGD, Adam in a; Adam, SGD in b)" in result.sentence


def batches(value, *, state="0"):
    return [[row("start", "rng", "torch", state), row("data", "batch", "DataLoader", value)]]


class TestBatches:
    def test_another_batch_size_is_not_order_nor_seed(self, compare):
        sentence = compare(batches(X), batches(X[:4])).sentence
        assert "left: batch size" in sentence
        assert "seed" not in sentence

    def test_a_permutation_of_floats_is_found(self, compare):
        big = np.random.default_rng(1).normal(size=(400, 30)).astype(F32)
        shuffled = big[np.random.default_rng(2).permutation(400)]
        sentence = compare(batches(big), batches(shuffled)).sentence
        assert "by its statistics the same values in another order)" in sentence

    def test_a_shifted_slice_is_no_permutation(self, compare):
        tokens = np.random.default_rng(1).integers(0, 50, 129)
        tokens[0], tokens[-1] = 7, 8
        assert "same values" not in compare(batches(tokens[:128]), batches(tokens[1:])).sentence

    def test_of_several_batches_a_step_the_equal_ones_are_reported(self, compare):
        def steps(last):
            return [
                [row("data", "batch", "DataLoader", X, call=call) for call in range(5)]
                + [row("data", "batch", "DataLoader", last, call=5)]
            ]

        assert "The batch before it is equal." in compare(steps(X), steps(X + 1)).evidence


class TestStart:
    def test_a_cast_is_called_a_cast(self, compare):
        def steps(value):
            return [[row("start", "param", "Net.a.weight", value)]]

        assert "left: the model was cast" in compare(steps(X), steps(X.astype(np.float16))).sentence

    def test_a_resumed_run_that_draws_other_numbers(self, compare):
        whole = train(steps=4)
        resumed = train("draw", steps=4, at=0)[2:]
        result = compare(whole, resumed, options=DiffOptions(offset=2, strict=True), both=({}, {"numbers": [0, 1]}))
        assert result.first.site.kind is Kind.RNG
        assert "resuming did not restore it" in result.sentence

    def test_a_model_first_seen_later_does_not_differ_before_training(self, compare):
        def steps(value):
            return [[row("forward", "output", "Net", X), SGD], [row("start", "param", "Ema.w", value), SGD]]

        sentence = compare(steps(X), steps(X + 1)).sentence
        assert "when it is first recorded, in step 1" in sentence
        assert "before any training" not in sentence
        assert "initialisation" not in sentence

    @pytest.mark.parametrize(
        ("rows_of_b", "words"),
        [
            ({"n.a": 1.0}, "1 differ and 3 are equal."),
            ({"n.a": 1.0, "n.b": 1e-9}, "1 differ and 2 are equal."),
            ({"n.a": 1.0, "n.b": 1.0}, "2 differ and 2 are equal."),
            (dict.fromkeys(("n.a", "n.b", "n.c", "n.d"), 1.0), "4 differ and 0 are equal."),
        ],
    )
    def test_of_the_other_initial_tensors_no_more_is_said_than_is_known(self, compare, rows_of_b, words):
        def steps(values):
            return [[row("start", "param", name, X + values.get(name, 0)) for name in ("n.a", "n.b", "n.c", "n.d")]]

        said = compare(steps({}), steps(rows_of_b), options=DiffOptions(rtol=1e-6)).evidence
        assert f"Of 4 tensors recorded there, {words}" in said

    def test_untouched_in_one_run_and_seeded_in_the_other_is_no_divergence(self, compare):
        def steps(state):
            return [[row("start", "rng", "numpy", state), row("forward", "output", "Net", X)]]

        result = compare(steps("untouched"), steps(np.arange(5)))
        assert result.verdict is Verdict.SAME


class TestNumbers:
    def test_no_distance_of_zero_for_values_that_differ(self, compare):
        one = summary(X)
        two = replace(one, checksum=one.checksum ^ 1)
        found = compare(outputs(one), outputs(two), modules=ACT).first
        document = divergence_document(found)
        assert (document["rel_l2"], document["rel_l2_below"]) == (None, 1e-7)

    def test_a_factor_and_the_distance_agree(self, compare):
        found = compare(outputs(X), outputs(X * F32(18.3)), modules=ACT).first
        assert found.scale == pytest.approx(18.3, rel=1e-5)
        assert found.rel_l2 == pytest.approx(1 - 1 / 18.3, rel=1e-5)


class TestNarrowing:
    @pytest.mark.parametrize(
        ("option", "values", "extra"),
        [
            ("ops", ([], ["gelu"]), ("forward", "op_output", "Net.a")),
            ("views", (False, True), ("forward", "op_output", "Net.a")),
            ("all_dtypes", (False, True), ("forward", "op_output", "Net.a")),
            ("vjp", ([], ["x"]), ("backward", "op_output", "Net.a")),
            ("level", ("module", "op"), ("forward", "op_output", "Net.a")),
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


def test_how_the_module_is_set_up_differently_is_the_cause(compare):
    def about(*attributes):
        return {"modules": (MODULES[0], ModuleInfo("Net.act", "LayerNorm", attributes=attributes))}

    both = about(("eps", "1e-05"), ("training", "True")), about(("eps", "0.001"), ("training", "False"))
    result = compare(outputs(X), outputs(X + 1), both=both)
    assert "cause: train mode in a, eval mode in b; eps 1e-05 -> 0.001." in result.sentence


def test_a_gap_in_a_store_with_an_unknown_layout_is_reported_too(compare):
    lost = replace(summary(None), layout=Layout((2,), "float32"))
    rows = [(site("forward", "input", "Net.act", path="[0]"), SiteInfo(), lost)]
    result = compare(
        [[*rows, row("forward", "output", "Net.act", X)]],
        [[*rows, row("forward", "output", "Net.act", X + 1)]],
        modules=ACT,
    )
    assert (lost.status, result.first.reason) == (Status.NOT_OBSERVED, "gap")
    assert result.first.site.phase is Phase.FORWARD
    assert "its inputs" in result.sentence


def test_a_closure_that_does_not_clear_its_gradients(compare):
    def steps(second):
        rows = [
            row("start", "param", "Net.a.weight", X),
            row("forward", "output", "Net", X),
            row("loss", "loss", "loss", 1.0),
        ]
        rows += [
            row("backward", "grad_output", "Net", X),
            row("optimizer", "hyperparameter", "LBFGS", 1.0, path="[0]['lr']"),
        ]
        grads = [row("optimizer", "grad", "Net.a.weight", value, call=call) for call, value in enumerate((X, second))]
        return [[*rows, *grads]]

    fresh = X[::-1].copy()
    result = compare(steps(fresh), steps(fresh + X))
    assert (result.first.site.call, result.first.reason) == (1, "gradient")
    assert "in evaluation 1 of its closure" in result.sentence
    assert "gradient plus that of the evaluation before: zero_grad is missing or late in b" in result.sentence


def train_ppo(eps):
    """One update of a policy by the clipped objective: the ratio is 1, so that eps changes hardly a loss."""
    torch.manual_seed(0)
    actor, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    states, actions, old = torch.randn(16, 4), torch.randint(0, 3, (16,)), torch.randn(16) * 1e-3
    advantages = (old - old.mean()) / (old.std() + eps)
    values = critic(states)
    chosen = torch.log_softmax(actor(states), -1).gather(1, actions[:, None])[:, 0]
    ratio = (chosen - chosen.detach()).exp()
    policy = -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
    loss = ((values[:, 0] - 1) ** 2).mean() + 0 * policy.detach() + (policy - policy.detach())
    loss.backward()
    optimizer.step()


def test_the_eps_of_an_advantage_is_reported_as_the_loss(tmp_path):
    for name, eps in (("a", 1e-8), ("b", 1e-3)):
        with watched(tmp_path / name):
            train_ppo(eps)
    with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
        result = compare_runs(one, two, DiffOptions())
    assert result.first.site.kind is Kind.GRAD_OUTPUT
    assert "left: the backward pass of what uses that output or the loss code" in result.sentence


class Bent(nn.Module):
    """A layer whose output goes through a function, written in two ways that differ in the backward pass alone."""

    def __init__(self, plain):
        super().__init__()
        self.inner = nn.ModuleDict({"wide": nn.Linear(4, 64), "narrow": nn.Linear(64, 2)})
        self.plain = plain

    def forward(self, x):
        x = self.inner["wide"](x)
        return self.inner["narrow"](torch.tanh(x if self.plain else Back.apply(x)))


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.5


def test_code_between_modules_is_not_reported_as_the_loss(tmp_path):
    def train(plain):
        torch.manual_seed(0)
        net = Bent(plain)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    for name, plain in (("a", True), ("b", False)):
        with watched(tmp_path / name):
            train(plain)
    with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
        result = compare_runs(one, two, DiffOptions())
    assert result.first.site.fqn == "Bent.inner.wide"
    said = "left: the backward pass of what uses that output or the loss code"
    assert said in result.sentence


@pytest.mark.parametrize("what", Thing)
def test_everything_that_a_divergence_can_rest_on_has_words(what):
    assert all(thing(Evidence(what, known))[0] for known in Known)


def test_every_kind_has_a_row_on_the_page_about_captures():
    page = (Path(__file__).parents[2] / "docs/reference/capture.md").read_text(encoding="utf-8")
    assert [kind.value for kind in Kind if f"`{kind.value}`" not in page] == []
