"""The lines of a module's class that changed between two commits.

That a file changed tells little where it has a thousand lines. Where both runs come from clean commits and the current
directory is a clone that has both, the class of the blamed module is cut out of either version and compared. A store
may be a stranger's: its commit and path are checked, and git is asked for plain file contents only, which runs nothing.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
from collections.abc import Mapping
from typing import Any

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PATH = re.compile(r"(?!/|-)(?!.*\.\.)[\w./ -]+\.py")
_LINE = 60
_SECONDS = 5


def changed_code(git_a: Any, git_b: Any, file: str, module_class: str) -> str:
    """The first changed line of a class: `line 41: return x / 2 -> return x / 3, and 2 more lines`; "" where unknown.

    Args:
        git_a: the settings of run a's work tree.
        git_b: those of run b's.
        file: the source file, relative to the top of the work tree.
        module_class: the class.
    """
    commits = [_clean_commit(git) for git in (git_a, git_b)]
    if None in commits or commits[0] == commits[1] or not _PATH.fullmatch(file):
        return ""
    versions = [_lines_of(_content(f"{commit}:{file}"), module_class) for commit in commits]
    if not all(versions):
        return ""
    (start, old), (_, new) = (version for version in versions if version)
    changes = [
        (start + low, old[low:high], new[first:last])
        for tag, low, high, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    if not changes:
        return ""
    number, before, after = changes[0]
    more = sum(max(len(gone), len(come)) for _, gone, come in changes) - 1
    told = f"line {number}: {_short(before)} -> {_short(after)}"
    return told + (f", and {more} more line{'s' * (more > 1)}" if more else "")


def _clean_commit(git: Any) -> str | None:
    """The commit of a work tree without changes; None where there is none."""
    if not isinstance(git, Mapping) or git.get("dirty") is not False:
        return None
    commit = git.get("commit")
    return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None


def _content(name: str) -> str:
    """A file at a commit, by `commit:path`; "" where the current directory's clone has it not."""
    try:
        done = subprocess.run(  # noqa: S603 - no shell; the name was checked
            ["git", "cat-file", "blob", name],  # noqa: S607 - the user's own git
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def _lines_of(text: str, module_class: str) -> tuple[int, list[str]] | None:
    """Where a class begins and its lines; None where it is not found."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == module_class and node.end_lineno is not None:
            return node.lineno, text.splitlines()[node.lineno - 1 : node.end_lineno]
    return None


def _short(lines: list[str]) -> str:
    text = lines[0].strip() if lines else "(nothing)"
    return text if len(text) <= _LINE else text[: _LINE - 3] + "..."
