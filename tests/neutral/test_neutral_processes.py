"""Loaders' workers and threads: the training is undisturbed, and what it takes from them is on record."""

from __future__ import annotations

import threading

import pytest
import torch
from neutrality import Log, assert_neutral, mlp, watched
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Numbers(Dataset):
    """Draws from torch's generator in the worker, as augmentations do."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.full((8,), float(index)) + torch.rand(8), "index": index}


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.full((8,), float(number)) for number in range(4))


def fit(log, loader, *, epochs=2, pick=lambda batch: batch["x"]):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            log.loss(net(pick(batch)).square().mean()).backward()
            optimizer.step()
            log(net, optimizer, batch)


LOADERS = {
    "main process": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "fork, persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "own generator": {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": 1},
}


@pytest.mark.parametrize("name", LOADERS)
def test_loader_workers_yield_the_same(tmp_path, name):
    def train(log):
        generator = torch.Generator().manual_seed(3) if name == "own generator" else None
        fit(log, DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator, **LOADERS[name]))

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps)[:4] == [0, 1, 2, 3]
    for step in range(4):
        assert [r.site.path for r in seen.of("batch", "DataLoader", step=step)] == ["['x']", "['index']"]
    assert {r.site.fqn for r in seen.of("batch")} == {"DataLoader"}


def test_iterable_dataset_and_two_loaders_at_once(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for one, other in zip(DataLoader(Stream(), batch_size=2), DataLoader(Stream(), batch_size=2), strict=True):
            optimizer.zero_grad()
            log.loss((net(one) + net(other)).square().mean()).backward()
            optimizer.step()
            log(net)

    seen = assert_neutral(train, tmp_path / "run")
    assert {r.site.fqn for r in seen.of("batch", step=1)} == {"DataLoader", "DataLoader#2"}


def test_two_models_in_two_threads(tmp_path):
    """The step clock is one for the process, so records of two threads mix; the trainings do not."""

    def one(seed, log):
        generator = torch.Generator().manual_seed(seed)
        net = mlp()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            loss = net(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            log._add("", net)

    def train(log):
        logs = [Log(), Log()]
        threads = [threading.Thread(target=one, args=(seed, logs[seed])) for seed in (0, 1)]
        torch.manual_seed(0)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.manual_seed(0)
        for lines in logs:
            log.entries += lines.entries

    seen = assert_neutral(train, tmp_path / "run")
    assert 30 <= len(seen.steps) <= 60  # a step in which nothing happened is none
    assert {"Sequential", "Sequential#2"} <= set(seen.modules)


def test_gradients_of_another_threads_optimizer_are_not_read(tmp_path):
    """A backward pass there may be writing them."""
    readers = set()

    class Watched(torch.nn.Parameter):
        @property
        def grad(self):
            readers.add(threading.get_ident())
            return torch.Tensor.grad.__get__(self)

        @grad.setter
        def grad(self, value):
            torch.Tensor.grad.__set__(self, value)

    def train(net, steps):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(steps):
            net(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    other, kept = mlp(), []
    for layer in other:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, Watched(parameter.detach()))
    with watched(tmp_path / "run"):
        thread = threading.Thread(target=lambda: kept.append(train(other, 3)))
        thread.start()
        thread.join()
        assert readers
        readers.clear()
        train(mlp(), 5)
    assert threading.get_ident() not in readers


def test_a_backward_pass_in_another_thread_trains_the_same(tmp_path):
    def train(log):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            loss = log.loss(net(torch.randn(4, 8)).square().mean())
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            optimizer.step()
            log(net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert seen.calls("grad_output", "Sequential.0", step=1) == [0]
