"""What a comparison says of state that modules keep, sparse gradients, penalties, and models without gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import introspect_cli

LEAN = "param,grad,loss"


class Memory(nn.Module):
    """Reads what it kept of its calls before, and keeps some more."""

    def __init__(self, gain):
        super().__init__()
        self.read, self.kept = nn.Linear(3, 3), torch.zeros(3)
        self.update = lambda out: self.kept + gain * out.detach().mean(0)

    def forward(self, x):
        out = torch.tanh(self.read(x)) + self.kept
        self.kept = self.update(out)
        return out


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


class Cell(nn.Module):
    def __init__(self, gain=1.0, scale=1.0):
        super().__init__()
        self.memory, self.out, self.state = Memory(gain), Scaled(scale), torch.zeros(2, 3)

    def forward(self, x):
        self.state = self.out(self.memory(x + self.state))
        return self.state


def sequence(path, net, *, calls=2, steps=1):
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            net.state, net.memory.kept = torch.zeros(2, 3), torch.zeros(3)
            for _ in range(calls):
                out = net(torch.ones(2, 3))
            out.square().mean().backward()
            optimizer.step()
    return path


def built(make, **options):
    torch.manual_seed(0)
    return make(**options)


def test_what_a_module_keeps_from_call_to_call_may_be_the_cause(tmp_path):
    a, b = (sequence(tmp_path / name, built(Cell, gain=gain)) for name, gain in (("a", 1.0), ("b", 2.0)))
    sentence = introspect_cli.diff(a, b).sentence
    assert "the output of Cell.memory (Memory) (call 1) differs" in sentence
    assert "after Cell.memory.read" in sentence
    assert sentence.endswith("or what it keeps from earlier calls.")


def test_later_calls_that_are_given_what_an_earlier_one_left_are_no_further_origins(tmp_path):
    a, b = (sequence(tmp_path / name, built(Cell, scale=scale)) for name, scale in (("a", 1.0), ("b", 2.0)))
    result = introspect_cli.diff(a, b)
    assert "(call 1)" not in result.sentence
    assert "(call 1)" not in str([origin.sentence for origin in result.result.origins])


class Embedded(nn.Module):
    def __init__(self, *, sparse=True):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 1)

    def forward(self, ids):
        return self.head(self.table(ids)).mean()


def embedded(path, *, sparse=True, zero=True, record="default", steps=3):
    net = built(Embedded, sparse=sparse)
    ids = torch.randint(0, 9, (steps, 8), generator=torch.Generator().manual_seed(1))
    with introspect_cli.recording(net, path, record=record):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in ids:
            if zero:
                optimizer.zero_grad()
            net(batch).backward()
            optimizer.step()
    return path


def test_a_sparse_gradient_that_nobody_cleared_is_not_laid_to_clipping_alone(tmp_path):
    sentence = introspect_cli.diff(embedded(tmp_path / "a"), embedded(tmp_path / "b", zero=False)).sentence
    assert "zero_grad" in sentence


@pytest.mark.parametrize("record", ["default", LEAN])
def test_a_dense_gradient_is_another_form_of_a_sparse_one_where_the_optimizer_makes_the_same_of_it(tmp_path, record):
    a, b = (embedded(tmp_path / name, sparse=sparse, record=record) for name, sparse in (("a", True), ("b", False)))
    exact, close = introspect_cli.diff(a, b), introspect_cli.diff(a, b, rtol=1e-5)
    assert close.verdict == "same"
    assert any("9x3 float32 (sparse) in a, 9x3 float32 in b" in note for note in close.result.notes)
    assert record == LEAN or "it is sparse in a and dense in b" in exact.sentence


def penalised(path, *, detached=False):
    net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in net.parameters())
            (net(torch.ones(2, 3)).mean() + (penalty.detach() if detached else penalty)).backward()
            optimizer.step()
    return path


def test_a_gradient_that_a_penalty_gives_is_not_laid_to_clipping_alone(tmp_path):
    sentence = introspect_cli.diff(penalised(tmp_path / "a"), penalised(tmp_path / "b", detached=True)).sentence
    assert sentence.endswith("or a penalty on the parameters in the loss.")


def stepped(path, make, *, frozen=False, record="default", anew=False):
    net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    net[0].weight.requires_grad_(not frozen)
    with introspect_cli.recording(net, path, record=record):
        optimizer = make(net.parameters())
        for step in range(3):
            if anew and step == 2:
                optimizer = make(net.parameters())
            optimizer.zero_grad()
            net(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
    return path


class Counting(torch.optim.Adagrad):
    """As Adagrad, with a state of another kind from the start."""

    def __init__(self, params):
        super().__init__(params)
        for state in self.state.values():
            state["sum"] += 1.0


def test_an_optimizer_of_another_class_is_named_by_the_state_that_it_keeps_from_the_start(tmp_path):
    adagrad, adam, other = (
        stepped(tmp_path / make.__name__, make) for make in (torch.optim.Adagrad, torch.optim.Adam, Counting)
    )
    assert "the optimizer is Adagrad in a and Adam in b." in introspect_cli.diff(adagrad, adam).sentence
    sentence = introspect_cli.diff(adagrad, other).sentence
    assert "differs when the first step begins" in sentence
    assert "the optimizer is Adagrad in a and Counting in b." in sentence


def test_a_first_layer_that_is_frozen_is_said_to_be_frozen_perhaps(tmp_path):
    runs = (stepped(tmp_path / name, torch.optim.SGD, frozen=name == "b") for name in "ab")
    assert "in b it is frozen (requires_grad), was cleared" in introspect_cli.diff(*runs).sentence


def test_a_lost_state_is_among_the_causes_where_lean_records_lack_it(tmp_path):
    runs = (stepped(tmp_path / name, torch.optim.Adam, record=LEAN, anew=name == "b") for name in "ab")
    sentence = introspect_cli.diff(*runs).sentence
    assert "left: the optimizer, its state or hyper-parameters (not recorded in this step)." in sentence


def accumulated(path, *, twice=False):
    """Four batches, two a step, and one more that no step takes; the first layer runs once more, to no effect."""
    net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    batches = torch.arange(30.0).view(5, 2, 3) / 30
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number, x in enumerate(batches):
            if twice:
                net[0](x + 1)
            net(x).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return path


def test_equal_results_decide_though_an_accumulation_is_left_over_at_the_end(tmp_path):
    result = introspect_cli.diff(accumulated(tmp_path / "a"), accumulated(tmp_path / "b", twice=True))
    assert result.verdict == "same"
    counts = result.result.counts
    assert counts.records == counts.equal > 0
    assert [change.change for change in result.result.structure] == ["calls"]


def sampled(path, *, gradients=True, more=0):
    """An agent that draws its actions from what its model gives, then learns; `more` passes are for statistics."""
    net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.ones(1, 3)
            for _ in range(3):
                with torch.set_grad_enabled(gradients):
                    x = x + torch.rand_like(x) * net(x).detach()
            optimizer.zero_grad()
            net(x).square().mean().backward()
            for _ in range(more):
                torch.autograd.grad(net(x)[0, 0], net.parameters())
            optimizer.step()
            x = x + 1
    return path


def test_draws_before_a_step_that_begins_later_are_not_called_one_runs_alone(tmp_path):
    result = introspect_cli.diff(sampled(tmp_path / "a"), sampled(tmp_path / "b", gradients=False), strict=True)
    assert "the random state of torch differs already when the first captured step begins" in result.sentence
    assert "models ran without gradients before the step of b begins" in result.sentence


def test_passes_that_have_no_loss_each_are_not_called_accumulated_batches(tmp_path):
    result = introspect_cli.diff(sampled(tmp_path / "a", more=2), sampled(tmp_path / "b"))
    assert "accumulated" not in result.sentence


class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(3, 3)

    def forward(self, x):
        return self.read(x), 1


class Write(nn.Module):
    def __init__(self):
        super().__init__()
        self.write = nn.Linear(3, 5)

    def forward(self, x):
        return self.write(x)


class Heads(nn.Module):
    def __init__(self, *classes):
        super().__init__()
        self.heads = nn.ModuleList(cls() for cls in classes)

    def forward(self, x):
        return sum((head(x)[0] if isinstance(head, Read) else head(x)).mean() for head in self.heads)


def test_a_module_of_another_class_is_told_as_such_and_not_as_a_model_that_did_not_run(tmp_path):
    def run(path, *classes):
        net = built(lambda: Heads(*classes))
        with introspect_cli.recording(net, path):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(2, 3)).backward()
            optimizer.step()
        return path

    sentence = introspect_cli.diff(run(tmp_path / "a", Read, Write), run(tmp_path / "b", Write, Read)).sentence
    assert "is Read in a and Write in b" in sentence
    assert "has not run" not in sentence


def test_of_many_arguments_those_are_shown_that_the_other_run_does_not_have(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, given):
            return sum(self.weight.mul(x).sum() for x in given)

    def run(path, extra):
        net = built(Sum)
        with introspect_cli.recording(net, path):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net([torch.ones(2)] * (6 + extra)).backward()
            optimizer.step()
        return path

    sentence = introspect_cli.diff(run(tmp_path / "a", 2), run(tmp_path / "b", 0)).sentence
    assert "only in a: [0][6], [0][7]" in sentence


def test_two_optimizers_that_share_a_parameter_are_told_by_what_only_one_has(tmp_path):
    def run(path, order, record="default"):
        net = built(lambda: nn.ModuleDict({name: nn.Linear(3, 3) for name in ("shared", "one", "two")}))
        with introspect_cli.recording(net, path, record=record):
            optimizers = [
                torch.optim.SGD([*net["shared"].parameters(), *net[name].parameters()], lr=0.1)
                for name in ("one", "two")
            ]
            hidden = net["shared"](torch.ones(2, 3))
            (net["one"](hidden) + net["two"](hidden)).square().mean().backward()
            for number in order:
                optimizers[number].step()
        return path

    sentence = introspect_cli.diff(run(tmp_path / "a", (0, 1)), run(tmp_path / "b", (1, 0))).sentence
    assert sentence.endswith("the optimizers step in a different order (SGD in a; SGD#2 in b).")
    lean = introspect_cli.diff(run(tmp_path / "c", (0, 1), LEAN), run(tmp_path / "d", (1, 0), LEAN)).sentence
    assert "or not of the optimizer" in lean


def test_batches_that_a_script_saved_before_it_trained_are_no_reason_to_look_elsewhere(tmp_path):
    def run(path, shift):
        net = built(lambda: nn.Linear(3, 1))
        batch = torch.arange(6.0).view(2, 3) + shift
        with introspect_cli.recording(net, path):
            torch.save({"batch": batch}, tmp_path / "batches.pt")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(batch).mean().backward()
            optimizer.step()
        return path

    sentence = introspect_cli.diff(run(tmp_path / "a", 0), run(tmp_path / "b", 1)).sentence
    assert "left: the script's preparation of it" in sentence


TEACHER = """
import sys, torch
from torch import nn
torch.manual_seed(0)
teacher, net = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*net.parameters(), *teacher.parameters()], lr=0.1)
with torch.no_grad():
    x = teacher(torch.ones(2, 3)) * float(sys.argv[1])
