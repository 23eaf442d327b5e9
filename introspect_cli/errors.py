"""Errors whose message is a sentence for a person: what, where, what to do.

`cli.main` prints the sentence and exits with the error's code; nothing else turns an error into text.
"""

import errno
import os

from introspect_cli.exit_codes import UNDECIDED


class IntrospectError(Exception):
    """An error to be shown as its one sentence, without a traceback."""

    exit_code: int = UNDECIDED


class UsageError(IntrospectError):
    """What was asked for cannot be meant: an unknown kind, a bad schedule, no such script."""


class StoreError(IntrospectError):
    """A store that is missing, damaged, newer than this reader, or cannot be written."""


class DocumentTooLargeError(StoreError):
    """A document larger than any reader takes, which leaves the store as it was."""


_SCARCE = {
    errno.EMFILE: "this process may not open more files (`ulimit -n` raises that)",
    errno.ENFILE: "this machine cannot open more files",
    errno.ENOMEM: "there is not enough memory",
}


def scarcity(error: BaseException) -> str:
    """What has run out, where that is all an error says; "" where it says something else.

    A sound run must not be called damaged, nor an error of ours reported, because a machine is full.
    """
    if isinstance(error, MemoryError):
        return _SCARCE[errno.ENOMEM]
    if isinstance(error, OSError):
        return _SCARCE.get(error.errno or 0, "")
    if isinstance(error, ImportError) and os.strerror(errno.EMFILE) in str(error):
        return _SCARCE[errno.EMFILE]
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "this machine cannot start more threads"
    return ""
