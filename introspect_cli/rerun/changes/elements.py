"""What differs between two runs and can be changed by itself: statements, files, settings, the interpreter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.project import changed_between
from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.terms.words import some
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.edits import edits_of
from introspect_cli.rerun.changes.minimise import SETTINGS, Difference, Element, differences
from introspect_cli.rerun.changes.texts import decoded, opened_texts, place_of_source, texts_of
from introspect_cli.rerun.changes.units import overlap, units
from introspect_cli.rerun.recipe import Recipe, UnrepeatableError, recipe_of
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.terms.result import DiffResult
    from introspect_cli.store.read.run import Run


_MOST = 5


@dataclass(frozen=True)
class Sides:
    """Both runs' source texts and recipes, and the differences between them.

    Attributes:
        recipe: how a can be run again.
        root: a's project.
        places: where each source file lies in a's directories, by its name.
        a: text of each of a's source files, by name.
        b: text of each of b's, by the name that the file has in a.
        elements: what differs.
        unknown: what differs and cannot be tried, as clauses.
        root_b: b's project.
        places_b: where b's source files lie.
        directory_b: where b ran.
        commits: the commits that the runs come from, "" where that was not recorded.
        opened: names of those among the texts that are no source, but opened by the script.
    """

    recipe: Recipe
    root: Path
    places: Mapping[str, Path]
    a: Mapping[str, str]
    b: Mapping[str, str]
    elements: tuple[Element, ...]
    unknown: tuple[str, ...]
    root_b: Path
    places_b: Collection[Path]
    directory_b: Path
    commits: tuple[str, str]
    opened: frozenset[str] = frozenset()

    @property
    def inert(self) -> dict[str, str]:
        """Text of source files that only b has, by name; without effect until imported."""
        return {name: text for name, text in self.b.items() if name not in self.a}


def sides_of(a: Run, b: Run) -> Sides:
    """Collect the source texts of two runs and everything that differs between them.

    Raises:
        UsageError: a cannot be run again from what it recorded.
        StoreError: a run is damaged.
    """
    recipe, recipe_b = recipe_of(a), _recipe_for_texts(b)
    one, two = texts_of(a, recipe), texts_of(b, recipe_b)
    if not recipe.sources:
        raise UsageError(f"{a.path} recorded no source files: capture it again with this version")
    names = _names_in_a(recipe, recipe_b, one.root, two.root)
    digests_b = {names.get(name, name): digest for name, digest in recipe_b.sources.items()}
    differing = {name for name, digest in digests_b.items() if recipe.sources.get(name) != digest}
    written = {names.get(name, name): text for name, text in two.texts.items()}
    texts_a = {**{name: written[name] for name in one.missing if name in written.keys() - differing}, **one.texts}
    gone = [name for name in one.missing if name not in texts_a and one.places[name].is_file()]
    if gone:
        raise UsageError(
            f"the text of {some(gone, _MOST)} is not kept in {a.path}, and the file was changed since: capture it again"
        )
    texts_a |= _not_imported(written.keys() - recipe.sources.keys(), recipe, one.root)
    changes = _changed_sources(texts_a, written, differing)
    settings, secret = differences(a, b)
    elements: list[Element] = [*changes, *settings]
    unknown = [f"{name}: its text in b is not kept" for name in two.missing if names.get(name, name) in differing]
    unknown += [f"{name}: its text in a is not kept" for name in one.missing if name in differing - texts_a.keys()]
    unknown += [f"{name}: its value was redacted" for name in secret]
    redacted = differing & {*one.redacted, *(names.get(name, name) for name in two.redacted)}
    unknown += [f"{name}: secrets were taken out of its text" for name in sorted(redacted)]
    opened, untried = opened_texts((a, b), (recipe.directory, recipe_b.directory), (one.root, two.root))
    elements += [change for text in opened for change in edits_of(text.name, text.a, text.b)]
    unknown += untried
    installed = (run.settings.document("packages") for run in (a, b))
    packages = [f"{name} {was} -> {now}" for name, was, now in unequal(*installed) if was and now]
    if packages and recipe_b.python != recipe.python and Path(recipe_b.python or "/").is_file():
        name = f"python, and {len(packages)} packages"
        elements.append(Difference("python", name, recipe.python, recipe_b.python))
    elif packages:
        unknown.append(f"{count(len(packages), 'package')} of another version: {some(packages, _MOST)}")
    return Sides(
        recipe=recipe,
        root=one.root,
        places={name: place_of_source(name, recipe, one.root) for name in {*texts_a, *written}}
        | {text.name: text.places[0] for text in opened},
        a=texts_a | {text.name: text.a for text in opened},
        b=written | {text.name: text.b for text in opened},
        elements=tuple(elements),
        unknown=tuple(unknown),
        root_b=two.root,
        places_b=(*two.places.values(), *(text.places[1] for text in opened)),
        directory_b=recipe_b.directory,
        commits=(recipe.commit, recipe_b.commit),
        opened=frozenset(text.name for text in opened),
    )


def _not_imported(names: AbstractSet[str], recipe: Recipe, root: Path) -> dict[str, str]:
    """Text by name of those files `names` that exist in a's project, though a did not import them."""
    places = {name: place_of_source(name, recipe, root) for name in names}
    texts = {name: decoded(path.read_bytes()) for name, path in places.items() if path.is_file()}
    return {name: text for name, text in texts.items() if text is not None}


