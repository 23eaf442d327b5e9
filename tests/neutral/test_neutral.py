"""Whatever a script does with torch computes the same bits under capture: one table of programs, one assertion.

A program trains and calls `log` with what it has after each step. Whatever it notes as a loss is on record in its
order, and no site names two values, where it does not say otherwise.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import io
import pickle
import re
import shutil
import sys

import pytest
import torch
import torch._dynamo.testing
from neutrality import assert_neutral, mlp, subnormals_kept
from torch import distributed as dist
from torch import nn
from torch._guards import CompileContext
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

from introspect_cli.records import Kind

pytestmark = pytest.mark.filterwarnings("ignore")
PROGRAMS, RECORDED = {}, {}
"""Programs by name, and of some of them a check of what is on record."""


def program_named(name):
    """Put a program into the table under a name."""

    def keep(train):
        PROGRAMS[name] = train
        return train

    return keep


def program(train):
    """Put a program into the table under its own name."""
    return program_named(train.__name__)(train)


@pytest.fixture(autouse=True)
def _as_of_many_ranks():
    """Shares of tensors are looked for, as where there is a process group."""
    hook = sys.excepthook  # torch's process groups put in one of their own
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.fixture(autouse=True)
def _fresh_compiler():
    limit = sys.getrecursionlimit()  # the compiler raises it for good
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # or it starts a thread of its own
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    sys.setrecursionlimit(limit)


def fit(log, net, data=lambda: (torch.randn(4, 8),), *, run=None, steps=2, optimizer=None):
    """The plainest loop there is."""
    optimizer = optimizer or sgd(net)
    for _ in range(steps):
        optimizer.zero_grad()
        log.loss((net if run is None else run)(*data()).float().square().mean()).backward()
        optimizer.step()
        log(net, optimizer)


# --- ways of calling forward and backward


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


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


@program
def double_backward_and_gradient_penalty(log):
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


@program
def autograd_grad_without_backward_under_autocast(log):
    model = mlp()
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = log.loss(model(torch.randn(4, 8)).square().mean())
        grads = torch.autograd.grad(outputs=loss, inputs=list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.sub_(0.1 * grad)
        log(model, grads)


@program
def functional_transforms_compute_the_same(log):
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


@program
def saved_tensor_hooks_and_anomaly_mode(log):
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


@program
def user_hooks_before_and_after_ours(log):
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


@program
def global_module_hooks_of_the_script(log):
    calls = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: calls.append(type(module).__name__)
    )
    try:
        fit(log, mlp())
    finally:
        handle.remove()
    log(calls)


@program
def script_watches_operations_and_functions(log):
    """Dispatch and torch-function modes of the script's see its own operations, not introspect's."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

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


@program
def a_default_device_and_dtype_train_the_same(log):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("cpu"):
            fit(log, mlp())
        with torch.device("meta"):
            mlp()(torch.randn(4, 8))
    finally:
        torch.set_default_dtype(torch.float32)


@program
def a_tensor_subclass_trains_the_same(log):
    class Tagged(torch.Tensor):
        seen: list[str] = []  # noqa: RUF012 - what the script counts

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    Tagged.seen.clear()
    model = mlp()
    optimizer = sgd(model)
    for _ in range(2):
        loss = model(torch.randn(4, 8).as_subclass(Tagged)).square().mean()
        loss.backward()
        optimizer.step()
    log(model, list(Tagged.seen))


@program
def the_script_finds_its_own_hooks_only(log):
    net = mlp()
    for _ in range(2):
        hidden = net[0](torch.randn(4, 8))
        log("before", hidden._backward_hooks)
        shared = net[2](net[1](hidden)) + net[2](hidden)
        hidden.register_hook(lambda grad: grad * 2)
        log("after", len(hidden._backward_hooks), shared._backward_hooks)
        shared.sum().backward()
        log("gradients", *(parameter.grad.clone() for parameter in net.parameters()))


