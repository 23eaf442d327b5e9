"""Shards: where their elements lie in the whole, and what a rank's part of a distributed tensor gets."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch
from summaries import taken
from torch import distributed

from introspect_cli.records import Status
from introspect_cli.tensors import checksum, places
from introspect_cli.tensors.summarizer import Summarizer

HAS_DTENSOR = distributed.is_available() and hasattr(importlib.import_module("torch.distributed.tensor"), "DTensor")


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


@pytest.mark.skipif(not HAS_DTENSOR, reason="torch without distributed, or without a public name for DTensor")
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
    table = taken(made)
    made.close()
    assert table.status.tolist() == [Status.PARTIAL] * 4 + [Status.OBSERVED]
    assert all("local shard" in text for text in table.text[:4])
    assert {table.layouts[index].shape for index in table.layout_index} == {(10, 12)}
    header = checksum.header("float32", (10, 12))
    *parts, wanted = (int(value) for value in table.checksum)
    assert checksum.mix(sum(checksum.unmix(part) - header for part in parts) + header) == wanted
    assert table.sketch[:4].sum(axis=0) == pytest.approx(table.sketch[4], rel=1e-5, abs=1e-6)
    assert np.nansum(table.counts["zeros"][:4]) == table.counts["zeros"][4]


@pytest.mark.skipif(not HAS_DTENSOR, reason="torch without distributed, or without a public name for DTensor")
def test_a_replicated_tensor_is_seen_whole():
    from torch.distributed.tensor import DTensor, Replicate

    whole = torch.randn(10, 12)
    made = Summarizer()
    as_rank(2, lambda mesh: made.add(DTensor.from_local(whole, mesh, [Replicate()], run_check=False)))
    made.add(whole)
    table = taken(made)
    made.close()
    assert table.status.tolist() == [Status.OBSERVED] * 2
    assert table.checksum[0] == table.checksum[1]


def placements(dims):
    """Placements of a two-dimensional mesh, sums still owed and one dimension cut twice included."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    every = [Replicate(), Partial(), *(Shard(dim) for dim in range(dims))]
    yield from ((one, two) for one in every for two in every)
    yield from ((_StridedShard(dim, split_factor=2), Shard(dim)) for dim in range(dims))


@pytest.mark.skipif(not HAS_DTENSOR, reason="torch without distributed, or without a public name for DTensor")
@pytest.mark.parametrize("shape", [(7,), (8, 6), (3, 5), (1, 4, 3)])
def test_parts_of_a_mesh_are_those_that_torch_cuts(shape):
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    for rank in range(4):
        hook = sys.excepthook
        distributed.init_process_group("fake", rank=rank, world_size=4, store=store)
        try:
            mesh = torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(4).view(2, 2))
            for placed in placements(len(shape)):
                wants = [None if place.is_partial() else place for place in placed]
                if None in wants:
                    tensor = DTensor.from_local(whole, mesh, placed, run_check=False)
                    assert places.part_of(tensor).reduction == "sum"
                    continue
                tensor = distribute_tensor(whole, mesh, placed, src_data_rank=None)
                part, local = places.part_of(tensor), tensor._local_tensor
                assert part.numel == local.numel(), (placed, rank)
                for offset, flat in places.runs(local, shape, part):
                    assert flat.tolist() == whole.flatten()[offset : offset + len(flat)].tolist(), (placed, rank)
        finally:
            distributed.destroy_process_group()
            sys.excepthook = hook
