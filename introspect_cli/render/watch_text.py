"""A run that goes on, on one screen: how far it is, its curves, what a check finds, its distance to a reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.health.findings import Level
from introspect_cli.labels import step_words
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Line, line
from introspect_cli.render.check_text import summary
from introspect_cli.render.map_text import map_blocks
from introspect_cli.render.text import clean, number, sparkline

if TYPE_CHECKING:
    from introspect_cli.health.curves import Curve
    from introspect_cli.health.look import Look

_CURVES = 4
_FINDINGS = 5
_MODULES = 8
_STYLE = {Level.ERROR: "bad", Level.WARNING: "unsure", Level.INFO: "dim"}


def watch_blocks(
    look: Look, width: int, against: tuple[str, DiffResult | None] | None = None, *, ascii_only: bool = False
) -> list[Block]:
    """The whole screen."""
    room = min(width, 80)
    blocks: list[Block] = [Line(((clean(look.path), "heading"), (f"  {watch_line(look)}", "")))]
    for curve in look.curves[:_CURVES]:
        blocks += _curve(curve, room, ascii_only=ascii_only)
    blocks.append(line())
    if against is not None:
        blocks += _distance(look, *against, room)
    for finding in look.check.findings[:_FINDINGS]:
        head = (f"{finding.level.value}: ", _STYLE[finding.level]), (finding.rule, "heading")
        blocks.append(Line((*head, (f" from step {finding.step}: {clean(finding.site)}", ""))))
        blocks.append(line(clean(finding.evidence), indent=2))
    more = len(look.check.findings) - _FINDINGS
    if more > 0:
        blocks.append(line(f"and {more} more (`introspect check` lists them)", "dim"))
    checked = summary(look.check) if look.check.checked else "no rule has what it looks at yet"
    blocks.append(line(f"check: {checked}", "dim"))
    return blocks


def watch_line(look: Look) -> str:
    """How far the run is, in a line."""
    average = "" if look.recent else " on average"
    rate = f", {number(look.rate, 3)} steps/s{average}" if look.rate is not None else ""
    where = "no step yet" if look.last is None else step_words(look.last, look.labels)
    return f"{look.state.value}, {where}{rate}"


def _curve(curve: Curve, room: int, *, ascii_only: bool) -> list[Block]:
    values = curve.values.tolist()
    finite = [value for value in values if math.isfinite(value)]
    span = f", {number(min(finite))} to {number(max(finite))}" if finite else ""
    last = number(values[-1]) if math.isfinite(values[-1]) else "not finite"
    return [
        Line(((clean(curve.name), "heading"), (f"  {last} at step {curve.steps[-1]}{span}", ""))),
        line(sparkline(values, room, ascii_only=ascii_only), "name", wrap=False),
    ]


def _distance(look: Look, name: str, result: DiffResult | None, room: int) -> list[Block]:
    if result is None:
        return [line(f"against {clean(name)}: nothing to compare yet", "dim"), line()]
    if result.verdict is Verdict.DIVERGED:
        said, style = result.sentence, "bad"
    elif look.over:
        said, style = result.sentence, "good" if result.verdict is Verdict.SAME else "unsure"
    else:
        counts = result.counts
        within = f", {counts.within:,} of them within the tolerance" if counts.within else ""
        agree = f"{count(counts.equal, 'record')} of {count(counts.steps_compared, 'step')} agree{within}"
        said, style = f"no divergence so far: {agree}", "good" if counts.equal else "unsure"
    blocks: list[Block] = [line(f"against {clean(name)}: {clean(said)}", style)]
    if result.verdict is Verdict.DIVERGED:
        blocks += map_blocks(result, room, _MODULES)
    return [*blocks, line()]
