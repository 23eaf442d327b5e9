"""Two runs with the texts of their files, all that differs between them, and what lies around a."""

from __future__ import annotations

import io
import os
import tokenize
from dataclasses import dataclass, field
from importlib.util import decode_source
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from introspect_cli.compare.changes.project import changed_between
from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.say import some
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.settings.settings import ARGUMENT, ENV_NOISE, OPTION, arguments
from introspect_cli.errors import UsageError
from introspect_cli.rerun.changes.edits import edits_of, join_edits, overlaps
from introspect_cli.rerun.place import Surroundings, survey
from introspect_cli.rerun.recipe import Recipe, UnrepeatableError, recipe_of
from introspect_cli.rerun.variant import started_at
from introspect_cli.store.files import REDACTED
from introspect_cli.store.run import Sources
from introspect_cli.sums import source_digest
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
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
    names = [change.name.partition(": ")[0] for change in recorded.settings]  # of a value, that of its file
    settings = {name: place for place, name in reversed([*enumerate(names)])}
    explaining = {name for name, change in zip(names, recorded.settings, strict=True) if change.explains}
    ranked = list(enumerate(recorded.code.ranked if recorded.code is not None else ()))

    def order(element: Element) -> tuple[int, int]:
        """Sort key: (place among the settings of `recorded`, place among its ranked statements, for a statement).

        `_UNRANKED` for what is not there, and as the first for a statement that is not likely.
        """
        if isinstance(element, Change) and element.file.endswith(".py"):
            found = ((place, one.likely) for place, one in ranked if overlaps(element, one.change))
            place, likely = next(found, (_UNRANKED, False))
            return (settings.get(element.file, _UNRANKED) if likely else _UNRANKED, place)
        return (settings.get(_setting_name(element), _UNRANKED + isinstance(element, Difference)), 0)

    ordered = tuple(sorted(elements, key=order))
    likely = [order(element)[0] < _UNRANKED and _setting_name(element) in explaining for element in ordered]
    return ordered, [*likely, False].index(False)


def _setting_name(element: Element) -> str:
    """The element's name among the comparison's settings: a file, an option or a variable."""
    return element.file if isinstance(element, Change) else element.name


_DOCUMENTS = {"argument": "command", "environment": "environment", "capture": "seeds"}
"""Settings document by axis; `capture` is an option of `introspect capture` that changes the run."""


@dataclass(frozen=True)
class Difference:
    """A difference between the runs that is not a text: a setting.

    Attributes:
        axis: `argument`, `environment` or `capture`.
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


def on_axis(elements: Iterable[Element], axis: str) -> list[Difference]:
    """The `Difference`s of one axis, in order."""
    return [element for element in elements if isinstance(element, Difference) and element.axis == axis]


def count_by_kind(elements: Collection[Element]) -> str:
    """Numbers by kind, in words: `37 changes in 6 files and 2 differing settings`; only the kinds that are there."""
    files = [element.file for element in elements if isinstance(element, Change)]
    settings = count(len(elements) - len(files), "differing setting")
    changes = f"{count(len(files), 'change')} in {count(len({*files}), 'file')}"
    return settings if not files else changes if len(files) == len(elements) else f"{changes} and {settings}"


def differing_settings(a: Run, b: Run) -> tuple[list[Difference], list[str]]:
    """The settings that differ and can be changed, and the names of those that cannot since a value is redacted.

    Arguments, environment variables and capture options, in this order, each sorted by name. Environment variables that
    say nothing of a training (`ENV_NOISE`) are left out.
    """
    changeable, secret = [], []
    for axis, document in _DOCUMENTS.items():
        one, two = (run.settings.document(document) for run in (a, b))
        if axis == "argument":
            words = (command.get("arguments") for command in (one, two))
            one, two = (arguments(map(str, given)) if isinstance(given, list) else {} for given in words)
        for name, left, right in sorted(unequal(one, two), key=lambda item: item[0]):
            if axis == "environment" and ENV_NOISE.match(name):
                continue
            if REDACTED in (left, right):
                secret.append(name)
            else:
                changeable.append(Difference(axis, name, left, right))
    return changeable, secret


def command_line(chosen: dict[str, Any]) -> list[str]:
    """Command-line words that `arguments` reads back as `chosen`: positional ones first, none for a value of None."""
    line = [str(value) for name, value in chosen.items() if name.startswith(ARGUMENT) and value is not None]
    for name, value in chosen.items():
        if name.startswith(ARGUMENT) or value is None:
            continue
        option, _, part = name.partition(" ")
        if value is True:
            line.append(option)
            continue
        first, *more = map(str, value if isinstance(value, list) else [value])
        if part and not part.startswith("("):
            first = f"{part}={first}"  # `-p lr=1`
        if more or (option.startswith("-") and first and not OPTION.match(first)):
            line += [option, first, *more]
        else:
            line.append(f"{option}={first}")
    return line


@dataclass(frozen=True)
class Texts:
    """Texts of a run's source files.

    Attributes:
        root: the project they are named in.
        places: where each file lies, or lay, by its name.
        texts: the text of each file by its name.
        missing: names of files whose text cannot be had.
        redacted: names of files whose text is there without its secrets.
    """

    root: Path
    places: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    redacted: tuple[str, ...] = ()


def source_texts(run: Run, recipe: Recipe) -> Texts:
    """Collect the text of each source file: first from the run, else from disk, where the digest is the recorded one.

    A text without its secrets, which the run kept, is taken last; its name is in `redacted`. One that cannot be had or
    decoded is in `missing`.

    Raises:
        StoreError: one that the run keeps is damaged.
    """
    root = project_root(recipe)
    kept = Sources(run)
    places = {name: place_of_source(name, recipe, root) for name in kept.digests}
    texts, missing, redacted = {}, [], []
    for name, digest in kept.digests.items():
        source = kept.get(name)
        data = source.data if source is not None and source.exact else read_unchanged(places[name], digest)
        text = None if data is None else decode_text(data)
        if text is None and source is not None:
            text = source.text
            redacted.append(name)
        if text is None:
            missing.append(name)
        else:
            texts[name] = text
    return Texts(root, places, texts, tuple(missing), tuple(redacted))


def project_root(recipe: Recipe) -> Path:
    """The directory that source names are relative to: the nearest directory with a `.git` that holds the script.

    Only one counts in which the script's path is the name of a recorded source. The script's own directory where there
    is none. For a module, where it ran stands for the script's directory, and any `.git` counts.
    """
    script = Path(os.path.realpath(recipe.directory / recipe.script)) if recipe.script else None
    start = script.parent if script is not None else Path(os.path.realpath(recipe.directory))
    for directory in (start, *start.parents):
        named = script is None or os.path.relpath(script, directory) in recipe.sources
        if (directory / ".git").exists() and named:
            return directory
    return start


def place_of_source(name: str, recipe: Recipe, root: Path) -> Path:
    """Path of a source file in the project; one from elsewhere is named by its module, a package `pkg` as `pkg.py`.

    A file that does not exist is `pkg/__init__.py` where another recorded source is in `pkg`.
    """
    package = name.removesuffix(".py") + "/"
    inside = not (root / name).is_file() and any(other.startswith(package) for other in recipe.sources)
    return root / (f"{package}__init__.py" if inside else name)


def decode_text(data: bytes) -> str | None:
    """The text of a source file in its declared encoding; None where it cannot be decoded."""
    try:
        return decode_source(data)
    except (SyntaxError, UnicodeDecodeError):
        return None


def encode_text(text: str) -> bytes:
    """The bytes of a source text in the encoding that it declares; UTF-8 where it declares none or that fails."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return text.encode(encoding)
    except (SyntaxError, UnicodeEncodeError):
        return data


