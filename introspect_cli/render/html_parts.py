"""The parts of the page that are plain markup: the answer, tables, lists. Every text is escaped here."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from introspect_cli.health.findings import CheckResult, Level
from introspect_cli.records import count
from introspect_cli.render.text import clean, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.records import Summary


@dataclass(frozen=True)
class OpRow:
    """What one operator returned, in one run or both.

    Attributes:
        op: operator with overload, and where in its result.
        fqn: module it ran in.
        phase: forward, backward, ...
        source: `file:line` of the user's code.
        layout: shape and dtype.
        a: mean in run a, None where absent.
        b: mean in run b.
        state: `equal`, `differs`, `only in a`, `only in b`, "" for a single run.
    """

    op: str
    fqn: str
    phase: str
    source: str
    layout: str
    a: float | None
    b: float | None
    state: str


_MOST = 200


def text(value: object, limit: int = 400) -> str:
    """Any text, harmless: control characters shown as escapes, markup as characters."""
    return escape(clean(str(value), limit))


def _cells(cells: Iterable[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are markup already."""
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{_cells(row[1:])}</tr>' for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def checksum_cell(side: Summary | None) -> str:
    """A record's checksum, or the text of a plain value."""
    if side is None:
        return "not there"
    return text(side.text, 120) if side.text else f"<code>{side.checksum:016x}</code>"


def shape_cell(side: Summary | None) -> str:
    """A record's shape and dtype."""
    return "" if side is None else text(f"{'x'.join(map(str, side.layout.shape)) or 'scalar'} {side.layout.dtype}")


def stat_cell(side: Summary | None, name: str) -> str:
    """A statistic of a record in seven digits; "" where it has none."""
    return "" if side is None or name not in side.stats else text(number(side.stats[name], 7))


def settings_table(result: DiffResult) -> str:
    """Settings that differ, the strongest explanation first."""
    if not result.settings:
        return "<p>No setting differs.</p>"
    rows = [
        (
            text(change.name, 120),
            text(change.source),
            "<em>not there</em>" if change.a is None else text(change.a),
            "<em>not there</em>" if change.b is None else text(change.b),
            "can explain it" if change.explains else "",
        )
        for change in result.settings[:_MOST]
    ]
    more = len(result.settings) - len(rows)
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    return table("Settings that differ", ("setting", "from", "a", "b", ""), rows) + rest


def findings(checks: Sequence[CheckResult]) -> str:
    """What `check` found in each run."""
    parts = []
    for name, check in zip("ab", checks, strict=False):
        if len(checks) > 1:
            parts.append(f"<h3>Run {name}</h3>")
        if not check.findings:
            where = f" on {text(check.only)}" if check.only else ""
            over = count(check.steps, "step")
            parts.append(f"<p>Nothing found{where} by {count(len(check.checked), 'rule')} over {over}.</p>")
            continue
        items = []
        for own in check.findings:
            also = f" Also: {text(', '.join(own.also[:8]), 600)}." if own.also else ""
            mark = {Level.ERROR: "bad", Level.WARNING: "unsure", Level.INFO: "quiet"}[own.level]
            items.append(
                f'<li><span class="badge {mark}">{own.level.value}</span> <strong>{text(own.rule)}</strong> from step '
                f"{own.step}: <code>{text(own.site)}</code><br>{text(own.evidence, 1000)}.{also}"
                f'<br><span class="quiet">Usually: {text(own.cause)}.</span></li>'
            )
        parts.append(f'<ul class="findings">{"".join(items)}</ul>')
    return "".join(parts)


def runs_table(paths: Sequence[str], facts: Sequence[Sequence[tuple[str, str]]]) -> str:
    """What ran, side by side."""
    names = list(dict.fromkeys(name for own in facts for name, _ in own))
    columns = [dict(own) for own in facts]
    rows = [(text(name), *(text(column.get(name, "")) for column in columns)) for name in names]
    head = ["", *(f"{letter}: {text(path, 120)}" for letter, path in zip("ab", paths, strict=False))]
    return table("What ran", head, rows)


_MOST_OPS = 3000


def ops_table(ops: Sequence[OpRow], step: int, *, two: bool) -> str:
    """Operators of a step in the order in which they ran."""
    rows = []
    for own in ops[:_MOST_OPS]:
        differs = own.state not in ("", "equal")
        state = f'<span class="bad">{own.state}</span>' if differs else own.state
        cells = [text(own.op, 120), text(own.fqn, 160), text(own.phase), text(own.source, 120), text(own.layout, 80)]
        means = [number(own.a, 6), *([number(own.b, 6), state] if two else [])]
        rows.append((*cells, *means))
    more = len(ops) - len(rows)
    head = ("operator", "module", "phase", "source", "result", *(("mean a", "mean b", "") if two else ("mean",)))
    return table(f"Operators of step {step}, in the order they ran", head, rows) + (
        f"<p>and {more:,} more</p>" if more > 0 else ""
    )
