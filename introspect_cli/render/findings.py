"""What a comparison finds beside the divergences: each type of finding as blocks and as JSON.

A new type of finding has its forms here, in a row of each table at the end, and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.outcome import SHOWN, clause_of
from introspect_cli.compare.result import DiffResult, Restored, SettingChange, Verdict
from introspect_cli.compare.say import head_of, parts_words
from introspect_cli.compare.settings.differences import describe
from introspect_cli.render.blocks import Block, Fold, Line, line, rest_of, section
from introspect_cli.render.divergence_text import changes_blocks
from introspect_cli.render.plain import plain
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.changes.statements import Side

_SHOWN_SETTINGS = 3
_SHOWN_STRUCTURE = 12
_LIKELY, _MOST = 3, 100
_LONGEST_CODE = 4000
"""Characters of one changed statement in JSON."""


def findings_blocks(result: DiffResult, *, everything: bool, settings: bool = False) -> list[Block]:
    """Lines of each finding: parts of a checkpoint, independent divergences, structure, settings.

    Args:
        result: the comparison.
        everything: whether lists are shown whole.
        settings: whether settings that differ are among the findings.
    """
    rows = (*_TEXT, _settings_blocks) if settings else _TEXT
    return [block for blocks_of in rows for block in blocks_of(result, everything)]


def page_blocks(result: DiffResult) -> list[Block]:
    """The findings for a page: the first `_LIKELY` likely changes, others up to `_MOST` in a fold, and the rest.

    Changes and what a resumed run lost only where there is a first divergence.
    """
    blocks: list[Block] = []
    code, resumed = result.code, result.resumed
    if code is not None and result.first is not None and (code.ranked or code.in_comments or code.in_names):
        shown = replace(code, ranked=code.likely[:_LIKELY])
        blocks += changes_blocks(shown) if shown.ranked or code.in_comments or code.in_names else []
        rest = code.ranked[len(shown.ranked) : _MOST]
        more = f"{count(len(code.ranked) - len(shown.ranked), 'more changed statement')} in {count(code.files, 'file')}"
        likely = len(code.likely) - len(shown.ranked) or "none"
        folded = changes_blocks(replace(code, ranked=rest, in_comments=(), in_names=(), unread=()))
        blocks += [Fold(f"{more}, {likely} of them likely", tuple(folded))] if rest else []
    if resumed is not None and result.first is not None:
        blocks.append(line(head_of(resumed)))
    return [*blocks, *findings_blocks(result, everything=True)]


def findings_document(result: DiffResult) -> dict[str, Any]:
    """Plain values of each finding by key; a key without a value is left out, except those in `_ALWAYS`."""
    documents = {key: document_of(result) for key, document_of in _DOCUMENT.items()}
    return {key: value for key, value in documents.items() if value is not None or key in _ALWAYS}


# --- what a resumed run goes on with


def _resumed_blocks(result: DiffResult, _everything: bool) -> list[Block]:
    """What a resumed run restored: a line for what was not, for what was, and for what cannot be told.

    [] where no run resumed.
    """
    resumed = result.resumed
    if resumed is None:
        return []
    styles = {Restored.NO: "bad", Restored.YES: "", Restored.UNSEEN: ""}
    by_state = {state: parts_words([part for part in resumed.parts if part.state is state]) for state in styles}
    lines = [
        line(clean(f"{state.value}: {'; '.join(parts)}"), styles[state], 2)
        for state, parts in by_state.items()
        if parts
    ]
    return section(f"What run {resumed.run} begins with, against step {resumed.at} of {resumed.whole}:", lines)


# --- what rests on nothing that differs


def _has_several_origins(result: DiffResult) -> bool:
    """Whether there is an origin other than the first divergence."""
    return any(origin.divergence != result.first for origin in result.origins)


def _origins_blocks(result: DiffResult, everything: bool) -> list[Block]:
    """A line per origin; [] where there is only the first divergence.

    Without `everything`, also [] where all origins are parts of a checkpoint that were not restored.
    """
    if not _has_several_origins(result) or (not everything and all(origin.part for origin in result.origins)):
        return []
    origins = (line(clean(origin.sentence), indent=2) for origin in result.origins)
    return section("Independent divergences (nothing they depend on differs):", origins)


def _origins_document(result: DiffResult) -> list[dict[str, Any]] | None:
    """Origins as plain values; None where there is only the first divergence, and it is no part of a checkpoint."""
    if not _has_several_origins(result) and not any(origin.part for origin in result.origins):
        return None
    return [
        {"sentence": origin.sentence, "part": origin.part or None, "divergence": plain(origin.divergence)}
        for origin in result.origins
    ]


# --- what differs besides numbers


def _structure_blocks(result: DiffResult, everything: bool) -> list[Block]:
    """Lines on differences in structure that the head does not name, with their evidence.

    [] where there are none, or where a verdict other than DIVERGED names them all in its sentence and none has
    evidence.
    """
    changes = tuple(change for change in result.structure if not (result.head and clause_of(change) in result.head))
    in_sentence = result.verdict is not Verdict.DIVERGED and len(changes) <= SHOWN
    if not changes or (in_sentence and not any(change.evidence for change in changes)):
        return []
    shown = changes if everything else changes[:_SHOWN_STRUCTURE]
    clauses = (f"{clause_of(change)}{f' ({change.evidence})' if change.evidence else ''}" for change in shown)
    rest = rest_of(len(changes), len(shown), "--all lists them", 2)
    return section("What differs besides numbers:", [*(line(clean(each), indent=2) for each in clauses), *rest])


# --- how the source files differ


def _code_document(result: DiffResult) -> dict[str, Any] | None:
    """Changed statements as plain values, the most likely cause first; None where the sources are not known."""
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
    """Lines of a changed statement, and its text cut at `_LONGEST_CODE` characters; None for None."""
    if side is None:
        return None
    return {"first": side.first, "last": side.last, "text": side.text[:_LONGEST_CODE]}


# --- settings: their values stand in JSON and on a page in places of their own


def _settings_blocks(result: DiffResult, everything: bool) -> list[Block]:
    """Differing settings: all with `everything`; else the first few, and only of UNDECIDED runs of unequal lengths.

    [] otherwise. Source files whose changed statements are known are left out.
    """
    counts, told = result.counts, {one.change.file for one in result.code.ranked} if result.code is not None else ()
    settings = [one for one in result.settings if one.source != "sources" or one.name not in told]
    if not settings or not (everything or (result.verdict is Verdict.UNDECIDED and counts.steps_a != counts.steps_b)):
        return []
    shown = settings if everything else settings[:_SHOWN_SETTINGS]
    rest = rest_of(len(settings), len(shown), "--settings lists them", 2)
    return section("Settings that differ:", [*map(_setting, shown), *rest])


def settings_blocks(result: DiffResult) -> list[Block]:
    """All differing settings, those that can explain the divergence first; a line where none differs."""
    if not result.settings:
        return [line("No setting that both runs kept differs.")]
    blocks: list[Block] = []
    for title, chosen in (("These can explain the divergence:", True), ("Other settings that differ:", False)):
        blocks += section(title, [_setting(change) for change in result.settings if change.explains is chosen])
    return blocks[1:]


def _setting(change: SettingChange) -> Line:
    """A line: how a setting differs, and the document it is in."""
    return Line(((clean(describe(change), 240), "name"), (f"  ({clean(change.source)})", "dim")), indent=2)


_TEXT: tuple[Callable[[DiffResult, bool], list[Block]], ...] = (
    _resumed_blocks,
    _origins_blocks,
    _structure_blocks,
)
_DOCUMENT: dict[str, Callable[[DiffResult], Any]] = {
    "structure": lambda result: plain(result.structure),
    "code": _code_document,
    "origins": _origins_document,
    "resumed": lambda result: plain(result.resumed),
}
_ALWAYS = frozenset({"structure", "code"})
