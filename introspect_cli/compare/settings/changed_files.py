"""A changed file among the settings that differ, by the statement of it that is most likely the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import Nearness, statement_words
from introspect_cli.compare.settings.settings import MADE_BY_CODE, SAYS_NOTHING, rounds_differently

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.changes.clues import CodeChanges
    from introspect_cli.compare.terms.result import SettingChange

_NEAR = dict(zip(Nearness, (0.98, 0.95, 0.85, 0.7, 0.7), strict=False))
_UNLIKELY = 0.45
_IN_COMMENTS = 0.05


def by_exclusion(code: CodeChanges | None, settings: Sequence[SettingChange]) -> CodeChanges | None:
    """The changes, where the one statement that changed is all that differs: names need not lead to the place then."""
    if code is None or len(code.ranked) != 1 or code.unread or code.likely or not code.ranked[0].can_matter:
        return code
    others = (change for change in settings if change.source not in MADE_BY_CODE | {"nested"})
    if any(change.weight > SAYS_NOTHING and change.source != "hardware" for change in others):
        return code
    return replace(code, ranked=(replace(code.ranked[0], nearness=Nearness.ALONE),))


def with_code(
    settings: tuple[SettingChange, ...], code: CodeChanges | None, *, rounding: bool = False
) -> tuple[SettingChange, ...]:
    """Settings that differ, a changed file by the statement of it that is most likely the cause.

    One that changed in comments alone, or in nothing that can matter to the place, explains nothing.

    Args:
        settings: the strongest explanation first.
        code: how the source files differ.
        rounding: whether the distance is of the size of rounding: flags and libraries that differ come before code.
    """
    if code is None:
        return settings
    rounding &= any(map(rounds_differently, settings))
    only = len({(one.change.file, one.change.scope) for one in code.likely}) == 1
    only &= not any(change.explains for change in settings if change.source not in MADE_BY_CODE)
    best = {one.change.file: one for one in reversed(code.ranked)}
    files = dict.fromkeys(one.change.file for one in code.ranked)
    place = {file: number for number, file in enumerate(files)}  # of two files that weigh the same, the nearer one
    weighed = []
    for change in settings:
        nearest = best.get(change.name) if change.source == "sources" else None
        if change.source == "sources" and change.name in (*code.in_comments, *code.in_names):
            alone = "comments" if change.name in code.in_comments else "the names of variables"
            change = replace(change, b=f"changed, in {alone} alone", explains=False, weight=_IN_COMMENTS)  # noqa: PLW2901
        elif nearest is not None and change.explains and not nearest.likely:
            change = replace(change, explains=False, weight=min(change.weight, _UNLIKELY))  # noqa: PLW2901
        elif nearest is not None and change.explains:
            where = change.b if nearest.change.unit == "file" else f"changed at {statement_words(nearest)}"
            weight = change.weight if rounding else max(_NEAR[nearest.nearness], _NEAR[Nearness.BUILDS] * only)
            other = change.a if nearest.change.unit == "file" else ""  # of a file that moved, too
            change = replace(change, a=other, b=where, weight=weight)  # noqa: PLW2901
        weighed.append((place.get(change.name, 0), change))
    return tuple(change for _, change in sorted(weighed, key=lambda one: (-one[1].weight, one[0])))
