"""Comparisons through idioms of training: what they do otherwise and leave the same, and what they hide."""

from __future__ import annotations

import pytest
import torch
from opcapture import captured, compared, records
from torch import nn
from torch.nn import functional as F

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import parse_rule

EVERY_SECOND = parse_rule("every(2)")
LEAN = frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS})
ALL_AND_LEAN = pytest.mark.parametrize("options", [{}, {"record": LEAN}], ids=["all", "lean"])


class Attention(nn.Module):
    def __init__(self, *, in_order):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.in_order = in_order

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT if self.in_order else q[..., :3] @ k[..., :3].mT + q[..., 3:] @ k[..., 3:].mT
        return self.out((scores / 8**0.5).softmax(-1) @ v)


class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Language(nn.Module):
    def __init__(self, norm=nn.LayerNorm, drop=0.0, *, in_order=True):
        super().__init__()
        self.tokens, self.types = nn.Embedding(11, 8), nn.Embedding(2, 8)
        self.attention, self.norm = Attention(in_order=in_order), norm(8)
        self.adapter, self.drop, self.head = nn.Linear(8, 8, bias=False), nn.Dropout(drop), nn.Linear(8, 11)
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x):
        h = self.tokens(x) + self.types(torch.zeros_like(x))
        h = h + self.drop(self.attention(h))
        h = self.norm(h.flatten(0, 1)).view(h.shape)
        return self.head(self.drop(h + self.adapter(h)))


