"""Possible causes of a divergence: changed statements and differing settings, in one ranked list."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.weights import MADE_BY_CODE, rounds_differently
from introspect_cli.compare.changes.statements import Clues, CodeChanges, Nearness
from introspect_cli.compare.result import Candidate, Certainty, SettingChange
from introspect_cli.compare.settings.differences import describe, on_one_line, paired
from introspect_cli.compare.settings.settings import ARGUMENT
from introspect_cli.store.run import Sources
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.answer.compared import (
        Raised,
    )
    from introspect_cli.compare.result import Finding
    from introspect_cli.store.run import Run


# --- what may have caused it, in one ranked list


_NEAR = dict(zip(Nearness, (0.98, 0.95, 0.85, 0.7, 0.7), strict=False))
_UNLIKELY = 0.45
_IN_COMMENTS = 0.05


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
    that has its value. Left out is the git commit; source files too, unless `code` has files that
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


def candidate_words(one: Candidate) -> str:
    """A cause in a line: `model.py:41 (Block.__init__): x / 2 -> x / 3`, `--lr 0.05 -> 0.06`.

    Statements are shortened around what changed; one that a run lacks is `(nothing)`.
    """
    if one.kind == "statement":
        a, b = on_one_line(*(" ".join((text or "(nothing)").split()) for text in (one.a, one.b)))
        return f"{one.line}{f' ({one.name})' if one.name else ''}: {a} -> {b}"
    return describe(SettingChange(one.line.partition(",")[0], one.name, one.a, one.b))


# --- changed source


_MOST = 1 << 19
"""Characters of unchanged files that are parsed to see who calls whom: some seconds."""


def code_changes(a: Run, b: Run, clues: Callable[[], Clues | None]) -> CodeChanges | None:
    """Changes of source files, ranked by nearness to the first divergence, or to the exception that ended a run.

    None where either run has no digests of its files. Files have their names in b. May run git to read texts. A file
    that seems to differ in comments or names alone is `unread` where what was redacted may differ too.

    Args:
        a: one run.
        b: the other run.
        clues: names and lines of the first divergence or of the exception, made where files differ.

    Raises:
        StoreError: the text of a file is damaged.
    """
    if any("sources" not in run.settings for run in (a, b)):
        return None
    one, two = Sources(a), Sources(b)
    renamed = _names_in_b((a, b), one, two)
    names = [name for name in dict.fromkeys([*one.digests, *two.digests]) if name not in renamed.values()]
    differing = [name for name in names if one.digests.get(name) != two.digests.get(renamed.get(name, name))]
    if not differing:
        return CodeChanges(compared=len(names))
    from introspect_cli.compare.changes.near import ranked
    from introspect_cli.compare.changes.project import changed_between

    unread: list[tuple[str, str]] = []
    sides: tuple[dict[str, str], dict[str, str]] = {}, {}
    wanted = {renamed.get(name, name) for name in differing}
    for name in differing:
        other = renamed.get(name, name)
        texts = _text_of(a, one, name), _text_of(b, two, other)
        if (texts[0] is None and name in one.digests) or (texts[1] is None and other in two.digests):
            unread.append((other, "text"))
            continue
        for side, text in zip(sides, texts, strict=True):
            if text is not None:
                side[other] = text
    changes, in_comments, in_names = changed_between(*sides, [renamed.get(name, name) for name in names])
    back = {new: old for old, new in renamed.items()}
    for quiet in (in_comments, in_names):
        versions = {other: ((one, back.get(other, other)), (two, other)) for other in quiet}
        for other in [o for o in quiet if any(n in kept and not kept[n].exact for kept, n in versions[o])]:
            quiet.remove(other)
            unread.append((other, "secret"))
    every = (_texts_of(one, renamed, wanted) | sides[0]) if changes else {}, _texts_of(two, {}, wanted) | sides[1]
    return CodeChanges(ranked(changes, every, clues()), tuple(in_comments), tuple(in_names), tuple(unread), len(names))


_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PATH = re.compile(r"(?!/|-)(?!.*\.\.)[\w./ -]+\.py")
_SECONDS = 5


def _text_of(run: Run, sources: Sources, name: str) -> str | None:
    """The text of a file: of the run, else of the git clone around, if that has the file with the recorded digest.

    None where neither has it. Waits at most `_SECONDS` for git.
    """
    import subprocess

    commit, digest = run.settings.document("git").get("commit"), sources.digests.get(name)
    if name in sources:
        return sources[name].text
    if digest is None or not (isinstance(commit, str) and _COMMIT.fullmatch(commit) and _PATH.fullmatch(name)):
        return None
    words = ["git", "cat-file", "blob", f"{commit}:{name}"]
    try:
        data = subprocess.run(words, capture_output=True, timeout=_SECONDS, check=False).stdout  # noqa: S603 - no shell; the words were checked
    except (OSError, subprocess.TimeoutExpired):
        return None
    return data.decode("utf-8", "replace") if source_digest(data) == digest else None


def _names_in_b(runs: tuple[Run, Run], one: Sources, two: Sources) -> dict[str, str]:
    """Files that have another name in b, a's name to b's.

    The two scripts, then files with one partner of their basename.
    """
    scripts = [PurePath(str(run.manifest.get("script") or "")).name for run in runs]
    left, right = (
        [(name, "" if PurePath(name).name == script else PurePath(name).name) for name in sources.digests]
        for sources, script in zip((one, two), scripts, strict=True)
    )
    pairs, _ = paired(left, right, lambda file: file[0], lambda file: file[1])
    return {old: new for (old, _), (new, _) in pairs if old != new}


def _texts_of(sources: Sources, renamed: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
    """Texts that a run keeps, by their names in b: all of `wanted`, and others until `_MOST` characters are reached.

    Of the others, those in the top directories of `wanted` come first.

    Args:
        sources: of the run.
        renamed: names in this run to names in b, where they differ.
        wanted: names in b.
    """
    tops = {name.partition("/")[0] for name in wanted}
    by_name = {renamed.get(name, name): name for name in sources}
    texts: dict[str, str] = {}
    for name in sorted(by_name, key=lambda n: (n not in wanted, "/" in n and n.partition("/")[0] not in tops)):
        if name in wanted or sum(map(len, texts.values())) < _MOST:
            texts[name] = sources[by_name[name]].text
    return texts


_LINE = re.compile(r"(.+):(\d+)\Z")


def parsed_lines(lines: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """`model.py:41` as `("model.py", 41)`; lines of another form are left out."""
    return tuple((match[1], int(match[2])) for line in lines if (match := _LINE.fullmatch(line)))


def clues_of_ending(raised: Sequence[Raised]) -> Clues | None:
    """Clues where exceptions ended one run alone, or b by another one: the line of the user's code that it left.

    No line where there is none. None where no exception ended a run, or the same one both.
    """
    lines = {each.side: parsed_lines([each.where]) for each in raised[-1:] if each.side}
    return Clues("raised", lines=(lines.get("a", ()), lines.get("b", ()))) if lines else None
