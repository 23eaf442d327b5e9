"""Shards: where their elements lie in the whole, and what a rank's part of a distributed tensor gets."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import distributed

from introspect_cli.tensors import places

HAS_DTENSOR = distributed.is_available() and hasattr(importlib.import_module("torch.distributed.tensor"), "DTensor")


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
