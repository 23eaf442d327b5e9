"""The compiled intake: plain tensors summarised, and their sites noted, in one call.

`add` and `add_all` are the summarizer's. A recorder tells `into` what it records into: its list of rows, that of slots
and the dictionary of times, how to acquire and to release its lock, which nobody who uses the summarizer does without,
a dictionary for the sums of samples by slot, or None, and the summarizer's `sample_headers`. Then:

- `record(site, tensor)` returns the slot; or -1, and nothing is done, where the tensor has to go the long way or the
  site has been recorded in this step.
- `record_all(sites, tensors)`, for who has the recorder's lock, takes lists and returns True; False where nothing is
  done; or the slots of those that it could summarise, -1 for the others, which `Summarizer.add_all` takes: no site is
  noted then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.tensors import handles, parallel
from introspect_cli.tensors import kernels as k

if TYPE_CHECKING:
    import threading

    import numpy as np
    import numpy.typing as npt


def new_intake(
    flags: int,
    layouts: list[int],
    addresses: list[int],
    team: npt.NDArray[np.int64],
    memory: Any,
    lock: threading.RLock,
) -> Any:
    """What summarises plain tensors in one call; None where torch, or we, cannot.

    Args:
        flags: STATS, SKETCH.
        layouts: the number of each slot's layout; it grows with each tensor that is summarised.
        addresses: of the slots' rows.
        team: the engine's.
        memory: what `reuse.new_memory` made.
        lock: the summarizer's.
    """
    functions = handles.functions()
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if functions is None else None
    if k.KERNELS is None or (functions is None and api is None):
        return None
    return k.KERNELS.intake(
        api,
        flags,
        k.WORTHWHILE,
        team.ctypes.data,
        torch.Tensor,
        torch.nn.Parameter,
        torch._C._len_torch_function_stack,  # noqa: SLF001  # no public one
        getattr(torch._C, "_is_cow_tensor", None),  # noqa: SLF001  # no public one
        torch.Tensor.is_neg,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage_offset,
        layouts,
        addresses,
        functions,
        team,
        memory,
        torch.get_num_threads,
        parallel.SCRIPT,
        lock.acquire,
        lock.release,
    )
