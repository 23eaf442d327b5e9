"""Ways of calling forward and backward: each trains the same bits under capture, and is recorded sensibly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from neutrality import assert_neutral, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from introspect_cli.capture.ranks import flat


@pytest.fixture(autouse=True)
def _as_of_many_ranks(monkeypatch):
    """Shares of tensors are looked for, as where there is a process group."""
    monkeypatch.setattr(flat, "launchers", SimpleNamespace(grouped=lambda: True))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def fit(log, model, *, steps=3, data=(4, 8), loss=lambda out: out.square().mean(), optimizer=None):
    """The plainest loop there is."""
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        value = log.loss(loss(model(torch.randn(*data))))
        value.backward()
        optimizer.step()
        log(model, optimizer)


def test_a_plain_loop_trains_the_same(tmp_path):
    seen = assert_neutral(lambda log: fit(log, mlp()), tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2]
    assert seen.repeated() == []
    assert seen.modules == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.2"]
    for kind in ("input", "output", "grad_output"):
        assert seen.calls(kind, "Sequential.0", step=1) == [0]
    assert seen.calls("grad_input", "Sequential.2", step=1) == [0]
    assert [r.site.fqn for r in seen.of("grad", step=2)] == [
        f"Sequential.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    ]


class InPlace(nn.Module):
    """In-place activation, in-place residual, and an in-place write into a view of an activation."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.act(self.first(x))
        y = self.second(x)
        y += x
        y[:, :4].mul_(2)
        y.view(-1)[0] = 0.5
        return self.last(y)


def test_in_place_activations_and_residuals(tmp_path):
    seen = assert_neutral(lambda log: fit(log, InPlace()), tmp_path / "run")
    seen.assert_losses()
    assert seen.repeated() == []
    # the gradient of a value that was written over afterwards is still that of the value the module gave
    assert seen.calls("grad_output", "InPlace.second", step=0) == [0]


class Views(nn.Module):
    """Outputs and inputs that are views, expanded, transposed, chunked and the very same object."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.flat = nn.Flatten()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.same(self.flat(x.view(-1, 2, 4)))
        halves = [part(half) for part, half in zip(self.parts, x.chunk(2, dim=1), strict=True)]
        y = torch.cat(halves, 1)
        return self.last(y.t().t().expand(2, *y.shape).sum(0))


def test_views_train_the_same(tmp_path):
    seen = assert_neutral(lambda log: fit(log, Views()), tmp_path / "run")
    assert seen.repeated() == []
    assert seen.calls("input", "Views.parts.1", step=1) == [0]


class StaleView(nn.Module):
    """Passes on a view whose base was written over, so that autograd refuses to say what made it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.look = nn.Identity()
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        y = self.first(x).clone()
        left, _ = y.chunk(2, dim=1)
        y.mul_(2)
        self.look(left)  # its gradient is asked for by nobody but us
        return self.last(y)


def test_view_that_autograd_has_given_up_on(tmp_path):
    seen = assert_neutral(lambda log: fit(log, StaleView()), tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "StaleView.last", step=2) == [0]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8)) for _ in range(2)
        )
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_trains_the_same(tmp_path, reentrant):
    def train(log):
        fit(log, Checkpointed(reentrant=reentrant), loss=lambda out: out.square().mean())

    def with_grad(log):
        model = Checkpointed(reentrant=reentrant)
        optimizer = sgd(model)
        for _ in range(3):
            loss = log.loss(model(torch.randn(4, 8, requires_grad=True)).square().mean())
            loss.backward()
            optimizer.step()
            log(model, optimizer)

    seen = assert_neutral(with_grad if reentrant else train, tmp_path / "run")
    seen.assert_losses()
    assert seen.repeated() == []
    for number in (0, 1):
        name = f"Checkpointed.blocks.{number}.0"
        assert seen.calls("output", name, step=1, phase="forward") == [0]
        assert seen.calls("output", name, step=1, phase="recompute") == [0]
        (first,) = seen.of("output", name, step=1, phase="forward")
        (again,) = seen.of("output", name, step=1, phase="recompute")
        assert first.summary.checksum == again.summary.checksum
        dropped = [
            seen.of("output", f"Checkpointed.blocks.{number}.1", step=1, phase=p)[0] for p in ("forward", "recompute")
        ]
        assert dropped[0].summary.checksum == dropped[1].summary.checksum
    assert seen.calls("loss", "loss", step=1) == [0]


class Energy(nn.Module):
    """A forward that itself calls autograd, over a checkpointed part."""

    def __init__(self):
        super().__init__()
        self.energy = mlp()

    def forward(self, x):
        x = x.requires_grad_()
        energy = checkpoint(self.energy, x, use_reentrant=False)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force


