"""What `--level op` records: every operator, where it ran, what it was given, what it belongs to."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from opcapture import captured, forward_of, inputs_of, named, operators, records
from summaries import checksum
from torch import nn
from torch.nn import functional as F

from introspect_cli.records import Kind, Phase, Status
from introspect_cli.schedule.rules import Schedule


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * 2)


def training(model, steps=1, loss=lambda out: out.pow(2).mean()):
    """A function that trains `model` for some steps on the same inputs each time it is called."""

    def work():
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            out = model(torch.randn(5, 4))
            optimizer.zero_grad()
            loss(out).backward()
            optimizer.step()

    return work


def run_op(path, work, **options):
    return captured(path, work, level="op", **options)


def places(found):
    return [(r.site.phase.value, r.site.fqn, r.site.path, r.site.call) for r in found]


def test_operators_stand_under_the_module_that_ran_them_forward_and_backward(tmp_path):
    found = places(operators(run_op(tmp_path / "run", training(Two()))))
    assert found[:4] == [
        ("forward", "Two.first", "aten.addmm.default", 0),
        ("forward", "Two", "aten.tanh.default", 0),
        ("forward", "Two", "aten.mul.Tensor", 0),
        ("forward", "Two.second", "aten.addmm.default", 0),
    ]
    assert ("loss", "script", "aten.pow.Tensor_Scalar", 0) in found
    assert ("backward", "Two", "aten.tanh_backward.default", 0) in found
    assert [entry for entry in found if entry[:2] == ("backward", "Two.second")] == [
        ("backward", "Two.second", "aten.mm.default", 0),
        ("backward", "Two.second", "aten.mm.default", 1),
        ("backward", "Two.second", "aten.sum.dim_IntList", 0),
    ]


def test_the_users_line_is_reported_and_backward_operators_bear_the_forward_ones(tmp_path):
    found = operators(run_op(tmp_path / "run", training(Two())))
    line = Two.forward.__code__.co_firstlineno + 1
    of_two = [r for r in found if r.site.fqn.startswith("Two")]
    assert {r.info.source.rpartition(":")[2] for r in of_two} == {str(line)}
    assert {r.info.source.rpartition("/")[2].rpartition(":")[0] for r in of_two} == {"test_ops_records.py"}


def test_inputs_are_named_by_the_sites_that_wrote_them(tmp_path):
    path = run_op(tmp_path / "run", training(Two()))
    by_number = named(path)
    found = {(r.site.fqn, r.site.path, r.site.phase): r for r in operators(path)}

    def inputs(*place):
        return [
            None if r is None else (r.site.fqn, r.site.path or r.site.kind.value)
            for r in inputs_of(found[place], by_number)
        ]

    assert inputs("Two", "aten.tanh.default", Phase.FORWARD) == [("Two.first", "aten.addmm.default")]
    assert inputs("Two", "aten.mul.Tensor", Phase.FORWARD) == [("Two", "aten.tanh.default")]
    assert inputs("Two.second", "aten.addmm.default", Phase.FORWARD) == [
        ("Two.second.bias", "param"),
        ("Two", "aten.mul.Tensor"),
        ("Two.second.weight", "param"),
    ]
    assert inputs("Two.first", "aten.addmm.default", Phase.FORWARD)[1] is None, "the batch is no operator's"
    assert ("Two", "aten.tanh.default") in inputs("Two", "aten.tanh_backward.default", Phase.BACKWARD)


def test_backward_operators_name_the_forward_operator_they_belong_to(tmp_path):
    path = run_op(tmp_path / "run", training(Two()))
    by_number = named(path)
    backward = [r for r in operators(path) if r.site.phase is Phase.BACKWARD]
    said = {}
    for record in backward:
        origin = forward_of(record, by_number)
        said[record.site.fqn, record.info.op] = origin if isinstance(origin, str) else origin.info.op
    assert said["Two", "aten.tanh_backward.default"] == "aten.tanh.default"
    assert said["Two.second", "aten.mm.default"] == "aten.addmm.default"
    assert said["script", "aten.mul.Tensor"] in {"aten.pow.Tensor_Scalar", "aten.mean.default"}


def test_the_numbers_are_those_of_the_operators(tmp_path):
    model = Two()
    found = {}

    def work():
        x = torch.ones(2, 4)
        found["tanh"] = torch.tanh(model.first(x))
        model(x)

    path = run_op(tmp_path / "run", work)
    tanh = [r for r in operators(path, 1) if r.info.op == "aten.tanh.default" and r.site.fqn == "Two"]
    assert [r.summary.checksum for r in tanh] == [checksum(found["tanh"])]


def test_in_place_and_out_variants_are_recorded_as_they_leave_memory(tmp_path):
    class Writes(nn.Module):
        def forward(self, x):
            y = x * 1
            y.add_(1)
            y.view(-1)[0].fill_(7)
            out = torch.empty(3)
            torch.mul(y, 2, out=out)
            return out

    path = run_op(tmp_path / "run", lambda: Writes()(torch.tensor([1.0, 2.0, 3.0])))
    found = [r for r in operators(path) if r.site.fqn == "Writes"]
    assert [r.info.op for r in found] == [
        "aten.mul.Tensor",
        "aten.add_.Tensor",
        "aten.fill_.Scalar",
        "aten.mul.out",
    ]
    by_op = {r.info.op: r for r in found}
    assert by_op["aten.add_.Tensor"].summary.checksum == checksum(torch.tensor([2.0, 3.0, 4.0]))
    assert by_op["aten.mul.out"].summary.checksum == checksum(torch.tensor([14.0, 6.0, 8.0]))
    sources = inputs_of(by_op["aten.mul.out"], named(path))
    assert sources[0].info.op == "aten.fill_.Scalar", "what wrote into the view last"


def test_unwritten_memory_is_never_recorded(tmp_path):
    class Makes(nn.Module):
        def forward(self, x):
            return torch.empty_like(x).copy_(x) + x.new_empty(3).zero_() + torch.empty(3).fill_(1)

    found = operators(run_op(tmp_path / "run", lambda: Makes()(torch.ones(3))))
    assert not [r for r in found if "empty" in r.info.op]


def test_views_are_left_out_unless_asked_for_and_inputs_see_through_them(tmp_path):
    class Views(nn.Module):
        def forward(self, x):
            return (x * 2).view(2, 3).t().unsqueeze(0) + 1

    work = lambda: Views()(torch.ones(6))  # noqa: E731
    plain = run_op(tmp_path / "plain", work)
    assert [r.info.op for r in operators(plain)] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert inputs_of(operators(plain)[1], named(plain))[0].info.op == "aten.mul.Tensor"
    viewed = operators(run_op(tmp_path / "views", work, views=True))
    assert [r.info.op for r in viewed] == [
        "aten.mul.Tensor",
        "aten.view.default",
        "aten.t.default",
        "aten.unsqueeze.default",
        "aten.add.Tensor",
    ]


def test_several_results_have_a_path_each(tmp_path):
    path = run_op(tmp_path / "run", lambda: nn.LayerNorm(4)(torch.randn(2, 4)))
    assert [r.site.path for r in operators(path)] == [f"aten.native_layer_norm.default[{i}]" for i in range(3)]


def test_only_floats_are_recorded_unless_asked(tmp_path):
    class Picks(nn.Module):
        def forward(self, x):
            return x.max(dim=0), x > 0

    work = lambda: Picks()(torch.randn(3, 2))  # noqa: E731
    assert [r.site.path for r in operators(run_op(tmp_path / "a", work))] == ["aten.max.dim[0]"]
    every = [r.site.path for r in operators(run_op(tmp_path / "b", work, all_dtypes=True))]
    assert every == ["aten.max.dim[0]", "aten.max.dim[1]", "aten.gt.Scalar"]


def test_globs_choose_operators_and_modules(tmp_path):
    path = run_op(tmp_path / "ops", training(Two()), ops=("tanh*", "aten.mm"))
    assert {r.info.op for r in operators(path)} == {
        "aten.tanh.default",
        "aten.tanh_backward.default",
        "aten.mm.default",
    }
    path = run_op(tmp_path / "modules", training(Two()), modules=("second",))
    assert {r.site.fqn for r in operators(path)} == {"Two.second"}


def test_operators_are_recorded_in_scheduled_steps_alone(tmp_path):
    path = run_op(tmp_path / "run", training(Two(), steps=3), steps=Schedule.parse("1"))
    assert len(operators(path, 1)) > 10
    with pytest.raises(KeyError):
        operators(path, 0)


def test_calls_are_counted_anew_in_each_step(tmp_path):
    path = run_op(tmp_path / "run", training(Two(), steps=3))
    assert places(operators(path, 1)) == places(operators(path, 2))


def test_random_operators_are_recorded(tmp_path):
    def work():
        torch.manual_seed(5)
        nn.Dropout(0.5)(torch.ones(40))

    one, two = (operators(run_op(tmp_path / name, work)) for name in "ab")
    assert [r.summary.checksum for r in one] == [r.summary.checksum for r in two]
    assert len(one) >= 1


def test_operators_of_custom_libraries_and_what_they_write_to(tmp_path):
    with torch.library._scoped_library("opstest", "FRAGMENT") as library:
        library.define("twice(Tensor x, Tensor(a!) kept) -> Tensor")

        def twice(x, kept):
            kept.copy_(x)
            return x * 2

        library.impl("twice", twice, "CompositeExplicitAutograd")

        class Uses(nn.Module):
            def forward(self, x):
                return torch.ops.opstest.twice(x, torch.zeros(3))

        found = operators(run_op(tmp_path / "run", lambda: Uses()(torch.ones(3))))
    checksums = {r.site.path: r.summary.checksum for r in found if r.info.op == "opstest.twice.default"}
    assert checksums == {
        "opstest.twice.default": checksum(torch.full((3,), 2.0)),
        "opstest.twice.default['kept']": checksum(torch.ones(3)),
    }


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.square() * 3


def test_operators_inside_an_autograd_function(tmp_path):
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Cube.apply(self.weight * x)

    path = run_op(tmp_path / "run", lambda: one_backward(Uses()))
    found = operators(path)
    forward = [r.info.op for r in found if r.site.phase is Phase.FORWARD]
    assert forward == ["aten.mul.Tensor", "aten.pow.Tensor_Scalar"]
    backward = [r for r in found if r.site.phase is Phase.BACKWARD and r.site.fqn == "Uses"]
    assert "aten.pow.Tensor_Scalar" in {r.info.op for r in backward}, "square, in the function's own backward"
    line = Cube.backward.__wrapped__.__code__ if hasattr(Cube.backward, "__wrapped__") else Cube.backward.__code__
    square = next(r for r in backward if r.info.op == "aten.pow.Tensor_Scalar")
    assert int(square.info.source.rpartition(":")[2]) == line.co_firstlineno + 3


def one_backward(model):
    model(torch.tensor([1.0, 2.0, 3.0])).sum().backward()


def test_checkpointed_forwards_are_recomputed_apart(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Two()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    found = operators(run_op(tmp_path / "run", training(Again())))
    forward = [r.site.path for r in found if r.site.phase is Phase.FORWARD and r.site.fqn == "Again.inner"]
    again = [r.site.path for r in found if r.site.phase is Phase.RECOMPUTE and r.site.fqn == "Again.inner"]
    assert forward[:2] == ["aten.tanh.default", "aten.mul.Tensor"]
    assert again
    assert set(again) <= set(forward)
    assert "aten.tanh_backward.default" in {r.info.op for r in found if r.site.fqn == "Again.inner"}


def test_operators_of_gradients_of_gradients_are_recorded(tmp_path):
    model = Two()

    def work():
        x = torch.randn(5, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    found = operators(run_op(tmp_path / "run", work))
    backward = [r for r in found if r.site.phase is Phase.BACKWARD]
    assert len({r.sequence for r in backward}) > 15
    assert {r.site.fqn for r in backward} >= {"Two", "Two.first", "Two.second"}


def test_optimizer_steps_are_left_to_what_they_change(tmp_path):
    found = records(run_op(tmp_path / "run", training(Two())))
    inside = [r for r in found if r.site.kind is Kind.OP_OUTPUT and r.site.phase is Phase.OPTIMIZER]
    assert inside == []
    assert [r for r in found if r.site.kind is Kind.PARAM and r.site.phase is Phase.OPTIMIZER]


def test_gradient_clipping_between_backward_and_step_is_recorded(tmp_path):
    model = Two()

    def work():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    found = [r for r in operators(run_op(tmp_path / "run", work)) if r.site.phase is Phase.OPTIMIZER]
    assert {r.site.fqn for r in found} == {"script"}
    assert any(r.info.op.startswith(("aten._foreach_mul_", "aten.mul_")) for r in found)


def test_what_runs_in_several_threads_is_recorded_without_mixing_them_up(tmp_path):
    models = [Two() for _ in range(2)]

    def work():
        threads = [threading.Thread(target=model, args=(torch.ones(2, 4),)) for model in models]
        for thread in threads:
            thread.start()
            thread.join()

    path = run_op(tmp_path / "run", work)
    assert all(r.summary.status is Status.OBSERVED for r in operators(path))


def test_modes_of_the_scripts_own_are_pushed_and_popped_as_ever(tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    seen = []

    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = Two()

    def work():
        model(torch.ones(2, 4))
        with Mine():
            model(torch.ones(2, 4))
        assert all(type(mode).__name__ != "Mine" for mode in _get_current_dispatch_mode_stack())

    path = run_op(tmp_path / "run", work)
    assert _get_current_dispatch_mode_stack() == []
    assert "aten.tanh.default" in seen
    assert len([r for r in operators(path, 1) if r.info.op == "aten.tanh.default"]) == 1


def test_a_mode_that_is_on_when_a_step_begins_is_not_disturbed(tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    model = Two()

    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def work():
        with Mine():
            model(torch.ones(2, 4))
            assert len(_get_current_dispatch_mode_stack()) == 1

    run_op(tmp_path / "run", work)
    assert _get_current_dispatch_mode_stack() == []


def test_errors_of_the_script_come_through_unchanged(tmp_path):
    class Fails(nn.Module):
        def forward(self, x):
            return x @ torch.ones(7, 7)

    def work():
        Fails()(torch.ones(2, 3))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_op(tmp_path / "run", work)


@pytest.mark.parametrize(
    "model",
    [
        Two(),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1)),
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3, padding=1), nn.MaxPool1d(2), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), nn.Flatten()),
    ],
    ids=["linear", "inplace-dropout", "batchnorm", "conv", "transformer"],
)
def test_training_is_bitwise_what_it_is_without(tmp_path, model):
    import copy

    def train(one):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            F.smooth_l1_loss(one(torch.randn(6, 4)), torch.zeros(())).backward()
            optimizer.step()
        return [p.detach().clone() for p in one.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broadcasting, which is meant
        bare = train(copy.deepcopy(model))
        watched = []
        run_op(tmp_path / "run", lambda: watched.extend(train(copy.deepcopy(model))))
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


def test_nothing_is_recorded_at_module_level(tmp_path):
    path = captured(tmp_path / "run", training(Two()))
    assert operators(path) == []


def test_operators_in_another_order_in_each_step_are_recorded_as_python_records_them(tmp_path, monkeypatch):
    class Swapping(Two):
        calls = 0

        def forward(self, x):
            self.calls += 1
            y = torch.tanh(self.first(x))
            if self.calls % 3:
                y = y.sigmoid() * 2 if self.calls % 2 else (y * 2).sigmoid().sigmoid()
            return self.second(y)

    def run(name):
        torch.manual_seed(1)
        path = run_op(tmp_path / name, training(Swapping(), steps=7))
        return [[(r.site, r.summary.checksum, r.given) for r in records(path, step)] for step in range(7)]

    assert run("one") == run("other")


def test_an_operator_that_fails_raises_as_without_a_capture(tmp_path):
    def frames_of_failure():
        with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
            nn.Linear(4, 6)(torch.ones(2, 5))
        return str(raised.value), [entry.name for entry in raised.traceback if "introspect_cli" not in str(entry.path)]

    expected, seen = frames_of_failure(), []

    def work():
        training(Two())()
        model = Two()
        model(torch.ones(2, 4))
        seen.append(frames_of_failure())

    run_op(tmp_path / "run", work)
    assert seen[0][0] == expected[0]
    assert seen[0][1][-1] == expected[1][-1]
