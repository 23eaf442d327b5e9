"""The few curves everyone looks at first: losses, the norm of all gradients, learning rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind
from introspect_cli.store.batch import l2_norm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.health.table import Table

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
    found = []
    for site in table.pick(Kind.LOSS)[:_MOST]:
        call = f" of backward {table.call[site]}" if table.call[site] else ""
        path = f" {table.path[site]}" if table.path[site] else ""
        found.append(_curve(table, site, "loss", f"loss{call}{path}"))
    norm = _gradient_norm(table)
    rates = [site for site in table.pick(Kind.HYPERPARAMETER) if table.path[site].endswith("['lr']")]
    for site in rates[:_MOST]:
        group = table.path[site].removesuffix("['lr']")
        found.append(_curve(table, site, "learning rate", f"learning rate of {table.fqn[site]} {group}".rstrip()))
    ordered = (*found[:1], *([norm] if norm else []), *found[1:])
    return tuple(replace(curve, steps=curve.steps + shift) for curve in ordered if len(curve.steps))


def _curve(table: Table, site: int, kind: str, name: str) -> Curve:
    """A site's mean, which is the value of a number; NaN where the value is recorded as not finite."""
    columns, place = table.columns(site)
    rows = np.flatnonzero((columns.layout[:, place] >= 0) | ~np.isnan(columns.floats["mean"][:, place]))
    values = columns.floats["mean"][rows, place].astype(np.float64)
    values[np.nan_to_num(columns.bad[rows, place]) > 0] = np.nan
    return Curve(name, kind, columns.steps[rows], values)


def _gradient_norm(table: Table) -> Curve | None:
    """L2 norm over the gradients of all recorded parameters, at their last backward pass in each step."""
    last: dict[str, int] = {}
    for site in sorted(table.pick(Kind.GRAD), key=lambda site: table.call[site]):
        last[table.fqn[site]] = site
    columns = table.many
    places = [columns.place[site] for site in last.values() if site in columns.place]
    if not places:
        return None
    with np.errstate(all="ignore"):
        mean, var = (columns.floats[name][:, places].astype(np.float64) for name in ("mean", "var"))
        bad = np.nan_to_num(columns.bad[:, places])
        norms = l2_norm(mean, var, table.numel[columns.layout[:, places]] * (1 - bad))
        total = np.sqrt(np.nansum(norms**2, axis=1))
    total[(bad > 0).any(axis=1)] = np.nan
    seen = np.isfinite(norms).any(axis=1) | (bad > 0).any(axis=1)
    return Curve("L2 norm of all recorded gradients", "gradients", columns.steps[seen], total[seen])