@program
def variables_that_others_hold_are_left_to_them(log):
    """Python before 3.13 keeps what it is asked for of a frame's variables: whoever asks again changes it."""
    if sys.version_info >= (3, 13):
        pytest.skip("nobody changes what another holds of a frame's variables")

    def asked_itself():
        net = mlp()
        held = locals()
        before = dict(held)
        net(torch.randn(4, 8)).sum().backward()
        later = 1
        return held.keys() - before.keys(), held["net"] is net, later

    def taken():
        return sys._getframe(1).f_locals

    def asked_by_another():
        net = mlp()
        held = taken()
        exec("rate = 0.25")
        net(torch.randn(4, 8)).sum().backward()
        return held["net"] is net, eval("rate")

    def executes():
        net = mlp()
        exec("rate = 0.25")
        net(torch.randn(4, 8)).sum().backward()
        return eval("rate")

    log(sorted(asked_itself()[0]), asked_itself()[1:], asked_by_another(), executes())


@program
def a_lazy_copy_stays_one(log):
    if not hasattr(torch._C, "_is_cow_tensor"):
        pytest.skip("this torch has no lazy copies that can be told")
    net = mlp()
    for size in (8, 8, 4096):
        batch = torch.ones(size, 8)._lazy_clone()
        net(batch)
        nn.Identity()(batch.t())
        log(size, torch._C._is_cow_tensor(batch))


# --- kinds of modules, and of what they take and give


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 6, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
        self.last = nn.Linear(12, 1)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        padded, _ = rnn.pad_packed_sequence(out, batch_first=True)
        return self.last(padded)


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2)


class LowRank(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, 2) * 0.1)
        self.b = nn.Parameter(torch.zeros(2, width))

    def forward(self, weight):
        return weight + self.a @ self.b


class WithCall(nn.Module):
    """Has a `__call__` of its own, and calls one child by its forward."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Linear(8, 8)
        self.direct = nn.Linear(8, 8)

    def __call__(self, x, *rest):
        return super().__call__(x * 2, *rest)

    def forward(self, x):
        return self.direct.forward(self.seen(x))


class NeverCalls(nn.Linear):
    """Its `__call__` leaves out torch's."""

    def __call__(self, x):
        return self.forward(x)


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - what scripts return


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list | None = None
    note: str = "text"


class Cache:
    """As a cache of attention keys: an object of objects."""

    def __init__(self, *keys):
        self.layers = [Layer(key) for key in keys]


class Layer:
    def __init__(self, key):
        self.key = key


def holding_itself(a, b):
    value = [a]
    value += [value, {"again": value, "b": b}]
    return value


def buried(value):
    for _ in range(150):
        value = [value]
    return value


