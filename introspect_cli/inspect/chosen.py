"""Which run a word stands for that is no path: `@1`, `@2`, or a label.

A person captures, changes a line, captures again, and asks what differs: the runs they mean are the last ones. They are
counted as `introspect runs` lists them, the newest first, so that `@1` is the first row. What is at a path is always
meant before anything else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from introspect_cli.errors import UsageError
from introspect_cli.inspect.runs import RunRow, find_runs
from introspect_cli.records import clean
from introspect_cli.records import count as run_count
from introspect_cli.store.files import RUNS
from introspect_cli.store.pack import is_remote

_COUNTED = re.compile(r"@([0-9]{1,9})")
_NAMED = 3


def chosen(word: str | os.PathLike[str]) -> Path | str:
    """The run that a word stands for; the word itself where it is a path, a URL, or stands for none.

    Raises:
        UsageError: there are not so many runs, or several have that label.
    """
    text = os.fspath(word)
    if not text or is_remote(text) or os.path.lexists(text):
        return word if isinstance(word, Path) else text
    counted = _COUNTED.fullmatch(text)
    if counted is not None:
        number = int(counted[1])
        if not number:
            raise UsageError("@0 is no run: @1 is the last one, @2 the one before it.")
        return latest(number, text)[-1]
    found = [row.path for row in _listed() if row.label == text]
    if len(found) > 1:
        named = ", ".join(clean(str(path)) for path in found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
        raise UsageError(f"{len(found)} runs have the label {text!r}: name one of {named}.")
    return found[0] if found else word if isinstance(word, Path) else text


def latest(count: int, asked: str = "") -> list[Path]:
    """The last runs below `introspect-runs/`, the newest first.

    Raises:
        UsageError: there are not so many.
    """
    rows = _listed()
    if len(rows) < count:
        there = f"there {'is' if len(rows) == 1 else 'are'} {run_count(len(rows), 'run')} below {RUNS}/ here"
        raise UsageError(f"{asked} stands for no run: {there}." if asked else f"{there}: name a run by its path.")
    return [row.path for row in rows[:count]]


def _listed() -> list[RunRow]:
    return find_runs([Path(RUNS)]).rows if Path(RUNS).is_dir() else []
