"""Everything that an FX interpreter sees of a model has a site at operator level, forward and backward."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from opcapture import captured, operators
from summaries import taken
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from introspect_cli.tensors.summarizer import Summarizer

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
