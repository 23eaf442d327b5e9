"""The first screen of a page, and what a notebook shows: the verdict in a line, three cards, the step as it ran.

Everything here is markup without a script, and every text of a store is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.terms.distance import ROUNDING
from introspect_cli.compare.terms.result import DiffResult, Divergence, Role, StripCell, Verdict
from introspect_cli.compare.terms.words import what
from introspect_cli.labels import step_words
from introspect_cli.records import Kind
from introspect_cli.render.blocks import cut, distance, number
from introspect_cli.render.findings import findings_html
from introspect_cli.render.html_parts import checksum_cell, shape_cell, stat_cell, table, text
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}
_WORD = {Verdict.SAME: "same", Verdict.DIVERGED: "diverged", Verdict.UNDECIDED: "could not tell"}
_MOST_CELLS = 400
_ROWS = {"forward": "forward pass", "backward": "backward pass", "update": "after the update"}
_TELLING = ("nans", "infs", "mean", "std", "amean", "min", "max")
_STATE_ORDER = ("equal", "not seen", "within", "differs", "only b", "only a")


def first_screen(result: DiffResult) -> str:
    """Verdict, cards and strip of a comparison."""
    badge = f'<span class="badge {_STYLE[result.verdict]}">{_WORD[result.verdict]}</span>'
    if result.first is None or result.subject == "checkpoints":
        sentence = f'<p class="verdict sentence">{badge} {text(result.sentence, 4000)}</p>'
        return f"{sentence}{findings_html(result)}{_rest(result)}"
    first = result.first
    place = f"First divergence at {first.step_words}: {what(first.site)}"
    parts = [
        f'<p class="verdict">{badge} <strong>{text(place)}</strong></p>{_both_verdicts(result)}',
        f'<div class="cards">{_where(result, first)}{_how_much(result, first)}{_why(result)}</div>',
        findings_html(result),
        strip(result),
    ]
    return "".join(parts)


def _both_verdicts(result: DiffResult) -> str:
    """The verdicts on training and on evaluation, where evaluation is on record."""
    if result.training is None or result.evaluation is None:
        return ""
    one, two = (_WORD[part.verdict] for part in (result.training, result.evaluation))
    return f'<p class="quiet">Training: {one}. Evaluation: {two}.</p>'


def _card(title: str, big: str, rows: Iterable[tuple[str, str]], more: str = "") -> str:
    """One card; all but the title is markup already."""
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows if value)
    return f'<article class="card"><h3>{title}</h3><div class="big">{big}</div>{more}<dl>{listed}</dl></article>'


def breakable(name: str) -> str:
    """A dotted name that may be broken after its dots."""
    return text(name).replace(".", ".<wbr>")


def _where(result: DiffResult, first: Divergence) -> str:
    site = first.site
    steps = text(step_words(first.step, first.labels))
    if result.counts.steps_compared:
        steps += f" <small>of {count(result.counts.steps_compared, 'step')} compared</small>"
    origin = next((node for node in result.tree if node.state == "origin"), None)
    nodes = {node.fqn: node for node in result.tree}
    owner = nodes.get(site.fqn) or nodes.get(site.fqn.rpartition(".")[0]) or origin
    kind = f"{site.kind.value}{f' {site.path}' if site.path else ''}{f', call {site.call}' if site.call else ''}"
    named = first.module_class if first.module_class and first.module_class != site.fqn else ""
    source = first.source or (owner.source if owner is not None else "")
    rows = [
        ("record", f"{text(kind)} <small>({text(site.phase.value)})</small>"),
        ("class", text(named)),
        ("defined in" if not first.source else "run by", f"<code>{text(source)}</code>" if source else ""),
        ("step of b", str(first.step_b) if first.step_b != first.step else ""),
        ("rank", str(first.rank) if len({candidate.rank for candidate in result.candidates}) > 1 else ""),
    ]
    return _card("Where", f'{steps}<br><code class="name">{breakable(site.fqn)}</code>', rows)


def roundings(first: Divergence) -> str:
    """The distance in units of its dtype's rounding, in words; "" where that means nothing."""
    if first.a is None or first.b is None or first.rel_l2 is None or first.site.kind is Kind.RNG:
        return ""
    dtype = first.a.layout.dtype
    unit = ROUNDING.get(dtype)
    if unit is None or first.b.layout.dtype != dtype or not first.rel_l2 > 0:
        return ""
    k = first.rel_l2 / unit
    return f"{f'{k:,.0f}' if 10 <= k < 1e7 else number(k, 2)} {dtype} rounding units"


def _how_much(result: DiffResult, first: Divergence) -> str:
    if first.a is None or first.b is None:
        big = f"only in {'b' if first.a is None else 'a'}"
    elif first.rel_l2 is None:
        big = "not measured"
    else:
        how = "from whole tensors" if first.exact else "estimated from sketches"
        big = f"{text(distance(first.rel_l2))} <small>relative L2, {how}</small>"
    rows = [("in roundings", text(roundings(first)))]
    if first.floor is not None:
        rows.append(("noise floor", text(distance(first.floor) if first.floor else "0: the noise runs agree here")))
    pair = _telling(first)
    if pair is not None:
        name, a, b = pair
        rows.append((text(name), f'<span class="a">a {a}</span> <span class="b">b {b}</span>'))
    rows.append(("before", text(" ".join(result.before))))
    rows.append(("later", _later(result)))
    return _card("How much", big, rows)


