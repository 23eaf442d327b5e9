"""What `nn.Sequential` hands on from one module to the next is read once, and only where nothing came in between."""

import pytest
import torch
from neutrality import watched
from torch import nn

from introspect_cli.records import Kind
from introspect_cli.store.read.run import open_run
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.summarizer import Summarizer

STEPS = 3
FORWARD = nn.Sequential.forward
LARGE = 128


def linear():
    return nn.Linear(LARGE, LARGE)


def read_all(self, x):
    """Torch's own forward, which cannot be known to be it: nothing is handed on."""
    return FORWARD(self, x)


class Doubles(nn.Module):
    """Writes to what it is given past autograd's count, in a call that the capture never sees."""

    def __call__(self, x):
        x.data.mul_(2)
        return x


class DoublesAfterwards(nn.Tanh):
    def __call__(self, x):
        result = super().__call__(x)
        result.data.mul_(2)
        return result


class DoublesBefore(nn.Tanh):
    def __call__(self, x):
        x.data.mul_(2)
        return super().__call__(x)


def doubling(self, x):
    for module in self:
        x = module(x)
        x.data.mul_(2)
    return x


def own_forward():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model.forward = doubling.__get__(model)
    return model


def doubling_hook(_module, _args, result):
    result.data.mul_(2)


def with_hook():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[1].register_forward_hook(doubling_hook)
    return model


def shared():
    tanh = nn.Tanh()
    return nn.Sequential(linear(), tanh, linear(), tanh, Doubles(), linear())


MODELS = {
    "plain": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.ReLU(inplace=True), linear()),
    "unseen call": lambda: nn.Sequential(linear(), Doubles(), linear()),
    "call of a class's own, after": lambda: nn.Sequential(linear(), DoublesAfterwards(), linear()),
    "call of a class's own, before": lambda: nn.Sequential(linear(), DoublesBefore(), linear()),
    "forward of its own": own_forward,
    "hook": with_hook,
    "one module twice": shared,
}


def captured(make, path, batch=256):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(batch, LARGE)
    with watched(path):
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with open_run(path) as run:
        records = run.rank(0).records(STEPS - 1)
        return {(r.site.kind, r.site.fqn, r.site.call): r.summary.checksum for r in records}


@pytest.mark.parametrize("batch", [3, 256], ids=["small", "large"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_recorded_is_what_was_there(tmp_path, monkeypatch, name, batch):
    seen = captured(MODELS[name], tmp_path / "seen", batch)
    monkeypatch.setattr(nn.Sequential, "forward", read_all)
    assert seen == captured(MODELS[name], tmp_path / "read", batch)
    assert len({checksum for (kind, _, _), checksum in seen.items() if kind is Kind.OUTPUT}) >= 2


@pytest.mark.skipif(KERNELS is None, reason="the compiled kernels hand on")
@pytest.mark.skipif(type(nn.Sequential()._modules) is not dict, reason="torch holds modules in an ordered dictionary")
def test_what_a_sequence_hands_on_is_read_once(tmp_path, monkeypatch):
    counts = {}
    end_step = Summarizer.end_step

    def counted(self, *given):
        counts["read"] += len(self._layout_of)  # what is handed on has no summary of its own
        return end_step(self, *given)

    monkeypatch.setattr(Summarizer, "end_step", counted)
    for name in ("handed on", "read"):
        counts["read"] = 0
        captured(MODELS["plain"], tmp_path / name)
        counts[name] = counts["read"]
        monkeypatch.setattr(nn.Sequential, "forward", read_all)
    assert counts["read"] - counts["handed on"] == 4 * (STEPS - 1)  # the first learns what there is
