"""One self-contained page about a run, or two: everything inline, nothing fetched, nothing of a stranger executed.

Texts from stores stand in the page as escaped text or as JSON in a block that is no script, and reach the document
through `textContent` alone. The page's policy allows the two scripts that were put in, by their hashes, and nothing
else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import count
from introspect_cli.render.graph import graph_svg
from introspect_cli.render.html_parts import OpRow, answer, findings, ops_table, runs_table, settings_table
from introspect_cli.render.html_plots import bokeh_script, depth_item, history_item, map_item
from introspect_cli.render.json import finite
from introspect_cli.render.text import clean

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult, Divergence, DivergenceMap
    from introspect_cli.health.findings import CheckResult
    from introspect_cli.health.history import Depth, Packed
    from introspect_cli.inspect.data_flow import Graph

MOST_CELLS = 2_000_000
"""Cells of the map; neighbouring rows share one where there are more."""

MOST_NODES = 600
"""Operators that a picture may have."""

_SHOWN = 200


@dataclass(frozen=True)
class Page:
    """What a page is made of.

    Attributes:
        paths: the runs, a first.
        facts: of each of them, what ran: names and values.
        result: the comparison, where there are two.
        checks: what `check` found in each.
        history: packed series of all runs, noise runs last.
        depths: scales along the depth by run and direction.
        noise: how many noise runs there are.
        ops: operators of one step in order, where they were captured.
        ops_step: which step that is.
        graph: how values went from operator to operator in that step, pruned; None where there is nothing to draw.
    """

    paths: tuple[str, ...]
    facts: tuple[tuple[tuple[str, str], ...], ...]
    result: DiffResult | None
    checks: tuple[CheckResult, ...]
    history: Packed
    depths: tuple[tuple[str, Depth], ...]
    noise: int = 0
    ops: tuple[OpRow, ...] = ()
    ops_step: int = 0
    graph: Graph | None = None


def page_html(page: Page) -> str:
    """The page.

    Raises:
        UsageError: the plotting library is not installed.
    """
    assets = files("introspect_cli.render") / "assets"
    script = (assets / "report.js").read_text(encoding="utf-8")
    library = bokeh_script()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"font-src data:; script-src {_hash(library)} {_hash(script)}"
    )
    title = " and ".join(clean(path, 80) for path in page.paths)
    two = page.result is not None
    folded = _folded(page.result.map) if page.result is not None and page.result.map is not None else None
    values = {
        "policy": policy,
        "title": escape(title),
        "style": (assets / "report.css").read_text(encoding="utf-8"),
        "answer": answer(page.result) if page.result is not None else "",
        "settings": settings_table(page.result) if page.result is not None else "",
        "findings": findings(page.checks),
        "runs": runs_table(page.paths, page.facts),
        "ops": _picture(page.graph) + ops_table(page.ops, page.ops_step, two=two) if page.ops else "",
        "ops_hidden": "" if page.ops else "hidden",
        "map_hidden": "" if folded is not None and folded[1] else "hidden",
        "answer_hidden": "" if two else "hidden",
        "depth_hidden": "" if page.depths else "hidden",
        "b_hidden": "" if two else "hidden",
        "kept": _kept(page.history),
        "data": _data(page, folded),
        "library": library,
        "script": script,
    }
    out = (assets / "report.html").read_text(encoding="utf-8")
    parts = out.split("%%")
    return "".join(values[part] if place % 2 else part for place, part in enumerate(parts))


def _picture(graph: Graph | None) -> str:
    """The graph of operators, which draws itself without a script; nothing where it is too large to look at."""
    if graph is None or not graph.nodes:
        return ""
    shown = f"{len(graph.nodes):,} of {graph.total:,} results of operators at step {graph.step}"
    if len(graph.nodes) > MOST_NODES:
        return f"<p>{shown} are left after pruning, too many to draw; `introspect show --graph` draws a part.</p>"
    label = f"{shown}; hover one to see its statistics"
    box = f'<div class="paper" tabindex="0" role="region" aria-label="Graph">{graph_svg(graph)}</div>'
    return f'<p class="quiet">{label}.</p>{box}'


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _kept(history: Packed) -> str:
    thinned = f"Drawn: {count(len(history.steps), 'step')}. "
    if len(history.sites) == history.total:
        return escape(thinned)
    return escape(
        f"{thinned}Histories of {len(history.sites):,} of {history.total:,} sites are in this page; "
        "`introspect show --history` has all."
    )


def _packed(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()


def _data(page: Page, folded: tuple[np.ndarray[Any, Any], list[list[str]], list[int]] | None) -> str:
    history = page.history
    document: dict[str, Any] = {
        "two": page.result is not None,
        "noise": page.noise,
        "steps": history.steps.tolist(),
        "sites": [
            [*map(_text, name[:3]), name[3], _text(name[4]), _text(about[0]), _text(about[1]), list(about[2]), about[3]]
            for name, about in zip(history.sites, history.about, strict=True)
        ],
        "series": [
            {stat: [int(log), finite(low), finite(high), *rows] for stat, (log, low, high, rows) in own.items()}
            for own in history.series
        ],
        "values": _packed(history.values),
        "states": _packed(history.states),
        "exact": {"steps": list(history.exact_steps), "values": _packed(history.exact)},
        "plots": {
            "linear": history_item(log=False),
            "log": history_item(log=True),
            "depth": depth_item(list(page.depths)) if page.depths else None,
            "map": None,
        },
        "map": None,
        "divergences": [],
    }
    if page.result is not None:
        listed = [own for own in page.result.divergences[:_SHOWN] if own != page.result.first]
        first = [{**_divergence(page.result.first), "first": True}] if page.result.first is not None else []
        document["divergences"] = [*first, *map(_divergence, listed)]
        if folded is not None:
            levels, names, steps = folded
            document["map"] = {
                "rows": levels.shape[0],
                "names": [[_text(name) for name in row] for row in names],
                "steps": steps,
                "levels": _packed(levels),
            }
            document["plots"]["map"] = map_item(levels.shape[0], steps, max(len(_text(row[0])) for row in names))
    # Inside a script element only `<` could end it early.
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _text(text: str) -> str:
    return clean(text, 400)


def _divergence(own: Divergence) -> dict[str, Any]:
    site = own.site
    sides = {}
    for name, summary in (("a", own.a), ("b", own.b)):
        if summary is not None:
            kept = {key: finite(float(value)) for key, value in summary.stats.items()}
            sides[name] = {
                "checksum": f"{summary.checksum:016x}",
                "dtype": _text(summary.layout.dtype),
                "shape": list(summary.layout.shape),
                "text": _text(summary.text),
                "stats": kept,
            }
    return {
        "step": own.step,
        "site": [site.phase.value, site.kind.value, _text(site.fqn), site.call, _text(site.path)],
        "role": own.role.value,
        "rel": finite(own.rel_l2) if own.rel_l2 is not None else None,
        **sides,
    }


def level(value: float) -> int:
    """A relative distance as a colour: 0 not compared, 1 equal, 3 to 254 from 1e-8 to 1, 255 only in one run.

    2 stands for a module whose forward pass is equal while its tensors or gradients differ.
    """
    if math.isnan(value):
        return 0
    if value == 0:
        return 1
    if math.isinf(value):
        return 255
    return round(3 + 251 * min(max((math.log10(value) + 8) / 8, 0.0), 1.0))


def _folded(found: DivergenceMap) -> tuple[np.ndarray[Any, Any], list[list[str]], list[int]]:
    """Levels (rows, steps), the modules of each row, and the steps."""
    values = np.array(found.values, np.float64).reshape(len(found.modules), len(found.steps))
    with np.errstate(all="ignore"):
        scaled = np.round(3 + 251 * np.clip((np.log10(values) + 8) / 8, 0, 1))
    behind = np.array(found.behind, np.bool_).reshape(values.shape)
    cases = [np.isnan(values), behind, values == 0, np.isinf(values)]
    levels = np.select(cases, [0, 2, 1, 255], scaled).astype(np.uint8)
    fold = max(1, -(-levels.size // MOST_CELLS))
    names = [list(found.modules[row : row + fold]) for row in range(0, len(found.modules), fold)]
    if fold > 1:
        levels = np.maximum.reduceat(levels, np.arange(0, len(levels), fold), axis=0)
    return levels, names, list(found.steps)