def _changed_sources(
    texts_a: Mapping[str, str], texts_b: Mapping[str, str], differing: AbstractSet[str]
) -> list[Change]:
    """The changes of differing source files, grouped by `units`; those that change what is computed first."""
    names = sorted(differing & texts_b.keys() & texts_a.keys())
    one, two = ({name: texts[name] for name in names} for texts in (texts_a, texts_b))
    edits = [edit for name in names for edit in edits_of(name, one[name], two[name])]
    more = {name: text for name, text in texts_b.items() if name in differing and name not in texts_a}
    computes, *_ = changed_between(one, {**two, **more}, texts_b)
    return units(edits, one, two, computes)


def _recipe_for_texts(run: Run) -> Recipe:
    """The recipe of a run; where it cannot be run again, only directory, script and sources."""
    try:
        return recipe_of(run)
    except UnrepeatableError:
        command, sources = run.settings.document("command"), run.settings.document("sources")
        directory = Path(str(command.get("directory") or "."))
        script = str(command.get("script") or "")
        return Recipe((), (), (), directory, script=script, sources=dict(sources))


def _names_in_a(a: Recipe, b: Recipe, root_a: Path, root_b: Path) -> dict[str, str]:
    """B's script name mapped to a's, where the two differ; {} otherwise."""
    if not a.script or not b.script:
        return {}
    name_a, name_b = (
        os.path.relpath(os.path.realpath(recipe.directory / recipe.script), root)
        for recipe, root in ((a, root_a), (b, root_b))
    )
    return {name_b: name_a} if name_a not in b.sources and name_b in b.sources else {}


_LAST = 1 << 30


def likely_first(elements: Sequence[Element], recorded: DiffResult) -> tuple[tuple[Element, ...], int]:
    """`elements` sorted by how likely `recorded` finds each the cause, and how many of the first are called likely."""
    settings = {change.name: place for place, change in reversed([*enumerate(recorded.settings)])}
    code = recorded.code.ranked if recorded.code is not None else ()
    ranked = list(enumerate(code))

    def order(element: Element) -> tuple[int, int]:
        """Sort key of an element: its rank among the likely causes, `_LAST` for others."""
        if isinstance(element, Change) and element.unit != "value":
            found = ((place, one.likely) for place, one in ranked if overlap(element, one.change))
            place, likely = next(found, (_LAST, False))
            before = place if recorded.first is None else settings.get(element.file, _LAST)
            return (before if likely else _LAST, place)
        is_setting = isinstance(element, Difference) and element.axis in SETTINGS
        return (settings.get(_name(element), _LAST + is_setting), 0)

    ordered = tuple(sorted(elements, key=order))
    explaining = {change.name for change in recorded.settings if change.explains}
    explaining |= set() if recorded.first is not None else {one.change.file for one in code if one.likely}
    likely = [order(element)[0] < _LAST and _name(element) in explaining for element in ordered]
    return ordered, [*likely, False].index(False)


def _name(element: Element) -> str:
    """The element's name among the comparison's settings: key, file, option or variable; "" for the interpreter."""
    if isinstance(element, Change):
        return element.place if element.unit == "value" else element.file
    return "" if element.axis == "python" else element.name
