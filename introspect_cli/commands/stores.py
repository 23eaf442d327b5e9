"""`introspect export`, `import`, `merge`, `pack` and `verify`: what is done with a run's files as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from introspect_cli.commands.shared import RunType, Selecting, engine_option, force_option, say, selecting
from introspect_cli.exchange.formats import FORMATS
from introspect_cli.exit_codes import DIVERGED, SAME
from introspect_cli.records import USUAL_PHASES, Kind

if TYPE_CHECKING:
    from introspect_cli.store.read.verify import VerifyReport


@click.command(
    epilog="\b\nFormats:\n"
    + "\n".join(f"  {name:<12} {form.about}" for name, form in FORMATS.items())
    + """

\b
Examples:
  introspect export runA --format parquet -o tables
  introspect export runA --format csv --modules 'blocks.*.attn' -o attention
  introspect export runA --format json-tree --steps 0 -o trees""",
)
@click.argument("run", type=RunType())
@click.option("--format", "format_", type=click.Choice(list(FORMATS)), required=True, help="What to write; see below.")
@click.option("-o", "--output", type=click.Path(), required=True, help="Directory to write to; new or empty.")
@selecting("steps", "kinds", "modules", "ranks")
@engine_option
def export(run: str, format_: str, output: str, *, engine: str, selected: Selecting) -> int:
    """Write RUN as tables, reports, trees or TensorBoard events."""
    from introspect_cli.engine import engine_of
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.exchange.formats import export as write
    from introspect_cli.selection import check_selection
    from introspect_cli.texts import count

    wanted = selected.read()
    with open_any(run) as opened, engine_of(engine) as at_work:
        wanted = check_selection(wanted, [opened])
        written = write(opened, format_, output, wanted, at_work.elsewhere)
    if not written:
        raise UsageError(f"{run} has no complete step, so there is nothing to export")
    say(f"wrote {count(written, 'file')} to {output}")
    return SAME


@click.command(
    name="import",
    epilog="""\b
Examples:
  introspect import dump -o theirs        (dump/output/h.0.mlp.npy, ...)
  introspect import model.safetensors --kind param --root GPT -o weights
  introspect import logs/introspection/fit -o runA
  introspect diff theirs ours""",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory of the run to make.")
@click.option(
    "--root",
    metavar="NAME",
    help="Class of the model, put before names [default: Model for reports].",
)
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in USUAL_PHASES]),
    help="Kind of the arrays whose names do not say one.",
)
@click.option(
    "--save-tensors", multiple=True, metavar="GLOB", help="Keep the whole arrays of these modules and tensors."
)
@force_option("a run")
def import_(
    source: Path, output: Path, root: str | None, kind: str | None, save_tensors: tuple[str, ...], *, force: bool
) -> int:
    """Make a run out of arrays, YAML reports or JSON debug trees below SOURCE.

    Arrays are .npy, .npz and .safetensors files named by site: [step=K/]KIND/NAME, as in output/h.0.mlp.npy.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange import arrays, trees, yaml_reports
    from introspect_cli.exchange.incoming import write_run
    from introspect_cli.store.files.folders import MANIFEST
    from introspect_cli.texts import count

    if (source / MANIFEST).exists():
        raise UsageError(f"{source} is a run already: `introspect diff` takes it as it is")
    files = arrays.find_arrays(source)
    if not source.is_dir() and not files:
        raise UsageError(f"{source} is neither a directory nor a .npy, .npz or .safetensors file: name one of these")
    reports, debug_trees = yaml_reports.find_reports(source), trees.find_trees(source)
    readable = {"arrays": files, "YAML reports": reports, "JSON debug trees": debug_trees}
    there = [name for name, paths in readable.items() if paths]
    if len(there) != 1:
        none = "no arrays (.npy, .npz, .safetensors), YAML reports (step=N/rankN.yaml) or JSON trees (*_debug_tree_*)"
        raise UsageError(f"{source} has {' and '.join(there) or none} below it: name a directory that has one kind")
    if not files and (kind or save_tensors):
        raise UsageError(f"{'--kind' if kind else '--save-tensors'} is for arrays, of which {source} has none")
    if files:
        dump = arrays.Dump(files, Kind(kind) if kind else None, root or "", save_tensors)
        rows = list(dump.read())
        notes = [arrays.ORDER_UNKNOWN] if dump.sorted else []
        about = {"not_observed": notes, "listed": True, "ordered": not dump.sorted}
        made = write_run(
            output, rows, source=str(source), settings={}, about=about, sketch=True, stored=dump.kept, force=force
        )
    else:
        rows = list(yaml_reports.read_reports(source, root or "Model") if reports else trees.read_trees(source))
        about = {
            "not_observed": ["there are no sketches: the files had statistics only, so distances cannot be estimated"]
        }
        settings = yaml_reports.read_settings(source) if reports else {}
        made = write_run(output, rows, source=str(source), settings=settings, about=about, force=force)
    say(f"made {output} of {count(made[0], 'step')} with {count(made[1], 'record')}")
    return SAME