def read_unchanged(path: Path, digest: str) -> bytes | None:
    """The bytes of a file; None where it cannot be read or has another source digest than `digest`."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if source_digest(data) == digest else None


@dataclass(frozen=True)
class OpenedText:
    """A configuration file that both scripts opened, with different contents.

    Attributes:
        name: as the runs name it.
        place: where it lies for a.
        a: what it held for a.
        b: what it held for b.
    """

    name: str
    place: Path
    a: str
    b: str


def opened_files(run: Run) -> dict[str, str]:
    """Digest by name of the files that a script opened; those without a digest are left out."""
    files = run.settings.document("files")
    digests = {str(name): about.get("digest") for name, about in files.items() if isinstance(about, dict)}
    return {name: digest for name, digest in digests.items() if isinstance(digest, str)}


def opened_texts(
    runs: tuple[Run, Run], directories: tuple[Path, Path], roots: tuple[Path, Path]
) -> tuple[list[OpenedText], list[str]]:
    """The configuration files that both scripts opened and that differ, and clauses on those that cannot be tried.

    Sorted by name. Files that are sources of both runs are left out. Those outside of the project, or whose UTF-8 text
    is neither kept nor unchanged on disk, cannot be tried.

    Args:
        runs: a and b, as in the other pairs.
        directories: where each ran.
        roots: the project of each.
    """
    one, two = map(opened_files, runs)
    sources = [run.settings.get("sources") or {} for run in runs]
    texts, unknown = [], []
    for name in sorted(one.keys() & two.keys()):
        if one[name] == two[name] or all(name in recorded for recorded in sources):
            continue
        if Path(name).is_absolute() or name.startswith("~"):
            unknown.append(f"{name}: it differs and lies outside of the project")
            continue
        at = [
            next((place for place in (root / name, directory / name) if place.is_file()), directory / name)
            for root, directory in zip(roots, directories, strict=True)
        ]
        held = [
            _opened_text(run, digest, place)
            for run, digest, place in zip(runs, (one[name], two[name]), at, strict=True)
        ]
        if held[0] is not None and held[1] is not None:
            texts.append(OpenedText(name, at[0], held[0], held[1]))
        else:
            unknown.append(f"{name}: it differs, and what it held is not kept")
    return texts, unknown


def _opened_text(run: Run, digest: str, place: Path) -> str | None:
    """The text of an opened file, from the run or from disk; None where neither has the digest, or it is no UTF-8."""
    data = run.source(digest) if digest in run.kept_sources else None
    data = data if data is not None and source_digest(data) == digest else read_unchanged(place, digest)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None
