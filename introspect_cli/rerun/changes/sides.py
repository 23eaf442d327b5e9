"""Two runs with what their files held, all that differs between them, and what lies around a."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from introspect_cli.compare.changes.project import changed_between
from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.say import some
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.settings.settings import ARGUMENT, ENV_NOISE, OPTION, arguments
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.edits import Edit, edits_of, join_edits, overlaps
from introspect_cli.rerun.place import Surroundings, survey
from introspect_cli.rerun.recipe import Recipe, recipe_of
from introspect_cli.rerun.recorded import decoded, project_root, recorded_files
from introspect_cli.rerun.variant import started_at
from introspect_cli.store.files import REDACTED
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.store.run import Run

_SHOWN = 5
_UNRANKED = 1 << 30


@dataclass(frozen=True)
class Sides:
    """Both runs' files and the differences between the runs.

    Attributes:
        recipe: how a can be run again.
        around: what lies around a.
        places: path of each file in a's directories, by name.
        a: what each of a's files held, by name.
        b: what each of b's did, by the name that the file has in a.
        edits: what each change of a file replaces, by file and both sides.
        elements: what differs.
        unknown: what differs and cannot be tried, as clauses.
    """

    recipe: Recipe
    around: Surroundings
    places: Mapping[str, Path]
    a: Mapping[str, bytes]
    b: Mapping[str, bytes]
    edits: Mapping[object, Sequence[Edit]]
    elements: tuple[Element, ...]
    unknown: tuple[str, ...]


def sides_of(a: Run, b: Run, output: Path) -> Sides:
    """Collect the files of two runs and everything that differs between them; `output` is where variants will run.

    A text of a that is kept nowhere is taken from b, if both recorded the same digest. Packages that differ are only
    named among `unknown`.

    Raises:
        UsageError: a cannot be run again, recorded no sources, or the text of one is not kept and was changed since.
        StoreError: a run is damaged.
    """
    recipe, recipe_b = recipe_of(a), recipe_of(b)
    if recipe.problem or not recipe.sources:
        raise UsageError(recipe.problem or f"{a.path} recorded no source files: capture it again with this version")
    one, two = recorded_files(a, recipe), recorded_files(b, recipe_b, _names_in_a(recipe, recipe_b))
    both = sorted(two.sources | two.digests.keys() & one.digests.keys())
    differing = [name for name in both if one.digests.get(name) != two.digests[name]]
    wanted = {*one.sources, *two.sources, *differing}
    held_b = two.held(wanted)
    equal = {name: data for name, data in held_b.items() if one.digests.get(name) == two.digests[name]}
    held_a = equal | one.held(wanted)
    gone = [name for name in sorted(one.sources - held_a.keys()) if one.places[name].is_file()]
    if gone:
        text = f"the text of {some(gone, _SHOWN)} is not kept in {a.path}"
        raise UsageError(f"{text}, and it was changed since: capture the run again")
    settings = differing_settings((a, b), (recipe, recipe_b))
    secret = [each for each in settings if REDACTED in (each.a, each.b)]
    unknown = [f"{each.name}: its value was redacted" for each in secret]
    for side, files, held in (("a", one, held_a), ("b", two, held_b)):
        why = f"its text in {side} is not kept as it was, or lies outside of the project"
        there = filter(files.digests.__contains__, differing)
        unknown += [f"{name}: {why}" for name in there if name not in held or files.is_redacted(name, held[name])]
    installed = (run.settings.document("packages") for run in (a, b))
    packages = [f"{name} {was} -> {now}" for name, was, now in unequal(*installed) if was and now]
    if packages:
        unknown.append(f"{count(len(packages), 'package')} of another version: {some(packages, _SHOWN)}")
    root, root_b = one.tops[0], two.tops[0]
    places = {name: one.places.get(name, root / name) for name in {*held_a, *held_b}}
    times = [started_at(run) for run in (a, b)]
    before = times[0] if root != root_b else None if None in times else min(filter(None, times))
    around = survey(root, recipe.directory, {*places.values()}, before, output)
    changes, edits = _changes(held_a, held_b, differing, one.digests)
    elements: list[Element] = [*changes, *(each for each in settings if each not in secret)]
    return Sides(recipe, around, places, held_a, held_b, edits, tuple(elements), tuple(dict.fromkeys(unknown)))


def _changes(
    held_a: Mapping[str, bytes], held_b: Mapping[str, bytes], differing: Collection[str], in_a: Collection[str]
) -> tuple[list[Change], dict[object, tuple[Edit, ...]]]:
    """The changes of the files in `differing` of which both texts are known, joined by `join_edits`; and their edits.

    Edits are by file and both sides of the change or, of a joined one, of its piece.
    """
    names = [name for name in differing if name in held_a and name in held_b]
    one, two = ({name: decoded(held[name]) or "" for name in names} for held in (held_a, held_b))
    edits = {change: of for name in names for change, of in edits_of(name, one[name], two[name]).items()}
    two |= {name: decoded(data) or "" for name, data in held_b.items() if name not in in_a}
    a, b = ({name: text for name, text in each.items() if name.endswith(".py")} for each in (one, two))
    computes, *_ = changed_between(a, b, held_b)
    joined = join_edits([*edits], a, b, computes)
    return joined, {(change.file, change.a, change.b): of for change, of in edits.items()}


def _names_in_a(a: Recipe, b: Recipe) -> dict[str, str]:
    """B's source name of its script mapped to that of a's, where they are two names of one script; {} otherwise.

    They are where b recorded a source of b's name and none of a's. {} also where either ran a module.
    """
    if not a.script or not b.script:
        return {}
    scripts = [(os.path.realpath(each.directory / each.script), project_root(each)) for each in (a, b)]
    name_a, name_b = (os.path.relpath(*script) for script in scripts)
    return {name_b: name_a} if name_a not in b.sources and name_b in b.sources else {}


# --- the likeliest first


def likely_first(elements: Sequence[Element], recorded: DiffResult) -> tuple[tuple[Element, ...], int]:
    """`elements` sorted by how likely `recorded` finds each the cause, and how many at the beginning are likely.

    What the comparison names among its settings comes first, in that order; of a source file only the statements that
    it calls likely. Then all others: statements in the order of their rank, settings last. Likely are those before the
    first whose setting or file does not explain the divergence.
    """
    names = [change.name.partition(": ")[0] for change in recorded.settings]  # of a value, that of its file
    explaining = {name for name, change in zip(names, recorded.settings, strict=True) if change.explains}
    ranked = list(enumerate(recorded.code.ranked if recorded.code is not None else ()))

    def order(element: Element) -> tuple[int, int, bool]:
        """Places among the settings of `recorded` and its ranked statements, and whether it does not explain."""
        name, place, likely = element.file if isinstance(element, Change) else element.name, _UNRANKED, True
        if isinstance(element, Change) and element.file.endswith(".py"):
            found = ((place, one.likely) for place, one in ranked if overlaps(element, one.change))
            place, likely = next(found, (_UNRANKED - 1, False))
        named = likely and name in names
        return names.index(name) if named else _UNRANKED, place, not (named and name in explaining)

    ordered = tuple(sorted(elements, key=order))
    return ordered, [*(order(element)[2] for element in ordered), True].index(True)


@dataclass(frozen=True)
class Difference:
    """A difference between the runs that is not a text: a setting.

    Attributes:
        axis: `argument`, `environment` or `capture` (an option of `introspect capture` that changes the run).
        name: option or variable.
        a: its value in run a; None where absent. A list for options of several values, True for a flag.
        b: its value in run b.
    """

    axis: str
    name: str
    a: Any
    b: Any

    @property
    def place(self) -> str:
        """The name, as a change of a file has its line."""
        return self.name


Element: TypeAlias = "Change | Difference"


def count_by_kind(elements: Collection[Element]) -> str:
    """Numbers by kind, in words: `37 changes in 6 files and 2 differing settings`; only the kinds that are there."""
    files = [element.file for element in elements if isinstance(element, Change)]
    settings = count(len(elements) - len(files), "differing setting")
    changes = f"{count(len(files), 'change')} in {count(len({*files}), 'file')}"
    return settings if not files else changes if len(files) == len(elements) else f"{changes} and {settings}"


def differing_settings(runs: tuple[Run, Run], recipes: tuple[Recipe, Recipe]) -> list[Difference]:
    """The settings that differ: arguments, environment variables and capture options, each sorted by name.

    Environment variables that say nothing of a training (`ENV_NOISE`) are left out.
    """
    axes = {
        "argument": [arguments(recipe.arguments) for recipe in recipes],
        "environment": [run.settings.document("environment") for run in runs],
        "capture": [run.settings.document("seeds") for run in runs],
    }
    every = [Difference(axis, *each) for axis, both in axes.items() for each in sorted(unequal(*both), key=str)]
    return [each for each in every if each.axis != "environment" or not ENV_NOISE.match(each.name)]


def command_line(chosen: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Command-line words that `arguments` reads back as `chosen`: positional ones first, none for a value of None."""
    line = [word for name, words in chosen.items() if name.startswith(ARGUMENT) for word in words or ()]
    for name, words in chosen.items():
        if words is not None and not name.startswith(ARGUMENT):
            begins = words[0] if words else name
            joined = not name.startswith("-") or not begins or (begins != name and OPTION.match(begins))
            line += [f"{name}={begins}", *words[1:]] if joined else [name, *words]
    return line
