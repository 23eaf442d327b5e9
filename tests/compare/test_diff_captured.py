"""Alignment, offsets, exact distances, evaluation and resumed runs, of runs that were really captured."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys

import numpy as np
import pytest
import torch
from opcapture import captured, compared, records
from torch import nn

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Kind, Phase
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.run import Run, open_run


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up = nn.Linear(width, 8)
        self.down = nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, body, head="head"):
        super().__init__()
        self.body = body
        self.add_module(head, nn.Linear(6, 2))
        self.head_name = head

    def forward(self, x):
        return getattr(self, self.head_name)(self.body(x))


def blocks(count=3):
    return nn.Sequential(*(Block() for _ in range(count)))


def fit(model, wrap=lambda net: net, steps=2, each=lambda net, step: None, optimizer=torch.optim.SGD):
    """A training run of a model that is built under one seed, and wrapped or changed after that."""

    def work():
        torch.manual_seed(0)
        net = wrap(model())
        stepper = optimizer(net.parameters(), lr=0.05)
        source = torch.Generator().manual_seed(1)
        for step in range(steps):
            each(net, step)
            loss = net(torch.randn(4, 6, generator=source)).square().mean()
            stepper.zero_grad()
            loss.backward()
            stepper.step()

    return work


def net():
    return Net(blocks())


@pytest.fixture
def compare(tmp_path):
    """Capture two functions, and any others as noise, and compare."""

    def run(a, b, *noise, options=None, capture=(), only_b=()):
        paths = [
            captured(tmp_path / f"run{i}", work, **dict(capture), **(dict(only_b) if i == 1 else {}))
            for i, work in enumerate((a, b, *noise))
        ]
        with contextlib.ExitStack() as stack:
            one, two, *rest = (stack.enter_context(open_run(path)) for path in paths)
            return compare_runs(one, two, options or DiffOptions(), rest)

    return run


def test_a_comparison_that_is_over_holds_no_run(compare, tmp_path):
    result = compare(fit(net), fit(net))
    assert result.verdict is Verdict.SAME
    gc.collect()
    held = [each.path for each in gc.get_objects() if type(each) is Run]
    assert not [path for path in held if path.parent == tmp_path]


class TestAlignment:
    @pytest.mark.filterwarnings("ignore:FSDP is switching")
    @pytest.mark.parametrize("wrapper", ["compile", "checkpoint", "ddp", "fsdp"])
    def test_wrappers_are_no_difference(self, compare, wrapper, tmp_path):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        def wrap(model):
            if wrapper == "checkpoint":
                model.body[1] = checkpoint_wrapper(model.body[1])
                return model
            if wrapper == "compile":
                return torch.compile(model, backend="eager")
            if wrapper == "ddp":
                return nn.parallel.DistributedDataParallel(model)
            from torch.distributed.fsdp import FullyShardedDataParallel

            model.body[1] = FullyShardedDataParallel(model.body[1], device_id=torch.device("cpu"), use_orig_params=True)
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

        hook = sys.excepthook  # torch's process groups put in one of their own
        distributed = wrapper in {"ddp", "fsdp"}
        if distributed:
            store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            result = compare(fit(net), fit(net, wrap))
        finally:
            if distributed:
                torch.distributed.destroy_process_group()
                sys.excepthook = hook
        assert result.first is None
        assert result.counts.equal > 20
        assert result.verdict is Verdict.SAME
        assert ("that only one run could see" in result.sentence) == (wrapper == "compile")


def test_steps_that_one_schedule_left_out_are_no_difference(compare):
    """What b records at the start of a step that it takes up again is compared with a's step before."""
    adam = functools.partial(fit, net, steps=5, optimizer=torch.optim.Adam)
    every = {"steps": Schedule.parse("::2")}
    result = compare(adam(), adam(), only_b=every)
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.counts.steps_compared == 3
    assert any("Only run a has 2 steps from 1 to 3" in note for note in result.notes)

    def bend(model, step):
        if step == 4:
            with torch.no_grad():
                model.head.weight.mul_(2)

    result = compare(adam(), adam(each=bend), only_b=every)
    assert (result.first.step, result.first.site.fqn, result.first.site.kind.value) == (4, "Net.head.weight", "param")