def test_a_backward_pass_inside_a_forward_trains_the_same(tmp_path):
    seen = assert_neutral(lambda log: fit(log, Energy()), tmp_path / "run")
    assert seen.calls("output", "Energy.energy", step=1, phase="forward") == [0]
    assert seen.calls("loss", "loss", step=1) == [0, 1]


def test_several_backward_calls_and_retain_graph(tmp_path):
    def train(log):
        model = mlp()
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(torch.randn(4, 8))
            log.loss(out.mean()).backward(retain_graph=True)
            log.loss(out.square().mean()).backward(retain_graph=True)
            torch.autograd.backward([log.loss(out.abs().mean()), log.loss(out.sum())])
            optimizer.step()
            log(model, optimizer)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert [(r.site.call, r.site.path) for r in seen.of("loss", step=1)] == [(0, ""), (1, ""), (2, "[0]"), (2, "[1]")]
    paths = [r.site.path for r in seen.of("grad_output", "Sequential.0", step=1)]
    assert paths == ["", "@1", "@2"]  # a site names one value: the second and third pass are told apart


def test_double_backward_and_gradient_penalty(tmp_path):
    def train(log):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            out = model(x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = log.loss(out.mean() + (grad.norm(dim=1) - 1).square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(model, optimizer, x.grad)

    seen = assert_neutral(train, tmp_path / "run")
    assert seen.calls("loss", "loss", step=1) == [0, 1]


def test_autograd_grad_without_backward_trains_the_same(tmp_path):
    def train(log):
        model = mlp()
        for _ in range(3):
            loss = log.loss(model(torch.randn(4, 8)).square().mean())
            grads = torch.autograd.grad(outputs=loss, inputs=list(model.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.sub_(0.1 * grad)
            log(model, grads)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2]  # no optimizer: a step is a forward


def test_accumulation_and_clipping_train_the_same(tmp_path):
    def train(log):
        model = mlp()
        optimizer = sgd(model)
        for _ in range(2):
            for _ in range(3):
                log.loss(model(torch.randn(4, 8)).square().mean() / 3).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            log(model, optimizer)
            optimizer.zero_grad()

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "Sequential.2", step=1) == [0, 1, 2]
    assert all(abs(r.summary.stats["max"]) <= 0.0500001 for r in seen.of("grad"))


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other):
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(other)
        return x / 2, other

    @staticmethod
    def backward(ctx, grad, _):
        return grad / 2, None


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 3


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        y, _ = Halve.apply(self.first(x), torch.arange(3))
        y = InPlaceFunction.apply(y)
        return self.last(y)


def test_custom_autograd_functions_train_the_same(tmp_path):
    seen = assert_neutral(lambda log: fit(log, Custom()), tmp_path / "run")
    seen.assert_losses()
    assert seen.repeated() == []


class Unused(nn.Module):
    """One output goes nowhere, one is detached, and backward passes an undefined gradient to a hook."""

    def __init__(self):
        super().__init__()
        self.split = Split()
        self.last = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, x):
        used, unused, _ = self.split(x)
        return self.last(used + unused.detach())


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        left, right = self.linear(x).chunk(2, dim=1)
        return left, right, None


def test_outputs_without_gradient_train_the_same(tmp_path):
    seen = assert_neutral(lambda log: fit(log, Unused()), tmp_path / "run")
    assert [r.site.path for r in seen.of("grad_output", "Unused.split", step=0)] == ["[0]"]
    assert [r.site.path for r in seen.of("output", "Unused.split", step=0)] == ["[0]", "[1]"]
    assert not seen.of("grad", "Unused.never.weight")
    assert seen.of("param", "Unused.never.weight")


def test_functional_transforms_compute_the_same(tmp_path):
    def train(log):
        model = mlp()
        params = {name: value.detach() for name, value in model.named_parameters()}

        def loss_of(params, x):
            return torch.func.functional_call(model, params, (x,)).square().mean()

        for _ in range(3):
            x = torch.randn(4, 8)
            grads, loss = torch.func.grad_and_value(loss_of)(params, x)
            per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, x)
            _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            hessian = torch.func.hessian(lambda row: model(row).sum())(x[0])
            jacobian = torch.func.jacrev(model)(x[0])
            params = {name: value - 0.1 * grads[name] for name, value in params.items()}
            log(loss, grads, per_sample, tangent, hessian, jacobian, params)

    seen = assert_neutral(train, tmp_path / "run")
    assert seen.records
    assert any("functorch" in text for text in seen.unseen().values())


def test_forward_mode_computes_the_same(tmp_path):
    import torch.autograd.forward_ad as fwad

    def train(log):
        model = mlp()
        for _ in range(2):
            with fwad.dual_level():
                out = model(fwad.make_dual(torch.randn(4, 8), torch.randn(4, 8)))
                log(*fwad.unpack_dual(out))

    assert assert_neutral(train, tmp_path / "run").records


