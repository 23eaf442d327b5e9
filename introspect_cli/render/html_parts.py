"""The parts of the page that are plain markup: tables, lists, pictures. Every text is escaped here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.compare.elements import ulp_words
from introspect_cli.compare.terms.words import what
from introspect_cli.render.blocks import number, shape, statistic
from introspect_cli.render.divergence_text import elements_words
from introspect_cli.render.values_text import axes_words, cell_words, element_rows, scale_of, scale_words
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.closeup import Closeup
    from introspect_cli.compare.elements import Picture
    from introspect_cli.compare.terms.result import DiffResult
    from introspect_cli.health.findings import CheckResult
    from introspect_cli.records import Record, Summary
    from introspect_cli.render.page_data import OpRow


_MOST = 200
_MOST_OPS = 3000
_CELL = 8
_SHADES = 12


def text(value: object, limit: int = 400) -> str:
    """Any text, harmless: control characters shown as escapes, markup as characters."""
    from html import escape  # with a table of entities, which a comparison on a terminal does not need

    return escape(clean(str(value), limit))


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], total: int = 0) -> str:
    """A table, and how many more rows there are than it has; cells are markup already."""
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{_cells(row[1:])}</tr>' for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
        + (f"<p>and {total - len(rows):,} more</p>" if total > len(rows) else "")
    )


def checksum_cell(side: Summary | None) -> str:
    """A record's checksum, or the text of a plain value."""
    if side is None:
        return "not there"
    return text(side.text, 120) if side.text else f"<code>{side.checksum:016x}</code>"


def shape_cell(side: Summary | None) -> str:
    """A record's shape and dtype."""
    return "" if side is None else text(f"{shape(side.layout.shape)} {side.layout.dtype}")


def stat_cell(side: Summary | None, name: str) -> str:
    """A statistic of a record in seven digits; "" where it has none."""
    return text(statistic(side, name, 7))


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
    return table("Settings that differ", ("setting", "from", "a", "b", ""), rows, len(result.settings))


def findings(checks: Sequence[CheckResult]) -> str:
    """What `check` found in each run."""
    from introspect_cli.health.findings import Level

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
        for finding in check.findings:
            also = f" Also: {text(', '.join(finding.also[:8]), 600)}." if finding.also else ""
            mark = {Level.ERROR: "bad", Level.WARNING: "unsure", Level.INFO: "quiet"}[finding.level]
            items.append(
                f'<li><span class="badge {mark}">{finding.level.value}</span> <strong>{text(finding.rule)}</strong> '
                f"from step {finding.step}: <code>{text(finding.site)}</code><br>{text(finding.evidence, 1000)}.{also}"
                f'<br><span class="quiet">Usually: {text(finding.cause)}.</span></li>'
            )
        parts.append(f'<ul class="findings">{"".join(items)}</ul>')
    return "".join(parts)


def runs_table(paths: Sequence[str], facts: Sequence[Sequence[tuple[str, str]]]) -> str:
    """What ran, side by side."""
    names = list(dict.fromkeys(name for named in facts for name, _ in named))
    columns = [dict(named) for named in facts]
    rows = [(text(name), *(text(column.get(name, "")) for column in columns)) for name in names]
    head = ["", *(f"{letter}: {text(path, 120)}" for letter, path in zip("ab", paths, strict=False))]
    return table("What ran", head, rows)


def ops_table(ops: Sequence[OpRow], step: int, *, two: bool) -> str:
    """Operators of a step in the order in which they ran."""
    rows = []
    for a, b in ops[:_MOST_OPS]:
        record = a or b
        assert record is not None, "one run has it"
        site, layout = record.site, record.summary.layout
        cells = [text(site.path or record.info.op, 120), text(site.fqn, 160), text(site.phase.value)]
        cells += [text(record.info.source, 120), text(f"{shape(layout.shape)} {layout.dtype}", 80)]
        means = [number(side.summary.stats.get("mean") if side is not None else None, 6) for side in (a, b)]
        rows.append((*cells, *means, _state(a, b)) if two else (*cells, means[0]))
    head = ("operator", "module", "phase", "source", "result", *(("mean a", "mean b", "") if two else ("mean",)))
    return table(f"Operators of step {step}, in the order they ran", head, rows, len(ops))


def _state(a: Record | None, b: Record | None) -> str:
    if a is not None and b is not None and a.summary.checksum == b.summary.checksum:
        return "equal"
    return f'<span class="bad">{"only in a" if b is None else "only in b" if a is None else "differs"}</span>'


def closeups_html(closeups: Sequence[Closeup]) -> str:
    """The divergences that whole tensors were stored of; nothing where there are none."""
    return "".join(
        _closeup(closeup)
        for closeup in closeups
        if closeup.difference is not None and closeup.difference.elements.differing
    )


def _closeup(closeup: Closeup) -> str:
    difference = closeup.difference
    assert difference is not None, "only what has elements is drawn"
    name = what(closeup.divergence.site)
    clauses = [f"{elements_words(difference.elements)}."]
    clauses += [f"Which: {'; '.join(difference.where)}."] * bool(difference.where)
    clauses += [f"How: {'; '.join(difference.relation)}."] * bool(difference.relation)
    rows = [tuple(map(text, cells)) for cells in element_rows(difference.largest)]
    parts = [
        f"<h3>{text(name[:1].upper() + name[1:])}, element by element</h3>",
        *(f"<p>{text(clause, 1000)}</p>" for clause in clauses),
        picture_svg(difference.picture),
        table("The largest differences", ("element", "a", "b", "|a-b|"), rows),
    ]
    if difference.ulps:
        bins = [(text(ulp_words(low)), text(f"{times:,}")) for low, times in difference.ulps]
        parts.append(table(f"Elements by distance in ULPs of {text(difference.unit)}", ("ULPs", "elements"), bins))
    return "".join(parts)


def picture_svg(picture: Picture) -> str:
    """The grid as squares, darker where the difference is larger, on a scale of powers."""
    low, high = scale_of(picture)
    tall, wide = len(picture.cells), len(picture.cells[0])
    squares = []
    for y, row in enumerate(picture.cells):
        for x, cell in enumerate(row):
            if cell:
                shade = f"{_opacity(cell, low, high):.2f}"
                squares.append(f'<rect x="{x}" y="{y}" width="1.02" height="1.02" fill-opacity="{shade}"/>')
    scale = f"{scale_words(low, high)}, " if high else ""
    label = f"{scale}blank where equal; {axes_words(picture)}; a square is {cell_words(picture)}."
    return (
        f'<figure class="closeup"><svg viewBox="0 0 {wide} {tall}" width="{wide * _CELL}" height="{tall * _CELL}" '
        f'preserveAspectRatio="none" role="img" aria-label="{text(label)}">{"".join(squares)}</svg>'
        f"<figcaption>{text(label)}</figcaption></figure>"
    )


def _opacity(cell: float, low: float, high: float) -> float:
    """From a sixth to 1, in a few shades; 1 where not finite."""
    if cell == math.inf or low >= high:
        return 1.0
    shade = round(math.log(cell / low) / math.log(high / low) * _SHADES) / _SHADES
    return 1 / 6 + 5 / 6 * shade
