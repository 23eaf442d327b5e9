"""One self-contained page about a run, or two: everything inline, nothing fetched, nothing of a stranger executed.

Texts from stores stand in the page as escaped text or as JSON in a block that is no script, and reach the document
through `textContent` alone. The page's policy allows the one script that was put in, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.render.blocks import number
from introspect_cli.render.cards import first_screen, first_table, rests_on, run_cards
from introspect_cli.render.graph import graph_svg
from introspect_cli.render.html_parts import closeups_html, findings, ops_table, runs_table, settings_table
from introspect_cli.render.page_data import Page, page_data
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from introspect_cli.health.history import Packed
    from introspect_cli.inspect.data_flow import Graph

MOST_NODES = 600
"""Operators that a picture may have."""


def page_html(page: Page) -> str:
    """The page."""
    assets = files("introspect_cli.render") / "assets"
    script = (assets / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src 'sha256-{digest}'"
    )
    result = page.result
    first = result.first if result is not None else None
    has_map = result is not None and result.map is not None and bool(result.map.modules)
    hidden = {
        "two_hidden": result is None,
        "first_hidden": first is None,
        "map_hidden": not has_map,
        "loss_hidden": not any(curve.kind == "loss" for hide in page.curves for curve in hide),
        "depth_hidden": not page.depths,
        "ops_hidden": not page.ops,
        "noise_hidden": not page.noise,
    }
    values = {
        "policy": policy,
        "title": escape(" and ".join(clean(path, 80) for path in page.paths)),
        "heading": "Where they diverge" if result is not None else "The run",
        "style": style(),
        "screen": first_screen(result) if result is not None else _summary(page),
        "first": first_table(first) if first is not None else "",
        "closeups": closeups_html(page.closeups),
        "rests": rests_on(result) if result is not None else "",
        "settings": settings_table(result) if result is not None else "",
        "findings": findings(page.checks),
        "runs": runs_table(page.paths, page.facts),
        "ops": _picture(page.graph) + ops_table(page.ops, page.ops_step, two=result is not None) if page.ops else "",
        "kept": _kept(page.history),
        "data": page_data(page),
        "script": script,
        **{name: "hidden" * hide for name, hide in hidden.items()},
    }
    parts = (assets / "report.html").read_text(encoding="utf-8").split("%%")
    return "".join(values[part] if place % 2 else part for place, part in enumerate(parts))


def style() -> str:
    """The style sheet, which pages and notebooks share."""
    return (files("introspect_cli.render") / "assets" / "report.css").read_text(encoding="utf-8")


def fragment(markup: str) -> str:
    """Parts of a page as a notebook shows them, the style kept to them."""
    return f'<div class="introspect"><style>@scope (.introspect) {{\n{style()}}}</style>{markup}</div>'


def _summary(page: Page) -> str:
    """Cards of a single run: what ran, its loss, what was found."""
    facts, check = dict(page.facts[0]), page.checks[0]
    cards: list[tuple[str, str, list[tuple[str, str]]]] = [
        (
            "What ran",
            f"{count(int(facts.get('steps', 0)), 'step')}, {facts.get('state', '')}",
            [(name, facts[name]) for name in ("command", "started", "torch", "exception") if name in facts],
        )
    ]
    loss = next((curve for curve in page.curves[0] if curve.kind == "loss"), None)
    if loss is not None:
        measured = np.isfinite(loss.values)
        ends = [number(float(loss.values[at])) if measured[at] else "NaN or Inf" for at in (0, -1)]
        rows = [("lowest", number(float(loss.values[measured].min())))] if measured.any() else []
        bad = loss.steps[~measured]
        rows += [("not finite", f"{count(len(bad), 'step')}, from step {bad[0]} on")] if len(bad) else []
        cards.append((loss.name, f"{ends[0]} to {ends[1]}", rows))
    levels = [finding.level.value for finding in check.findings]
    counted = ", ".join(count(levels.count(level), level) for level in dict.fromkeys(levels)) or "nothing found"
    rows = [(finding.rule, f"from step {finding.step}: {finding.site}") for finding in check.findings[:3]]
    cards.append(("Findings", counted, rows or [("rules", str(len(check.checked)))]))
    return run_cards(cards)


def _picture(graph: Graph | None) -> str:
    """The graph of operators, which draws itself without a script; nothing where it is too large to look at."""
    if graph is None or not graph.nodes:
        return ""
    shown = f"{len(graph.nodes):,} of {graph.total:,} results of operators at step {graph.step}"
    if len(graph.nodes) > MOST_NODES:
        return f"<p>{shown} are left after pruning, too many to draw; `introspect show graph` draws a part.</p>"
    label = f"{shown}; hover one to see its statistics"
    box = f'<div class="paper" id="graph" tabindex="0" role="region" aria-label="Graph">{graph_svg(graph)}</div>'
    return f'<p class="quiet">{label}.</p>{box}'


def _kept(history: Packed) -> str:
    every, some = history.parts
    sentence = f"{count(history.whole, 'site')} with {count(len(every.steps), 'step')} of {history.steps:,}"
    rest = len(history.sites) - history.whole
    if rest:
        sentence += f", {count(rest, 'site')} with {count(len(some.steps), 'step')}"
    sentence += ", values as recorded (float32)."
    left = history.total - len(history.sites)
    if left:
        sentence += f" {count(left, 'site')} found no room: `introspect show history` has all."
    return escape(sentence)
