"""The runs that lie below a directory, and which of them could go.

A person who captures often has dozens of runs and remembers the names of none. Each is told by its manifest and its
indexes alone, so that a hundred large runs are listed in a moment; one that cannot be read is listed as damaged, never
skipped.
"""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.inspect.overview import size_on_disk
from introspect_cli.store.files import MANIFEST
from introspect_cli.store.pack import ENDING, is_pack
from introspect_cli.store.reader import Run, open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_DEEPEST = 4
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


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
            code than 0) or `damaged`.
        detail: the exception or exit code of a failed run, the sentence about a damaged one.
        label: what somebody wrote of it.
    """

    path: Path
    script: str
    started: dt.datetime | None
    steps: int
    size: int
    ended: str
    detail: str = ""
    label: str = ""


def find_runs(roots: Iterable[Path]) -> list[RunRow]:
    """All runs at or below the given directories, the latest first.

    Raises:
        UsageError: a directory does not exist.
    """
    rows = []
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"there is no directory {root}; name one that holds runs.")
        rows += [_row(path) for path in _runs_below(root, _DEEPEST)]
    oldest = dt.datetime.min.replace(tzinfo=dt.timezone.utc)
    return sorted(rows, key=lambda row: (row.started or oldest, str(row.path)), reverse=True)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / MANIFEST).is_file():
        yield folder
        return
    yield from sorted(own for own in folder.glob(f"*{ENDING}") if is_pack(own))
    if depth == 0:
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        if not name.startswith("."):
            yield from _runs_below(folder / name, depth - 1)


def _row(path: Path) -> RunRow:
    size = size_on_disk(str(path))
    try:
        with open_run(path) as run:
            return _told(path, run, size)
    except StoreError as error:
        return RunRow(path, "", None, 0, size, "damaged", str(error))


def _told(path: Path, run: Run, size: int) -> RunRow:
    manifest = run.manifest
    ended, detail = run.state.value, ""
    code = manifest.get("exit_code")
    if ended == "complete" and code not in (None, 0):
        ended, detail = "failed", str(manifest.get("exception") or f"exit code {code}")
    steps = max((len(run.rank(rank)) for rank in run.ranks), default=0)
    return RunRow(path, _command(manifest), _time(manifest.get("started")), steps, size, ended, detail, run.label)


def _command(manifest: dict[str, Any]) -> str:
    argv = manifest.get("argv")
    words = argv if isinstance(argv, list) else [manifest.get("script") or ""]
    return " ".join([Path(str(words[0])).name, *map(str, words[1:])]) if words else ""


def _time(value: object) -> dt.datetime | None:
    try:
        found = value if isinstance(value, dt.datetime) else dt.datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)


def parse_age(text: str) -> dt.timedelta:
    """`7d`, `12h`, `30m`, `45s` or `2w` as a duration.

    Raises:
        UsageError: it is none.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not (number.isascii() and number.isdigit()):
        raise UsageError(f"{text!r} is not an age: give a number and s, m, h, d or w, as in 7d.")
    return dt.timedelta(seconds=int(number) * _UNITS[unit])


def prunable(rows: Sequence[RunRow], *, keep: int, older_than: dt.timedelta | None, now: dt.datetime) -> list[RunRow]:
    """The runs that may go: beyond the `keep` latest, and older than `older_than` where that is given.

    A run that is still being written never goes, nor a packed one, nor one whose age is not known while an age is
    asked for.

    Args:
        rows: runs, the latest first.
        keep: how many of the latest stay whatever their age.
        older_than: only runs that started longer ago go; None for any age.
        now: the time to count from.
    """
    return [
        row
        for row in rows[keep:]
        if row.ended != "running"
        and row.path.suffix != ".zip"
        and (older_than is None or (row.started is not None and now - row.started > older_than))
    ]
