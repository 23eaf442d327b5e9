"""`introspect export`: a run in the formats of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("parquet", "csv", "jsonl", "yaml", "json-tree", "tensorboard")


@click.command(
    short_help="Write a run in the formats of others.",
    epilog="""\b
Examples:
  introspect export runA --format parquet -o tables
  introspect export runA --format yaml --steps 0,10 -o reports
  introspect export runA --format json-tree --steps 0 --prune-layers -o trees""",
)
@click.argument("run", type=click.Path())
@click.option("--format", "format_", type=click.Choice(FORMATS), required=True, help="What to write.")
@click.option("-o", "--output", type=click.Path(), required=True, help="Directory to write to; new or empty.")
@click.option("--steps", help="Steps to write, like 0,5,10:20,100::50.")
@click.option("--kinds", help="Kinds to write, separated by commas.")
@click.option("--modules", multiple=True, metavar="GLOB", help="FQNs to write; may be repeated.")
@click.option("--prune-layers", is_flag=True, help="json-tree: keep the first and the last of repeated layers.")
def export(run: str, format_: str, output: str, *, prune_layers: bool, **asked: Any) -> int:
    """Write RUN as tables, reports, trees or TensorBoard events.

    parquet is partitioned by step and rank; csv and jsonl are one file; yaml is a report for each step and rank;
    json-tree is a tree of module calls for each step; tensorboard has scalars, and histograms of what was stored whole.
    """
    from introspect_cli.errors import UsageError

    if prune_layers and format_ != "json-tree":
        raise UsageError("--prune-layers goes with --format json-tree only")
    from functools import partial

    from introspect_cli.exchange import flat, selection, tensorboard, tree, yaml_report
    from introspect_cli.selection import parse_kinds, parse_steps
    from introspect_cli.store.reader import open_run

    writers: dict[str, Callable[..., int]] = {
        "parquet": flat.write_parquet,
        "csv": flat.write_csv,
        "jsonl": flat.write_jsonl,
        "yaml": yaml_report.write_yaml,
        "json-tree": partial(tree.write_tree, prune=prune_layers),
        "tensorboard": tensorboard.write_tensorboard,
    }
    wanted = selection.Selection(
        parse_steps(asked["steps"]) if asked["steps"] else (),
        parse_kinds(asked["kinds"]) if asked["kinds"] else frozenset(),
        tuple(asked["modules"]),
    )
    with open_run(run) as opened:
        directory = selection.fresh_directory(output)
        try:
            written = writers[format_](opened, directory, wanted)
        except OSError as error:
            raise UsageError(f"cannot write to {directory}: {error.strerror}") from None
    if not written:
        raise UsageError(f"nothing of {run} was wanted: no step and kind fits --steps and --kinds")
    click.echo(f"wrote {written:,} file{'s' * (written != 1)} to {directory}")
    return SAME
