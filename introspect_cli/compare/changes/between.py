"""How the source files of two runs differ, the most likely cause of their divergence first.

Files are laid beside one another by name; the two scripts, too, where they have other names. A text comes from the run,
or, where the run did not keep it, from the git clone in the current directory, if that has the very file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import clues_of, clues_of_ending
from introspect_cli.compare.changes.ranking import CodeChanges, ranked
from introspect_cli.compare.changes.renames import with_names_of_a
from introspect_cli.compare.changes.statements import Change, as_written, changed_statements
from introspect_cli.compare.endings import one_raised
from introspect_cli.store.sources import Sources
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.store.reader import Run

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PATH = re.compile(r"(?!/|-)(?!.*\.\.)[\w./ -]+\.py")
_SECONDS = 5
_MOST = 4 << 20
"""Characters of unchanged files that are parsed to see who calls whom."""


def code_changes(a: Run, b: Run, scene: Scene | None) -> CodeChanges | None:
    """How the source files of two runs differ; None where either run has no digests of its files.

    Raises:
        StoreError: the text of a file is damaged.
    """
    if any("sources" not in run.settings for run in (a, b)):
        return None
    one, two = _Texts(a), _Texts(b)
    renamed = _renamed(one, two)
    changes: list[Change] = []
    in_comments: list[str] = []
    in_names: list[str] = []
    unread: list[tuple[str, str]] = []
    names = [name for name in dict.fromkeys([*one.digests, *two.digests]) if name not in renamed.values()]
    differing = [name for name in names if one.digests.get(name) != two.digests.get(renamed.get(name, name))]
    wanted = {renamed.get(name, name) for name in differing}
    texts_b = two.all({}, wanted) if differing else {}
    for name in differing:
        other = renamed.get(name, name)
        texts = one.text(name), two.text(other)
        missing = [t is None and n in side.digests for t, n, side in zip(texts, (name, other), (one, two), strict=True)]
        if any(missing):
            unread.append((other, "text"))
            continue
        text_a, text_b = texts
        as_in_a = text_b
        if text_a is not None and text_b is not None:
            as_in_a = with_names_of_a(text_a, text_b, [text for file, text in texts_b.items() if file != other])
        found = changed_statements(other, text_a, as_in_a)
        if found:
            changes += found if text_b is None else (as_written(change, text_b) for change in found)
        elif one.exact(name) and two.exact(other):
            (in_comments if as_in_a == text_b else in_names).append(other)
        else:
            unread.append((other, "secret"))
    every = one.all(renamed, wanted) if changes else {}, texts_b
    ended = one_raised(a, b) if scene is None else None
    clues = clues_of(scene) if scene is not None else clues_of_ending(ended) if ended is not None else None
    order = ranked(changes, every, clues)
    order = tuple(replace(own, above=_above(own.change, every)) for own in order)
    return CodeChanges(order, tuple(in_comments), tuple(in_names), tuple(unread), len(names))


def _above(change: Change, texts: tuple[Mapping[str, str], Mapping[str, str]]) -> str:
    """The line above a change that is not blank: in b's version, or in a's where it was removed."""
    side, text = (change.b, texts[1]) if change.b is not None else (change.a, texts[0])
    if side is None or change.unit == "file":
        return ""
    lines = text.get(change.file, "").splitlines()[: side.first - 1]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _renamed(one: _Texts, two: _Texts) -> dict[str, str]:
    """Names of a's files that are b's under another name: the script, and files of one name in two directories."""
    left = [name for name in one.digests if name not in two.digests]
    right = [name for name in two.digests if name not in one.digests]
    found = {}
    if one.script in left and two.script in right:
        found[one.script] = two.script
    for name in left:
        same = [other for other in right if PurePath(other).name == PurePath(name).name]
        if name not in found and len(same) == 1 and same[0] not in found.values():
            found[name] = same[0]
    return found


class _Texts:
    """The source files of one run."""

    def __init__(self, run: Run) -> None:
        self._sources = Sources(run)
        self.digests = self._sources.digests
        git = run.settings.get("git")
        commit = git.get("commit") if isinstance(git, Mapping) else None
        self._commit = commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else ""
        script = PurePath(str(run.manifest.get("script") or "")).name
        named = [name for name in self.digests if PurePath(name).name == script]
        self.script = named[0] if len(named) == 1 else ""

    def text(self, name: str) -> str | None:
        """A file; None where it is not there."""
        if name in self._sources:
            return self._sources[name].text
        digest = self.digests.get(name)
        if digest is None or not self._commit or not _PATH.fullmatch(name):
            return None
        data = _content(f"{self._commit}:{name}")
        return data.decode("utf-8", "replace") if source_digest(data) == digest else None

    def exact(self, name: str) -> bool:
        """Whether the text of a file is all that it held."""
        return name not in self._sources or self._sources[name].exact

    def all(self, renamed: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
        """Files by the names that they have in b; of very many, those that changed."""
        found: dict[str, str] = {}
        size = 0
        for name in sorted(self.digests, key=lambda name: renamed.get(name, name) not in wanted):
            text = self.text(name) if name in self._sources or renamed.get(name, name) in wanted else None
            if text is not None and (size < _MOST or renamed.get(name, name) in wanted):
                found[renamed.get(name, name)] = text
                size += len(text)
        return found


def _content(name: str) -> bytes:
    """A file at a commit, by `commit:path`; nothing where the current directory's clone has it not."""
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603 - no shell; the name was checked
            ["git", "cat-file", "blob", name],  # noqa: S607 - the user's own git
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
