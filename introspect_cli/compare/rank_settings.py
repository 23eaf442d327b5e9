"""Settings that differ between two runs on some ranks alone.

The settings of a run are those of its lowest rank. Another rank's learning rate may have changed without a trace in
any number, where gradients are zero or NaN: then nothing diverges, and nothing else would tell of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.compare.reasons.settings import describe, rank_changes
from introspect_cli.store.launched import rank_list

if TYPE_CHECKING:
    from introspect_cli.store.reader import Run

_MOST = 16
"""Ranks that are looked at: their settings are documents of their own. `check` holds all ranks of a run together."""


def on_some_ranks(a: Run, b: Run) -> list[str]:
    """Sentences on optimizers and flags that differ on some ranks and not on the lowest."""
    ranks = [rank for rank in a.recorded if rank in b.recorded][:_MOST]
    if len(ranks) < 2:
        return []
    found: dict[Any, list[int]] = {}
    for rank in ranks:
        for change in rank_changes(a.settings_of(rank), b.settings_of(rank)):
            found.setdefault(change, []).append(rank)
    return [
        f"On {rank_list(own)} alone a setting differs: {describe(change)} ({change.source})."
        for change, own in found.items()
        if ranks[0] not in own
    ]
