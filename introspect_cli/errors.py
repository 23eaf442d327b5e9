"""Errors whose message is a sentence for a person: what, where, what to do.

`cli.main` prints the sentence and exits with the error's code; nothing else turns an error into text.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import TYPE_CHECKING

from introspect_cli.exit_codes import UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Iterable


class IntrospectError(Exception):
    """An error to be shown as its one sentence, without a traceback."""

    exit_code: int = UNDECIDED


class UsageError(IntrospectError):
    """Invalid arguments: an unknown kind, a bad schedule, no such script."""


class StoreError(IntrospectError):
    """A store that is missing, damaged, newer than this reader, or cannot be written."""

    def __reduce__(self) -> tuple[type[StoreError], tuple[str]]:
        """Pickle the sentence alone, for errors from another process."""
        return StoreError, (str(self),)


class DocumentTooLargeError(StoreError):
    """A document above the size that readers accept; the store is unchanged."""


_LONGEST_WORD = 300
_LONGEST = 2000


def abridged(sentence: str) -> str:
    """A sentence with the middle of each word over 300 characters cut out, then of the whole if that is over 2000.

    `...(N characters)...` is put in its place, and makes the result longer than that.
    """
    sentence = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda match: _cut(match[0], _LONGEST_WORD), sentence)
    return _cut(sentence, _LONGEST)


def _cut(text: str, most: int) -> str:
    """A text of up to `most` characters as it is; of a longer one both ends, and between them how many are left out.

    Both ends together have `most` characters.
    """
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]}...({left:,} characters)...{text[-most // 2 :]}"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean x?` for the name nearest to `name`; "" where none has a `difflib` ratio of `cutoff` or more."""
    import difflib  # only for who mistypes

    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


_SCARCE = {
    errno.EMFILE: "this process may not open more files (`ulimit -n` raises that)",
    errno.ENFILE: "this machine cannot open more files",
    errno.ENOMEM: "there is not enough memory",
}


def scarcity(error: BaseException) -> str:
    """Sentence on exhausted open files, memory or threads; "" for any other error, a full disk included."""
    if isinstance(error, MemoryError):
        return _SCARCE[errno.ENOMEM]
    if isinstance(error, OSError):
        return _SCARCE.get(error.errno or 0, "")
    if isinstance(error, ImportError) and os.strerror(errno.EMFILE) in str(error):
        return _SCARCE[errno.EMFILE]
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "this machine cannot start more threads"
    return ""


_CALLED = sys.stdlib_module_names | {"builtins", "introspect_cli", "numpy", "torch", "yaml"}
"""Top-level names of the modules that introspect calls inside a script."""


def belongs_to_script(error: BaseException) -> bool:
    """Whether an exception that introspect's code caught is meant for the script, so that it must be raised on.

    True for an interrupt, and for an order to stop that another thread raised in this one: it appears in our code, or
    in code that we call (`_CALLED`), and is no `Exception`, of a class that none of that code defines, or a
    TimeoutError without arguments. False for everything else, and for all that the script's own code raises, such as a
    `SystemExit` of an object's `__class__`: without us nobody had called that. (Signal handlers wait until our code is
    left.)
    """
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return True
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    if entry is not None and not _is_called(entry.tb_frame.f_globals.get("__name__")):
        return False  # code of an object of the script's, which we called
    if not isinstance(error, Exception):
        return True
    if entry is None:
        return False
    return not _is_called(type(error).__module__) or (type(error) is TimeoutError and not error.args)


def _is_called(module: object) -> bool:
    """Whether a module, by its `__name__`, is of the standard library, introspect, numpy, torch or yaml (`_CALLED`)."""
    return type(module) is str and module.partition(".")[0] in _CALLED
