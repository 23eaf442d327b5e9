"""Blocks as markup, and the first screen of a page: the verdict in a line, three cards, the step as it ran.

A notebook shows the same. Every text is escaped here, control characters shown as escapes; there is no script.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING

from introspect_cli.compare.result import Certainty, DiffResult, Divergence, Role, StripCell, Verdict
from introspect_cli.compare.say import what
from introspect_cli.derived import ROUNDING
from introspect_cli.labels import step_words
from introspect_cli.records import Phase
from introspect_cli.render.blocks import Block, Fold, Line, Span, Table, cut, distance, line
from introspect_cli.render.diff_text import VERDICT_STYLE, glance, page_blocks, why_lines
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONGEST = 4000


def text(value: object, limit: int = _LONGEST) -> str:
    """A value as escaped markup, control characters as visible escapes.

    It is cut to `limit` characters before `<` and `&` are escaped, so that the markup may be longer.
    """
    return escape(clean(str(value), limit))


def html_of(blocks: Iterable[Block]) -> str:
    """Blocks as markup; neighbouring lines that are not wrapped share a `<pre>`."""
    parts = []
    for as_it_is, together in groupby(blocks, lambda block: isinstance(block, Line) and not block.wrap):
        lines = [_block(block) for block in together]
        parts.append(f"<pre>{chr(10).join(lines)}</pre>" if as_it_is else "".join(lines))
    return "".join(parts)


def _block(block: Block) -> str:
    """One block as markup; an unwrapped line is left as text for a `<pre>`, an empty line is ""."""
    if isinstance(block, Line):
        said = "".join(map(_span, block.spans))
        paragraph = f'<p class="in{block.indent}">{said}</p>' * bool(said)
        return paragraph if block.wrap else f"{' ' * block.indent}{said}"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Fold):
        return f"<details><summary>{text(block.title)}</summary>{html_of(block.blocks)}</details>"
    return block.drawing()


def _span(span: Span) -> str:
    """A text as markup in its style; one of style `name` may break after each dot."""
    content, style = span
    tag, said = ("code", breakable(content)) if style == "name" else ("span", text(content))
    return f'<{tag} class="{style}">{said}</{tag}>' if style and said else said


def _table(table: Table) -> str:
    """A table as markup that scrolls sideways; the first cell of a row is its heading.

    Cells are cut at 400 characters.
    """
    titles = "".join(f'<th scope="col">{text(column.title)}</th>' for column in table.columns)
    body = "".join(
        f'<tr class="{style}"><th scope="row">{text(row[0], 400)}</th>'
        f"{''.join(f'<td>{text(cell, 400)}</td>' for cell in row[1:])}</tr>"
        for row, style in zip(table.rows, chain(table.styles, repeat("")), strict=False)
    )
    caption = text(table.caption or ", ".join(column.title for column in table.columns))
    head = f"<caption>{caption}</caption>" if table.caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>{head}'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def style() -> str:
    """The style sheet, which pages and notebooks share."""
    return (files("introspect_cli.render") / "assets" / "report.css").read_text(encoding="utf-8")


def fragment(markup: str) -> str:
    """Markup for a notebook, with a style sheet that applies to it alone."""
    return f'<div class="introspect"><style>@scope (.introspect) {{\n{style()}}}</style>{markup}</div>'


def card(title: str, big: str, rows: Iterable[tuple[str, str]], more: str = "") -> str:
    """A card as markup; rows without a value are left out. Title, `big`, `more` and rows are put in unescaped."""
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows if value)
    return f'<article class="card"><h3>{title}</h3><div class="big">{big}</div>{more}<dl>{listed}</dl></article>'


_WORD = {Verdict.SAME: "same", Verdict.DIVERGED: "diverged", Verdict.UNDECIDED: "could not tell"}
_MOST_CELLS = 400
_ROWS = {Phase.BACKWARD: "backward pass", Phase.OPTIMIZER: "after the update"}
_FORWARD = "forward pass"
_STATE_ORDER = ("equal", "not seen", "within", "differs", "only b", "only a")


def first_screen(result: DiffResult) -> str:
    """Markup of a comparison's verdict, three cards, findings and strip.

    Without a first divergence, and for checkpoints, the verdict with the whole sentence, findings and counts.
    """
    badge = f'<span class="badge {VERDICT_STYLE[result.verdict]}">{_WORD[result.verdict]}</span>'
    first, found = result.first, html_of(page_blocks(result))
    if first is None or result.subject == "checkpoints":
        return f'<p class="verdict sentence">{badge} {text(result.sentence)}</p>{found}{html_of([_count_line(result)])}'
    place = f"First divergence at {first.step_words}: {what(first.site)}"
    both = ""
    if result.training is not None and result.evaluation is not None:
        one, two = (_WORD[part.verdict] for part in (result.training, result.evaluation))
        both = f'<p class="quiet">Training: {one}. Evaluation: {two}.</p>'
    return (
        f'<p class="verdict">{badge} <strong>{text(place)}</strong></p>{both}'
        f'<div class="cards">{_where(result, first)}{_how_much(first)}{_why(result, first)}</div>'
        f"{found}{strip(result)}"
    )


def breakable(name: str) -> str:
    """A dotted name as markup that may break after each dot."""
    return text(name).replace(".", ".<wbr>")


def _where(result: DiffResult, first: Divergence) -> str:
    """The card "Where": step, module, kind and source line of the first divergence.

    Also the step of b if it is another one, and the rank if several ranks diverge.
    """
    site = first.site
    steps = text(step_words(first.step, first.labels))
    if result.counts.steps_compared:
        steps += f" <small>of {count(result.counts.steps_compared, 'step')} compared</small>"
    kind = f"{site.kind.value}{f' {site.path}' if site.path else ''}{f', call {site.call}' if site.call else ''}"
    source = first.source or result.defined_in
    rows = [
        ("record", f"{text(kind)} <small>({text(site.phase.value)})</small>"),
        ("class", text(first.module_class if first.module_class != site.fqn else "")),
        ("defined in" if not first.source else "run by", f"<code>{text(source)}</code>" if source else ""),
        ("step of b", str(first.step_b) if first.step_b != first.step else ""),
        ("rank", str(first.rank) if len({candidate.rank for candidate in result.candidates}) > 1 else ""),
    ]
    return card("Where", f'{steps}<br><code class="name">{breakable(site.fqn)}</code>', rows)


def _how_much(first: Divergence) -> str:
    """The card "How much": distance, roundings, noise floor, both values.

    In place of the distance, the run that alone has the record, or that it was not measured.
    """
    how = "from whole tensors" if first.exact else "estimated from sketches"
    big = f"{text(distance(first.rel_l2))} <small>relative L2, {how}</small>"
    if first.only or first.rel_l2 is None:
        big = f"only in {first.only}" if first.only else "not measured"
    floor = "" if first.floor is None else distance(first.floor) if first.floor else "0: the noise runs agree here"
    dtype = first.a.layout.dtype if first.a is not None else ""
    times = f"{first.rel_l2 / ROUNDING[dtype]:.3g} {dtype} rounding units" if first.rel_l2 and dtype in ROUNDING else ""
    rows = [("in roundings", text(times)), ("noise floor", text(floor))]
    if not first.only:
        one, two = map(text, glance(first))
        rows.append(("values", f'<span class="a">a {one}</span> <span class="b">b {two}</span>'))
    return card("How much", big, rows)


def _why(result: DiffResult, first: Divergence) -> str:
    """The card "Why": the first finding, or the reason, and the lines that a terminal shows.

    In place of the finding, that the cause is unknown where not all was recorded, or that none is on record where
    several causes remain.
    """
    follows = first.role is not Role.ORIGIN and first.reason != "resumed"
    known = result.explains[0].text if result.explains else first.reason
    if [one.certainty for one in result.explains[:2]] == [Certainty.LEFT] * 2:
        known = "no cause is on record"  # none of those that are left is more than the others
    blamed = "unknown: not everything was recorded" if follows else known
    return card("Why", text(blamed), (), html_of(why_lines(result) if result.head else [line(result.sentence)]))


def _count_line(result: DiffResult) -> Block:
    """A line: how many records agree, differ and were not observed."""
    counts = result.counts
    compared = f"{count(counts.records, 'record')} of {count(counts.steps_compared, 'step')} compared"
    counted = f"{counts.equal:,} agree, {counts.diverged:,} differ, {counts.not_observed:,} were not observed"
    return line(f"{compared}: {counted}.", "dim")


def rests_on(result: DiffResult) -> list[Block]:
    """Evidence, counts where there is a first divergence, and notes in a fold; no fold without notes."""
    blocks: list[Block] = [line(f"- {clause}") for clause in result.evidence]
    blocks += [_count_line(result)] * (result.first is not None)
    notes = tuple(line(f"- {note}") for note in result.notes)
    return [*blocks, Fold(f"Notes ({len(notes)})", notes)] if notes else blocks


def strip(result: DiffResult) -> str:
    """Markup of the first diverging step in order of execution; "" without a first divergence or cells."""
    if result.first is None or not result.strip:
        return ""
    each: dict[str, list[StripCell]] = {title: [] for title in (_FORWARD, *_ROWS.values())}
    for cell in result.strip:
        each[_ROWS.get(cell.site.phase, _FORWARD)].append(cell)
    rows = "".join(_strip_row(title, cells, result.first) for title, cells in each.items() if cells)
    caption = f"Step {result.first.step} of a as it ran, left to right: equal is pale, the first divergence is marked."
    return f'<figure class="strip"><figcaption>{caption}</figcaption>{rows}</figure>'


def _shade(cell: StripCell) -> str:
    """CSS class of a cell by its state; of one that differs `h0` to `h4`: how many of four bounds its distance reaches.

    `far` where the distance is unknown, `one` where only one run has the record.
    """
    if cell.state != "differs":
        return {"equal": "eq", "within": "in", "not seen": "un"}.get(cell.state, "one")
    rel = cell.rel_l2
    return "far" if rel is None else f"h{sum(rel >= bound for bound in (1e-6, 1e-4, 1e-2, 0.3))}"


def _strip_row(title: str, cells: Sequence[StripCell], first: Divergence) -> str:
    """One row of the strip, of at most `_MOST_CELLS` cells.

    Where there are more records, neighbours share a cell: it shows the first divergence if that is among them, else the
    one that is furthest from equal by state, then by distance.
    """
    fold = -(-len(cells) // _MOST_CELLS)
    wide = 100 / -(-len(cells) // fold)
    parts, mark = [], ""
    for place in range(0, len(cells), fold):
        folded = cells[place : place + fold]
        # A shared cell shows the first divergence if it holds it, else what is furthest from equal.
        lead = next((cell for cell in folded if cell.site == first.site), None)
        cell = lead or max(folded, key=lambda cell: (_STATE_ORDER.index(cell.state), cell.rel_l2 or 0.0))
        tip = cell.state if cell.rel_l2 is None else f"relative L2 {distance(cell.rel_l2)}"
        left = place // fold * wide
        parts.append(
            f'<rect class="{_shade(cell)}" x="{left:.3f}%" y="16" width="{wide:.3f}%" height="20">'
            f"<title>{text(what(cell.site))}: {tip}</title></rect>"
        )
        if lead is not None:
            at = left + wide / 2
            name = escape(cut(clean(first.site.fqn), 36, front=True))
            anchor = "start" if at < 30 else "end" if at > 70 else "middle"
            mark = (
                f'<rect class="origin" x="{left:.3f}%" y="13" width="{wide:.3f}%" height="26"/>'
                f'<text class="named" x="{at:.3f}%" y="10" text-anchor="{anchor}">{name}</text>'
            )
    equal = sum(cell.state == "equal" for cell in cells)
    label = f"{title}: {equal} of {count(len(cells), 'record')} equal"
    return (
        f'<div class="strip-row"><span>{title} <small>{equal} of {len(cells)} equal</small></span>'
        f'<svg width="100%" height="42" role="img" aria-label="{label}">{"".join(parts)}{mark}</svg></div>'
    )
