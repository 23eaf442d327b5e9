"""Possible causes of the first divergence in one ranked list: changed statements and differing settings."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import Nearness
from introspect_cli.compare.result import Candidate, Certainty, SettingChange
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.settings.documents import ARGUMENT
from introspect_cli.compare.settings.settings import MADE_BY_CODE, SAYS_NOTHING, rounds_differently

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.result import Finding


_NEAR = dict(zip(Nearness, (0.98, 0.95, 0.85, 0.7, 0.7), strict=False))
_UNLIKELY = 0.45
_IN_COMMENTS = 0.05


def mark_only_change(code: CodeChanges | None, settings: Sequence[SettingChange]) -> CodeChanges | None:
    """Changes with the only changed statement marked `Nearness.ALONE`, if it can matter and nothing else differs.

    That is, every text was read, no statement is near already, and no setting beside hardware and what code makes
    weighs over `SAYS_NOTHING`. Otherwise the changes as they are.
    """
    if code is None or len(code.ranked) != 1 or code.unread or code.likely or not code.ranked[0].can_matter:
        return code
    others = (change for change in settings if change.source not in MADE_BY_CODE)
    if any(change.weight > SAYS_NOTHING and change.source != "hardware" for change in others):
        return code
    return replace(code, ranked=(replace(code.ranked[0], nearness=Nearness.ALONE),))


def weighed_by_code(
    settings: tuple[SettingChange, ...], code: CodeChanges | None, *, rounding: bool = False
) -> tuple[SettingChange, ...]:
    """Settings re-sorted by weight, each changed file weighed by its statement nearest to the divergence.

    A file changed only in comments or names, or without a likely statement, explains nothing. Where all likely
    statements are in one function, and of all settings only what code makes explains anything, they count as near as
    BUILDS at least. Of files that weigh the same, the one with the nearest statement comes first. `settings` as they
    are where `code` is None.

    Args:
        settings: the strongest explanation first.
        code: how the source files differ.
        rounding: whether the distance is of the size of rounding: if any setting that differs rounds otherwise, files
            keep their weight, so that flags and libraries come before code.
    """
    if code is None:
        return settings
    rounding &= any(map(rounds_differently, settings))
    only = len({(one.change.file, one.change.scope) for one in code.likely}) == 1
    only &= not any(change.explains for change in settings if change.source not in MADE_BY_CODE)
    best = {one.change.file: one for one in reversed(code.ranked)}
    places = [one.change.file for one in code.ranked]  # of two files that weigh the same, the nearer one

    def weighed(change: SettingChange) -> SettingChange:
        """The setting with the weight of its file's nearest statement.

        A file without a likely statement explains nothing. Unchanged if it is no source file that explains, or where
        rounding counts.
        """
        nearest = best.get(change.name) if change.source == "sources" else None
        if change.source == "sources" and change.name in (*code.in_comments, *code.in_names):
            return replace(change, explains=False, weight=_IN_COMMENTS)
        if nearest is None or not change.explains:
            return change
        if not nearest.likely:
            return replace(change, explains=False, weight=min(change.weight, _UNLIKELY))
        near = max(_NEAR[nearest.nearness], _NEAR[Nearness.BUILDS] * only)
        return change if rounding else replace(change, weight=near)

    return tuple(
        sorted(
            map(weighed, settings),
            key=lambda one: (-one.weight, places.index(one.name) if one.name in places else 0),
        )
    )


_NO_CAUSE = frozenset({"git", "sources"})
"""Sources whose changes are told by others: what a commit changed stands in the files."""
_GIVEN = frozenset({"command", "environment", "options", "files"})
"""Sources whose names somebody wrote."""


def ranked_candidates(
    findings: Sequence[Finding], code: CodeChanges | None, settings: Sequence[SettingChange]
) -> tuple[Candidate, ...]:
    """Statements that are likely, then settings that explain, in the order given.

    Settings with the same values in a and b are one candidate, and so is an argument of one run alone with the setting
    that has its value. Left out are the git commit and nested settings; source files too, unless `code` has files that
    it could not read, or no changed statement.

    Args:
        findings: a setting is PROVED, not LIKELY, if a proved one of these has its two values; they add no candidates.
        code: what changed in the code; None where that was not compared.
        settings: the best first.
    """
    statements = [
        Candidate(
            "statement",
            one.change.scope,
            None if one.change.a is None else one.change.a.text,
            None if one.change.b is None else one.change.b.text,
            Certainty.LIKELY,
            one.change.place,
        )
        for one in (code.likely if code is not None else ())
    ]
    proved = [one.fields for one in findings if one.certainty is Certainty.PROVED]
    on_record = {(str(fields.get("a")), str(fields.get("b"))) for fields in proved if "name" in fields}
    merged: dict[tuple[str | None, str | None] | tuple[str, str], list[SettingChange]] = {}
    for change in settings:
        file = change.source == "sources" and code is not None and (code.unread or not code.ranked)
        if change.explains and (change.source not in _NO_CAUSE or file):
            tells = None not in (change.a, change.b) and not file
            merged.setdefault((change.a, change.b) if tells else (change.source, change.name), []).append(change)
    for key in [key for key, members in merged.items() if members[0].source == "command"]:
        flag = merged[key][0]
        value = flag.b if flag.a is None else flag.a if flag.b is None else None
        side = "b" if flag.a is None else "a"
        made = next((one for one, members in merged.items() if getattr(members[0], side) == value), key)
        if value is not None and made != key:  # what was made of it has its value
            merged[made] += merged.pop(key)
    return (*statements, *(_setting_candidate(members, on_record) for members in merged.values()))


def _setting_candidate(members: Sequence[SettingChange], on_record: AbstractSet[tuple[str, str]]) -> Candidate:
    """One cause for settings that were merged, named by one that a person wrote (`_GIVEN`) if there is one.

    Of those, positional arguments do not count. PROVED if a finding has its two values, else LIKELY.

    Args:
        members: the settings.
        on_record: value in a and value in b of proved findings.
    """
    named = min(members, key=lambda change: change.source not in _GIVEN or change.name.startswith(ARGUMENT))
    certainty = Certainty.PROVED if (str(named.a), str(named.b)) in on_record else Certainty.LIKELY
    sources = ", ".join(dict.fromkeys(change.source for change in members))
    return Candidate("setting", named.name, named.a, named.b, certainty, sources)


def likely_words(findings: Sequence[Finding], causes: Sequence[Candidate]) -> list[tuple[str, str]]:
    """The first `_LIKELY` likely causes: each in words, with the sources of a setting ("" for others).

    Findings of certainty LIKELY come first, then candidates that no proved finding names.
    """
    said = " ".join(one.text for one in findings if one.certainty is Certainty.PROVED)
    likely = [(one.text, "") for one in findings if one.certainty is Certainty.LIKELY]
    named = [(candidate_words(one), one.line if one.kind == "setting" else "") for one in causes]
    return [*likely, *(each for each in named if each[0] not in said)][:_LIKELY]


_LIKELY = 3
_SHOWN, _AROUND, _WORDS = 60, 12, 400
"""Characters that are shown of a statement, of these around what changed, and words of it that are compared."""


def candidate_words(one: Candidate) -> str:
    """A cause in a line: `model.py:41 (Block.__init__): x / 2 -> x / 3`, `--lr 0.05 -> 0.06`.

    Statements are shortened around what changed; one that a run lacks is `(nothing)`.
    """
    if one.kind == "statement":
        a, b = (text or "(nothing)" for text in _shortened_pair(one.a or "", one.b or ""))
        return f"{one.line}{f' ({one.name})' if one.name else ''}: {a} -> {b}"
    return describe(SettingChange(one.line.partition(",")[0], one.name, one.a, one.b))


def _shortened_pair(*texts: str) -> list[str]:
    """Two versions of a statement, one line each; if either is over `_SHOWN` characters, long equal parts become `...`.

    Each then has at most `2 * _SHOWN` characters, or `_SHOWN` where one version is empty. Only their first `_WORDS`
    words and other characters are compared and shown.
    """
    whole = [" ".join(text.split()) for text in texts]
    if max(map(len, whole)) <= _SHOWN:
        return whole
    a, b = (re.findall(r"\w+|\W", text)[:_WORDS] for text in whole)
    shown, blocks = ["", ""], SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    for number, (tag, begin, end, begin_b, end_b) in enumerate(blocks):
        pieces = "".join(a[begin:end]), "".join(b[begin_b:end_b])
        before, after = _AROUND * (number > 0), _AROUND * (number < len(blocks) - 1)
        if tag == "equal" and len(pieces[0]) > before + after + 3:
            pieces = (f"{pieces[0][:before]}...{pieces[0][len(pieces[0]) - after :]}",) * 2
        shown = [text + piece for text, piece in zip(shown, pieces, strict=True)]
    room = 2 * _SHOWN if all(whole) else _SHOWN
    return [text if len(text) <= room else f"{text[: room - 3]}..." for text in shown]
