"""`introspect export`, `import`, `merge`, `pack` and `verify`: what is done with a run's files as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import RunType, Selecting, Working, option, say, takes
from introspect_cli.exchange.formats import FORMATS
from introspect_cli.exit_codes import DIVERGED, SAME
from introspect_cli.records import USUAL_PHASES, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.store.verify import VerifyReport


def _output(text: str) -> Callable[[Any], Any]:
    """The decorator of the required option `-o`, with the help `text`; its value is the `Path` `output`."""
    return click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help=text)


@click.command(
    epilog="\b\nFormats:\n"
    + "\n".join(f"  {name:<12} {about}" for name, (about, _) in FORMATS.items())
    + """

\b
Examples:
  introspect export runA --format parquet -o tables
  introspect export runA --format csv --modules 'blocks.*.attn' -o attention""",
)
@click.argument("run", type=RunType())
@click.option("--format", "format_", type=click.Choice(list(FORMATS)), required=True, help="What to write; see below.")
@_output("Directory to write to; new or empty.")
@takes(Selecting, "selected")
def export(run: str, format_: str, output: Path, selected: Selecting) -> int:
    """Write RUN as tables, reports or trees."""
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.exchange.formats import export as write
    from introspect_cli.selection import check_selection
    from introspect_cli.texts import count

    wanted = selected.read()
    with open_any(run) as opened:
        written = write(opened, format_, str(output), check_selection(wanted, [opened]))
    if not written:
        raise UsageError(f"{run} has no complete step, so there is nothing to export")
    say(f"wrote {count(written, 'file')} to {output}")
    return SAME


_KINDS = tuple(kind.value for kind in USUAL_PHASES)


@dataclass(frozen=True)
class ImportOptions:
    """How arrays and reports are named in the run."""

    root: str | None = option(None, "Class of the model, before names [default: Model for reports].", metavar="NAME")
    kind: str | None = option(None, "Kind of the arrays whose names do not say one.", choices=_KINDS)
    save_tensors: tuple[str, ...] = option((), "Keep the whole arrays of these modules and tensors.", metavar="GLOB")
    force: bool = option(False, "Replace a run that is there.")


@click.command(
    name="import",
    epilog="""\b
Examples:
  introspect import dump -o theirs        (dump/output/h.0.mlp.npy, ...)
  introspect import model.safetensors --kind param --root GPT -o weights
  introspect import logs/introspection/fit -o runA""",
)
@click.argument("source", type=click.Path(path_type=Path))
@_output("Directory of the run to make.")
@takes(ImportOptions)
def import_(source: Path, output: Path, asked: ImportOptions) -> int:
    """Make a run out of arrays or YAML reports below SOURCE.

    Arrays are .npy, .npz and .safetensors files named by site: [step=K/]KIND/NAME, as in output/h.0.mlp.npy.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange import arrays, yaml_reports
    from introspect_cli.exchange.incoming import write_run
    from introspect_cli.store.files import MANIFEST
    from introspect_cli.texts import count

    if (source / MANIFEST).exists():
        raise UsageError(f"{source} is a run already: `introspect diff` takes it as it is")
    files = arrays.find_arrays(source)
    if not source.is_dir() and not files:
        raise UsageError(f"{source} is neither a directory nor a .npy, .npz or .safetensors file: name one of these")
    readable = {"arrays": files, "YAML reports": yaml_reports.find_reports(source)}
    there = [name for name, paths in readable.items() if paths]
    if len(there) != 1:
        none = "no arrays (.npy, .npz, .safetensors) or YAML reports (step=N/rankN.yaml)"
        raise UsageError(f"{source} has {' and '.join(there) or none} below it: name a directory that has one kind")
    more: dict[str, Any]
    if files:
        kind = Kind(asked.kind) if asked.kind else None
        rows, stored, made_up = arrays.read_arrays(files, kind, asked.root or "", asked.save_tensors)
        about = {"not_observed": [arrays.ORDER_UNKNOWN] * made_up, "listed": True, "ordered": not made_up}
        more = {"settings": {}, "sketch": True, "stored": stored}
    else:
        rows = list(yaml_reports.read_reports(source, asked.root or "Model"))
        unseen = "there are no sketches: the files had statistics only, so distances cannot be estimated"
        about = {"not_observed": [unseen]}
        more = {"settings": yaml_reports.read_settings(source)}
    steps, records = write_run(output, rows, source=str(source), about=about, force=asked.force, **more)
    say(f"made {output} of {count(steps, 'step')} with {count(records, 'record')}")
    return SAME


