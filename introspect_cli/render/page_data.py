"""What a page is made of, and what its script draws from: one JSON document, arrays inside it compressed."""

from __future__ import annotations

import base64
import json
import math
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.derived import ROUNDING
from introspect_cli.render.json import finite
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.closeup import Closeup
    from introspect_cli.compare.result import DiffResult, Divergence, DivergenceMap
    from introspect_cli.health.findings import CheckResult
    from introspect_cli.health.history import Curve, Depth, Packed
    from introspect_cli.inspect.data_flow import Graph
    from introspect_cli.inspect.overview import Overview

LOWEST = 3
"""The level of the least distance; 253 is the largest.

0 not compared, 1 equal, 2 equal in the forward pass alone, 254 differs by an unknown distance, 255 in one run only.
"""

_SHOWN = 200


class Page(NamedTuple):
    """Everything that a page shows.

    Attributes:
        runs: the runs, a first.
        result: the comparison, where there are two.
        checks: what `check` found in each.
        curves: losses, gradient norm and learning rates of each.
        history: packed series of all runs, noise runs last.
        depths: scales along the depth by run and direction.
        noise: the map of a against each noise run.
        closeups: divergences element by element, where whole tensors were stored.
        graph: how values went from operator to operator in a step, pruned; None where no operators were captured.
    """

    runs: tuple[Overview, ...]
    result: DiffResult | None
    checks: tuple[CheckResult, ...]
    curves: tuple[tuple[Curve, ...], ...]
    history: Packed
    depths: tuple[tuple[str, Depth], ...]
    noise: tuple[DivergenceMap | None, ...] = ()
    closeups: tuple[Closeup, ...] = ()
    graph: Graph | None = None


def page_data(page: Page) -> str:
    """The JSON that the page's script reads, safe inside a script element; the first `_SHOWN` divergences alone."""
    result, history = page.result, page.history
    document: dict[str, Any] = {
        "two": result is not None,
        "first": result.first.step if result is not None and result.first is not None else None,
        "curves": _curves(page.curves),
        "sites": [
            [*map(_text, name[:3]), name[3], _text(name[4]), _text(about[0]), _text(about[1]), list(about[2]), about[3]]
            for name, about in zip(history.sites, history.about, strict=True)
        ],
        "series": [
            {stat: [[finite(cell)] if isinstance(cell, float) else cell for cell in row] for stat, row in site.items()}
            for site in history.series
        ],
        "steps": history.kept.tolist(),
        "values": packed(history.values),
        "states": packed(history.states),
        "depth": [_depth(name, depth) for name, depth in page.depths],
        "rounding": _units(history),
        "map": None,
        "divergences": [_divergence(one) for one in result.divergences[:_SHOWN]] if result is not None else [],
    }
    if result is not None and result.map is not None and result.map.modules:
        document["map"] = _map(result.map, page.noise, result)
    # Inside a script element only `<` could end it early.
    out = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return out.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def packed(array: np.ndarray[Any, Any]) -> str:
    """An array as base64 of zlib, without shape and dtype.

    Float32 is stored as four planes, of bytes of equal significance, which compresses better.
    """
    data = np.ascontiguousarray(array)
    if data.dtype == np.float32:
        data = np.ascontiguousarray(data.reshape(-1).view(np.uint8).reshape(-1, 4).T)
    return base64.b64encode(zlib.compress(data.tobytes(), 6)).decode()


def _text(value: str) -> str:
    return clean(value, 400)


def _curves(curves: Sequence[Sequence[Curve]]) -> list[dict[str, Any]]:
    """The curves of all runs by kind and name, each with its points in every run; None for a run without it."""
    sides = [{(curve.kind, curve.name): _line(curve) for curve in side} for side in curves]
    every = dict.fromkeys(key for side in sides for key in side)
    return [{"name": _text(key[1]), "kind": key[0], "lines": [side.get(key) for side in sides]} for key in every]


def _line(curve: Curve) -> list[Any]:
    """[steps, values] of a curve, no more than 2000 points, evenly chosen, in the fewest digits that read back equal.

    None for a value that is not finite.
    """
    keep = np.unique(np.linspace(0, len(curve.steps) - 1, min(len(curve.steps), 2000)).round().astype(np.int64))
    norm = curve.kind == "gradients"
    values = [float(f"{value:.9g}" if norm else str(np.float32(value))) for value in curve.values[keep]]
    return [curve.steps[keep].tolist(), [value if math.isfinite(value) else None for value in values]]


