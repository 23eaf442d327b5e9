"""Workers, forks, threads: the training process is undisturbed, and the others write nothing."""

from __future__ import annotations

import threading

import pytest
import torch
from alike import assert_alike, both, script
from neutrality import Log, Seen, assert_neutral, mlp
from torch.utils.data import DataLoader, Dataset, IterableDataset

pytestmark = pytest.mark.usefixtures("quick_python")


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


def test_a_worker_that_raises_ends_the_script_as_before(tmp_path):
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise ValueError("broken sample")
            return super().__getitem__(index)

    def train(log):
        try:
            fit(log, DataLoader(Broken(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
        except ValueError as error:
            log(str(error).splitlines()[0])

    seen = assert_neutral(train, tmp_path / "run")
    assert list(seen.steps)[:2] == [0, 1]


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


def test_forked_child_trains_without_writing(tmp_path):
    """A child made by `os.fork` in the middle of training goes on bare; the parent's run stays its own.

    In a process of its own: no child can train where autograd has started threads before, as other tests have it do.
    """
    file = script(
        tmp_path / "train.py",
        """
        import os
        import torch
        from torch import nn

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step == 1:
                child = os.fork()
                if not child:
                    code = 1
                    try:
                        net(torch.randn(4, 8)).sum().backward()
                        optimizer.step()
                        code = 7 if nn.Module.__call__.__module__ == "torch.nn.modules.module" else 8
                    finally:
                        os._exit(code)
                _, status = os.waitpid(child, 0)
                print("child", os.waitstatus_to_exitcode(status))
            print([parameter.tolist() for parameter in net.parameters()])
        """,
    )
    bare, seen = both(file, tmp_path / "run")
    assert_alike(bare, seen)
    assert "child 7" in bare.stdout
    assert list(Seen(tmp_path / "run").steps) == [0, 1, 2]


def test_spawned_and_persistent_workers_yield_the_same(tmp_path):
    file = script(
        tmp_path / "train.py",
        """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.full((4,), float(index)) + torch.rand(4)

        def main():
            torch.manual_seed(0)
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            loader = DataLoader(
                Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
            )
            for _ in range(2):
                for batch in loader:
                    loss = net(batch).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    print(loss.item())
            print(net.weight.tolist(), torch.rand(1).item())

        if __name__ == "__main__":
            main()
        """,
    )
    bare, seen = both(file, tmp_path / "run")
    assert_alike(bare, seen)
    assert list(Seen(tmp_path / "run").steps)[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.sweep)])
def test_hogwild_trains_under_capture(tmp_path, method):
    """Children that train a shared model, one after the other so that the outcome is fixed."""
    file = script(
        tmp_path / "train.py",
        f"""
        import torch
        import torch.multiprocessing as mp
        from torch import nn

        def work(rank, net):
            torch.manual_seed(rank)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()

        if __name__ == "__main__":
            torch.manual_seed(0)
            torch.set_num_threads(1)
            net = nn.Linear(4, 1)
            net(torch.randn(2, 4)).sum().backward()
            net.zero_grad()
            net.share_memory()
            context = mp.get_context({method!r})
            for rank in range(2):
                child = context.Process(target=work, args=(rank, net))
                child.start()
                child.join()
                print(child.exitcode)
            print(net.weight.tolist())
        """,
    )
    bare, seen = both(file, tmp_path / "run")
    assert_alike(bare, seen)
    assert "0\n0\n" in bare.stdout
    assert Seen(tmp_path / "run").manifest["status"] == "complete"


@pytest.mark.sweep
def test_tensors_and_models_sent_to_other_processes(tmp_path):
    file = script(
        tmp_path / "train.py",
        """
        import torch
        import torch.multiprocessing as mp
        from torch import nn

        def work(queue, answers):
            net, x = queue.get()
            answers.put(net(x).sum().item())

        if __name__ == "__main__":
            torch.manual_seed(0)
            net = nn.Linear(4, 1)
            x = torch.randn(2, 4, requires_grad=True)
            net(x).sum().backward()
            context = mp.get_context("spawn")
            queue, answers = context.Queue(), context.Queue()
            child = context.Process(target=work, args=(queue, answers))
            child.start()
            queue.put((net, x))
            print(answers.get())
            child.join()
        """,
    )
    bare, seen = both(file, tmp_path / "run")
    assert_alike(bare, seen)
    assert bare.returncode == 0
