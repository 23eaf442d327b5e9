"""Errors whose message is a sentence for a person: what, where, what to do.

`cli.main` prints the sentence and exits with the error's code; nothing else turns an error into text.
"""

from introspect_cli.exit_codes import UNDECIDED


class IntrospectError(Exception):
    """An error to be shown as its one sentence, without a traceback."""

    exit_code: int = UNDECIDED


class UsageError(IntrospectError):
    """What was asked for cannot be meant: an unknown kind, a bad schedule, no such script."""


class StoreError(IntrospectError):
    """A store that is missing, damaged, newer than this reader, or cannot be written."""
