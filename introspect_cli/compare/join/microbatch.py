"""The microbatches of one step of a run: their samples, losses, and how much of each counts, as far as it is known.

How many tokens of a microbatch count follows from the gradient of what the loss is computed of: it is zero for each
token that the loss leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Phase, Site
from introspect_cli.store.whole import Reader, WholeReader

if TYPE_CHECKING:
    from introspect_cli.store.rank_reader import RankReader


@dataclass(frozen=True)
class Microbatch:
    """One call of the model on one rank.

    Attributes:
        samples: leading size of what it is given; 0 where that is not on record.
        tokens: rows of the gradient of what the loss is computed of that are not zero; 0 where that is not on record.
    """

    samples: int = 0
    tokens: int = 0


def microbatches(reader: Reader, root: str, step: int) -> list[list[Microbatch]]:
    """The microbatches of a step, of each rank."""
    readers = reader.readers if isinstance(reader, WholeReader) else [reader]
    return [_of_rank(own, root, step) for own in readers]


def _of_rank(reader: RankReader, root: str, step: int) -> list[Microbatch]:
    sites, batch = reader.sites, reader.read(step)
    order = np.argsort(np.asarray(batch.sequence), kind="stable").tolist()
    samples: dict[int, int] = {}
    tokens: dict[int, int] = {}
    last = ""
    for row in order:
        number = int(batch.site[row])
        call, kind, fqn = int(sites.call[number]), sites.kind[number], sites.fqn[number]
        shape = reader.layouts[int(batch.layout[row])].shape
        if fqn == root and sites.phase[number] == Phase.FORWARD.value and kind in {"input", "output"}:
            samples.setdefault(call, 0)
            if shape and not samples[call]:
                samples[call] = shape[0]
        elif kind == Kind.GRAD_OUTPUT.value and len(shape) > 1 and "zeros" in batch.counts:
            last = last or fqn
            if fqn == last and call not in tokens:
                tokens[call] = _counted(shape, int(batch.counts["zeros"][row]))
    exact = all(tokens.get(call, 0) > 0 for call in samples) and len(tokens) == len(samples)
    return [Microbatch(samples[call], tokens[call] if exact else 0) for call in sorted(samples)]


def _counted(shape: tuple[int, ...], zeros: int) -> int:
    """Rows of a gradient that are not zero; 0 where zeros do not come by whole rows."""
    rows, rest = int(np.prod(shape[:-1])), zeros % shape[-1]
    return 0 if zeros < 0 or rest else rows - zeros // shape[-1]


def values_of(reader: Reader, site: Site, step: int, each: int = 1) -> list[list[float]]:
    """The single numbers that the calls of a rank gave at a site, of each rank, in order of the calls.

    Args:
        reader: of the run.
        site: where; its call is that within one microbatch.
        step: the run's own number of the step.
        each: how many calls a microbatch makes.
    """
    readers = reader.readers if isinstance(reader, WholeReader) else [reader]
    found = []
    for own in readers:
        sites, batch = own.sites, own.read(step)
        values: dict[int, float] = {}
        for row, number in enumerate(np.asarray(batch.site).tolist()):
            there = sites.phase[number], sites.kind[number], sites.fqn[number], sites.path[number]
            call = int(sites.call[number])
            if there == (site.phase.value, site.kind.value, site.fqn, site.path) and call % each == site.call % each:
                values[call] = float(batch.floats["mean"][row]) if "mean" in batch.floats else np.nan
        found.append([values[call] for call in sorted(values)])
    return found
