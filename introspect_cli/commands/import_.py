"""`introspect import`: reports and trees that other tools wrote, as a run."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.exit_codes import SAME


@click.command(
    name="import",
    short_help="Import a run from reports of other tools.",
    epilog="""\b
Examples:
  introspect import logs/introspection/fit -o runA
  introspect import debug_trees -o runB
  introspect diff runA runB""",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory of the run to make.")
@click.option(
    "--root", default="Model", show_default=True, help="Class of the model, put before names in YAML reports."
)
@click.option("--force", is_flag=True, help="Replace a run that is there.")
def import_(source: Path, output: Path, root: str, *, force: bool) -> int:
    """Make a run out of the YAML reports or the JSON debug trees below SOURCE.

    The run has what the files say and no more: `diff` and `check` take it like any other.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange import tree_import, yaml_import
    from introspect_cli.exchange.incoming import write_run
    from introspect_cli.records import count

    if not source.is_dir():
        raise UsageError(f"{source} is not a directory: name one with YAML reports or JSON debug trees below it")
    reports, trees = yaml_import.find_reports(source), tree_import.find_trees(source)
    if bool(reports) == bool(trees):
        both, neither = "both YAML reports and JSON debug trees", "neither step=<n>/rank<n>.yaml nor *_debug_tree_*"
        what = both if reports else neither
        raise UsageError(f"{source} has {what} below it: name a directory that has one of them")
    found = list(yaml_import.read_reports(source, root) if reports else tree_import.read_trees(source))
    notes = ["sketches are not observed: the files had statistics only, so distances cannot be told"]
    steps, records = write_run(
        output,
        found,
        source=str(source),
        settings=yaml_import.read_settings(source) if reports else {},
        notes=notes,
        force=force,
    )
    click.echo(f"made {output} of {count(steps, 'step')} with {count(records, 'record')}")
    return SAME