def train(*, parts=1, steps=3, wrong="", scale=None, wrap=False, decay=0.0, last=8, **model):
    torch.manual_seed(0)
    net = Language(**model)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, eps=1e-12, weight_decay=decay)
    called = Wrapper(net) if wrap else net
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    data = torch.randint(0, 11, (steps * 8, 7), generator=torch.Generator().manual_seed(1)).split(8)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        for part in batch[: last if step == steps - 1 else 8].split(8 // parts):
            loss = F.cross_entropy(called(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            loss = loss / {"added": 1, "twice": parts**2}.get(wrong, parts)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if wrong == "bias":
            net.head.bias.grad.mul_(1.1)
        if scaler is None or wrong == "still scaled":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("runs"), {}

    def captured_once(options=None, work=train, **given):
        key = repr((work, options, given))
        if key not in runs:
            runs[key] = captured(folder / str(len(runs)), lambda: work(**given), **(options or {}))
        return runs[key]

    return captured_once


@pytest.mark.parametrize(
    "options", [{}, {"record": LEAN}, {"steps": EVERY_SECOND}], ids=["all", "lean", "every second"]
)
def test_what_adam_makes_of_a_gradient_of_rounding_alone_is_no_divergence(run, options):
    result = compared(run(options), run(options, parts=4))
    assert result.verdict is Verdict.SAME, result.sentence
    (note,) = [note for note in result.notes if "nothing but rounding in both runs" in note]
    assert "The gradient of Language.attention.k.bias" in note
    wrong = compared(run(options), run(options, parts=4, wrong="bias"))
    assert wrong.first.site.fqn == ("loss" if "record" in options else "Language.head.bias"), wrong.sentence
    assert compared(run(options), run(options, parts=4), strict=True).verdict is Verdict.DIVERGED


@ALL_AND_LEAN
def test_a_tolerance_that_is_given_lets_it_pass_as_well_and_none_does_not(run, options):
    other = run(options, in_order=False)
    assert compared(run(options), other, rtol=1e-5).verdict is Verdict.SAME
    assert compared(run(options), other).verdict is Verdict.DIVERGED


@ALL_AND_LEAN
def test_a_loss_that_is_scaled_by_another_power_of_two_and_unscaled_again_is_no_divergence(run, options):
    for other in (1024.0, None):
        result = compared(run(options, scale=65536.0), run(options, scale=other))
        assert result.verdict is Verdict.SAME, result.sentence
        assert any(note.startswith("Nothing recorded rests on") for note in result.notes)
    wrong = compared(run(options, scale=65536.0), run(options, scale=1024.0, wrong="still scaled"))
    assert wrong.verdict is Verdict.DIVERGED
    assert not any("Nothing recorded rests on" in note for note in wrong.notes)


def test_a_scaler_where_microbatches_are_added_up_is_no_divergence(run):
    result = compared(run(), run(parts=4, scale=256.0))
    assert result.verdict is Verdict.SAME, result.sentence
    assert any("256 x those of run a: its loss is scaled (GradScaler, or by hand)" in note for note in result.notes)
    wrong = compared(run(), run(parts=4, scale=256.0, wrong="still scaled"))
    assert wrong.verdict is Verdict.DIVERGED


def convolve(*, half=False, in_order=True, momentum=0.1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.Flatten(), nn.Linear(8 * 16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for _ in range(3):
        x, y = torch.randn(8, 3, 6, 6), torch.randint(4, (8,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = F.cross_entropy(net(x if in_order else x.flip(0)), y if in_order else y.flip(0))
        loss.backward()
        optimizer.step()


def test_rounding_is_larger_where_autocast_computes_in_half_precision(run):
    held = {"record": LEAN}
    result = compared(run(held, convolve, half=True), run(held, convolve), rtol=0.05)
    assert result.verdict is Verdict.SAME, result.sentence
    assert any("gradient of Sequential.0.bias is nothing but rounding" in note for note in result.notes)


def test_a_running_mean_that_such_a_bias_alone_has_moved_is_no_divergence_where_no_output_is_on_record(run):
    held = {"record": LEAN | {Kind.BUFFER}}
    result = compared(run(held, convolve), run(held, convolve, in_order=False), rtol=1e-4)
    assert result.verdict is Verdict.SAME, result.sentence
    wrong = compared(run(held, convolve), run(held, convolve, in_order=False, momentum=0.11), rtol=1e-4)
    assert wrong.first.site.fqn.startswith("Sequential.1.running"), wrong.sentence


def embedded(*, coalesced=False, times=1.0, in_order=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))
    optimizers = torch.optim.AdamW(net[2].parameters(), 0.01), torch.optim.SparseAdam(net[0].parameters(), 0.01)
    for _ in range(2):
        ids = torch.randint(9, (6, 3))
        net(ids if in_order else ids.flip(0)).square().mean().backward()
        if coalesced:
            net[0].weight.grad = net[0].weight.grad.coalesce() * times
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_sparse_gradients_are_compared_by_what_they_add_up_to(run):
    assert compared(run(None, embedded), run(None, embedded, coalesced=True)).verdict is Verdict.SAME
    held = {"record": LEAN}
    result = compared(run(held, embedded), run(held, embedded, in_order=False), rtol=1e-5)
    assert result.verdict is Verdict.SAME, result.sentence


def test_what_a_second_optimizer_takes_rests_on_what_ran_before_the_first(run):
    result = compared(run(None, embedded), run(None, embedded, coalesced=True, times=2.0))
    assert (result.first.step, result.first.site.fqn) == (1, "Sequential.0.weight"), result.sentence
    assert "b is 2 times a; left: clipping, unscaling" in result.sentence


class Ahead:
    """Reads a batch before it hands on the one before, as wrappers of a loader do."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        batches = iter(self.loader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch


def looped(*, ahead=False, late=1.0, shifted=0):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[shifted:], y[shifted:]), batch_size=4)
    for step, (given, target) in enumerate(Ahead(loader) if ahead else loader):
        optimizer.zero_grad()
        F.cross_entropy(net(given), target).backward()
        optimizer.param_groups[0]["lr"] = 0.1 * (late if step == 3 else 1)
        optimizer.step()


def test_a_batch_that_a_wrapper_reads_ahead_is_no_divergence(run):
    assert compared(run(None, looped), run(None, looped, ahead=True)).verdict is Verdict.SAME
    result = compared(run(None, looped), run(None, looped, ahead=True, late=2.0))
    assert (result.first.step, result.first.site.kind) == (3, Kind.PARAM), result.sentence
    result = compared(run(None, looped), run(None, looped, shifted=4))
    assert (result.first.step, result.first.site.kind) == (0, Kind.BATCH), result.sentence


@pytest.mark.usefixtures("fresh_compiler")
def test_the_forward_of_a_compiled_model_that_is_called_by_name_is_no_other_structure(run):
    def work(*, named=False, times=1.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        called = torch.compile(net, backend="eager").forward if named else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (called(torch.randn(4, 4)) * times).square().mean().backward()
            optimizer.step()

    result = compared(run(None, work), run(None, work, named=True))
    assert result.verdict is Verdict.SAME, result.sentence
    assert "structure differs" not in result.sentence
    assert compared(run(None, work), run(None, work, named=True, times=2.0)).verdict is Verdict.DIVERGED


def test_a_scale_that_rounds_is_the_cause_of_another_loss(run):
    result = compared(run(scale=65536.0), run(scale=1000.0))
    assert "cause: the scale of GradScaler 65536 -> 1000." in result.sentence


@ALL_AND_LEAN
def test_losses_of_microbatches_that_are_divided_otherwise_diverge(run, options):
    twice = compared(run(options), run(options, parts=4, wrong="twice"))
    assert (twice.verdict, twice.first.step) == (Verdict.DIVERGED, 0)
    last = compared(run(options, last=2), run(options, parts=4, last=2))
    assert last.first.step == 2


@ALL_AND_LEAN
def test_a_loop_in_another_wrapper_that_cuts_its_batches_otherwise_is_compared_over_the_samples(run, options):
    result = compared(run(options), run(options, parts=2, wrap=True))
    assert result.verdict is Verdict.SAME, result.sentence
    assert any("microbatches" in note for note in result.notes)
    wrong = compared(run(options), run(options, parts=2, wrap=True, wrong="added"))
    assert "in b the losses of the 2 microbatches of a step are added up, not averaged" in wrong.sentence


@ALL_AND_LEAN
def test_hyper_parameters_of_a_model_with_another_name_are_compared(run, options):
    result = compared(run(options), run(options, wrap=True, decay=0.1))
    assert "weight_decay 0 -> 0.1" in result.sentence


def test_a_loss_that_is_made_anew_in_each_forward_is_one_module_with_several_calls(run):
    class Losing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x, y):
            return nn.CrossEntropyLoss()(self.net(x), y)

    def work(parts):
        torch.manual_seed(0)
        model, x, y = Losing(), torch.randn(8, 4), torch.arange(8) % 3
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for one, two in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (model(one, two) / parts).backward()
            optimizer.step()

    cut = run(work=work, parts=2)
    sites = [record.site for record in records(cut) if "CrossEntropyLoss" in record.site.fqn]
    assert {site.call for site in sites} == {0, 1}
    assert not any("@" in site.path for site in sites)
    result = compared(run(work=work, parts=1), cut)
    assert result.verdict is Verdict.SAME, result.sentence


def two_optimizers(folder, lost="", *, goes_on=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9), torch.optim.Adam(net[2].parameters(), 0.01)]
    data = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
    if goes_on:
        state = torch.load(folder / "kept.pt")
        net.load_state_dict(state["net"])
        for number, optimizer in enumerate(optimizers):
            if str(number) != lost:
                optimizer.load_state_dict(state["optimizers"][number])
    for step in range(2 * goes_on, 4):
        if step == 2 and not goes_on:
            kept = {"net": net.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
            torch.save(kept, folder / "kept.pt")
        net.zero_grad()
        net(data[step]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@ALL_AND_LEAN
@pytest.mark.parametrize("lost", ["", "0", "1"])
def test_a_resumed_run_of_two_optimizers_is_held_against_what_each_of_them_left(tmp_path, options, lost):
    whole = captured(tmp_path / "a", lambda: two_optimizers(tmp_path), **options)
    late = captured(tmp_path / "b", lambda: two_optimizers(tmp_path, lost, goes_on=True), **options)
    result = compared(whole, late)
    assert result.verdict is (Verdict.DIVERGED if lost else Verdict.SAME), result.sentence
    expected = {"optimizer state"} if lost and not options else set()
    assert {part.part for part in result.resumed.lost} == expected, result.sentence
    if not lost:
        assert result.sentence.startswith("Resumed correctly: run b restored all that is on record of step 3 of a")
