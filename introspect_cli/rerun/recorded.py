"""The files that a run read, as they were: its sources, and what its script opened.

Files change after a run. Their texts are in the run, or still lie where they lay; the digest that was recorded says
which of the two it was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.rerun.variant import digest_of, opened_files
from introspect_cli.store.run import Sources
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.rerun.recipe import Recipe
    from introspect_cli.store.run import Run


@dataclass(frozen=True)
class Recorded:
    """The files that a run read.

    Attributes:
        run: the run.
        tops: the project that they are named in, and where the script ran.
        sources: names of its source files.
        digests: digest of each file by its name.
        places: where each lies, or lay.
    """

    run: Run
    tops: tuple[Path, Path]
    sources: frozenset[str]
    digests: Mapping[str, str]
    places: Mapping[str, Path]

    def unchanged(self, name: str) -> bytes | None:
        """The bytes of a file where it lies, if they have its digest; None otherwise."""
        place = self.places[name]
        return place.read_bytes() if digest_of(place) == self.digests[name] else None

    def held(self, names: Iterable[str]) -> dict[str, bytes]:
        """What files held: from the run, else from where they lie if they are unchanged.

        Of a source, the text without its secrets where no other is known. Left out are files of which nothing is known,
        that are no text, or that lie outside of the project.

        Raises:
            StoreError: one that the run keeps is damaged.
        """
        found = {}
        for name in filter(self.digests.__contains__, names):
            kept = self.run.source(self.digests[name])
            if kept is None or self.is_redacted(name, kept):
                unchanged = self.unchanged(name)
                kept = kept if unchanged is None and name in self.sources else unchanged
            inside = any(map(self.places[name].is_relative_to, self.tops))
            if inside and kept is not None and decoded(kept) is not None:
                found[name] = kept
        return found

    def is_redacted(self, name: str, data: bytes) -> bool:
        """Whether what is held of a file is without its secrets."""
        return hex_digest(data) != self.digests[name]


def recorded_files(run: Run, recipe: Recipe, names: Mapping[str, str] | None = None) -> Recorded:
    """The files that a run read; `names` has other names for some.

    Raises:
        StoreError: the run is damaged.
    """
    tops, names = (project_root(recipe), Path(os.path.realpath(recipe.directory))), names or {}
    sources = Sources(run).digests
    places = {name: place_of_source(name, recipe, tops[0]) for name in sources}
    opened = {name: digest for name, digest in opened_files(run).items() if name not in sources}
    for name in opened:
        there = [Path(os.path.realpath(top / Path(name).expanduser())) for top in tops]
        places[name] = next(filter(Path.is_file, there), there[-1])
    digests = {names.get(name, name): digest for name, digest in (opened | sources).items()}
    places = {names.get(name, name): place for name, place in places.items()}
    return Recorded(run, tops, frozenset(names.get(name, name) for name in sources), digests, places)


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


def decoded(data: bytes) -> str | None:
    """The text of a file, its lines ended as on Unix; None for what is no text."""
    return None if b"\0" in data else data.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


def encoded(text: str) -> bytes:
    """The bytes of a text that `decoded` gave."""
    return text.encode("utf-8", "surrogateescape")
