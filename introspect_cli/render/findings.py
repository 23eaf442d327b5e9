"""What a comparison finds beside the divergences: the forms of each type of finding, in text, on a page and as JSON.

A new type of finding has its forms here, in a row of each table at the end, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.compare.answer.restored import head_of, together
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.step.structure import SHOWN, clause_of
from introspect_cli.compare.terms.findings import Restored, Resumption
from introspect_cli.compare.terms.result import DiffResult, SettingChange, Verdict
from introspect_cli.render.blocks import Block, Line, line, rest_of
from introspect_cli.render.divergence_text import HEADS, code_blocks
from introspect_cli.render.html_parts import table, text
from introspect_cli.render.plain import divergence_document, plain
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.changes.clues import Ranked
    from introspect_cli.compare.changes.statements import Side

_SHOWN_SETTINGS = 3
_SHOWN_STRUCTURE = 12
_LIKELY, _MOST = 3, 100
_LONGEST, _LINES = 200, 40
_LONGEST_CODE = 4000
"""Characters of one changed statement in JSON."""


def findings_blocks(result: DiffResult, *, everything: bool, short: bool = False) -> list[Block]:
    """Each finding as lines; in `short`, not what stands among the causes already."""
    told = (_code_blocks, _settings_blocks) if short else ()
    return [block for blocks_of in _TEXT if blocks_of not in told for block in blocks_of(result, everything)]


def findings_html(result: DiffResult) -> str:
    """Each finding as markup."""
    return "".join(html_of(result) for html_of in _PAGE)


def findings_document(result: DiffResult) -> dict[str, Any]:
    """Each finding as plain values, by its key; what always has a key may be empty or None."""
    documents = {key: document_of(result) for key, document_of in _DOCUMENT.items()}
    return {key: value for key, value in documents.items() if value is not None or key in _ALWAYS}


# --- what a resumed run goes on with


def _resumed_blocks(result: DiffResult, _everything: bool) -> list[Block]:
    """What a resumed run goes on with: what was not restored a line each, the rest in a line."""
    resumed = result.resumed
    if resumed is None:
        return []
    blocks: list[Block] = [line(), line(f"{_resumed_title(resumed)}:", "heading")]
    for state in (Restored.NO, Restored.YES, Restored.UNSEEN):
        parts = together([part for part in resumed.parts if part.state is state])
        if parts:
            blocks.append(line(clean(f"{state.value}: {'; '.join(parts)}"), "bad" if state is Restored.NO else "", 2))
    return blocks


def _resumed_title(resumed: Resumption) -> str:
    return f"What run {resumed.run} begins with, against step {resumed.at} of {resumed.whole}"


def _resumed_html(result: DiffResult) -> str:
    """What a resumed run goes on with, a row for each part."""
    resumed = result.resumed
    if resumed is None:
        return ""
    rows = [(text(part.part), text(part.state.value), text(part.text)) for part in resumed.parts]
    head = f'<p class="sentence">{text(head_of(resumed))}</p>' if result.first is not None else ""
    return head + table(_resumed_title(resumed), ("part", "", ""), rows)


# --- what rests on nothing that differs


def _several(result: DiffResult) -> bool:
    """Whether there is another origin beside the first divergence."""
    return any(origin.divergence != result.first for origin in result.origins)


def _origins_blocks(result: DiffResult, _everything: bool) -> list[Block]:
    """Every origin, where there are several; the parts of a checkpoint are listed as such."""
    if not _several(result) or all(origin.part for origin in result.origins):
        return []
    blocks: list[Block] = [line(), line("Independent divergences (nothing they depend on differs):", "heading")]
    blocks += [line(clean(origin.sentence), indent=2) for origin in result.origins]
    return blocks


def _origins_html(result: DiffResult) -> str:
    """Every origin, where there are several."""
    if not _several(result):
        return ""
    lines = "".join(f"<li>{text(origin.sentence, 1000)}</li>" for origin in result.origins)
    return (
        f'<p class="quiet">Independent divergences (nothing they depend on differs):</p><ul class="plain">{lines}</ul>'
    )


def _origins_document(result: DiffResult) -> list[dict[str, Any]] | None:
    if not _several(result) and not any(origin.part for origin in result.origins):
        return None
    return [
        {
            "sentence": origin.sentence,
            "part": origin.part or None,
            "divergence": divergence_document(origin.divergence) if origin.divergence else None,
        }
        for origin in result.origins
    ]


# --- what differs besides numbers


def _structure_blocks(result: DiffResult, everything: bool) -> list[Block]:
    """What differs in structure, with what that rests on; nothing where the sentence has said it all."""
    changes = tuple(change for change in result.structure if not (result.head and clause_of(change) in result.head))
    in_sentence = result.verdict is not Verdict.DIVERGED and len(changes) <= SHOWN
    if not changes or (in_sentence and not any(change.evidence for change in changes)):
        return []
    shown = changes if everything else changes[:_SHOWN_STRUCTURE]
    blocks: list[Block] = [line(), line("What differs besides numbers:", "heading")]
    for change in shown:
        rests_on = f" ({change.evidence})" if change.evidence else ""
        blocks.append(line(clean(f"{clause_of(change)}{rests_on}"), indent=2))
    return [*blocks, *rest_of(len(changes), len(shown), "--all lists them", 2)]


# --- how the source files differ


def _code_blocks(result: DiffResult, _everything: bool) -> list[Block]:
    code = result.code
    return code_blocks(code) if result.verdict is Verdict.DIVERGED or (code is not None and code.likely) else []


def _code_html(result: DiffResult) -> str:
    """The likely changes, and all others folded; nothing where no source file differs."""
    code = result.code
    if code is None or result.first is None or not (code.ranked or code.in_comments or code.in_names):
        return ""
    shown = code.likely[:_LIKELY]
    parts = [_figure(one) for one in shown]
    rest = code.ranked[len(shown) : _MOST]
    if rest:
        more = f"{count(len(code.ranked) - len(shown), 'more changed statement')} in {count(code.files, 'file')}"
        likely = len(code.likely) - len(shown)
        folded = "".join(map(_figure, rest))
        parts.append(f"<details><summary>{more}, {likely or 'none'} of them likely</summary>{folded}</details>")
    if code.in_comments:
        names = ", ".join(code.in_comments[:_MOST])
        parts.append(f'<p class="quiet">Changed in comments alone: {text(names)}.</p>')
    if code.in_names:
        names = ", ".join(code.in_names[:_MOST])
        parts.append(f'<p class="quiet">Changed in the names of variables alone: {text(names)}.</p>')
    return f'<div class="code">{"".join(parts)}</div>'


def _figure(one: Ranked) -> str:
    change = one.change
    scope = f" in <code>{text(change.scope)}</code>" if change.scope else ""
    caption = f"<code>{text(change.place)}</code>{scope} <small>{text(HEADS[one.nearness].lower())}</small>"
    sides = "".join(_side(name, side) for name, side in (("a", change.a), ("b", change.b)))
    return f'<figure><figcaption>{caption}</figcaption><div class="sides">{sides}</div></figure>'


def _side(name: str, side: Side | None) -> str:
    if side is None:
        return f'<pre class="{name}"><small>{name}</small> not there</pre>'
    lines = f"{name} {side.first}" if side.first == side.last else f"{name} {side.first}-{side.last}"
    code = "\n".join(text(row, _LONGEST) for row in side.text.splitlines()[:_LINES])
    return f'<pre class="{name}"><small>{lines}</small>\n{code}</pre>'


def _code_document(result: DiffResult) -> dict[str, Any] | None:
    """Changed statements, the most likely cause first."""
    code = result.code
    if code is None:
        return None
    return {
        "changes": [
            {
                "place": one.change.place,
                "file": one.change.file,
                "scope": one.change.scope,
                "unit": one.change.unit,
                "nearness": one.nearness.value,
                "likely": one.likely,
                "a": _lines(one.change.a),
                "b": _lines(one.change.b),
            }
            for one in code.ranked
        ],
        "in_comments": list(code.in_comments),
        "in_names": list(code.in_names),
        "unread": [{"file": name, "why": why} for name, why in code.unread],
    }


def _lines(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {"first": side.first, "last": side.last, "text": side.text[:_LONGEST_CODE]}


# --- settings: their values stand in JSON and on a page in places of their own


def _settings_blocks(result: DiffResult, everything: bool) -> list[Block]:
    settings = result.settings
    counts = result.counts
    shorter = result.verdict is Verdict.UNDECIDED and counts.steps_a != counts.steps_b  # why one run ends earlier
    if not settings or not (everything or shorter or result.verdict is Verdict.DIVERGED):
        return []
    # not what is shown as a changed statement
    settings = tuple(change for change in settings if change.source != "sources" or not _is_shown(change, result))
    explaining = [change for change in settings if change.explains]
    if not settings:
        return []
    shown = settings if everything else tuple(explaining[:_SHOWN_SETTINGS] or settings[:_SHOWN_SETTINGS])
    title = "Settings that differ and can explain it:" if explaining else "Settings that differ:"
    blocks: list[Block] = [line(), line(title, "heading")]
    return [*blocks, *map(_setting, shown), *rest_of(len(settings), len(shown), "--settings lists them", 2)]


def _is_shown(change: SettingChange, result: DiffResult) -> bool:
    best = result.code.ranked[0] if result.code is not None and result.code.ranked else None
    return best is not None and best.likely and best.change.file == change.name


def settings_blocks(result: DiffResult) -> list[Block]:
    """What differs besides numbers, what can explain the divergence first."""
    if not result.settings:
        return [line("No setting that both runs kept differs.")]
    blocks: list[Block] = []
    for title, chosen in (("These can explain the divergence:", True), ("Other settings that differ:", False)):
        changes = [change for change in result.settings if change.explains is chosen]
        if changes:
            blocks += [line(), line(title, "heading"), *map(_setting, changes)]
    return blocks[1:]


def _setting(change: SettingChange) -> Line:
    return Line(((clean(describe(change), 240), "name"), (f"  ({clean(change.source)})", "dim")), indent=2)


# --- how far rounding carries


def _reach_blocks(result: DiffResult, _everything: bool) -> list[Block]:
    """Where b is furthest from a, beside what rounding makes there."""
    reach = result.reach
    if reach is None or reach.furthest is None:
        return []
    seeds, far = ", ".join(map(str, reach.seeds)), reach.furthest
    text = f"b is {far.times:.2g} x as far from a as one rounding of the parameters (--perturb {seeds}) carries it, at"
    return [line(), line(f"{text} {clean(far.text)} in step {far.step}, the most in {count(reach.measured, 'step')}.")]


_TEXT: tuple[Callable[[DiffResult, bool], list[Block]], ...] = (
    _resumed_blocks,
    _origins_blocks,
    _structure_blocks,
    _code_blocks,
    _settings_blocks,
    _reach_blocks,
)
_PAGE: tuple[Callable[[DiffResult], str], ...] = (_code_html, _resumed_html, _origins_html)
_DOCUMENT: dict[str, Callable[[DiffResult], Any]] = {
    "structure": lambda result: plain(result.structure),
    "code": _code_document,
    "origins": _origins_document,
    "resumed": lambda result: plain(result.resumed),
    "reach": lambda result: plain(result.reach),
}
_ALWAYS = frozenset({"structure", "code"})