class TestExact:
    def test_stored_tensors_give_the_true_distance_and_sketches_an_estimate(self, compare):
        weights = []

        def bend(model, step):
            if step == 1:
                before = model.body[1].up.weight.detach().clone()
                with torch.no_grad():
                    model.body[1].up.weight[2] *= 1.25
                weights.append((before, model.body[1].up.weight.detach().clone()))

        about = {"save_tensors": ("Net.body.1.up.weight", "Net.body.1.up")}
        kept = compare(fit(net), fit(net, each=bend), capture=about, options=DiffOptions(limit=None))
        plain = compare(fit(net), fit(net, each=bend), options=DiffOptions(limit=None))
        place = ("Net.body.1.up.weight", "start")

        def at(result):
            return next(d for d in result.divergences if (d.site.fqn, d.site.kind.value) == ("Net.body.1.up", "output"))

        assert (kept.first.site.fqn, kept.first.site.phase.value) == place
        assert at(kept).exact
        assert not at(plain).exact
        assert 0.5 < at(plain).rel_l2 / at(kept).rel_l2 < 2
        before, after = weights[0]
        diverged = (after - before).norm() / max(after.norm(), before.norm())
        bent = [d for d in kept.divergences if (d.site.kind.value, d.site.fqn) == ("param", "Net.body.1.up.weight")]
        assert bent[1].exact
        assert bent[1].rel_l2 == pytest.approx(float(diverged), rel=0.05)  # an optimizer step later


# --- training and evaluation have a verdict each: a fault in one of them is not laid at the other's door


def test_a_hand_trained_model_that_only_one_capture_saw_evaluated_is_the_same(tmp_path):
    """An evaluation that is recorded has the parameters looked at once more, which is no change that only it has."""

    def work():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        for step in range(6):
            net.train()
            net.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
                if step % 3 == 2:
                    net.eval()
                    net(torch.ones(2, 4))

    bare, seen = (captured(tmp_path / str(each), work, eval=each) for each in (False, True))
    assert [each.site for each in records(seen, 2) if each.site.phase is Phase.START and each.site.call]
    result = compared(bare, seen)
    assert result.verdict is Verdict.SAME, result.sentence


# --- runs that go on from weights which no `torch.load` reads, and steps that only make room for a checkpoint


def recorded(path, work, **options):
    """A capture as in a process of its own, where the generators begin in another state than training leaves them."""
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 - as above
    return captured(path, work, **options)


def test_a_step_that_makes_room_for_a_distributed_checkpoint_is_none_of_the_training(tmp_path):
    """`get_state_dict` steps a new optimizer with gradients and a learning rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def work(*, room):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(net.parameters())
        if room:
            state = get_state_dict(net, optimizer)[1]
            assert {float(state["state"][name]["step"]) for name in ("weight", "bias")} == {1}
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    run = recorded(tmp_path / "b", lambda: work(room=True), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS}))
    assert (
        compared(
            recorded(tmp_path / "a", lambda: work(room=False), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS})),
            run,
        ).counts.steps_b
        == 2
    )


RENAMED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {kept}
        self.{name} = nn.Embedding(4, 4)
        nn.init.normal_(torch.empty({size}))
        self.end = nn.Embedding(4, 4)

    def forward(self, x):
        return self.end(x) + self.{name}(x)


torch.manual_seed(0)
net = Net()
net(torch.tensor([1])).sum().backward()
torch.optim.SGD(net.parameters(), 0.1).step()
"""


def test_a_draw_of_a_renamed_parameter_that_leaves_the_same_state_is_none_that_differs(introspect, tmp_path):
    for run, size, name, kept in (("a", 4, "first", ""), ("b", 5, "table", "self.kept = 1\n")):
        (tmp_path / "train.py").write_text(RENAMED.format(size=size, name=name, kept=kept))
        assert introspect("capture", "-q", "-o", run, "train.py").returncode == 0
    answer = introspect("diff", "a", "b").stdout
    assert "of Net.first" not in answer
    assert "another number was drawn" in answer
