"""One self-contained page about a run, or two: everything inline, nothing fetched, nothing of a stranger executed.

What a terminal shows as blocks is markup here. Texts from stores stand in the page as escaped text or as JSON in a
block that is no script, and reach the document through `textContent` alone. The page's policy allows the one script
that was put in, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from introspect_cli.render.blocks import Block, Column, Figure, Table, line
from introspect_cli.render.check_text import check_blocks, summary
from introspect_cli.render.diff_text import detail_blocks, settings_blocks
from introspect_cli.render.graph import graph_svg
from introspect_cli.render.markup import first_screen, html_of, rests_on, style
from introspect_cli.render.page_data import Page, page_data
from introspect_cli.render.show_text import facts_of, notes_of
from introspect_cli.render.values_text import closeup_blocks
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from introspect_cli.health.history import Packed
    from introspect_cli.inspect.data_flow import Graph

MOST_NODES = 600
"""Operators that a picture may have."""


def page_html(page: Page) -> str:
    """The whole HTML page, with style, script and data inline; sections without content are hidden."""
    assets = files("introspect_cli.render") / "assets"
    script = (assets / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src 'sha256-{digest}'"
    )
    result = page.result
    first = result.first if result is not None else None
    hidden = {
        "two_hidden": result is None,
        "first_hidden": first is None,
        "map_hidden": result is None or result.map is None or not result.map.modules,
        "loss_hidden": not any(curve.kind == "loss" for hide in page.curves for curve in hide),
        "depth_hidden": not page.depths,
        "ops_hidden": page.graph is None or not page.graph.nodes,
        "noise_hidden": not page.noise,
    }
    drawn = [each for each in page.closeups if each.difference is not None and each.difference.elements.differing]
    checks: list[Block] = []
    for name, check in zip("ab", page.checks, strict=False):
        checks += [line(f"Run {name}", "heading")] * (len(page.checks) > 1) + check_blocks(check)
    blocks: dict[str, list[Block]] = {
        "first": detail_blocks([first]) if first is not None else [],
        "closeups": [block for each in drawn for block in closeup_blocks(each)],
        "rests": rests_on(result) if result is not None else [],
        "settings": settings_blocks(result) if result is not None else [],
        "findings": checks,
        "runs": _what_ran(page),
        "ops": _picture(page.graph),
    }
    values = {
        "policy": policy,
        "title": escape(" and ".join(clean(run.path, 80) for run in page.runs)),
        "heading": "Where they diverge" if result is not None else "The run",
        "style": style(),
        "screen": first_screen(result) if result is not None else html_of([line(summary(page.checks[0]))]),
        "kept": _kept_sentence(page.history),
        "data": page_data(page),
        "script": script,
        **{name: html_of(each) for name, each in blocks.items()},
        **{name: "hidden" * hide for name, hide in hidden.items()},
    }
    parts = (assets / "report.html").read_text(encoding="utf-8").split("%%")
    return "".join(values[part] if place % 2 else part for place, part in enumerate(parts))


def _what_ran(page: Page) -> list[Block]:
    """A table of what ran, a column per run, and notes on what was not recorded."""
    sides = [dict(facts_of(run)) for run in page.runs]
    heads = [f"{letter}: {clean(run.path, 120)}" for letter, run in zip("ab", page.runs, strict=False)]
    names = dict.fromkeys(name for side in sides for name in side if name != "run" and side[name])
    rows = tuple((name, *(side.get(name, "") for side in sides)) for name in names)
    table = Table((Column(""), *map(Column, heads)), rows, caption="What ran")
    return [table, *(note for run in page.runs for note in notes_of(run))]


def _picture(graph: Graph | None) -> list[Block]:
    """The graph of operators as a picture; just a line where it has over `MOST_NODES` nodes, [] without a graph."""
    if graph is None or not graph.nodes:
        return []
    shown = f"{len(graph.nodes):,} of {graph.total:,} results of operators at step {graph.step}"
    if len(graph.nodes) > MOST_NODES:
        return [line(f"{shown} are left after pruning, too many to draw; `introspect show graph` draws a part.")]
    box = f'<div class="paper" id="graph" tabindex="0" role="region" aria-label="Graph">{graph_svg(graph)}</div>'
    return [line(f"{shown}; hover one to see its statistics.", "dim"), Figure(lambda: box)]


def _kept_sentence(history: Packed) -> str:
    """Markup of a sentence: how many sites and steps the page holds, and how many sites found no room."""
    sentence = f"{count(len(history.sites), 'site')} with {count(len(history.kept), 'step')} of {history.steps:,}"
    sentence += ", values as recorded (float32)."
    left = history.total - len(history.sites)
    if left:
        sentence += f" {count(left, 'site')} found no room: `introspect show history` has all."
    return escape(sentence)
