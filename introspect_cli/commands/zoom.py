"""`introspect zoom`: both runs again, up to where they diverge, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from introspect_cli.commands.shared import RunType, compared_by, comparing, exit_code, pair_of, tell


@click.command(
    epilog="""\b
Examples:
  introspect zoom runA runB
  introspect zoom runA runB --link data -o zoomed
  introspect zoom runA runB --modules 'blocks.3' --rtol 1e-6

Exit status: as of `introspect diff`: 0 the same, 1 diverged, 2 could not tell.""",
)
@click.argument("a", type=RunType(), required=False)
@click.argument("b", type=RunType(), required=False)
@comparing
@click.option("--link", "links", multiple=True, metavar="PATH", help="Data outside of git that a commit's files need.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the new captures are kept.")
def zoom(
    a: str | None,
    b: str | None,
    output: Path | None,
    links: tuple[str, ...],
    **asked: Any,
) -> int:
    """Run what A and B recorded again, up to their first divergence, and show which elements differ there.

    Without runs, the last two below introspect-runs/ are taken.

    The recorded command lines are executed: zoom only into runs that you trust. Each runs where it ran if its files are
    unchanged, else in a work tree of its commit, with operators recorded and whole tensors kept around the first
    divergence. zoom warns when a run does not reproduce its numbers, and then shows what the stores hold.
    """
    from introspect_cli.compare.options import DiffOptions

    one, two = map(Path, pair_of(a, b))
    return show_zoom(one, two, DiffOptions(**compared_by(asked)), output, links, asked["noise"])


def show_zoom(
    a: Path,
    b: Path,
    options: Any,
    output: Path | None = None,
    links: tuple[str, ...] = (),
    noise: tuple[Path, ...] = (),
) -> int:
    """Zoom and draw what is seen; the exit code."""
    from introspect_cli.render.console import Screen
    from introspect_cli.render.rerun_text import zoom_blocks
    from introspect_cli.rerun.zoom import zoom as look

    zoomed = look(a, b, options, output, links, tell, noise)
    screen = Screen()
    screen.draw(zoom_blocks(zoomed, screen.width))
    return exit_code(zoomed.verdict)