net(x).mean().backward()
optimizer.step()
"""


def test_a_model_without_gradients_may_have_made_what_goes_into_another(introspect, tmp_path):
    (tmp_path / "train.py").write_text(TEACHER)
    for name, scale in (("a", "1"), ("b", "2")):
        assert introspect("capture", "-q", "-o", name, "train.py", scale).returncode == 0
    answer = introspect("diff", "a", "b").stdout
    assert "a model that ran without gradients, which was not recorded" in answer


@pytest.mark.sweep
def test_a_model_that_is_also_called_compiled_has_its_tensors_twice_and_is_not_changed_by_that(tmp_path):
    def run(path, compiled):
        net = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        trained = torch.compile(net, backend="eager") if compiled else net
        with introspect_cli.recording(net, path):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(3):
                if step == 1:
                    net(torch.ones(2, 3))
                optimizer.zero_grad()
                trained(torch.ones(2, 3)).mean().backward()
                optimizer.step()
        return path

    sentence = introspect_cli.diff(run(tmp_path / "a", compiled=False), run(tmp_path / "b", compiled=True)).sentence
    assert "was changed outside of an optimizer step" not in sentence


def test_what_is_drawn_after_a_parameter_that_one_run_lacks_is_no_origin_of_its_own(tmp_path):
    def run(path, bias):
        net = built(lambda: nn.Sequential(nn.Linear(3, 3, bias=bias), nn.Linear(3, 1)))
        torch.manual_seed(1)
        with introspect_cli.recording(net, path):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(2, 3)).mean().backward()
            optimizer.step()
        return path

    result = introspect_cli.diff(run(tmp_path / "a", bias=True), run(tmp_path / "b", bias=False)).result
    assert "exists only in a" in result.sentence
    assert len(result.origins) < 2