@click.command(
    epilog="""\b
Examples:
  introspect merge node0/run node1/run -o run
  introspect merge node*.introspect.zip -o run
  introspect merge --whole run -o whole --engine processes:8""",
)
@click.argument("runs", nargs=-1, required=True, type=RunType())
@click.option("-o", "--output", metavar="DIR", required=True, help="Directory of the run to make; it must not exist.")
@click.option("--sources/--no-sources", default=True, help="With the text of the source files [default: yes].")
@click.option("--whole", is_flag=True, help="Add up the ranks of one RUN, so that it reads like a run of one process.")
@engine_option
def merge(runs: tuple[str, ...], output: str, *, sources: bool, whole: bool, engine: str) -> int:
    """Put the ranks of one launch, recorded on machines without a common disk, into one run.

    With --whole, add up what the ranks of one run hold: some kilobytes a step, whatever their number.
    """
    from introspect_cli.engine import HERE, engine_of
    from introspect_cli.errors import UsageError
    from introspect_cli.store.ranks.merge import merge as put_together
    from introspect_cli.store.read.run import open_run
    from introspect_cli.texts import count

    if whole:
        from introspect_cli.store.ranks.merge import reduce_run

        if len(runs) > 1:
            raise UsageError("--whole takes one run: merge those of several machines first")
        with engine_of(engine) as at_work:
            steps = reduce_run(runs[0], Path(output), at_work.run, texts=sources)
        say(f"wrote {output} ({count(steps, 'step')})")
        return SAME
    if engine != HERE:
        raise UsageError("--engine says where --whole adds ranks up: give --whole with it, or leave it out")
    ranks = put_together(runs, Path(output), texts=sources)
    with open_run(output) as run:
        endings = run.endings
    say(f"wrote {output} ({count(len(ranks), 'rank')})")
    for sentence in endings:
        say(f"{sentence}.")
    return SAME


@click.command(
    epilog="""\b
Examples:
  introspect pack introspect-runs/a
  introspect pack introspect-runs/a -o reference.zip
  introspect pack introspect-runs/a -o s3://bucket/a.zip
  introspect diff reference.zip https://example.org/b.zip""",
)
@click.argument("run", type=RunType())
@click.option("-o", "--output", metavar="FILE", help="File or URL to write [default: RUN.introspect.zip].")
@click.option(
    "--sources/--no-sources",
    default=None,
    help="With the text of the source files [default: not to a URL].",
)
def pack(run: str, output: str | None, *, sources: bool | None) -> int:
    """Make one file of RUN (a zip), which every verb reads in its place."""
    import tempfile

    from introspect_cli.errors import UsageError
    from introspect_cli.inspect.overview import size_on_disk
    from introspect_cli.store.read.run import RunState, open_run
    from introspect_cli.store.remote import pack as packing
    from introspect_cli.store.remote.objects import is_remote
    from introspect_cli.texts import count, human_size

    if not is_remote(run) and not Path(run).is_dir():
        raise UsageError(f"{run} is not a directory of a run: name one that `introspect capture -o` made.")
    with open_run(run) as opened:
        if opened.state is RunState.RUNNING:
            raise UsageError(f"{run} is still being written: wait for its end, then pack it.")
        texts = len(opened.kept_sources)
    out = output or f"{run.rstrip('/').rpartition('/')[2] if is_remote(run) else run.rstrip('/')}{packing.ENDING}"
    carried = sources if sources is not None else not is_remote(out)
    with packing.local_copy(run) as source, tempfile.TemporaryDirectory() as place:
        file = Path(place) / "run.zip" if is_remote(out) else Path(out)
        written = packing.pack(source, file, sources=carried)
        if is_remote(out):
            packing.upload(file, out)
        unpacked = size_on_disk(str(source))
    say(f"wrote {out} ({human_size(written)}, unpacked {human_size(unpacked)})")
    if texts and sources is None:
        files = count(texts, "source file")
        say(
            f"with the text of {files}; --no-sources leaves it out"
            if carried
            else f"without the text of {files}; --sources sends it, too"
        )
    return SAME


@click.command(
    epilog="""\b
Examples:
  introspect verify runA
  introspect verify s3://bucket/runs/a

Exit status: 0 sound, 1 damage was found, 2 there is no run to check.""",
)
@click.argument("run", type=RunType())
def verify(run: str) -> int:
    """Read every byte of RUN, and say what is damaged."""
    from introspect_cli.store.read.verify import verify_run

    report = verify_run(run)
    for line in _lines(report):
        click.echo(line)
    return SAME if report.sound else DIVERGED


def _lines(report: VerifyReport) -> list[str]:
    """The report as text."""
    from introspect_cli.store.read.run import RunState
    from introspect_cli.texts import count

    kept = (
        f"{count(report.steps, 'step')} with {count(report.records, 'record')}, {count(report.documents, 'document')}"
    )
    if report.tensors:
        kept += f", {count(report.tensors, 'tensor')}"
    out = [f"damaged: {finding}" for finding in report.findings]
    if report.omitted:
        out.append(f"damaged: {count(report.omitted, 'more finding')} not listed")
    end = f"last complete step {report.last_step}" if report.last_step is not None else "no complete step"
    closed = {
        RunState.COMPLETE: "closed properly",
        RunState.RUNNING: "still being written",
        RunState.INTERRUPTED: "not closed by its writer",
    }[report.state]
    return [*out, f"{'sound' if report.sound else 'still sound'}: {kept}; {closed}, {end}"]