@dataclass(frozen=True)
class MergeOptions(Working):
    """What a run of merged ranks has."""

    sources: bool = option(True, "With the text of the source files [default: yes].")


@click.command(
    epilog="""\b
Examples:
  introspect merge run -o whole
  introspect merge run -o whole --workers 8""",
)
@click.argument("run", type=RunType())
@_output("Directory of the run to make; it must not exist.")
@takes(MergeOptions)
def merge(run: str, output: Path, asked: MergeOptions) -> int:
    """Add up what the ranks of RUN hold, so that it reads like a run of one process.

    Some kilobytes a step are left, whatever their number.
    """
    from introspect_cli.store.merge import merge as put_together
    from introspect_cli.texts import count
    from introspect_cli.workers import at_work

    with at_work(asked.workers) as work:
        steps = put_together(run, output, work or map, texts=asked.sources)
    say(f"wrote {output} ({count(steps, 'step')})")
    return SAME


@dataclass(frozen=True)
class PackOptions:
    """Where a packed run goes, and what is in it."""

    output: str | None = option(None, "File to write [default: RUN.introspect.zip].", "-o", metavar="FILE")
    sources: bool = option(True, "With the text of the source files [default: yes].")


@click.command(
    epilog="""\b
Examples:
  introspect pack introspect-runs/a
  introspect pack s3://bucket/runs/a -o a.zip
  introspect diff reference.zip https://example.org/b.zip""",
)
@click.argument("run", type=RunType())
@takes(PackOptions)
def pack(run: str, asked: PackOptions) -> int:
    """Make one file of RUN (a zip), which every verb reads in its place."""
    from introspect_cli.errors import UsageError
    from introspect_cli.inspect.overview import size_on_disk
    from introspect_cli.store import pack as packing
    from introspect_cli.store.remote import is_remote
    from introspect_cli.store.run import RunState, open_run
    from introspect_cli.texts import count, human_size

    with open_run(run) as opened:
        if opened.state is RunState.RUNNING:
            raise UsageError(f"{run} is still being written: wait for its end, then pack it.")
        texts = len(opened.kept_sources)
    name = run.rstrip("/")
    out = Path(asked.output or f"{name.rpartition('/')[2] if is_remote(run) else name}{packing.ENDING}")
    with packing.local_copy(run) as source:
        written = packing.pack(source, out, sources=asked.sources)
        unpacked = size_on_disk(str(source))
    say(f"wrote {out} ({human_size(written)}, unpacked {human_size(unpacked)})")
    if texts and asked.sources:
        say(f"with the text of {count(texts, 'source file')}; --no-sources leaves it out")
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
    from introspect_cli.store.verify import verify_run

    report = verify_run(run)
    for line in _lines(report):
        click.echo(line)
    return SAME if report.sound else DIVERGED


def _lines(report: VerifyReport) -> list[str]:
    """The report as text: a line for each damage, then what is sound and how the run ends."""
    from introspect_cli.store.run import RunState
    from introspect_cli.texts import count

    kept = ("steps", "records", "documents", *(["tensors"] if report.counts["tensors"] else []))
    counts = [count(report.counts[thing], thing.removesuffix("s")) for thing in kept]
    text = f"{counts[0]} with {', '.join(counts[1:])}"
    out = [f"damaged: {finding}" for finding in report.findings]
    end = f"last complete step {report.last_step}" if report.last_step is not None else "no complete step"
    ended = {RunState.COMPLETE: "closed properly", RunState.RUNNING: "still being written"}
    how = ended.get(report.state, "not closed by its writer")
    return [*out, f"{'sound' if report.sound else 'still sound'}: {text}; {how}, {end}"]
