"""What everyone looks at first: losses, the norm of all gradients, learning rates, scales along the depth of a model.

A look at a run that may go on has these, how far it is, how fast, and what a check finds so far.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.check import check_tables
from introspect_cli.health.reading import read_table
from introspect_cli.records import Kind
from introspect_cli.store.reader import Run, RunState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.health.findings import CheckResult
    from introspect_cli.health.table import Table
    from introspect_cli.labels import Labels

_MOST = 4  # of a kind; a script with more losses than that has a history for each


@dataclass(frozen=True, eq=False)
class Curve:
    """One number a step.

    Attributes:
        name: what it is.
        kind: `loss`, `gradients` or `learning rate`.
        steps: int64 (T,).
        values: float64 (T,); not finite where the run's value was not.
    """

    name: str
    kind: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def curves(table: Table, shift: int = 0) -> tuple[Curve, ...]:
    """The curves of a rank that there are, the first loss first; `shift` is added to its step numbers."""
    made = []
    for site in table.pick(Kind.LOSS)[:_MOST]:
        call = f" of backward {table.call[site]}" if table.call[site] else ""
        path = f" {table.path[site]}" if table.path[site] else ""
        made.append(_curve(table, site, "loss", f"loss{call}{path}"))
    norm = _gradient_norm(table)
    rates = [site for site in table.pick(Kind.HYPERPARAMETER) if table.path[site].endswith("['lr']")]
    for site in rates[:_MOST]:
        group = table.path[site].removesuffix("['lr']")
        made.append(_curve(table, site, "learning rate", f"learning rate of {table.fqn[site]} {group}".rstrip()))
    ordered = (*made[:1], *([norm] if norm else []), *made[1:])
    return tuple(replace(curve, steps=curve.steps + shift) for curve in ordered if len(curve.steps))


def _curve(table: Table, site: int, kind: str, name: str) -> Curve:
    """A site's mean, which is the value of a number; NaN where the value is recorded as not finite."""
    column = table.column(site)
    rows = np.flatnonzero((column.layout >= 0) | ~np.isnan(column.floats["mean"]))
    values = column.floats["mean"][rows].astype(np.float64)
    values[np.nan_to_num(column.floats["bad"][rows]) > 0] = np.nan
    return Curve(name, kind, column.steps[rows], values)


def _gradient_norm(table: Table) -> Curve | None:
    """L2 norm over the gradients of all recorded parameters, at their last backward pass in each step."""
    last: dict[str, int] = {}
    for site in sorted(table.pick(Kind.GRAD), key=lambda site: table.call[site]):
        last[table.fqn[site]] = site
    sites = list(last.values())
    if not sites:
        return None
    with np.errstate(all="ignore"):
        norms, total = table.norms(sites), table.total_norm(sites)
    bad = np.stack([table.column(site).floats["bad"] > 0 for site in sites], axis=1).any(axis=1)
    total[bad] = np.nan
    seen = np.isfinite(norms).any(axis=1) | bad
    return Curve("L2 norm of all recorded gradients", "gradients", table.many.steps[seen], total[seen])


@dataclass(frozen=True)
class Depth:
    """How large values are along the depth of a model, over all steps.

    Attributes:
        names: modules in execution order.
        low: 10th percentile over the steps of the root mean square of each.
        middle: median.
        high: 90th percentile.
        dtypes: dtype of each.
        total: modules there were; every k-th is kept where there are very many.
    """

    names: tuple[str, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]
    dtypes: tuple[str, ...] = ()
    total: int = 0


def depth(table: Table, kind: Kind, most: int = 300) -> Depth:
    """Scales of outputs (`Kind.OUTPUT`) or of the gradients at them (`Kind.GRAD_OUTPUT`), first call of each module."""
    order = {
        (table.fqn[site], table.path[site]): place
        for place, site in enumerate(table.pick(Kind.OUTPUT))
        if not table.call[site]
    }
    sites = [site for site in table.pick(kind) if not table.call[site] and (table.fqn[site], table.path[site]) in order]
    sites.sort(key=lambda site: order[table.fqn[site], table.path[site]])
    rows = []
    for site in sites[:: max(1, -(-len(sites) // most))]:
        with np.errstate(all="ignore"):
            steps, norm = table.l2(site)
        layout = table.layout(site)
        if layout is None or not layout.numel or not len(steps):
            continue
        scale = norm[np.isfinite(norm)] / layout.numel**0.5
        if len(scale) and layout.dtype.startswith(("float", "bfloat")):
            low, middle, high = np.quantile(scale, [0.1, 0.5, 0.9])
            rows.append((f"{table.fqn[site]}{table.path[site]}", float(low), float(middle), float(high), layout.dtype))
    if not rows:
        return Depth((), (), (), ())
    names, low, middle, high, dtypes = zip(*rows, strict=True)
    return Depth(names, low, middle, high, dtypes, len(sites))


@dataclass(frozen=True)
class Look:
    """What is seen of a run.

    Attributes:
        path: where it is.
        state: whether it goes on, or how it ended.
        steps: steps that can be read, of the rank with most.
        last: the last of them that every rank has; None without any.
        labels: what its framework calls that step.
        rate: steps of the script in a second; None where nothing tells.
        recent: whether that is the rate of late; else it is the average since the script started.
        curves: losses, norms and learning rates of its lowest rank.
        check: what a check of it finds.
        behind: steps that the run went on while it was looked at.
    """

    path: str
    state: RunState
    steps: int
    last: int | None
    labels: Labels
    rate: float | None
    curves: tuple[Curve, ...]
    check: CheckResult
    recent: bool = False
    behind: int = 0

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state is not RunState.RUNNING


def look(run: Run) -> Look:
    """Look at a run that was opened just now.

    Raises:
        StoreError: it cannot be read.
    """
    tables = {rank: read_table(run.rank(rank)) for rank in run.ranks}
    drawn = curves(tables[run.ranks[0]]) if run.ranks else ()
    last = run.last_step
    labels = run.rank(run.ranks[0]).labels.get(last, {}) if run.ranks and last is not None else {}
    check = check_tables(str(run.path), list(tables.values()))
    return Look(str(run.path), run.state, run.steps, last, labels, _rate(run), drawn, check)


def _rate(run: Run) -> float | None:
    """Steps in a second from the start of the script to now, or to its end."""
    began, ended = run.time("started"), run.time("ended")
    if run.state is RunState.RUNNING:
        ended = dt.datetime.now(dt.timezone.utc)
    if began is None or ended is None or run.last_step is None or ended <= began:
        return None
    return (run.last_step + 1) / (ended - began).total_seconds()
