"""Single operators inside compiled regions: seen under the sites they have in eager, and a wrong one is named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from neutrality import assert_same, trajectory, watched
from opcapture import captured, compared, operators, records
from sweeps import sliced
from taps import run as run_fixture
from taps import wrong_backend
from torch import nn
from torch.utils.checkpoint import checkpoint

from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import OTHERS, Kind, Phase, Status

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Linears(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class Loops(Linears):
    def forward(self, x):
        for _ in range(3):
            x = x + F.gelu(self.a(x))
        return self.b(x)


class InPlace(Linears):
    def forward(self, x):
        h = self.a(x) * 2
        h.add_(1)
        F.relu_(h)
        return self.b(h)


class Several(Linears):
    """Operators of several results, of which some are used."""

    def forward(self, x):
        q, k = self.a(x).chunk(2, -1)
        largest, _ = q.max(-1)
        _, mean = torch.std_mean(k, -1)
        return self.b(torch.cat([q * largest[:, None], k - mean[:, None]], -1))


class ThreeAxes(Linears):
    """Linear layers on three axes run as operators on two."""

    def forward(self, x):
        y = self.a(x[None].expand(3, -1, -1))
        return self.b(((y @ y.transpose(1, 2)).softmax(-1) @ y).mean(0))


class Attends(Linears):
    def forward(self, x):
        q = self.a(x).view(1, 2, -1, 4)
        return self.b(F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(-1, 8))


class Drops(Linears):
    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.3, self.training))


class Unused(Linears):
    """What nobody uses is counted all the same."""

    def forward(self, x):
        h = self.a(x)
        _ = (h * 3).sum()
        return self.b(h * 2)


class WithoutGradient(Linears):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            norm = h.exp().sum()
        return self.b(h / norm)


class Halves(Linears):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x).relu()
        return self.b(h.float())


class Breaks(Linears):
    def forward(self, x):
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h.sigmoid() * h)


class Checkpoints(Linears):
    def forward(self, x):
        return self.b(checkpoint(lambda y: self.a(y).tanh() * 2, x, use_reentrant=False))


# of each model: operators of its forward pass that have no value of their own once compiled
MODELS = {
    Loops: set(),
    InPlace: set(),
    Several: {"aten.std_mean.correction[0]"},
    ThreeAxes: {"aten.clone.default", "aten.mm.default"},
    Attends: {"aten._scaled_dot_product_flash_attention_for_cpu.default[1]"},
    Drops: {"aten.bernoulli_.float", "aten.div_.Scalar"},
    Unused: set(),
    WithoutGradient: set(),
    Halves: {"aten._to_copy.default"},
    Breaks: set(),
    Checkpoints: {"aten.addmm.default", "aten.tanh.default", "aten.mul.Tensor"},
}


def work(build, *, sizes=(8, 8), function=False, **settings):
    def train(log=None):
        torch.compiler.reset()
        torch.manual_seed(9)
        model = build()
        called = (lambda x: (model(x) * 2).tanh()) if function else model
        if settings:
            called = torch.compile(called, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for size in sizes:
            optimizer.zero_grad()
            loss = called(torch.randn(size, 8)).pow(2).mean()
            (log.loss(loss) if log else loss).backward()
            optimizer.step()
            if log:
                log(model)

    return train


def run(path, build, **settings):
    return captured(path, work(build, **settings), compile="keep", level="op")


def forward(path, step=0):
    return [record for record in operators(path, step) if record.site.phase is Phase.FORWARD]


def is_seen(record):
    return record.summary.status is not Status.NOT_OBSERVED


@pytest.mark.parametrize("build", MODELS)
def test_operators_have_the_sites_and_values_of_eager(tmp_path, build):
    eager, kept = run(tmp_path / "eager", build), run(tmp_path / "kept", build, backend="aot_eager")
    values = {record.site: record.summary.checksum for record in forward(kept) if is_seen(record)}
    unseen = {record.site.path for record in forward(eager) if record.site not in values}
    assert unseen == MODELS[build]
    for record in forward(eager):
        assert values.get(record.site, record.summary.checksum) == record.summary.checksum, record.site
    assert not set(values) - {record.site for record in forward(eager)}
    lines = {record.site: record.info.source for record in forward(eager)}
    assert all(record.info.source == lines[record.site] for record in forward(kept) if is_seen(record))
    result = compared(eager, kept, strict=True)
    assert result.verdict is Verdict.UNDECIDED, "the backward pass is not seen"
    assert "all that both runs saw agrees" in result.sentence


@pytest.mark.parametrize("build", sliced(MODELS, (Loops, Unused, Breaks)))
def test_a_compiled_function_is_never_said_to_part_where_it_was_not_seen(tmp_path, build):
    eager = run(tmp_path / "eager", build, function=True)
    kept = run(tmp_path / "kept", build, function=True, backend="aot_eager")
    result = compared(eager, kept, strict=True)
    assert result.verdict is Verdict.UNDECIDED, result.sentence
    assert "all that both runs saw agrees" in result.sentence


@pytest.mark.parametrize("build", sliced([Several, ThreeAxes, Loops], [ThreeAxes]))
def test_the_sizes_of_a_compiled_model_may_change(tmp_path, build):
    eager = run(tmp_path / "eager", build, sizes=(8, 12, 20))
    kept = run(tmp_path / "kept", build, sizes=(8, 12, 20), backend="aot_eager", dynamic=True)
    assert "all that both runs saw agrees" in compared(eager, kept, strict=True).sentence
    seen = [sum(is_seen(record) for record in forward(kept, step)) for step in range(3)]
    assert seen[0] == seen[1] == seen[2] > 5


def test_no_compilation_more_than_without(tmp_path):
    def compilations(**options):
        torch._dynamo.utils.counters.clear()
        captured(tmp_path / "run", work(ThreeAxes, sizes=(8, 12, 20, 24), backend="aot_eager"), **options)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert compilations(compile="keep", level="op") == compilations(compile="keep") == compilations(compile="boundary")


def test_a_wrong_decomposition_is_found_at_its_operator(tmp_path):
    eager, wrong = run(tmp_path / "eager", Loops), run(tmp_path / "wrong", Loops, backend=wrong_backend())
    result = compared(eager, wrong, rtol=1e-4)
    first = result.first
    assert result.verdict is Verdict.DIVERGED
    assert (first.step, first.site.kind, first.site.fqn, first.site.path) == (
        0,
        Kind.OP_OUTPUT,
        "Loops",
        "aten.gelu.default",
    )
    assert first.role.value == "origin"
    assert first.source.startswith("tests/capture/test_tap_operators.py:") or "test_tap_operators.py:" in first.source
    assert "aten.gelu.default of Loops" in result.sentence
    assert {item.role.value for item in result.divergences[1:] if item.step == 0} == {"propagated"}


@pytest.mark.sweep
def test_a_wrong_decomposition_in_a_fixture_is_found_at_its_operator(tmp_path, monkeypatch):
    eager = run_fixture(tmp_path / "eager", monkeypatch, "train_gpt", level="op")
    wrong = run_fixture(tmp_path / "wrong", monkeypatch, "train_gpt", level="op", backend=wrong_backend())
    first = compared(eager, wrong).first
    assert (first.site.fqn, first.site.path, first.step) == ("GPT.blocks.0.mlp.act", "aten.gelu.default", 0)
    assert first.role.value == "origin"


NORM = {"aten.native_layer_norm.default[1]", "aten.native_layer_norm.default[2]"}
FIXTURES = {
    "train_cnn": {"aten.native_batch_norm.default[1]", "aten.native_batch_norm.default[2]"},
    "train_gpt": NORM
    | {
        "aten._scaled_dot_product_flash_attention_for_cpu.default[1]",
        "aten._log_softmax.default",
        "aten.nll_loss_forward.default[1]",
    },
    "train_rnn": {"aten.addmm.default", "aten.add_.Tensor"},
}


@pytest.mark.parametrize("name", sliced(FIXTURES, ("train_rnn",)))
def test_fixtures_agree_at_every_operator_that_is_seen(tmp_path, monkeypatch, name):
    eager = run_fixture(tmp_path / "eager", monkeypatch, name, level="op")
    kept = run_fixture(tmp_path / "kept", monkeypatch, name, level="op", backend="aot_eager")
    result = compared(eager, kept, strict=True)
    assert result.verdict is Verdict.UNDECIDED
    assert "all that both runs saw agrees" in result.sentence
    seen = {record.site for record in forward(kept) if is_seen(record)}
    assert {record.site.path for record in forward(eager) if record.site not in seen} == FIXTURES[name]
    assert len(seen) > 20


@pytest.mark.sweep
def test_rounding_of_a_real_compiler_is_reported_at_the_operator(tmp_path):
    eager, inductor = run(tmp_path / "eager", ThreeAxes), run(tmp_path / "inductor", ThreeAxes, backend="inductor")
    near = compared(eager, inductor, rtol=1e-3, atol=1e-5)
    assert near.verdict is Verdict.UNDECIDED
    assert "all that both runs saw agrees" in near.sentence


def gated(x, y):
    h = F.gelu(x) * torch.sigmoid(y)
    return (h - h.mean()).tanh()


def test_a_region_without_modules_is_seen_too(tmp_path):
    def run(path, **settings):
        def train():
            torch.compiler.reset()
            torch.manual_seed(3)
            model = Linears()
            compute = torch.compile(gated, **settings) if settings else gated
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                x = torch.randn(8, 8)
                compute(model.a(x), model.b(x)).square().mean().backward()
                optimizer.step()

        return captured(path, train, compile="keep", level="op")

    eager, kept = run(tmp_path / "eager"), run(tmp_path / "kept", backend="aot_eager")
    values = {record.site: record.summary.checksum for record in operators(kept) if is_seen(record)}
    inside = [record for record in operators(eager) if record.site.phase is Phase.LOSS]
    names = {record.site.path for record in inside if values.get(record.site) == record.summary.checksum}
    assert names >= {f"aten.{name}" for name in ("gelu.default", "sigmoid.default", "mul.Tensor", "tanh.default")}
    assert "all that both runs saw agrees" in compared(eager, kept, strict=True).sentence
    wrong = compared(eager, run(tmp_path / "wrong", backend=wrong_backend()), rtol=1e-4).first
    assert (wrong.site.fqn, wrong.site.path, wrong.step) == ("script", "aten.gelu.default", 0)


def test_what_is_not_seen_is_said_once_a_step(tmp_path):
    kept = run(tmp_path / "kept", Loops, backend="aot_eager")
    for step in (0, 1):
        marks = [record for record in operators(kept, step) if record.site.path == OTHERS]
        assert {(mark.site.phase, mark.site.fqn) for mark in marks} == {
            (phase, fqn) for phase in (Phase.FORWARD, Phase.BACKWARD) for fqn in ("Loops", "Loops.a", "Loops.b")
        }
        assert not any(is_seen(mark) for mark in marks)


def test_globs_choose_operators_inside_regions_too(tmp_path):
    kept = captured(tmp_path / "run", work(Loops, backend="aot_eager"), compile="keep", level="op", ops=("gelu",))
    assert {record.site.path for record in forward(kept)} == {"aten.gelu.default", OTHERS}


def test_checkpointing_inside_a_region_shifts_no_call(tmp_path):
    eager = captured(tmp_path / "eager", work(Checkpoints), compile="keep")
    kept = captured(tmp_path / "kept", work(Checkpoints, backend="aot_eager"), compile="keep")
    result = compared(eager, kept)
    assert result.verdict is Verdict.SAME, result.sentence
    again = [record.site.fqn for record in records(kept) if record.site.phase is Phase.RECOMPUTE]
    assert again


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("function", sliced([False, True], [False]))
def test_training_is_the_bare_one(tmp_path, build, function):
    train = work(build, function=function, backend="aot_eager")
    bare = trajectory(train)
    torch.manual_seed(0)
    with watched(tmp_path / "run", compile="keep", level="op", record=CaptureOptions().record | {Kind.OP_OUTPUT}):
        seen = trajectory(train)
    assert_same(bare, seen)
