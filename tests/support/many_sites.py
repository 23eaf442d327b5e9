"""The time it takes to know the modules of a run under other names, by the number of sites, which are made up.

Layers of ten modules have a parameter, its gradient, input, output and gradient of the output each; one module in ten,
one in a thousand, or none has another name in b.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from introspect_cli.compare.match import Correspondence, matched_by_value
from introspect_cli.records import Status
from introspect_cli.store.batch import StepBatch

KINDS = ("param", "input", "output", "grad", "grad_output")
PHASES = ("start", "forward", "forward", "optimizer", "backward")


def made(sites: int, renamed: str, every: int = 1) -> Any:
    """One step of a rank with so many sites, as the matcher reads it; in one layer of `every`, a module is renamed."""
    fqn = []
    for number in range(sites // len(KINDS)):
        layer, slot = divmod(number, 10)
        name = f"Net.blocks.{layer}.{renamed if slot == 3 and layer % every == 0 else f'm{slot}'}"
        fqn += [f"{name}.weight", name, name, f"{name}.weight", name]
    count = len(fqn)
    keys = np.fromiter(map(hash, zip(fqn, KINDS * (count // 5), strict=True)), np.int64, count).astype(np.uint64)
    table = SimpleNamespace(
        phase=list(PHASES) * (count // 5), kind=list(KINDS) * (count // 5), fqn=fqn, path=[""] * count,
        key=keys, call=np.zeros(count, np.int64), module_class=["Linear"] * count,
    )  # fmt: skip
    numbers = np.arange(count, dtype=np.uint32)
    batch = StepBatch(
        site=numbers,
        sequence=numbers,
        layout=np.zeros(count, np.uint32),
        status=np.full(count, int(Status.OBSERVED), np.uint8),
        checksum=np.random.default_rng(1).integers(1, 2**63, count).astype(np.uint64),
        floats={"min": np.zeros(count), "max": np.ones(count)},
    )
    return SimpleNamespace(entries={"step": np.array([0])}, sites=table, modules=[], layouts=[], read=lambda _: batch)


def timed(sites: int, *, other: str = "mlp", every: int = 1) -> tuple[Correspondence, float]:
    """What was found, and seconds of CPU time."""
    runs = made(sites, "body", every), made(sites, other, every)
    start = time.process_time()
    return matched_by_value(*runs), time.process_time() - start
