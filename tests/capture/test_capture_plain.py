"""Scripts of plain tensors and custom functions: what is recorded of them, and what is said where nothing was."""

import gc
import weakref

import pytest
import torch
from neutrality import watched

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.store.read.run import open_run

STEPS = 5


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


def train(how):
    torch.manual_seed(0)
    w = torch.randn(4, 3, requires_grad=True)
    others = {"b": torch.zeros(3, requires_grad=True)}
    x, y = torch.randn(16, 4), torch.randn(16, 3)
    tensors = [w, others["b"]]
    optimizer = torch.optim.SGD(tensors, lr=0.1) if how == "optimizer" else None
    for _ in range(STEPS):
        loss = ((Cube.apply(torch.tanh(x @ w + others["b"])) - y) ** 2).mean()
        if how == "autograd.grad":
            found = torch.autograd.grad(loss, tensors)
        else:
            loss.backward()
            found = [tensor.grad for tensor in tensors]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            continue
        with torch.no_grad():
            for tensor, gradient in zip(tensors, found, strict=True):
                tensor.sub_(0.1 * gradient)
                tensor.grad = None


HOWS = ("by hand", "optimizer", "autograd.grad")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    paths = {}
    for how in HOWS:
        paths[how] = tmp_path_factory.mktemp("plain") / "run"
        with watched(paths[how]):
            train(how)
    return paths


@pytest.mark.parametrize("how", HOWS)
def test_steps_leaves_and_gradients_are_recorded_under_the_scripts_own_names(plain, how):
    with open_run(plain[how]) as run:
        assert run.manifest["steps"] == STEPS
        found = {(r.site.kind, r.site.fqn) for r in run.rank(0).records(STEPS - 1)}
    assert {(Kind.PARAM, "w"), (Kind.PARAM, "others['b']"), (Kind.GRAD, "w"), (Kind.LOSS, "loss")} <= found
    assert {(Kind.GRAD, "others['b']")} <= found


@pytest.mark.parametrize("how", HOWS)
def test_twins_are_the_same_and_what_was_not_seen_is_said(tmp_path, plain, how):
    with watched(tmp_path / "run"):
        train(how)
    with open_run(plain[how]) as a, open_run(tmp_path / "run") as b:
        result = compare_runs(a, b, DiffOptions(), [])
    assert result.verdict is Verdict.SAME
    assert any("no module was called, so nothing between" in note for note in result.notes)


def test_looking_for_names_keeps_no_tensor_alive(tmp_path):
    def step():
        w = torch.ones(3, requires_grad=True)
        big = torch.ones(1000)
        reference = weakref.ref(big)
        (w * big[:3]).sum().backward()
        del big
        gc.collect()
        return reference() is None

    with watched(tmp_path / "run"):
        assert step()