def _telling(first: Divergence) -> tuple[str, str, str] | None:
    """The statistic that differs most, with both values."""
    if first.a is None or first.b is None:
        return None
    best: tuple[float, str] | None = None
    for name in _TELLING:
        one, two = first.a.stats.get(name), first.b.stats.get(name)
        if one is None or two is None or stat_cell(first.a, name) == stat_cell(first.b, name):
            continue
        if name in ("nans", "infs"):
            return name, stat_cell(first.a, name), stat_cell(first.b, name)
        moved = abs(one - two) / max(abs(one), abs(two)), name
        best = moved if best is None else max(best, moved)
    return None if best is None else (best[1], stat_cell(first.a, best[1]), stat_cell(first.b, best[1]))


def _later(result: DiffResult) -> str:
    """How far it has grown by the last step that was compared."""
    divergence_map, first = result.map, result.first
    if divergence_map is None or first is None or not divergence_map.steps or divergence_map.steps[-1] <= first.step:
        return ""
    column = [
        (row[-1], name)
        for row, name in zip(divergence_map.values, divergence_map.modules, strict=True)
        if row[-1] == row[-1]
    ]
    measured = [cell for cell in column if cell[0] != float("inf")]
    if not measured or max(measured)[0] == 0:
        return ""
    largest, name = max(measured)
    return f"{text(distance(largest))} at step {divergence_map.steps[-1]}, largest at <code>{breakable(name)}</code>"


def _why(result: DiffResult) -> str:
    """What the sentence says after the place, the settings that explain it, and what that rests on."""
    why = result.why or result.sentence
    settings = [change for change in result.settings if change.explains][:4]
    listed = "".join(f"<li><code>{text(describe(change), 160)}</code></li>" for change in settings)
    more = f'<p class="sentence">{text(why[0].upper() + why[1:], 4000)}</p>'
    if listed:
        more += f'<p class="quiet">Settings that differ and can explain it:</p><ul class="plain">{listed}</ul>'
    elif result.settings:
        more += f'<p class="quiet">{count(len(result.settings), "setting")} differ; none is known to explain it.</p>'
    return _card("Why", text(_blamed(result)), (), more)


def _blamed(result: DiffResult) -> str:
    """Where the cause lies, in a few words; what merely follows has none."""
    if result.first is None or (result.first.role is not Role.ORIGIN and result.first.reason != "resumed"):
        return "unknown: not everything was recorded"
    return reason_named(result.first.reason).place


def _rest(result: DiffResult) -> str:
    counts = result.counts
    counted = (
        f"{count(counts.records, 'record')} of {count(counts.steps_compared, 'step')} compared: {counts.equal:,} "
        f"agree, {counts.diverged:,} differ at {count(counts.steps_diverged, 'step')}, {counts.not_observed:,} were "
        "not observed."
    )
    return f'<p class="quiet">{counted}</p>'


def rests_on(result: DiffResult) -> str:
    """Evidence, counts and notes."""
    evidence = "".join(f"<li>{text(clause, 1000)}</li>" for clause in result.evidence)
    parts = [f"<ul>{evidence}</ul>" if evidence else "", _rest(result) if result.first is not None else ""]
    if result.notes:
        notes = "".join(f"<li>{text(note, 1000)}</li>" for note in result.notes)
        parts.append(f"<details open><summary>Notes ({len(result.notes)})</summary><ul>{notes}</ul></details>")
    return "".join(parts)


def first_table(first: Divergence) -> str:
    """Both records of the first divergence; what is equal in both is counted, not listed."""
    site = first.site
    rows = [("checksum", checksum_cell(first.a), checksum_cell(first.b))]
    rows.append(("layout", shape_cell(first.a), shape_cell(first.b)))
    names = dict.fromkeys(name for side in (first.a, first.b) if side is not None for name in side.stats)
    rows += [(text(name), stat_cell(first.a, name), stat_cell(first.b, name)) for name in names]
    shown = [row for row in rows if row[1] != row[2]]
    caption = f"Step {first.step}, {text(what(site))}: what differs"
    equal = [row[0] for row in rows if row[1] == row[2] and row[1]]
    rest = f'<p class="quiet">Equal in both as printed: {", ".join(equal)}.</p>' if equal else ""
    return table(caption, ("", "a", "b"), shown) + rest


def strip(result: DiffResult) -> str:
    """The first diverging step in the order it ran; nothing where it holds none of what the strip shows."""
    if result.first is None or not result.strip:
        return ""
    rows = []
    for row, title in _ROWS.items():
        cells = [cell for cell in result.strip if cell.row == row]
        if cells:
            rows.append(_strip_row(title, cells, result.first))
    caption = f"Step {result.first.step} of a as it ran, left to right: equal is pale, the first divergence is marked."
    return f'<figure class="strip"><figcaption>{caption}</figcaption>{"".join(rows)}</figure>'


def _shade(cell: StripCell) -> str:
    if cell.state != "differs":
        return {"equal": "eq", "within": "in", "not seen": "un"}.get(cell.state, "one")
    rel = cell.rel_l2
    return "far" if rel is None else f"h{sum(rel >= bound for bound in (1e-6, 1e-4, 1e-2, 0.3))}"


def _strip_row(title: str, cells: Sequence[StripCell], first: Divergence) -> str:
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


def run_cards(
    cards: Sequence[tuple[str, str, Sequence[tuple[str, str]]]],
) -> str:
    """Cards of a single run: title, what is large, and names with values; plain texts."""
    return (
        '<div class="cards">'
        + "".join(
            _card(text(title), text(big), [(text(name), text(value)) for name, value in rows])
            for title, big, rows in cards
        )
        + "</div>"
    )
