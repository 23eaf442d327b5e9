"""Verbs called in this process, which is quicker than a process of their own."""

from subprocess import CompletedProcess

import click
from click.testing import CliRunner

from introspect_cli.cli import introspect
from introspect_cli.errors import IntrospectError


def verb(*words):
    """What a verb prints and how it ends; the sentence of an error is all of `stderr`."""
    given = [str(word) for word in words]
    done = CliRunner().invoke(introspect, given, standalone_mode=False)
    if done.exception is None:
        return CompletedProcess(given, done.return_value, done.stdout, done.stderr)
    if isinstance(done.exception, IntrospectError | click.ClickException):
        return CompletedProcess(given, 2, done.stdout, str(done.exception))
    raise done.exception