def _depth(name: str, depth: Depth) -> dict[str, Any]:
    """The scales along the depth in four digits, with their modules and dtypes; 0 for what is not finite."""
    scales = {
        side: [float(f"{value:.4g}") if math.isfinite(value) else 0.0 for value in getattr(depth, side)]
        for side in ("low", "middle", "high")
    }
    modules = [_text(module) for module in depth.names]
    return {"name": name, "total": depth.total, "modules": modules, "dtypes": list(depth.dtypes), **scales}


def _units(history: Packed) -> list[list[Any]]:
    """[dtype, rounding unit] of each dtype among the sites, the smallest unit first."""
    dtypes = {about[1] for about in history.about}
    return [[name, unit] for name, unit in sorted(ROUNDING.items(), key=lambda entry: entry[1]) if name in dtypes]


def levels_of(divergence_map: DivergenceMap) -> tuple[np.ndarray[Any, Any], int, int]:
    """Levels (rows, steps) as uint8 (see `LOWEST`), and the powers of ten (low, high) that they span.

    Those reach from the 5 % quantile of measured distances, at least 1e-8, to the largest, at most 10; (-8, 0) without
    any. Distances outside that span get the nearest level.
    """
    values, unmeasured, behind = _cells(divergence_map)
    measured, low, high = values[np.isfinite(values) & (values > 0) & ~unmeasured], -8, 0
    if len(measured):
        high = math.ceil(math.log10(min(measured.max(), 10.0)))
        low = min(math.floor(math.log10(max(np.quantile(measured, 0.05), 1e-8))), high - 1)
    with np.errstate(all="ignore"):
        scaled = np.round(LOWEST + 250 * np.clip((np.log10(values) - low) / (high - low), 0, 1))
    cases = [np.isnan(values), behind, values == 0, np.isinf(values), unmeasured]
    return np.select(cases, [0, 2, 1, 255, 254], scaled).astype(np.uint8), low, high


def _cells(found: DivergenceMap) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Distances (rows, steps), bool for unmeasured cells, and bool for cells equal in the forward pass alone."""
    shape = len(found.modules), len(found.steps)
    unmeasured, behind = (np.array(cells, np.bool_).reshape(shape) for cells in (found.unmeasured, found.behind))
    return np.array(found.values, np.float64).reshape(shape), unmeasured, behind


def _map(divergence_map: DivergenceMap, noise: Sequence[DivergenceMap | None], result: DiffResult) -> dict[str, Any]:
    """The map with its levels, the cell of the first divergence, and the noise at each step.

    The cell is [row, column], in the last step of the map up to that of the divergence; None where its module has no
    row.
    """
    levels, low, high = levels_of(divergence_map)
    names, steps, origin = divergence_map.modules, list(divergence_map.steps), None
    if result.first is not None:
        fqn = result.first.site.fqn
        owners = (fqn, fqn.rpartition(".")[0], f"random state: {fqn}")
        row = next((names.index(owner) for owner in owners if owner in names), None)
        later = next((at for at, step in enumerate(steps) if step > result.first.step), len(steps))
        origin = None if row is None else [row, later - 1]
    return {
        "names": list(map(_text, names)),
        "steps": steps,
        "levels": packed(levels),
        "low": low,
        "high": high,
        "origin": origin,
        "noise": _noise_band(noise, steps),
    }


def _noise_band(noise: Sequence[DivergenceMap | None], steps: Sequence[int]) -> list[float]:
    """The largest finite distance of any module in any noise run, per step of the map; [] without noise runs.

    0.0 at steps that no noise run has.
    """
    band = dict.fromkeys(steps, 0.0)
    for found in noise:
        if found is not None:
            distances, unmeasured, _ = _cells(found)
            largest = np.where(np.isfinite(distances) & ~unmeasured, distances, 0).max(axis=0, initial=0)
            band |= {s: max(band[s], v) for s, v in zip(found.steps, largest.tolist(), strict=True) if s in band}
    return [float(f"{value:.4g}") for value in band.values()] if noise else []


def _divergence(divergence: Divergence) -> dict[str, Any]:
    """A divergence with checksum, text, mean and standard deviation of both records."""
    site = divergence.site
    made: dict[str, Any] = {"step": divergence.step, "role": divergence.role_word, "rel": finite(divergence.rel_l2)}
    made["site"] = [site.phase.value, site.kind.value, _text(site.fqn), site.call, _text(site.path)]
    for name, summary in (("a", divergence.a), ("b", divergence.b)):
        if summary is not None:
            kept = {key: finite(float(summary.stats[key])) for key in ("mean", "std") if key in summary.stats}
            made[name] = {"checksum": f"{summary.checksum:016x}", "text": _text(summary.text), "stats": kept}
    return made