class Nested(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.wrap = Wrap(wrap)

    def forward(self, *, x=None, scale: float = 1.0, flags=(True, None), mapping=None):
        return self.wrap({"x": self.linear(x) * scale + mapping["shift"]}, values=[x, 3])


class Wrap(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.make = wrap

    def forward(self, inputs, values):
        return self.make(inputs["x"], values[0])


OUTPUTS = {
    "dict": (lambda a, b: {"a": a, "b": {"c": b}}, ["['a']", "['b']['c']"], lambda out: out["a"]),
    "ordered": (lambda a, b: collections.OrderedDict(a=a, b=b), ["['a']", "['b']"], lambda out: out["a"]),
    "namedtuple": (Pair, [".left", ".right"], lambda out: out.left),
    "dataclass": (lambda a, b: Output(a, [b]), [".logits", ".hidden[0]", ".note"], lambda out: out.logits),
    "list": (lambda a, b: [a, (b, None)], ["[0]", "[1][0]"], lambda out: out[0]),
    "iterator": (lambda a, b: iter([a, b]), [], next),
    "deque": (lambda a, b: collections.deque([a, b]), ["[0]", "[1]"], lambda out: out[0]),
    "default dict": (lambda a, b: collections.defaultdict(list, a=[a], b=[b]), ["['a'][0]", "['b'][0]"],
                     lambda out: out["a"][0]),
    "what torch returns": (lambda a, b: torch.return_types.max((a, b)), ["[0]", "[1]"], lambda out: out[0]),
    "objects in an object": (Cache, [".layers[0].key", ".layers[1].key"],
                             lambda out: out.layers[0].key),
    "nothing but one": (lambda a, b: [{}, None, (), a], ["[3]"], lambda out: out[3]),
    "itself": (holding_itself, ["[0]", "[2]['b']"], lambda out: out[0]),
    "too deep": (lambda a, b: Pair(a, buried(b)), [".left"], lambda out: out.left),
}  # fmt: skip


@program
def modules_with_their_own_call(log):
    net = nn.Sequential(WithCall(), NeverCalls(8, 1))
    fit(log, net, lambda: (torch.randn(4, 8),))
    direct = mlp()
    log(direct.forward(torch.randn(4, 8)))


@program
def copies_of_a_watched_model(log):
    net = mlp()
    x = torch.randn(4, 8, requires_grad=True)
    out = net(x)
    out.mean().backward()
    copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    saved = io.BytesIO()
    torch.save({"net": net, "x": x, "leaf": out.detach()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    log(copied, pickled, loaded["net"], loaded["x"], copy.deepcopy(x), saved.getvalue())
    log(copied(x), pickled(x), loaded["net"](x), vars(net).keys(), vars(net[0]).keys())


@program
def what_the_script_overrides_is_not_called(log):
    """`modules()` and its like may be the script's own: they may count, be slow, or leave things out."""
    calls = []

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 1)

        def forward(self, x):
            return self.inner(x)

    def counting(name):
        def method(self, *args, **kwargs):
            calls.append(name)
            return getattr(nn.Module, name)(self, *args, **kwargs)

        return method

    names = ("modules", "named_modules", "parameters", "named_parameters", "buffers", "children", "state_dict")
    for name in (*names, "extra_repr", "__repr__", "_get_name", "__dir__"):
        setattr(Counts, name, counting(name))
    model = Counts()
    optimizer = torch.optim.SGD(nn.Module.parameters(model), lr=0.1)
    calls.clear()
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    log(calls)


# --- optimizers, scalers and schedulers


OPTIMIZERS = {
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, foreach=False, lr=torch.tensor(0.01)),
    "adam-differentiable": lambda p: torch.optim.Adam(p, maximize=True),
    "asgd": torch.optim.ASGD,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
}
"""Each way in which torch steps: fused, by lists, one by one; with a state of numbers, of tensors, and of both."""


if hasattr(torch.optim, "Adafactor"):  # new in torch 2.5
    OPTIMIZERS["adafactor"] = torch.optim.Adafactor


@program
def sparse_gradients_train_the_same(log):
    def model():
        return nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(16, 1))

    net = model()
    sparse, dense = torch.optim.SparseAdam(net[0].parameters()), torch.optim.SGD(net[2].parameters(), lr=0.1)
    for _ in range(2):
        log.loss(net(torch.randint(10, (4, 2))).square().mean()).backward()
        sparse.step()
        dense.step()
        log(net, sparse, dense)
        net.zero_grad()


@program
def step_that_raises_and_goes_on(log):
    net = mlp()
    optimizer = torch.optim.LBFGS(net.parameters())

    def closure():
        raise ValueError("no")

    for _ in range(2):
        net(torch.randn(4, 8)).mean().backward()
        with pytest.raises(ValueError, match="no"):
            optimizer.step(closure)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(4, 8)).mean().backward()
        plain.step()
        log(net)


# --- code that torch rewrites before it runs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.body(x))


def plain(graph):
    """A graph's text without the numbers by which torch tells two classes of one name apart."""
    return re.sub(r"___torch_mangle_\d+\.|#.*", "", str(graph))


BACKENDS = ["eager", "aot_eager"] + (["inductor"] if shutil.which("g++") else [])


@program
def compiler_is_not_slowed_into_more_graphs(log):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    net = Model()
    fit(log, net, run=torch.compile(net, backend=counter))
    log(counter.frame_count, counter.op_count)


@program
def a_traced_model_trains_the_same(log):
    net = Model()
    traced = torch.jit.trace(net, torch.randn(4, 8))
    log(plain(traced.graph), plain(traced.inlined_graph))
    fit(log, net, run=traced)


@program
def an_exported_model_trains_the_same(log):
    net = Model()
    program = torch.export.export(net, (torch.randn(4, 8),))
    log(str(program.graph))
    fit(log, net)
    log(program.module()(torch.ones(4, 8)))


@program
def the_compiler_sees_no_frame_of_introspect(log):
    """After a graph break it saw introspect's frames too, numbered the script's regions differently, and failed."""
    torch._dynamo.reset()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = []

    def backend(graph, inputs):
        names = [str(CompileContext.current_compile_id()), *(node.name for node in graph.graph.nodes)]
        compiled.append(names)
        return graph.forward

    @torch.compile(backend=backend)
    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        step(torch.ones(2, 8))
    log(compiled, model)


