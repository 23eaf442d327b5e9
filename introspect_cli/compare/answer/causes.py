"""Possible causes of a divergence: changed statements and differing settings, in one ranked list."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import CodeChanges, Nearness, Ranked, code_on_one_line
from introspect_cli.compare.result import Candidate, Certainty, SettingChange
from introspect_cli.compare.settings.differences import describe, on_one_line, paired
from introspect_cli.compare.settings.settings import ARGUMENT
from introspect_cli.store.run import Sources

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from introspect_cli.compare.answer.compared import Raised
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.store.run import Run


# --- what may have caused it, in one ranked list


_NO_CAUSE = frozenset({"git", "sources"})
"""Sources whose changes are told by others: what a commit changed stands in the files."""
_GIVEN = frozenset({"command", "environment", "options", "files"})
"""Sources whose names somebody wrote."""


def ranked_candidates(
    findings: Sequence[Finding], code: CodeChanges | None, settings: Sequence[SettingChange]
) -> tuple[Candidate, ...]:
    """Statements that are likely, then settings that explain, in the order given.

    Settings with the same values in a and b are one candidate, and so is an argument of one run alone with the setting
    that has its value. Left out is the git commit; source files too, unless `code` has files that it could not read, or
    no changed statement.

    Each is named by one that a person wrote (`_GIVEN`) if there is one; of those, positional arguments do not count.

    Args:
        findings: a setting is PROVED, not LIKELY, if a proved one of these has its two values; they add no candidates.
        code: what changed in the code; None where that was not compared.
        settings: the best first.
    """
    statements = []
    for change in (one.change for one in (code.likely if code is not None else ())):
        a, b = (None if side is None else side.text for side in (change.a, change.b))
        statements.append(Candidate("statement", change.scope, a, b, Certainty.LIKELY, change.place, change.before))
    unknown = code is not None and (code.unread or not code.ranked)
    groups: list[list[SettingChange]] = []
    for setting in settings:
        if setting.explains and (setting.source not in _NO_CAUSE or (unknown and setting.source == "sources")):
            group = next((group for group in groups if any(_is_one_change(each, setting) for each in group)), [])
            groups += [] if group else [group]
            group.append(setting)
    proved = (one.fields for one in findings if one.certainty is Certainty.PROVED)
    on_record = {(str(fields.get("a")), str(fields.get("b"))) for fields in proved if "name" in fields}
    causes = []
    for members in groups:
        named = min(members, key=lambda change: change.source not in _GIVEN or change.name.startswith(ARGUMENT))
        certainty = Certainty.PROVED if (str(named.a), str(named.b)) in on_record else Certainty.LIKELY
        sources = ", ".join(dict.fromkeys(change.source for change in members))
        causes.append(Candidate("setting", named.name, named.a, named.b, certainty, sources))
    return (*statements, *causes)


def _is_one_change(one: SettingChange, two: SettingChange) -> bool:
    """Whether two settings have the same values in a and b; of an argument of one run alone, that run's."""
    both = [(x, y) for x, y in ((one.a, two.a), (one.b, two.b)) if None not in (x, y)]
    enough = len(both) == 2 or (len(both) == 1 and "command" in (one.source, two.source))
    return enough and all(x == y for x, y in both)


def likely_words(findings: Sequence[Finding], causes: Sequence[Candidate]) -> list[tuple[str, str]]:
    """The first `_LIKELY` likely causes: each in words, with the sources of a setting ("" for others).

    Findings of certainty LIKELY come first, then candidates that no finding of these, nor a proved one, names.
    """
    said = " ".join(one.text for one in findings if one.certainty in {Certainty.PROVED, Certainty.LIKELY})
    likely = [(one.text, "") for one in findings if one.certainty is Certainty.LIKELY]
    named = [(candidate_words(one), one.line if one.kind == "setting" else "") for one in causes]
    return [*likely, *(each for each in named if each[0] not in said)][:_LIKELY]


_LIKELY = 3


