"""Verbs called in this process, which is quicker than a process of their own."""

from click.testing import CliRunner

from introspect_cli.cli import introspect


def verb(*words):
    """What a verb prints and how it ends."""
    return CliRunner().invoke(introspect, [str(word) for word in words])
