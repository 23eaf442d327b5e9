"""Which kernels summarise a tensor in CPU memory: the jitted ones, or the reference where there are none.

Both fill the same row and agree on every checksum bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.tensors import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from introspect_cli.tensors.rows import Rows


def fill(
    out: Rows,
    tensor: torch.Tensor,
    *,
    with_stats: bool,
    with_sketch: bool,
    sorted_stats: Sequence[str] = (),
    runs: Sequence[tuple[int, torch.Tensor]] | None = None,
) -> None:
    """Summarise a strided CPU tensor into a row.

    Args:
        out: the row, shape (32,).
        tensor: what to summarise.
        with_stats: whether to fill the statistics words.
        with_sketch: whether to fill the sketch words.
        sorted_stats: `med`, `mode`.
        runs: the runs of a shard, see `reference.row`.
    """
    row = reference.row(tensor, with_stats=with_stats, with_sketch=with_sketch, sorted_stats=sorted_stats, runs=runs)
    out[:] = row.numpy().view(np.uint64)
