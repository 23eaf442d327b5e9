"""`introspect import`: reports, trees and arrays that other tools wrote, as a run."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import say
from introspect_cli.exit_codes import SAME
from introspect_cli.records import USUAL_PHASES, Kind
from introspect_cli.texts import count


@click.command(
    name="import",
    epilog="""\b
Examples:
  introspect import dump -o theirs              (dump/output/h.0.mlp.npy, dump/param/wte.npy, ...)
  introspect import model.safetensors --kind param --root GPT -o weights
  introspect import logs/introspection/fit -o runA
  introspect diff theirs ours""",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory of the run to make.")
@click.option(
    "--root", help="Class of the model, put in front of names [default: in reports Model, in arrays nothing]."
)
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in USUAL_PHASES]),
    help="Kind of the arrays whose names do not say one.",
)
@click.option(
    "--save-tensors", multiple=True, metavar="GLOB", help="Keep the whole arrays of these modules and tensors."
)
@click.option("--force", is_flag=True, help="Replace a run that is there.")
def import_(
    source: Path, output: Path, root: str | None, kind: str | None, save_tensors: tuple[str, ...], *, force: bool
) -> int:
    """Make a run out of arrays, YAML reports or JSON debug trees below SOURCE.

    Arrays are .npy, .npz and .safetensors files named by site: [step=K/]KIND/NAME, as in output/h.0.mlp.npy. The run
    has what the files say and no more: `diff` and `check` take it like any other.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange import arrays, trees, yaml_reports
    from introspect_cli.exchange.incoming import write_run
    from introspect_cli.store.files import MANIFEST

    if (source / MANIFEST).exists():
        raise UsageError(f"{source} is a run already: `introspect diff` takes it as it is")
    files = arrays.find(source)
    if not source.is_dir() and not files:
        raise UsageError(f"{source} is no directory, and no .npy, .npz or .safetensors file: name one of these")
    reports, debug_trees = yaml_reports.find_reports(source), trees.find_trees(source)
    readable = {"arrays": files, "YAML reports": reports, "JSON debug trees": debug_trees}
    there = [name for name, paths in readable.items() if paths]
    if len(there) != 1:
        neither = "neither .npy, .npz or .safetensors files nor step=<n>/rank<n>.yaml nor *_debug_tree_*"
        raise UsageError(f"{source} has {' and '.join(there) or neither} below it: name a directory that has one kind")
    if not files and (kind or save_tensors):
        raise UsageError(f"{'--kind' if kind else '--save-tensors'} is for arrays, of which {source} has none")
    if files:
        dump = arrays.Dump(files, Kind(kind) if kind else None, root or "", save_tensors)
        rows = list(dump.read())
        notes = [arrays.SORTED] if dump.sorted else []
        about = {"not_observed": notes, "listed": True, "ordered": not dump.sorted}
        made = write_run(
            output, rows, source=str(source), settings={}, about=about, sketch=True, stored=dump.kept, force=force
        )
    else:
        rows = list(yaml_reports.read_reports(source, root or "Model") if reports else trees.read_trees(source))
        about = {
            "not_observed": ["sketches are not observed: the files had statistics only, so distances cannot be told"]
        }
        settings = yaml_reports.read_settings(source) if reports else {}
        made = write_run(output, rows, source=str(source), settings=settings, about=about, force=force)
    say(f"made {output} of {count(made[0], 'step')} with {count(made[1], 'record')}")
    return SAME
