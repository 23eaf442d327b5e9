"""The runs that lie below a directory, and which of them could go.

A person who captures often has dozens of runs and remembers the names of none. Each is told by its manifest and its
indexes alone, so that a hundred large runs are listed in a moment; one that cannot be read is listed as damaged, never
skipped. Somebody may name a whole disk: the search goes a few levels down, and knows where it did not look.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.inspect.overview import size_on_disk
from introspect_cli.records import perturbed_by
from introspect_cli.store.files import MANIFEST, RUNS, DamageError
from introspect_cli.store.pack import ENDING, is_pack
from introspect_cli.store.run import open_run
from introspect_cli.texts import count as run_count

if TYPE_CHECKING:
    from collections.abc import Iterable


DEEPEST = 4
"""Levels of directories that a search goes down."""


@dataclass(frozen=True)
class RunRow:
    """One run, as a list shows it.

    Attributes:
        path: where it is.
        script: what ran, with its arguments.
        started: when, in UTC; None where the manifest does not say.
        steps: complete steps of the rank with most.
        size: bytes on disk.
        ended: how it ended: `running`, `complete`, `interrupted`, `failed` (the script raised or exited with another
            code than 0), `damaged`, or `unreadable` (this user may not, or its format is newer).
        detail: the exception or exit code of a failed run, that `--stop` ended one, the sentence about a damaged or an
            unreadable one.
        perturbed: seed of its `--perturb`, which moved its initial parameters; None for an ordinary run.
    """

    path: Path
    script: str
    started: dt.datetime | None
    steps: int
    size: int
    ended: str
    detail: str = ""
    perturbed: int | None = None


@dataclass(frozen=True)
class RunList:
    """What a search found, and where it did not look.

    Attributes:
        runs: the latest first.
        not_searched: directories that may not be read or lie too deep.
    """

    runs: list[RunRow]
    not_searched: list[Path]


def find_runs(roots: Iterable[Path]) -> RunList:
    """All runs at or below the given directories, packed ones too, the latest first, and what was not searched.

    Runs without a start time come last. Neither links nor directories whose names begin with a dot are followed. Goes
    `DEEPEST` levels down, and not into runs.

    Raises:
        UsageError: one of the given directories does not exist.
    """
    paths: list[Path] = []
    left: list[Path] = []

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # else it has gone since
            left.append(Path(error.filename))

    for root in roots:
        if not root.is_dir():
            raise UsageError(f"there is no directory {root}; name one that holds runs.")
        for name, inside, files in os.walk(root, onerror=note):
            folder = Path(name)
            kept = [] if MANIFEST in files else [folder / each for each in sorted(inside) if not each.startswith(".")]
            is_last = len(folder.parts) - len(root.parts) == DEEPEST
            inside[:] = [] if is_last else [path.name for path in kept]
            left.extend(path for path in kept if is_last and not path.is_symlink())
            packs = (folder / each for each in sorted(files) if each.endswith(ENDING))
            paths.extend([folder] if MANIFEST in files else filter(is_pack, packs))
    oldest = dt.datetime.min.replace(tzinfo=dt.timezone.utc)
    rows = sorted(map(_row, paths), key=lambda row: (row.started or oldest, str(row.path)), reverse=True)
    return RunList(rows, sorted(left, key=lambda path: len(path.parts)))


def _row(path: Path) -> RunRow:
    """The row of the run at `path`, which is opened and closed; also where it is damaged or unreadable.

    One that is complete with another exit code than 0 is `failed`, unless `--stop` ended it.
    """
    size = size_on_disk(str(path))
    try:
        with open_run(path) as run:
            manifest, ended, detail = run.manifest, run.state.value, ""
            code = manifest.get("exit_code")
            if manifest.get("stopped") is True:
                detail = "at its first divergence (--stop)"
            elif ended == "complete" and code not in (None, 0):
                ended, detail = "failed", str(manifest.get("exception") or f"exit code {code}")
            script, *arguments = command_words(manifest)
            ran, seed = " ".join([Path(script).name, *arguments]), perturbed_by(manifest)
            return RunRow(path, ran, run.time("started"), run.steps, size, ended, detail, seed)
    except StoreError as error:
        ended = "damaged" if isinstance(error, DamageError) else "unreadable"
        return RunRow(path, "", None, 0, size, ended, str(error))


def command_words(manifest: dict[str, Any]) -> list[str]:
    """The script, as it was named, and its arguments; [""] where neither is on record."""
    argv = manifest.get("argv")
    return list(map(str, argv)) if argv and isinstance(argv, (list, tuple)) else [str(manifest.get("script") or "")]


_COUNTED = re.compile(r"@([1-9][0-9]{0,8})")


def chosen(word: str | os.PathLike[str]) -> Path | str:
    """The run that `@1` (the last), `@2`, ... stands for, among those below `introspect-runs/` here.

    A path that exists, and all other words, are returned as they are.

    Raises:
        UsageError: there are not so many runs.
    """
    text = os.fspath(word)
    counted = _COUNTED.fullmatch(text)
    if counted and not os.path.lexists(text):
        return latest(int(counted[1]))[-1]
    return word if isinstance(word, Path) else text


def latest(count: int) -> list[Path]:
    """The last `count` runs below `introspect-runs/`, the newest first.

    Raises:
        UsageError: there are not so many.
    """
    rows = find_runs([Path(RUNS)]).runs if Path(RUNS).is_dir() else []
    if len(rows) < count:
        there = f"{run_count(len(rows), 'run')} below {RUNS}/ here"
        raise UsageError(f"there is no @{count} among {there}: name a run by its path.")
    return [row.path for row in rows[:count]]