def candidate_words(one: Candidate) -> str:
    """A cause in a line: `model.py:41 (Block.__init__): x / 2 -> x / 3`, `--lr 0.05 -> 0.06`.

    Statements are shortened around what changed; one that a run lacks is `(nothing)`, one that both have `(moved)`.
    """
    if one.kind == "statement":
        text_a, text_b = (code_on_one_line(text or "(nothing)") for text in (one.a, one.b))
        a, b = on_one_line(text_a, text_b, one.before)
        if a == b:  # what changed lies behind what is shown
            a, b = on_one_line(text_a, text_b)
        return f"{one.line}{f' ({one.name})' if one.name else ''}: {f'{a} -> {b}' if a != b else f'{b} (moved)'}"
    return describe(SettingChange(one.line.partition(",")[0], one.name, one.a, one.b))


# --- changed source


_MOST = 1 << 19
"""Characters of unchanged files that are parsed to see who calls whom: some seconds."""


def ranked_code(code: CodeChanges | None, at: View | None = None, ending: Raised | None = None) -> CodeChanges | None:
    """Changes of the code ranked by nearness to a divergence, or to where an exception ended a run, without texts."""
    if code is None or not code.ranked or not (at or ending):
        return code
    from introspect_cli.compare.answer.near import ranked

    return code._replace(ranked=ranked(code, at, ending), texts=({}, {}))


def code_changes(a: Run, b: Run) -> CodeChanges | None:
    """What differs between the source files of two runs; None where either run has no digests of its files.

    Files have their names in b, and changes stand in the order of the code.

    A file that seems to compute the same is `unread` where what was redacted may differ too.

    Raises:
        StoreError: the text of a file is damaged.
    """
    if any("sources" not in run.settings for run in (a, b)):
        return None
    one, two = Sources(a), Sources(b)
    renamed = _names_in_b((a, b), one, two)
    of_a, of_b = {renamed.get(name, name): name for name in one.digests}, {name: name for name in two.digests}
    names = list(dict.fromkeys([*of_a, *of_b]))
    differing = [name for name in names if one.digests.get(of_a.get(name, "")) != two.digests.get(name)]
    if not differing:
        return CodeChanges(compared=len(names))
    from introspect_cli.compare.changes.project import changed_between

    runs = (one, of_a), (two, of_b)
    unread = {name: "text" for name in differing if any(name in of and of[name] not in kept for kept, of in runs)}
    side_a, side_b = (
        {name: kept[of[name]].text for name in differing if name in of and name not in unread} for kept, of in runs
    )
    changes, classes, quiet = changed_between(side_a, side_b, names)
    unread |= {name: "secret" for name in quiet if not all(kept[of[name]].exact for kept, of in runs)}
    unchanged = tuple(name for name in quiet if name not in unread)
    every = [_texts_of(kept, of, differing) if changes else {} for kept, of in runs]
    ranked = tuple(Ranked(change, Nearness.ELSEWHERE) for change in changes)
    return CodeChanges(ranked, unchanged, tuple(unread.items()), len(names), (every[0], every[1]), classes)


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


def _texts_of(kept: Sources, of: Mapping[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Texts that a run keeps, by their names in b: all of `wanted`, and others until `_MOST` characters are reached.

    Of the others, those of no directory come first, such as the script, then those beside `wanted`, then those in their
    top directories.

    Args:
        kept: files of the run.
        of: names in b to names in this run.
        wanted: names in b.
    """
    near, texts = {name[:end] for name in wanted for end in (name.find("/"), name.rfind("/"))}, dict[str, str]()

    def order(name: str) -> tuple[bool, ...]:
        """What names are sorted by."""
        return name not in wanted, "/" in name, name.rpartition("/")[0] not in near, name.partition("/")[0] not in near

    for name in sorted(of, key=order):
        if of[name] in kept and (name in wanted or sum(map(len, texts.values())) < _MOST):
            texts[name] = kept[of[name]].text
    return texts
