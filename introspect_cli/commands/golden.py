"""`introspect golden`: keep a small run in git, and ask whether a script still trains the same."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import exit_code, say
from introspect_cli.exit_codes import SAME


@click.group()
def golden() -> None:
    """Keep a small run in git, and ask later whether the script still trains the same."""


@golden.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to keep it in.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Keep the first N steps."
)
@click.option(
    "--rtol", type=float, default=0.0, metavar="X", help="Let relative RMS differences up to X pass in each check."
)
@click.option(
    "--atol", type=float, default=0.0, metavar="X", help="Let absolute RMS differences up to X pass in each check."
)
@click.option("--tolerance", multiple=True, metavar="KIND=RTOL[,ATOL]", help="Tolerance of one kind; may be repeated.")
@click.option("--force", is_flag=True, help="Replace a golden run that is there.")
@click.option("--sources/--no-sources", default=False, help="Also keep the text of the source files [default: no].")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CAPTURE OPTIONS] SCRIPT [ARGS]...")
def save(
    words: tuple[str, ...],
    output: Path,
    steps: int,
    rtol: float,
    atol: float,
    tolerance: tuple[str, ...],
    *,
    force: bool,
    sources: bool,
) -> int:
    """Run a script for some steps and keep checksums and sketches of what it computes."""
    from introspect_cli.commands.capture import capture, split_words
    from introspect_cli.rerun.golden import Golden, tolerance_of
    from introspect_cli.rerun.golden import save as keep

    options, rest = split_words(capture, words)
    made = Golden(tuple(rest), tuple(options), steps, tolerance_of(tolerance, rtol, atol))
    size = keep(made, output, force=force, sources=sources)
    say(f"introspect: the golden run in {output} takes {size / 1000:.1f} kB", err=True)
    return SAME


@golden.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="GOLDEN")
@click.option(
    "--noise", is_flag=True, help="Run the script twice, and let four times the difference of these runs pass."
)
@click.option(
    "--keep", "keep_run", type=click.Path(path_type=Path), metavar="RUN", help="Keep the new run in this directory."
)
def check(path: Path, *, noise: bool, keep_run: Path | None) -> int:
    """Run the script of a golden run again: 0 if it trains the same, 1 if not, 2 if that could not be told."""
    from introspect_cli.render.console import Screen
    from introspect_cli.render.diff_text import diff_blocks
    from introspect_cli.rerun.golden import check as checked

    result = checked(path, noise=noise, keep_run=keep_run)
    Screen().draw(diff_blocks(result))
    return exit_code(result.verdict)
