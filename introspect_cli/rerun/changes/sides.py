"""Two runs with the texts of their files, all that differs between them, and what lies around a."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.project import changed_between
from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.say import some
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.edits import edits_of
from introspect_cli.rerun.changes.elements import Difference, Element, differing_settings
from introspect_cli.rerun.changes.texts import opened_texts, place_of_source, source_texts
from introspect_cli.rerun.changes.units import join_edits, overlaps
from introspect_cli.rerun.place import Surroundings, survey
from introspect_cli.rerun.recipe import Recipe, UnrepeatableError, recipe_of
from introspect_cli.rerun.variant import started_at
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.store.run import Run

_SHOWN = 5
_UNRANKED = 1 << 30


@dataclass(frozen=True)
class Sides:
    """Both runs' texts and the differences between the runs.

    Attributes:
        recipe: how a can be run again.
        around: what lies around a.
        places: path of each source and opened file in a's directories, by name.
        a: text of each of a's files, by name.
        b: text of each of b's, by the name that the file has in a.
        elements: what differs.
        unknown: what differs and cannot be tried, as clauses.
    """

    recipe: Recipe
    around: Surroundings
    places: Mapping[str, Path]
    a: Mapping[str, str]
    b: Mapping[str, str]
    elements: tuple[Element, ...]
    unknown: tuple[str, ...]


def sides_of(a: Run, b: Run, output: Path) -> Sides:
    """Collect the texts of two runs and everything that differs between them; `output` is where variants will run.

    A text of a that is kept nowhere is taken from b, if both recorded the same digest. Packages that differ are only
    named among `unknown`.

    Raises:
        UsageError: a cannot be run again, recorded no sources, or the text of one is not kept and was changed since.
        StoreError: a run is damaged.
    """
    recipe, recipe_b = recipe_of(a), _recipe_for_texts(b)
    one, two = source_texts(a, recipe), source_texts(b, recipe_b)
    if not recipe.sources:
        raise UsageError(f"{a.path} recorded no source files: capture it again with this version")
    in_a = _names_in_a(recipe, recipe_b, one.root, two.root)
    digests_b = {in_a.get(name, name): digest for name, digest in recipe_b.sources.items()}
    differing = {name for name, digest in digests_b.items() if recipe.sources.get(name) != digest}
    texts_b = {in_a.get(name, name): text for name, text in two.texts.items()}
    texts_a = {name: texts_b[name] for name in one.missing if name in texts_b.keys() - differing} | dict(one.texts)
    gone = [name for name in one.missing if name not in texts_a and one.places[name].is_file()]
    if gone:
        raise UsageError(
            f"the text of {some(gone, _SHOWN)} is not kept in {a.path}, and it was changed since: capture the run again"
        )
    settings, secret = differing_settings(a, b)
    opened, unknown = opened_texts((a, b), (recipe.directory, recipe_b.directory), (one.root, two.root))
    lost_b = [in_a.get(name, name) for name in two.missing if in_a.get(name, name) in differing]
    redacted = differing & {*one.redacted, *(in_a.get(name, name) for name in two.redacted)}
    unknown += [f"{name}: its text in b is not kept" for name in lost_b]
    unknown += [f"{name}: its text in a is not kept" for name in one.missing if name in differing - texts_a.keys()]
    unknown += [f"{name}: its value was redacted" for name in secret]
    unknown += [f"{name}: secrets were taken out of its text" for name in sorted(redacted)]
    installed = (run.settings.document("packages") for run in (a, b))
    packages = [f"{name} {was} -> {now}" for name, was, now in unequal(*installed) if was and now]
    if packages:
        unknown.append(f"{count(len(packages), 'package')} of another version: {some(packages, _SHOWN)}")
    places = {name: place_of_source(name, recipe, one.root) for name in {*texts_a, *texts_b}}
    places |= {text.name: text.place for text in opened}
    times, is_one = [started_at(run) for run in (a, b)], os.path.realpath(one.root) == os.path.realpath(two.root)
    before = times[0] if not is_one else None if None in times else min(filter(None, times))
    around = survey(one.root, recipe.directory, {*places.values()}, before, output)
    changes = _changed_sources(texts_a, texts_b, differing)
    changes += [change for text in opened for change in edits_of(text.name, text.a, text.b)]
    return Sides(
        recipe=recipe,
        around=around,
        places=places,
        a=texts_a | {text.name: text.a for text in opened},
        b=texts_b | {text.name: text.b for text in opened},
        elements=(*changes, *settings),
        unknown=tuple(unknown),
    )


def _changed_sources(
    texts_a: Mapping[str, str], texts_b: Mapping[str, str], differing: AbstractSet[str]
) -> list[Change]:
    """The changes of the source files in `differing` whose text both runs have, by name, joined by `join_edits`."""
    names = sorted(differing & texts_b.keys() & texts_a.keys())
    one, two = ({name: texts[name] for name in names} for texts in (texts_a, texts_b))
    edits = [edit for name in names for edit in edits_of(name, one[name], two[name])]
    more = {name: text for name, text in texts_b.items() if name in differing and name not in texts_a}
    computes, *_ = changed_between(one, {**two, **more}, texts_b)
    return join_edits(edits, one, two, computes)


def _recipe_for_texts(run: Run) -> Recipe:
    """The recipe of a run; where it cannot be run again, one with only its directory, script and sources."""
    try:
        return recipe_of(run)
    except UnrepeatableError:
        command, sources = run.settings.document("command"), run.settings.document("sources")
        directory = Path(str(command.get("directory") or "."))
        return Recipe((), (), (), directory, script=str(command.get("script") or ""), sources=dict(sources))


def _names_in_a(a: Recipe, b: Recipe, root_a: Path, root_b: Path) -> dict[str, str]:
    """B's source name of its script mapped to that of a's, where they are two names of one script; {} otherwise.

    They are where b recorded a source of b's name and none of a's. {} also where either ran a module.
    """
    if not a.script or not b.script:
        return {}
    name_a, name_b = (
        os.path.relpath(os.path.realpath(recipe.directory / recipe.script), root)
        for recipe, root in ((a, root_a), (b, root_b))
    )
    return {name_b: name_a} if name_a not in b.sources and name_b in b.sources else {}


# --- the likeliest first


def likely_first(elements: Sequence[Element], recorded: DiffResult) -> tuple[tuple[Element, ...], int]:
    """`elements` sorted by how likely `recorded` finds each the cause, and how many at the beginning are likely.

    What the comparison names among its settings comes first, in that order; of a source file only the statements that
    it calls likely. Then all others: statements in the order of their rank, settings last. Likely are those before the
    first whose setting or file does not explain the divergence.
    """
    settings = {change.name: place for place, change in reversed([*enumerate(recorded.settings)])}
    explaining = {change.name for change in recorded.settings if change.explains}
    ranked = list(enumerate(recorded.code.ranked if recorded.code is not None else ()))

    def order(element: Element) -> tuple[int, int]:
        """Sort key: (place among the settings of `recorded`, place among its ranked statements, for a statement).

        `_UNRANKED` for what is not there, and as the first for a statement that is not likely.
        """
        if isinstance(element, Change) and element.unit != "value":
            found = ((place, one.likely) for place, one in ranked if overlaps(element, one.change))
            place, likely = next(found, (_UNRANKED, False))
            return (settings.get(element.file, _UNRANKED) if likely else _UNRANKED, place)
        return (settings.get(_setting_name(element), _UNRANKED + isinstance(element, Difference)), 0)

    ordered = tuple(sorted(elements, key=order))
    likely = [order(element)[0] < _UNRANKED and _setting_name(element) in explaining for element in ordered]
    return ordered, [*likely, False].index(False)


def _setting_name(element: Element) -> str:
    """The element's name among the comparison's settings: `file:key` of a value, file, option or variable."""
    if isinstance(element, Change):
        return element.place if element.unit == "value" else element.file
    return element.name
