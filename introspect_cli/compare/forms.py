"""Inputs that have another form in the other run, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.reasons.words import what
from introspect_cli.records import Layout, Site, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.join.sites import Ids
    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.compare.table import Table


@dataclass(frozen=True)
class Form:
    """An input and its form in either run; None where a run does not give it."""

    step: int
    site: Site
    a: Layout | None
    b: Layout | None


def forms_of(table: Table, rows: Ids, sides: Sides) -> tuple[Form, ...]:
    """The inputs of some rows, the earliest first."""
    found = []
    for row in rows[np.argsort(table.order[rows], kind="stable")].tolist():
        at = int(table.row_a[row]), int(table.row_b[row])
        a = sides.a.layouts[int(table.a.layout[at[0]])] if at[0] >= 0 else None
        b = sides.b.layouts[int(table.b.layout[at[1]])] if at[1] >= 0 else None
        found.append(Form(table.step, table.named(row), a, b))
    return tuple(found)


def forms_note(forms: Sequence[Form]) -> str:
    """The sentence on them, the first in words; "" for none."""
    if not forms:
        return ""
    first = forms[0]
    told = f"in step {first.step} {what(first.site)} is {_layout(first.a)} in a and {_layout(first.b)} in b"
    more = f", as {count(len(forms) - 1, 'other input')} of that step" if len(forms) > 1 else ""
    which = "those modules" if len(forms) > 1 else "that module"
    return f"Another form, no divergence: {told}{more}; what {which} gave agrees, or differs by rounding."


def _layout(layout: Layout | None) -> str:
    if layout is None:
        return "not given"
    shape = "x".join(map(str, layout.shape)) or "scalar"
    return f"{shape} {layout.dtype}"
