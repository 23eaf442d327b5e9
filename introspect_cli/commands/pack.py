"""`introspect pack`: a run as one file."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import RunType, say
from introspect_cli.exit_codes import SAME


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
    help="Also pack the text of the source files [default: into a file yes, to a URL no].",
)
def pack(run: str, output: str | None, *, sources: bool | None) -> int:
    """Make one file of RUN (a zip), which every verb reads in its place."""
    import tempfile

    from introspect_cli.errors import UsageError
    from introspect_cli.inspect.overview import size_on_disk
    from introspect_cli.store import pack as packing
    from introspect_cli.store.objects import is_remote
    from introspect_cli.store.reader import RunState, open_run
    from introspect_cli.texts import count, human_size

    if not is_remote(run) and not Path(run).is_dir():
        raise UsageError(f"{run} is no directory of a run: name one that `introspect capture -o` made.")
    with open_run(run) as opened:
        if opened.state is RunState.RUNNING:
            raise UsageError(f"{run} is still being written: wait for its end, then pack it.")
        texts = len(opened.kept_sources)
    out = output or f"{run.rstrip('/').rpartition('/')[2] if is_remote(run) else run.rstrip('/')}{packing.ENDING}"
    carried = sources if sources is not None else not is_remote(out)
    with packing.local(run) as source, tempfile.TemporaryDirectory() as place:
        file = Path(place) / "run.zip" if is_remote(out) else Path(out)
        written = packing.pack(source, file, sources=carried)
        if is_remote(out):
            packing.sent(file, out)
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
