"""What a site is, in the few characters of a table cell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.render.text import clean

if TYPE_CHECKING:
    from introspect_cli.records import Site

_BRIEF = {"optimizer_state": "state", "hyperparameter": "hyper"}


def site_text(site: Site) -> str:
    """Kind, path, and the call where it is not the first: `output [0] #2`."""
    path = f" {clean(site.path)}" if site.path else ""
    return f"{site.kind.value}{path}{f' #{site.call}' if site.call else ''}"


def brief_what(site: Site) -> str:
    """The same with shorter words and no quotes: `state exp_avg`."""
    path = re.sub(r"^\['(\w+)'\]$", r"\1", clean(site.path))
    kind = _BRIEF.get(site.kind.value, site.kind.value)
    return f"{kind}{f' {path}' if path else ''}{f' #{site.call}' if site.call else ''}"
