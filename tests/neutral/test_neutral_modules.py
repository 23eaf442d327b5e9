"""Kinds of modules and of what they take and give: each computes the same bits under capture."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle

import pytest
import torch
from neutrality import Seen, assert_neutral, mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize, rnn


def fit(log, net, data, *, steps=2, loss=lambda out: out.float().square().mean()):
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        log.loss(loss(net(*data()))).backward()
        optimizer.step()
        log(net, optimizer)


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


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_packed_sequences_train_the_same(tmp_path, kind):
    seen = assert_neutral(
        lambda log: fit(log, Recurrent(kind), lambda: (torch.randn(3, 5, 4), torch.tensor([5, 2, 3]))), tmp_path / "run"
    )
    seen.assert_losses()
    paths = [r.site.path for r in seen.of("input", "Recurrent.rnn", step=1)]
    assert paths == ["[0].data", "[0].batch_sizes", "[0].sorted_indices", "[0].unsorted_indices"]
    assert seen.of("grad_output", "Recurrent.rnn", step=1)


def test_cells_called_many_times_train_the_same(tmp_path):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(4, 4)

        def forward(self, x):
            state = None
            for row in x:
                state = self.cell(row, state)
            return state[0]

    seen = assert_neutral(lambda log: fit(log, Cells(), lambda: (torch.randn(5, 2, 4),)), tmp_path / "run")
    assert [r.site.call for r in seen.of("output", "Cells.cell", step=1) if r.site.path == "[0]"] == [0, 1, 2, 3, 4]
    assert seen.repeated() == []


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2)


def test_a_transformer_trains_the_same(tmp_path):
    seen = assert_neutral(lambda log: fit(log, encoder(), lambda: (torch.randn(2, 3, 8),)), tmp_path / "run")
    assert seen.calls("output", "TransformerEncoder.layers.1.linear1", step=1) == [0]
    assert seen.unseen() == {}


def test_transformer_fast_path_stays_on(tmp_path):
    """In eval mode torch runs each layer as one fused operation; what is inside was not seen, and that is said."""

    def evaluate(log):
        net = encoder(dropout=0.0).eval()
        entered = []
        net.layers[0].linear1.forward = entered.append
        mask = torch.zeros(2, 3, dtype=torch.bool)
        mask[1, 2] = True
        with torch.no_grad():
            for _ in range(2):
                log(net(torch.randn(2, 3, 8)), net(torch.randn(2, 3, 8), src_key_padding_mask=mask))
        log(len(entered))
        assert not entered

    seen = assert_neutral(evaluate, tmp_path / "run")
    assert seen.calls("output", "TransformerEncoder.layers.1", step=0) == [0]
    unseen = seen.unseen()
    for number in (0, 1):
        for name in ("self_attn", "self_attn.out_proj", "linear1", "norm2", "dropout"):
            assert unseen[f"TransformerEncoder.layers.{number}.{name}"].startswith(
                "inside fused TransformerEncoder.layers"
            )
    assert "TransformerEncoder.layers.0" not in unseen


def test_attention_that_never_calls_its_projection(tmp_path):
    """Outside the fast path `MultiheadAttention` passes `out_proj`'s weights on instead of calling it."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=False)[0]

    seen = assert_neutral(lambda log: fit(log, Attention(), lambda: (torch.randn(2, 3, 8),)), tmp_path / "run")
    assert [r.site.path for r in seen.of("output", "Attention.attn", step=1)] == ["[0]"]
    assert seen.of("grad", "Attention.attn.out_proj.weight", step=1)


def test_channels_last_trains_the_same(tmp_path):
    def train(log):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
        net = net.to(memory_format=torch.channels_last)
        fit(log, net, lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),))

    seen = assert_neutral(train, tmp_path / "run")
    assert seen.of("output", "Sequential.0", step=0)[0].summary.layout.strides == "channels_last"
    assert seen.of("buffer", "Sequential.1.running_mean", step=1, phase="optimizer")


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_computes_the_same(tmp_path):
    def evaluate(log):
        net = mlp().eval()
        dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(net), {nn.Linear}, dtype=torch.qint8)
        x = torch.randn(4, 8)
        with torch.no_grad():
            log(dynamic(x), torch.quantize_per_tensor(x, 0.1, 3, torch.qint8))
            log(nn.Identity()(torch.quantize_per_channel(x, torch.rand(8), torch.zeros(8), 1, torch.quint8)))

    assert assert_neutral(evaluate, tmp_path / "run").of("output", "Sequential")


@pytest.mark.filterwarnings("ignore")
def test_quantisation_aware_training_is_the_same(tmp_path):
    def train(log):
        net = nn.Sequential(
            torch.ao.quantization.QuantStub(), nn.Linear(8, 8), nn.ReLU(), torch.ao.quantization.DeQuantStub()
        )
        net.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        net = torch.ao.quantization.prepare_qat(net.train())
        fit(log, net, lambda: (torch.randn(4, 8),))

    assert assert_neutral(train, tmp_path / "run").of("loss")


class LowRank(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, 2) * 0.1)
        self.b = nn.Parameter(torch.zeros(2, width))

    def forward(self, weight):
        return weight + self.a @ self.b


