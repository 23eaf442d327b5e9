"""What `--level op` records: every operator, where it ran, what it was given, what it belongs to."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, forward_of, inputs_of, named, operators
from summaries import checksum
from torch import nn

from introspect_cli.records import Phase


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
    assert [r.info.op for r in found] == ["aten.mul.Tensor", "aten.add_.Tensor", "aten.fill_.Scalar", "aten.mul.out"]
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


def test_globs_choose_operators_and_modules(tmp_path):
    path = run_op(tmp_path / "ops", training(Two()), ops=("tanh*", "aten.mm"))
    assert {r.info.op for r in operators(path)} == {
        "aten.tanh.default",
        "aten.tanh_backward.default",
        "aten.mm.default",
    }
    path = run_op(tmp_path / "modules", training(Two()), modules=("second",))
    assert {r.site.fqn for r in operators(path)} == {"Two.second"}


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