@program
def a_network_of_subnormal_numbers(log):
    net = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.mul_(1e-38)
    for _ in range(3):
        out = net(torch.full((2, 4), 0.01))
        out.sum().backward()
        log(net, out, subnormals_kept())
    assert 0 < out.abs().min() < torch.finfo(torch.float32).tiny


# --- models in the plainest loop


class Attention(nn.Module):
    """Outside the fast path `MultiheadAttention` passes `out_proj`'s weights on instead of calling it."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


class Tree(nn.Module):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, depth=2):
        return self.linear(x) if depth == 0 else self(x, depth - 1) + self(x.relu(), depth - 1)


class LossMadeAnew(nn.Module):
    """Makes a module in each forward, and reads rows from another that gives an iterator."""

    class Rows(nn.Module):
        def forward(self, x):
            return (row for row in x)

    def __init__(self):
        super().__init__()
        self.body, self.rows = mlp(), self.Rows()

    def forward(self, x):
        return nn.MSELoss(reduction="none")(torch.stack([*self.rows(self.body(x))]), torch.zeros(4, 1))


def channels_last():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    return net.to(memory_format=torch.channels_last)


def quantisation_aware():
    stubs = torch.ao.quantization
    net = nn.Sequential(stubs.QuantStub(), nn.Linear(8, 8), nn.ReLU(), stubs.DeQuantStub())
    net.qconfig = stubs.get_default_qat_qconfig("x86")
    return stubs.prepare_qat(net.train())


def parametrised():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.Linear(8, 8),
    )
    parametrize.register_parametrization(net[3], "weight", LowRank(8))
    net[3].parametrizations.weight.original.requires_grad_(requires_grad=False)
    return net


def lazy():
    net = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(1))
    with torch.no_grad():
        net(torch.randn(2, 3, 8))
    return net


def of_a_part_that_was_called_before():
    inner = mlp()
    inner(torch.randn(4, 8))
    return nn.Sequential(nn.Linear(8, 8), inner)


def sequence():
    return (torch.randn(2, 3, 8),)


def images():
    return (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),)


def packed():
    return torch.randn(3, 5, 4), torch.tensor([5, 2, 3])


FITTED = {
    "a plain loop": mlp,
    "in-place activations and residuals": InPlace,
    "views": Views,
    "a view that autograd has given up on": StaleView,
    "a backward pass inside a forward": Energy,
    "custom autograd functions": Custom,
    "outputs without gradient": Unused,
    "a transformer": (encoder, sequence),
    "attention that never calls its projection": (Attention, sequence),
    "channels last": (channels_last, images),
    "quantisation-aware training": quantisation_aware,
    "a part called before it is part of something": of_a_part_that_was_called_before,
    "a parametrised module": parametrised,
    "weight and spectral norm as they were": lambda: nn.Sequential(
        nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 8))
    ),
    "lazy modules": (lazy, sequence),
    "data parallel": lambda: nn.DataParallel(mlp()),
    "a module that calls itself": Tree,
    "modules made anew in each forward": LossMadeAnew,
    "a scripted model": lambda: torch.jit.script(Model()),
    **{f"packed sequences, {kind}": (lambda kind=kind: Recurrent(kind), packed) for kind in ("RNN", "LSTM", "GRU")},
}
"""What makes a model, and where it is no (4, 8) of float32 what makes a batch."""

for name, made in FITTED.items():
    PROGRAMS[name] = lambda log, made=made: (
        fit(log, made[0](), made[1]) if isinstance(made, tuple) else fit(log, made())
    )


# --- programs of which more is on record than what is asserted of all


def recording(*names):
    """Put a check of what is on record of these programs beside them."""

    def keep(check):
        RECORDED.update(dict.fromkeys(names, check))
        return check

    return keep


for reentrant in (True, False):

    @program_named(f"activation checkpointing, reentrant {reentrant}")
    def _(log, reentrant=reentrant):
        data = lambda: (torch.randn(4, 8, requires_grad=reentrant),)  # noqa: E731 - without gradients nothing is recomputed
        fit(log, Checkpointed(reentrant=reentrant), data, steps=3)


@recording("activation checkpointing, reentrant True", "activation checkpointing, reentrant False")
def _(seen):
    for number in (0, 1):
        name = f"Checkpointed.blocks.{number}.0"
        for phase in ("forward", "recompute"):
            assert seen.calls("output", name, step=1, phase=phase) == [0]
        for part in (name, f"Checkpointed.blocks.{number}.1"):
            first, again = (seen.of("output", part, step=1, phase=phase)[0] for phase in ("forward", "recompute"))
            assert first.summary.checksum == again.summary.checksum
    assert seen.calls("loss", "loss", step=1) == [0]


@program
def several_backward_calls_and_retain_graph(log):
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


@recording("several_backward_calls_and_retain_graph")
def _(seen):
    assert [(r.site.call, r.site.path) for r in seen.of("loss", step=1)] == [(0, ""), (1, ""), (2, "[0]"), (2, "[1]")]
    paths = [r.site.path for r in seen.of("grad_output", "Sequential.0", step=1)]
    assert paths == ["", "@1", "@2"]  # a site names one value: the second and third pass are told apart


@recording("outputs without gradient")
def _(seen):
    assert [r.site.path for r in seen.of("grad_output", "Unused.split", step=0)] == ["[0]"]
    assert [r.site.path for r in seen.of("output", "Unused.split", step=0)] == ["[0]", "[1]"]
    assert not seen.of("grad", "Unused.never.weight")
    assert seen.of("param", "Unused.never.weight")


@recording("packed sequences, RNN", "packed sequences, LSTM", "packed sequences, GRU")
def _(seen):
    paths = [r.site.path for r in seen.of("input", "Recurrent.rnn", step=1)]
    assert paths == ["[0].data", "[0].batch_sizes", "[0].sorted_indices", "[0].unsorted_indices"]
    assert seen.of("grad_output", "Recurrent.rnn", step=1)


@program
def the_fast_path_of_a_transformer_stays_on(log):
    """In evaluation torch runs each layer as one fused operation."""
    net = encoder(dropout=0.0).eval()
    entered = []
    net.layers[0].linear1.forward = entered.append
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 2] = True
    with torch.no_grad():
        for _ in range(2):
            log(net(torch.randn(2, 3, 8)), net(torch.randn(2, 3, 8), src_key_padding_mask=mask))
    assert not entered


@recording("the_fast_path_of_a_transformer_stays_on")
def _(seen):
    """What is inside was not seen, and that is said."""
    assert seen.calls("output", "TransformerEncoder.layers.1", step=0) == [0]
    unseen = seen.unseen()
    for number in (0, 1):
        for name in ("self_attn", "self_attn.out_proj", "linear1", "norm2", "dropout"):
            said = unseen[f"TransformerEncoder.layers.{number}.{name}"]
            assert said.startswith("inside TransformerEncoder.layers")
    assert "TransformerEncoder.layers.0" not in unseen


for name, (wrap, paths, pick) in OUTPUTS.items():

    @program_named(f"nested values by keyword, {name}")
    def _(log, wrap=wrap, pick=pick):
        net = Nested(wrap)
        run = lambda x: pick(net(x=x, scale=0.5, mapping={"shift": torch.ones(8)}))  # noqa: E731
        fit(log, net, run=run, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))

    @recording(f"nested values by keyword, {name}")
    def _(seen, paths=paths):
        assert [r.site.path for r in seen.of("output", "Nested.wrap", step=1)] == paths
        given = [r.site.path for r in seen.of("input", "Nested", step=1)]
        assert given == ["['x']", "['scale']", "['mapping']['shift']"]


@program
def tensors_of_every_sort_pass_through_a_module(log):
    """None may cost the script anything, warnings included."""
    look = nn.Identity()
    values = [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.randn(3, 4).t(),
        torch.randn(1).expand(5),
        torch.randn(3).to(torch.complex64).conj(),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.randn(4).bfloat16(),
        torch.arange(4).to(torch.uint16),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ]
    for value in values:
        assert look(value) is value
        log(value)
    for value in (torch.randn(3, 3).to_sparse(), torch.randn(3, 3).to_sparse_csr(), torch.empty(3, device="meta")):
        assert look(value) is value
    look(torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]))
    look(torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged))


@recording("tensors_of_every_sort_pass_through_a_module")
def _(seen):
    assert len(seen.of("output", "Identity")) == 15


for name, make in OPTIMIZERS.items():

    @program_named(f"the optimizer {name}")
    def _(log, make=make):
        net = mlp()
        fit(log, net, steps=3, optimizer=make(net.parameters()))


@recording(*(f"the optimizer {name}" for name in OPTIMIZERS))
def _(seen):
    assert list(seen.steps) == [0, 1, 2]
    weight = "Sequential.0.weight"
    written = [record.summary.checksum for record in seen.of("param", weight, phase="optimizer")]
    assert len(seen.of("grad", weight)) == len(set(written)) == len(written) == 3


for fused in (False, True):

    @program_named(f"a gradient scaler that skips a step, fused {fused}")
    def _(log, fused=fused):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(4, 8)).square().mean()
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            log(net, optimizer, scaler.state_dict())


@recording("a gradient scaler that skips a step, fused False", "a gradient scaler that skips a step, fused True")
def _(seen):
    assert list(seen.steps) == [0, 1, 2, 3]  # a skipped step is a step
    weight = [seen.of("param", "Sequential.0.weight", step=step, phase="optimizer")[0] for step in (0, 1)]
    assert weight[0].summary.checksum == weight[1].summary.checksum
    assert seen.of("output", "Sequential.0", step=0)[0].summary.layout.dtype == "float16"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(8, 8)
        self.loose = torch.ones(8)

    def forward(self, ids):
        return self.head(self.frozen(self.embed(ids)) * self.loose)


@program
def parameters_that_are_frozen_unused_added_and_tied(log):
    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(3):
        if step == 2:
            net.adapter = nn.Linear(8, 8)
            optimizer.add_param_group({"params": net.adapter.parameters(), "lr": 0.5})
            net.frozen.register_forward_hook(lambda module, args, out: net.adapter(out))
        log.loss(net(torch.randint(10, (4, 3))).logsumexp(-1).mean()).backward()
        optimizer.step()
        log(net, optimizer)


@recording("parameters_that_are_frozen_unused_added_and_tied")
def _(seen):
    assert len(seen.of("grad", "Tied.embed.weight")) == 3
    assert not seen.of("grad", "Tied.head.weight")
    assert not seen.of("grad", "Tied.frozen.weight")
    assert seen.of("grad", "Tied.adapter.weight", step=2)
    assert seen.of("param", "Tied.unused.weight", step=0, phase="start")


for backend in BACKENDS:

    @program_named(f"a model compiled by {backend}")
    def _(log, backend=backend):
        torch._dynamo.reset()
        net = Model()
        fit(log, net, run=torch.compile(net, backend=backend, fullgraph=True))


@recording(*(f"a model compiled by {backend}" for backend in BACKENDS))
def _(seen):
    assert seen.calls("output", "Model", step=1) == [0]
    assert "compiled" in seen.unseen()["Model.body.0"]
    assert not [name for name in seen.modules if "GraphModule" in name or "_orig_mod" in name]


# --- what is asserted of all


MORE_LOSSES = (
    "a backward pass inside a forward",
    "double_backward_and_gradient_penalty",
    *(name for name in PROGRAMS if name.startswith("a gradient scaler")),
)
"""Programs that differentiate more than their loss."""
TWICE = (
    *MORE_LOSSES[:2],
    "the_script_finds_its_own_hooks_only",
    "step_that_raises_and_goes_on",
    "several_backward_calls_and_retain_graph",
)
"""Programs with several backward passes, or optimizers, in one step: a site has several values."""
OPTIONS = {
    "operators": {"level": "op"},
    "tensors": {"save_tensors": ("*",)},
    "black box": {"keep_around": 2},
    "a few kinds": {"record": frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS})},
}
FEW = (
    "in-place activations and residuals", "a transformer", "channels last", "sparse_gradients_train_the_same",
    "script_watches_operations_and_functions",
)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_equals_bare(name, tmp_path):
    seen = assert_neutral(PROGRAMS[name], tmp_path / "run")
    assert seen.records
    if seen.trained.losses and name not in MORE_LOSSES:
        seen.assert_losses()
    assert seen.repeated() == [] or name in TWICE
    RECORDED.get(name, lambda _: None)(seen)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FEW)
def test_captured_equals_bare_with_each_option(name, options, tmp_path):
    assert assert_neutral(PROGRAMS[name], tmp_path / "run", **OPTIONS[options]).records