def test_saved_tensor_hooks_and_anomaly_mode(tmp_path):
    def train(log):
        count = []

        def pack(tensor):
            count.append(tensor.shape)
            return tensor

        model = mlp()
        optimizer = sgd(model)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(torch.randn(4, 8)).square().mean()
            with torch.autograd.detect_anomaly(check_nan=True):
                loss.backward()
            optimizer.step()
            log(model, len(count))

    assert assert_neutral(train, tmp_path / "run").records


def test_user_hooks_before_and_after_ours(tmp_path):
    def train(log):
        model = mlp()
        optimizer = sgd(model)
        order = []
        model[0].register_forward_pre_hook(lambda module, args: order.append("pre") or (args[0] * 2,))
        model[0].register_forward_hook(lambda module, args, out: order.append("post") or out + 1)
        model[2].register_full_backward_hook(lambda module, gin, gout: order.append("full"))
        model[2].register_full_backward_pre_hook(lambda module, gout: order.append("full pre"))
        model[0].weight.register_hook(lambda grad: order.append("tensor") or grad * 2)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
        model[1].register_forward_hook(lambda module, args, out: out.register_hook(lambda g: g * 0.5) and None)
        optimizer.register_step_pre_hook(lambda *a: order.append("step pre"))
        optimizer.register_step_post_hook(lambda *a: order.append("step post"))
        for _ in range(2):
            out = model(torch.randn(4, 8))
            out.retain_grad()
            out.register_hook(lambda grad: order.append("late") or grad * 3)
            log.loss(out.square().mean()).backward()
            optimizer.step()
            log(model, optimizer, out.grad, order)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()


def test_global_module_hooks_of_the_script(tmp_path):
    def train(log):
        calls = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: calls.append(type(module).__name__)
        )
        try:
            fit(log, mlp())
        finally:
            handle.remove()
        log(calls)

    assert assert_neutral(train, tmp_path / "run").records


def test_script_watches_operations_and_functions(tmp_path):
    """Dispatch and torch-function modes of the script's see its own operations, not introspect's."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    def train(log):
        ops, functions = [], []

        class Ops(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                ops.append(str(func))
                return func(*args, **(kwargs or {}))

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                functions.append(getattr(func, "__name__", str(func)))
                return func(*args, **(kwargs or {}))

        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
        with Ops(), Functions():
            for batch in loader:
                loss = F.mse_loss(model(batch), torch.zeros(4, 1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        log(model, optimizer, ops, functions)

    seen = assert_neutral(train, tmp_path / "run")
    assert len(seen.of("loss")) == 2
    assert seen.unseen() == {}


def test_a_default_device_and_dtype_train_the_same(tmp_path):
    def train(log):
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("cpu"):
                fit(log, mlp())
            with torch.device("meta"):
                mlp()(torch.randn(4, 8))
        finally:
            torch.set_default_dtype(torch.float32)

    seen = assert_neutral(train, tmp_path / "run")
    assert len(seen.of("loss")) == 3


def test_a_tensor_subclass_trains_the_same(tmp_path):
    class Tagged(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012 - what the script counts

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    def train(log):
        Tagged.seen.clear()
        model = mlp()
        optimizer = sgd(model)
        for _ in range(2):
            loss = model(torch.randn(4, 8).as_subclass(Tagged)).square().mean()
            loss.backward()
            optimizer.step()
        log(model, list(Tagged.seen))

    seen = assert_neutral(train, tmp_path / "run")
    assert len(seen.of("loss")) == 2


def test_the_script_finds_its_own_hooks_only(tmp_path):
    def count(log):
        net = mlp()
        for _ in range(2):
            hidden = net[0](torch.randn(4, 8))
            log("before", hidden._backward_hooks)
            shared = net[2](net[1](hidden)) + net[2](hidden)
            hidden.register_hook(lambda grad: grad * 2)
            log("after", len(hidden._backward_hooks), shared._backward_hooks)
            shared.sum().backward()
            log("gradients", *(parameter.grad.clone() for parameter in net.parameters()))

    assert_neutral(count, tmp_path / "run")


def test_a_lazy_copy_stays_one(tmp_path):
    if not hasattr(torch._C, "_is_cow_tensor"):
        pytest.skip("this torch has no lazy copies that can be told")

    def lazily(log):
        net = mlp()
        for size in (8, 8, 4096):
            batch = torch.ones(size, 8)._lazy_clone()
            net(batch)
            nn.Identity()(batch.t())
            log(size, torch._C._is_cow_tensor(batch))

    assert_neutral(lazily, tmp_path / "run")
