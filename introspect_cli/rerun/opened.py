"""Configuration files as both scripts opened them: what they held is kept in the runs, or still lies where it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from introspect_cli.store.reader import Run

_LARGEST_TEXT = 1 << 20


@dataclass(frozen=True)
class OpenedText:
    """A configuration file that both scripts opened and that held something else for b.

    Attributes:
        name: as the runs name it.
        places: where it lies for a, and for b.
        a: what it held for a.
        b: what it held for b.
    """

    name: str
    places: tuple[Path, Path]
    a: str
    b: str


@dataclass(frozen=True)
class Opened:
    """What is known of the files that both scripts opened: texts, and clauses on those that cannot be tried."""

    texts: tuple[OpenedText, ...]
    unknown: tuple[str, ...]


def opened_files(run: Run) -> dict[str, str]:
    """Digest by name of the files that a script opened, where one was taken."""
    found = run.settings.get("files")
    files = found.items() if isinstance(found, Mapping) else ()
    digests = {str(name): own.get("digest") for name, own in files if isinstance(own, Mapping)}
    return {name: digest for name, digest in digests.items() if isinstance(digest, str)}


def opened_texts(runs: tuple[Run, Run], directories: tuple[Path, Path], roots: tuple[Path, Path]) -> Opened:
    """The configuration files that both scripts opened and that differ; what is a source of both is none."""
    one, two = map(opened_files, runs)
    sources = [run.settings.get("sources") or {} for run in runs]
    texts, unknown = [], []
    for name in sorted(one.keys() & two.keys()):
        if one[name] == two[name] or all(name in own for own in sources):
            continue
        if Path(name).is_absolute() or name.startswith("~"):
            unknown.append(f"{name}: it differs and lies outside of the project")
            continue
        at = [
            next((place for place in (root / name, directory / name) if place.is_file()), directory / name)
            for root, directory in zip(roots, directories, strict=True)
        ]
        held = [_held(run, digest, place) for run, digest, place in zip(runs, (one[name], two[name]), at, strict=True)]
        if held[0] is not None and held[1] is not None:
            texts.append(OpenedText(name, (at[0], at[1]), held[0], held[1]))
        elif at[0] == at[1]:
            unknown.append(f"{name}: it differs, and what it held is not kept")
    return Opened(tuple(texts), tuple(unknown))


def _held(run: Run, digest: str, place: Path) -> str | None:
    """The text of a file that a run opened; None where it is not all there, or no text."""
    data = run.source(digest) if digest in run.kept_sources else None
    if data is None or source_digest(data) != digest:
        try:
            data = place.read_bytes() if place.stat().st_size < _LARGEST_TEXT else b""
        except OSError:
            return None
    try:
        return data.decode() if source_digest(data) == digest else None
    except UnicodeDecodeError:
        return None
