"""`introspect completion`: the script that teaches a shell to complete our command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from introspect_cli.exit_codes import SAME

_WHERE = {
    "bash": 'eval "$(introspect completion bash)" in ~/.bashrc (bash 4.4 or newer)',
    "zsh": 'eval "$(introspect completion zsh)" in ~/.zshrc, after compinit',
    "fish": "introspect completion fish > ~/.config/fish/completions/introspect.fish",
}


@click.command(
    epilog="\b\nPut one of these where the shell reads it:\n" + "\n".join(f"  {line}" for line in _WHERE.values()),
)
@click.argument("shell", type=click.Choice(list(_WHERE)))
def completion(shell: str) -> int:
    """Print the script that completes verbs, options and paths of introspect in SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(click.Group("introspect"), {}, "introspect", "_INTROSPECT_COMPLETE").source())
    return SAME
