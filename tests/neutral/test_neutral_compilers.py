"""Code that torch rewrites before it runs: compiled, scripted, traced, exported, symbolically traced."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys

import pytest
import torch
from neutrality import assert_neutral, mlp
from torch import nn
from torch._guards import CompileContext

from introspect_cli.capture.naming.names import NameFilter, Names

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    limit = sys.getrecursionlimit()  # the compiler raises it for good
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # or it starts a thread of its own
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    sys.setrecursionlimit(limit)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.body(x))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return self.linear(x).relu()


def plain(graph):
    """A graph's text without the numbers by which torch tells two classes of one name apart."""
    return re.sub(r"___torch_mangle_\d+\.|#.*", "", str(graph))


def fit(log, net, run=None, *, steps=3):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        log.loss((net if run is None else run)(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        log(net, optimizer)


BACKENDS = ["eager", "aot_eager"] + (["inductor"] if shutil.which("g++") else [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_trains_the_same(tmp_path, backend):
    def train(log):
        torch._dynamo.reset()
        net = Model()
        fit(log, net, torch.compile(net, backend=backend, fullgraph=True))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "Model", step=1) == [0]
    assert seen.repeated() == []
    assert "compiled" in seen.unseen()["Model.body.0"]
    assert not [name for name in seen.modules if "GraphModule" in name or "_orig_mod" in name]


def test_a_graph_of_a_models_modules_takes_none_of_their_names():
    """With torch 2.4 the compiler's own graphs hold them."""
    net = Model()
    graph = torch.fx.GraphModule(net, torch.fx.Tracer().trace(net))
    names = Names(NameFilter((), (), None))
    names.registered(net, "last", net.last)
    names.registered(graph, "last", graph.last)
    assert graph.last is net.last
    assert names.state(net.last, None).fqn == "Model.last"


def test_a_model_that_is_compiled_in_part_trains_the_same(tmp_path):
    def train(log):
        torch._dynamo.reset()
        net = Model()
        net.body = Body()
        net.body.compile(backend="aot_eager", fullgraph=True)
        fit(log, net)

    seen = assert_neutral(train, tmp_path / "run")
    assert seen.calls("output", "Model.last", step=1) == [0]
    assert seen.calls("output", "Model.body", step=1) == [0]
    assert "compiled" in seen.unseen()["Model.body.linear"]


def test_compiled_function_around_backward_and_optimizer(tmp_path):
    def train(log):
        torch._dynamo.reset()
        net = Model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @torch.compile(backend="eager")
        def forward(x):
            out = net(x)
            torch._dynamo.graph_break()
            return out.square().mean()

        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            log.loss(forward(torch.randn(4, 8))).backward()
            step()
            log(net, optimizer)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1, 2]
    assert "GraphModule" not in seen.modules


def test_compiler_is_not_slowed_into_more_graphs(tmp_path):
    def train(log):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        net = Model()
        fit(log, net, torch.compile(net, backend=counter))
        log(counter.frame_count, counter.op_count)

    import torch._dynamo.testing

    assert assert_neutral(train, tmp_path / "run").records


def test_a_scripted_model_trains_the_same(tmp_path):
    def train(log):
        net = torch.jit.script(Model())
        fit(log, net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.of("output", step=1)
    assert "scripted" in seen.unseen()["Model.body"]


def test_a_model_that_is_scripted_in_part_trains_the_same(tmp_path):
    def train(log):
        net = Model()
        net.body = torch.jit.script(net.body)
        fit(log, net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "Model.body", step=1) == [0]
    assert seen.calls("output", "Model.last", step=1) == [0]


def test_a_traced_model_trains_the_same(tmp_path):
    def train(log):
        net = Model()
        traced = torch.jit.trace(net, torch.randn(4, 8))
        log(plain(traced.graph), plain(traced.inlined_graph))
        fit(log, net, traced)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()


def test_a_symbolically_traced_model_trains_the_same(tmp_path):
    def train(log):
        net = torch.fx.symbolic_trace(Model())
        log(str(net.graph), net.code)
        fit(log, net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert any(name.endswith("body.0") for name in seen.modules)


def test_an_exported_model_trains_the_same(tmp_path):
    def train(log):
        net = Model()
        program = torch.export.export(net, (torch.randn(4, 8),))
        log(str(program.graph))
        fit(log, net)
        log(program.module()(torch.ones(4, 8)))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "Model.body.0", step=1) == [0]


def test_exported_by_onnx_style_tracing_of_fake_tensors(tmp_path):
    from torch.fx.experimental.proxy_tensor import make_fx

    def train(log):
        net = Model()
        graph = make_fx(net, tracing_mode="real")(torch.randn(4, 8))
        log(graph.code)
        fit(log, net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()


def test_a_module_that_calls_itself_trains_the_same(tmp_path):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, depth=2):
            return self.linear(x) if depth == 0 else self(x, depth - 1) + self(x.relu(), depth - 1)

    seen = assert_neutral(lambda log: fit(log, Tree()), tmp_path / "run")
    assert sorted(seen.calls("output", "Tree", step=1)) == list(range(7))
    assert seen.calls("output", "Tree.linear", step=1) == [0, 1, 2, 3]


def test_meta_and_fake_models_compute_the_same(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def train(log):
        with FakeTensorMode():
            shape = tuple(Model()(torch.randn(4, 8)).shape)
        with torch.device("meta"):
            log(shape, tuple(Model()(torch.randn(4, 8)).shape))
        fit(log, Model())

    assert assert_neutral(train, tmp_path / "run").of("loss")


def test_the_compiler_sees_no_frame_of_introspect(tmp_path):
    """After a graph break it saw introspect's frames too, numbered the script's regions differently, and failed."""

    def broken(log):
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

    assert_neutral(broken, tmp_path / "run")