def test_part_called_before_it_is_part_of_something(tmp_path):
    def train(log):
        inner = mlp()
        inner(torch.randn(4, 8))
        net = nn.Sequential(nn.Linear(8, 8), inner)
        fit(log, net, lambda: (torch.randn(4, 8),))
        holder = nn.Sequential(net)  # from the first step on, names stay
        holder(torch.randn(4, 8))
        fit(log, net, lambda: (torch.randn(4, 8),))

    seen = assert_neutral(train, tmp_path / "run")
    assert seen.calls("output", "Sequential.1.0", step=1) == [0]
    assert seen.of("grad", "Sequential.1.0.weight", step=3)
    assert not any(name.startswith("Sequential#2.") for name in seen.modules)


def test_a_parametrised_module_trains_the_same(tmp_path):
    def train(log):
        net = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 8)),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            parametrizations.orthogonal(nn.Linear(8, 8)),
            nn.Linear(8, 8),
        )
        parametrize.register_parametrization(net[3], "weight", LowRank(8))
        net[3].parametrizations.weight.original.requires_grad_(requires_grad=False)
        fit(log, net, lambda: (torch.randn(4, 8),))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps) == [0, 1]  # setting a parametrization up calls it, and is no step
    assert seen.of("grad", "Sequential.3.parametrizations.weight.0.b")
    assert seen.of("param", "Sequential.1.parametrizations.weight.original", step=1)
    assert seen.of("buffer", "Sequential.1.parametrizations.weight.0._u")
    assert not any(name.startswith("ParametrizationList") for name in seen.modules)


@pytest.mark.filterwarnings("ignore")
def test_old_weight_and_spectral_norm(tmp_path):
    def train(log):
        net = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 8)))
        fit(log, net, lambda: (torch.randn(4, 8),))

    assert_neutral(train, tmp_path / "run").assert_losses()


def test_lazy_modules_train_the_same(tmp_path):
    def train(log):
        net = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(1))
        with torch.no_grad():
            net(torch.randn(2, 3, 8))
        fit(log, net, lambda: (torch.randn(2, 3, 8),))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.of("param", "Sequential.3.weight", step=1)


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


def test_modules_with_their_own_call(tmp_path):
    def train(log):
        net = nn.Sequential(WithCall(), NeverCalls(8, 1))
        fit(log, net, lambda: (torch.randn(4, 8),))
        direct = mlp()
        log(direct.forward(torch.randn(4, 8)))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "Sequential.0.seen", step=0) == [0]
    assert not seen.of("output", "Sequential.0.direct")  # its class has torch's `__call__`, and nothing calls that
    assert seen.calls("output", "Sequential.1", step=0) == [0]
    assert seen.of("grad", "Sequential.0.direct.weight", step=1)


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - what scripts return


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list | None = None
    note: str = "text"


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
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_nested_values_by_keyword_train_the_same(tmp_path, name):
    wrap, paths, pick = OUTPUTS[name]

    def train(log):
        net = Nested(wrap)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            out = net(x=torch.randn(4, 8), scale=0.5, mapping={"shift": torch.ones(8)})
            log.loss(pick(out).square().mean()).backward()
            optimizer.step()
            log(net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert [r.site.path for r in seen.of("output", "Nested.wrap", step=1)] == paths
    given = [r.site.path for r in seen.of("input", "Nested", step=1)]
    assert given == ["['x']", "['scale']", "['mapping']['shift']"]


def test_output_that_is_an_iterator_is_left_alone(tmp_path):
    class Rows(nn.Module):
        def forward(self, x):
            return (row for row in x)

    def evaluate(log):
        log(list(Rows()(torch.randn(3, 2))))

    assert_neutral(evaluate, tmp_path / "run")


def test_copies_of_a_watched_model(tmp_path):
    def train(log):
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

    seen = assert_neutral(train, tmp_path / "run")
    assert {"Sequential", "Sequential#2", "Sequential#3", "Sequential#4"} <= set(seen.modules)


def test_data_parallel_trains_the_same(tmp_path):
    def train(log):
        fit(log, nn.DataParallel(mlp()), lambda: (torch.randn(4, 8),))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("output", "Sequential.0", step=0) == [0]


def test_replicas_in_threads_train_the_same(tmp_path):
    """What `DataParallel` does with several devices, on one."""
    from torch.nn.parallel.parallel_apply import get_a_var  # noqa: F401 - there in every torch that has replicas

    def evaluate(log):
        import threading

        net = mlp().eval()
        replica = net._replicate_for_data_parallel()
        out = {}

        def run(number, model, x):
            with torch.no_grad():
                out[number] = model(x)

        x = torch.randn(4, 8)
        threads = [threading.Thread(target=run, args=(n, m, x)) for n, m in enumerate((net, replica))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log(out[0], out[1])

    assert_neutral(evaluate, tmp_path / "run")


def test_module_made_anew_each_step(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            loss = nn.MSELoss()(net(torch.randn(4, 8)), torch.zeros(4, 1))
            log.loss(loss).backward()
            optimizer.step()
            log(net)

    seen = assert_neutral(train, tmp_path / "run")
    assert {name for name in seen.modules if name.startswith("MSELoss")} == {"MSELoss"}
    assert all(seen.calls("output", "MSELoss", step=step) == [0] for step in range(4))


def test_unusual_tensors_change_nothing(tmp_path):
    """Values of every sort pass through a module; none may cost the script anything, warnings included."""

    def evaluate(log):
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

    seen = assert_neutral(evaluate, tmp_path / "run")
    assert isinstance(seen, Seen)
    assert len(seen.of("output", "Identity")) == 15


def test_what_the_script_overrides_is_not_called(tmp_path):
    """`modules()` and its like may be the script's own: they may count, be slow, or leave things out."""

    def counted(log):
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

    assert_neutral(counted, tmp_path / "run")
