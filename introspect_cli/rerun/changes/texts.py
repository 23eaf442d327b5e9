"""The text of the files that a run was made of, or opened: kept in the run, or on disk.

A text counts where its digest is the one that the run recorded, wherever it comes from. A text from which a secret was
taken out is not what ran, so it is the last that is taken.
"""

from __future__ import annotations

import io
import os
import tokenize
from dataclasses import dataclass, field
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.store.run import Sources
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.rerun.recipe import Recipe
    from introspect_cli.store.run import Run


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
    """Path of a source file: in the project, else where python finds its module, else its place in the project.

    A file from elsewhere is named by its module, a package `pkg` as `pkg.py`. A place that does not exist is
    `pkg/__init__.py` where another recorded source is in `pkg`.
    """
    path = root / name
    if path.is_file():
        return path
    forms = (name, name.removesuffix(".py") + "/__init__.py")
    for directory in (*search_path(recipe), *_package_directory(name)):
        for form in forms:
            if (directory / form).is_file():
                return directory / form
    package = forms[1].removesuffix("__init__.py")
    return root / (forms[1] if any(other.startswith(package) for other in recipe.sources) else name)


def search_path(recipe: Recipe) -> list[Path]:
    """Directories in which python looks for modules before installed packages: the script's, then PYTHONPATH's.

    For a module, where it ran stands for the script's. The recorded PYTHONPATH wins over that of this process.
    """
    variables = {**os.environ, **recipe.environment}
    paths = (variables.get("PYTHONPATH") or "").split(os.pathsep)
    first = str(Path(recipe.script).parent) if recipe.script else "."
    return [Path(os.path.realpath(recipe.directory / path)) for path in (first, *filter(None, paths))]


def _package_directory(name: str) -> list[Path]:
    """The directory in which this python finds the package of a source file, as a list of one; [] where it finds none.

    The package is the name's first part. Namespace packages and builtins are not found.
    """
    package = name.split("/", maxsplit=1)[0].removesuffix(".py")
    try:
        spec = find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        return []
    if spec is None or not spec.origin or spec.origin in {"built-in", "frozen"}:
        return []
    origin = Path(os.path.realpath(spec.origin))
    return [origin.parent.parent if spec.submodule_search_locations else origin.parent]


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
