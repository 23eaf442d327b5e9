"""The sum of the checksums of a tensor's samples: the same however ranks share them out, another for other samples."""

from __future__ import annotations

import pytest
import torch
from summaries import taken

from introspect_cli.capture.options.capture_options import CaptureOptions
from introspect_cli.capture.recording.samples import KINDS
from introspect_cli.capture.session import Session
from introspect_cli.records import Kind
from introspect_cli.script.ending import Ending
from introspect_cli.store.format.batch import sample_lists, samples_of
from introspect_cli.store.read.run import open_run
from introspect_cli.sums import MASK
from introspect_cli.tensors import kernels
from introspect_cli.tensors.cpu import sum_of_samples
from introspect_cli.tensors.summarizer import Summarizer


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


TENSORS = {
    "large samples": drawn(3, 70_000),
    "images": drawn(4, 3, 5, 7),
    "tokens without the last": drawn(4, 9).mul(9).long()[:, :-1],
    "labels": torch.arange(6),
    "flags": drawn(4, 3) > 0,
    "bfloat16": drawn(4, 3).bfloat16(),
    "float64": drawn(4, 3).double(),
    "conjugate": drawn(4, 3).cfloat().conj(),
    "transposed": drawn(5, 4).t(),
    "one sample": drawn(1, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_the_sum_of_the_samples_own_checksums_in_any_order(name):
    tensor = TENSORS[name]
    summarizer = Summarizer(stats=False, sketch=False)
    slots = [summarizer.add(sample) for sample in tensor]
    sums = taken(summarizer).checksum[slots].tolist()
    assert sum_of_samples(tensor) == sum(sums) & MASK
    assert sum_of_samples(tensor.flip(0)) == sum(sums) & MASK
    if len(tensor) > 1:
        assert (sum_of_samples(tensor[:1]) + sum_of_samples(tensor[1:])) & MASK == sum_of_samples(tensor)


@pytest.mark.parametrize("swap", [(0, 1), (0, 4)], ids=["in a sample", "between samples"])
def test_samples_that_are_others_give_another_sum(swap):
    tensor = torch.arange(12).view(3, 4)
    other = tensor.clone()
    other.view(-1)[list(swap)] = tensor.view(-1)[list(swap[::-1])]
    assert sum_of_samples(other) != sum_of_samples(tensor)
    assert sum_of_samples(tensor.view(6, 2)) != sum_of_samples(tensor)
    assert sum_of_samples(tensor.int()) != sum_of_samples(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.empty(0, 3),
        torch.empty(3, 0),
        torch.empty(2, 2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
    ],
    ids=["scalar", "no samples", "empty samples", "meta", "sparse", "quantized", "float8"],
)
def test_what_has_no_samples_or_none_that_can_be_read_has_no_sum(tensor):
    assert sum_of_samples(tensor) is None


@pytest.mark.parametrize("samples", [{}, {0: 1, 2: MASK}, {1: 1 << 63}], ids=["none", "some", "one"])
def test_the_column_gives_back_what_it_was_given(samples):
    column = sample_lists(samples, 3)
    assert len(column) == 3
    assert samples_of(column) == samples


HANDLED = {"large samples", "images", "labels", "flags", "bfloat16", "float64", "one sample"}


@pytest.mark.parametrize("name", [*TENSORS, "scalar", "no samples"])
def test_the_short_way_adds_up_the_same(name):
    """The compiled intake notes the sum in the call that records; what it does not know, it leaves to the long way."""
    tensor = {**TENSORS, "scalar": torch.tensor(1.0), "no samples": torch.empty(0, 3)}[name]
    summarizer, sums = Summarizer(), {}
    summarizer.add(tensor)  # its shape is learnt
    intake = summarizer.intake
    if intake is None:
        pytest.skip("torch has none of the functions that it asks")
    held = kernels.new_numbers(), kernels.new_numbers(), kernels.KERNELS.times(), kernels.new_lock()
    intake.into(*held, sums, summarizer.sample_headers)
    slot = intake.record(0, tensor)
    assert (slot >= 0) == (name in {*HANDLED, "scalar", "no samples"})
    assert sums == ({slot: sum_of_samples(tensor)} if name in HANDLED else {})
    held[2].clear()  # another step
    intake.into(*held, None, summarizer.sample_headers)
    assert intake.record(0, tensor) == (slot if slot < 0 else slot + 1)
    assert len(sums) == (name in HANDLED)
    summarizer.close()


def test_activations_of_the_first_step_have_sums_and_later_what_goes_into_the_model_alone(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.parameters())
    session = Session(None, CaptureOptions(output=tmp_path / "run", quiet=True))
    session.attach()
    for _ in range(2):
        net(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.finish(Ending(0, "returned"))
    with open_run(tmp_path / "run") as run:
        rank = run.rank(0)
        batch = rank.read(0)
        kinds = [rank.sites[site][0].kind for site in batch.site.tolist()]
        assert {row for row, kind in enumerate(kinds) if kind in KINDS} == set(batch.samples) != set()
        later = rank.read(1)
        names = [rank.sites[site][0] for site in later.site[sorted(later.samples)].tolist()]
        assert [(site.kind, site.fqn) for site in names] == [(Kind.INPUT, "Sequential")]
