"""Runs that were made of somebody's arrays: they list some values, and need not know which came first.

A capture that lacks a site says that the site did not run; a directory of arrays says only that nobody wrote it there.
So nothing that such a run lacks is a divergence, and what it alone has was not compared. Where a listing gave no order,
the other run's stands for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from introspect_cli.compare.join.sites import Alignment, Ids
    from introspect_cli.store.batch import StepBatch


def lists(manifest: dict[str, Any]) -> bool:
    """Whether a run lists values, so that what it lacks means nothing."""
    return manifest.get("listed") is True


def ordered(manifest: dict[str, Any]) -> bool:
    """Whether the order of a run's records is that in which they were computed."""
    return manifest.get("ordered") is not False


def notes(manifest_a: dict[str, Any], manifest_b: dict[str, Any]) -> list[str]:
    """What is to be said of runs that list values."""
    return [
        f"Run {name} lists values that were written elsewhere: what it does not list is not compared."
        for name, manifest in (("a", manifest_a), ("b", manifest_b))
        if lists(manifest)
    ]


def in_order_of(alignment: Alignment, batch: StepBatch, other: StepBatch, union: Ids, other_union: Ids) -> StepBatch:
    """A step's records in the order of another run's; those that it has not come last."""
    place = np.full(alignment.size, np.iinfo(np.int64).max)
    place[other_union] = np.asarray(other.sequence)
    order = np.lexsort((np.asarray(batch.sequence), place[union]))
    sequence = np.empty(len(order), np.uint32)
    sequence[order] = np.arange(len(order))
    return replace(batch, sequence=sequence)
