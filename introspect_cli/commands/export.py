"""`introspect export`: a run in the formats of others."""

from __future__ import annotations

from typing import Any

import click

from introspect_cli.commands.shared import RunType, engine_option, say, selecting, selection_of
from introspect_cli.exchange.formats import FORMATS
from introspect_cli.exit_codes import SAME


@click.command(
    epilog="\b\nFormats:\n"
    + "\n".join(f"  {name:<12} {form.about}" for name, form in FORMATS.items())
    + """

\b
Examples:
  introspect export runA --format parquet -o tables
  introspect export runA --format yaml --steps 0,3 -o reports
  introspect export runA --format csv --modules 'blocks.*.attn' -o attention
  introspect export runA --format json-tree --steps 0 --prune-layers -o trees""",
)
@click.argument("run", type=RunType())
@click.option("--format", "format_", type=click.Choice(list(FORMATS)), required=True, help="What to write; see below.")
@click.option("-o", "--output", type=click.Path(), required=True, help="Directory to write to; new or empty.")
@selecting("steps", "kinds", "modules", "ranks")
@click.option("--prune-layers", is_flag=True, help="json-tree: keep the first and the last of repeated layers.")
@engine_option
def export(run: str, format_: str, output: str, *, prune_layers: bool, engine: str, **asked: Any) -> int:
    """Write RUN as tables, reports, trees or TensorBoard events."""
    from introspect_cli.engine import engine_of
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.exchange.formats import export as write
    from introspect_cli.selection import check_selection
    from introspect_cli.texts import count

    wanted = selection_of(asked)
    with open_any(run) as opened, engine_of(engine) as at_work:
        wanted = check_selection(wanted, [opened])
        written = write(opened, format_, output, wanted, at_work.elsewhere, prune_layers=prune_layers)
    if not written:
        raise UsageError(f"{run} has no complete step, so there is nothing to export")
    say(f"wrote {count(written, 'file')} to {output}")
    return SAME
