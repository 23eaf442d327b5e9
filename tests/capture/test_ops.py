"""What `--level op` records: every operator, where it ran, what it was given; products and norms that are asked for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from logs import documents_of
from opcapture import captured, forward_of, inputs_of, named, operators, records
from summaries import checksum, taken
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import introspect_cli
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.tensors.summarizer import Summarizer


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
    assert {r.info.source.rpartition("/")[2].rpartition(":")[0] for r in of_two} == {Path(__file__).name}


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


def test_what_follows_a_backward_pass_of_which_nothing_is_recorded_belongs_to_the_optimizer(tmp_path):
    model = Two()

    def work():
        model(torch.ones(5, 4)).sum().backward()
        model.first.weight.grad.abs()

    found = places(operators(run_op(tmp_path / "run", work, ops=("abs",))))
    assert found == [("optimizer", "script", "aten.abs.default", 0)]


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


# --- everything that an FX interpreter sees of a model has a site at operator level, forward and backward


GPT = Path(__file__).resolve().parents[2] / "fixtures" / "train_gpt.py"


@pytest.fixture(scope="module")
def gpt():
    spec = importlib.util.spec_from_file_location("train_gpt", GPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_gpt"]


class Watching(fx.Interpreter):
    """Keeps the checksum of every floating point tensor that a node gives."""

    def __init__(self, graph):
        super().__init__(graph)
        self.seen = {}
        self.summarizer = Summarizer()

    def run_node(self, node):
        result = super().run_node(node)
        if node.op == "call_function":
            values = result if isinstance(result, (tuple, list)) else [result]
            for place, value in enumerate(values):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    slot = self.summarizer.add(value)
                    self.seen[f"{node.name}[{place}]"] = slot
        return result

    def checksums(self):
        table = taken(self.summarizer)
        self.summarizer.close()
        return {name: int(table.checksum[slot]) for name, slot in self.seen.items()}


def test_every_float_tensor_an_interpreter_sees_has_a_site_forward_and_backward(gpt, tmp_path, record_property, capsys):
    torch.manual_seed(0)
    model = gpt.GPT(20, width=16, heads=2, depth=2, context=8)
    tokens = torch.randint(20, (2, 8))
    parameters = dict(model.named_parameters())

    def step(values):
        _, loss = torch.func.functional_call(model, values, (tokens, tokens))
        return loss, torch.autograd.grad(loss, list(values.values()))

    leaves = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    graph = make_fx(step)(leaves)
    watching = Watching(graph)
    with torch.no_grad():
        watching.run(leaves)
    expected = watching.checksums()

    def work():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()

    path = captured(tmp_path / "run", work, level="op", views=True)
    recorded = {record.summary.checksum for record in operators(path)}
    missing = {name for name, checksum in expected.items() if checksum not in recorded}
    record_property("values an interpreter sees", len(expected))
    record_property("of these without a site", len(missing))
    with capsys.disabled():
        sys.stdout.write(f"\n{len(expected)} float values that an interpreter sees, {len(missing)} without a site\n")
    assert len(expected) > 150
    assert missing == set()


# --- with --level op, arguments that functions were called with are on record, and the answer names those that differ


class Told(nn.Module):
    def __init__(self, said):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self._told = said  # not plain: no attribute of the module tells of it

    def forward(self, x):
        x = functional.gelu(self.lin(x), approximate=self._told.get("approximate", "none"))
        x = functional.layer_norm(x, (4,), eps=self._told.get("eps", 1e-5))
        return functional.leaky_relu(x, self._told.get("slope", 0.01))


def train_told(path, said, late=None):
    torch.manual_seed(0)
    net = Told(dict(said))
    with introspect_cli.recording(net, path, level="op", source=False):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            net._told.update(late or {} if step else {})
            optimizer.zero_grad()
            net(torch.ones(2, 4) * torch.arange(4)).square().sum().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"approximate": "tanh"}, "cause: argument approximate none -> tanh."),
        ({"eps": 0.5}, "cause: argument eps 1e-05 -> 0.5."),
        ({"slope": 0.3}, "cause: argument negative_slope 0.01 -> 0.3."),
    ],
)
def test_the_argument_that_differs_is_named(tmp_path, said, words):
    sentence = introspect_cli.diff(train_told(tmp_path / "a", {}), train_told(tmp_path / "b", said)).sentence
    assert words in sentence
    assert "has different options or a different kernel" not in sentence


def test_arguments_are_noted_once(tmp_path):
    train_told(tmp_path / "a", {})
    found = documents_of(tmp_path / "a")["operators"]
    assert found["forward Told 0 aten.leaky_relu.default"] == {"negative_slope": 0.01}
    assert found["forward Told 0 aten.native_layer_norm.default"] == {"normalized_shape": "[4]", "eps": 1e-05}


# --- `--vjp` and `--jacobian-norm`: exact against torch's own, and without a trace in the script's training


KINDS = frozenset({Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.OP_OUTPUT, Kind.PARAM})


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)

    def forward(self, x):
        return {"out": self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Three()


INPUT = torch.linspace(-1, 1, 8).view(2, 4)


def training_of_three(model, steps=2):
    def work():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(INPUT)["out"].pow(2).sum().backward()
            optimizer.step()

    return work


def products_of(path, step=0):
    return {r.site.path: r.summary for r in records(path, step) if r.site.kind is Kind.OP_OUTPUT}


def test_a_product_is_the_gradient_of_one_value_at_the_other_by_module_or_path(model, tmp_path):
    hidden = model.a(INPUT)
    inside = torch.tanh(hidden)
    at = torch.autograd.grad(model.c(torch.tanh(model.b(inside))).sum(), (hidden, inside))
    pairs = ("c:a", "Three['out']:b/input[0]")
    found = products_of(captured(tmp_path / "run", training_of_three(model), vjp=pairs, record=KINDS))
    assert [found[f"vjp({pair})"].checksum for pair in pairs] == [checksum(expected) for expected in at]


def test_the_norm_is_within_its_error_and_exact_where_it_must_be(model, tmp_path):
    hidden = model.a(INPUT).detach()
    jacobian = torch.autograd.functional.jacobian(lambda h: model.c(torch.tanh(model.b(torch.tanh(h)))), hidden)
    path = captured(tmp_path / "run", training_of_three(model), jacobian_norm=("c:a",), probes=64, record=KINDS)
    seen = products_of(path)
    norm = float(seen["jacobian_norm(c:a)"].text)
    error = float(seen["jacobian_norm(c:a) standard error"].text)
    assert 0 < error < 0.2 * norm
    assert abs(norm - float(jacobian.norm())) < 4 * error


def test_values_that_do_not_depend_on_each_other_are_said_not_to(model, tmp_path):
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return {"out": self.a(x) + self.b(x)}

    path = captured(tmp_path / "run", training_of_three(Apart()), vjp=("b:a",), record=KINDS)
    assert products_of(path)["vjp(b:a)"].status is Status.NOT_OBSERVED


def test_products_can_be_asked_for_on_the_command_line(introspect, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))\n"
        "model(torch.ones(4, 2)).sum().backward()\n",
        encoding="utf-8",
    )
    said = introspect("capture", "-o", "run", "--vjp", "2:0", "--jacobian-norm", "2:0", "--probes", "4", "train.py")
    assert said.returncode == 0, said.stderr
    assert {"vjp(2:0)", "jacobian_norm(2:0)"} <= set(products_of(tmp_path / "run"))
    said = introspect("capture", "-o", "other", "--vjp", "nonsense", "train.py")
    assert said.returncode == 2
    assert "OUTPUT:INPUT" in said.stderr
