"""What torch's collectives and messages between ranks are called: its operators, its functions, its groups' methods."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """One operator: its common name, and the positions of its arguments; -1 for none.

    Attributes:
        word: its name.
        given: position of what goes in.
        gives: position of what comes out.
        group: position of the group.
        reduces: position of the reduction.
        peer: position of the other rank, or of the root.
    """

    word: str
    given: int
    gives: int
    group: int
    reduces: int = -1
    peer: int = -1


FACTS = {
    "allreduce_": Facts("all_reduce", 0, 0, 1, 2),
    "allreduce_coalesced_": Facts("all_reduce", 0, 0, 1, 2),
    "allgather_": Facts("all_gather", 1, 0, 2),
    "_allgather_base_": Facts("all_gather", 1, 0, 2),
    "allgather_coalesced_": Facts("all_gather", 1, 0, 2),
    "allgather_into_tensor_coalesced_": Facts("all_gather", 1, 0, 2),
    "reduce_scatter_": Facts("reduce_scatter", 1, 0, 2, 3),
    "_reduce_scatter_base_": Facts("reduce_scatter", 1, 0, 2, 3),
    "reduce_scatter_tensor_coalesced_": Facts("reduce_scatter", 1, 0, 2, 3),
    "reduce_": Facts("reduce", 0, 0, 1, 2, 3),
    "broadcast_": Facts("broadcast", 0, 0, 1, -1, 2),
    "gather_": Facts("gather", 1, 0, 2, -1, 3),
    "scatter_": Facts("scatter", 1, 0, 2, -1, 3),
    "alltoall_": Facts("all_to_all", 1, 0, 2),
    "alltoall_base_": Facts("all_to_all", 1, 0, 2),
    "send": Facts("send", 0, -1, 1, -1, 2),
    "recv_": Facts("recv", -1, 0, 1, -1, 2),
    "barrier": Facts("barrier", -1, -1, 1),
}
"""Operators by name; others (checks of memory, waits) move nothing."""

FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""Prefixes of torch's functional collectives, whose endings differ between versions."""


METHODS = ("all", "_allgather", "broadcast", "gather", "recv", "reduce", "_reduce_scatter", "scatter")
"""Prefixes of a group's methods that give a handle of results; each version of torch has others."""
