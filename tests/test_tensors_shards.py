"""Shards: where their elements lie in the whole, and what a rank's part of a distributed tensor gets."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import distributed

from introspect_cli.records import Status
from introspect_cli.tensors import checksum, shards
from introspect_cli.tensors.summarizer import Summarizer


@pytest.mark.parametrize(
    ("local", "start", "wanted"),
    [
        ((4, 6), (0, 0), (24, [0])),
        ((2, 6), (1, 0), (12, [6])),
        ((4, 2), (0, 3), (2, [3, 9, 15, 21])),
        ((2, 2), (1, 4), (2, [10, 16])),
        ((1, 1), (3, 5), (1, [23])),
        ((0, 6), (2, 0), (0, [])),
    ],
)
def test_runs_of_a_box(local, start, wanted):
    assert shards.run_offsets(local, (4, 6), start) == wanted


def test_runs_hold_the_elements_at_their_indices():
    whole = torch.arange(5 * 6 * 7).view(5, 6, 7)
    box = whole[1:4, 2:5, :]
    runs = list(shards.runs(box, whole.shape, (1, 2, 0)))
    assert len(runs) == 3
    for offset, flat in runs:
        assert flat.tolist() == list(range(offset, offset + 21))


def test_a_scalar_is_one_run():
    assert shards.run_offsets((), (), ()) == (1, [0])


def as_rank(rank, call):
    """What a call returns in a process group that is only pretended."""
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    hook = sys.excepthook  # torch puts one of its own
    distributed.init_process_group("fake", rank=rank, world_size=4, store=store)
    try:
        return call(torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(4)))
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("dim", [0, 1])
def test_checksums_of_all_ranks_add_up(dim):
    from torch.distributed.tensor import DTensor, Shard, _utils

    torch.manual_seed(0)
    whole = torch.randn(10, 12)
    made = Summarizer()

    def add(mesh):
        sizes, start = _utils.compute_local_shape_and_global_offset(whole.shape, mesh, [Shard(dim)])
        box = whole[tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))].clone()
        tensor = DTensor.from_local(box, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
        made.add(tensor)

    for rank in range(4):
        as_rank(rank, add)
    made.add(whole)
    table = made.take()
    made.close()
    assert table.status.tolist() == [Status.PARTIAL] * 4 + [Status.OBSERVED]
    assert all("local shard" in text for text in table.text[:4])
    assert {table.layouts[index].shape for index in table.layout_index} == {(10, 12)}
    header = checksum.header("float32", (10, 12))
    *parts, wanted = (int(value) for value in table.checksum)
    assert checksum.combine(parts, [header] * 4, header) == wanted
    assert table.sketch[:4].sum(axis=0) == pytest.approx(table.sketch[4], rel=1e-5, abs=1e-6)
    assert np.nansum(table.counts["zeros"][:4]) == table.counts["zeros"][4]


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_a_replicated_tensor_is_seen_whole():
    from torch.distributed.tensor import DTensor, Replicate

    whole = torch.randn(10, 12)
    made = Summarizer()
    as_rank(2, lambda mesh: made.add(DTensor.from_local(whole, mesh, [Replicate()], run_check=False)))
    made.add(whole)
    table = made.take()
    made.close()
    assert table.status.tolist() == [Status.OBSERVED] * 2
    assert table.checksum[0] == table.checksum[1]
