"""`introspect bisect`, `golden` and `zoom`: what runs a script again to answer a question."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import (
    Comparing,
    RunType,
    answer,
    atol_option,
    comparing,
    exit_code,
    force_option,
    formats,
    link_option,
    pair_of,
    rtol_option,
    say,
    tell,
)
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

_TO_CAPTURE = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Of verbs that hand on what they do not know to `capture`."""


@click.command(
    context_settings=_TO_CAPTURE,
    epilog="""\b
Examples:
  introspect bisect --good v1.2 train.py --steps 50
  introspect bisect --good v1.2 --bad HEAD --setup 'pip install -e .' train.py
  introspect bisect --changes runA runB

Exit status: 1 when the culprit is found, 2 when it cannot be told.""",
)
@click.option("--good", metavar="REV", help="A revision whose run is right.")
@click.option("--bad", metavar="REV", default="HEAD", show_default=True, help="A later revision whose run is wrong.")
@click.option(
    "--changes",
    nargs=2,
    type=RunType(),
    metavar="RUN_A RUN_B",
    help="Find which changed statements, files and settings make two runs diverge.",
)
@click.option(
    "--max-runs",
    type=click.IntRange(min=0),
    metavar="N",
    default=50,
    show_default=True,
    help="Run no more than N variants for that.",
)
@click.option("--until-step", type=click.IntRange(min=0), metavar="N", help="Look no further than step N.")
@click.option("--setup", metavar="COMMAND", help="Shell command to run before each capture.")
@link_option
@click.option("--keep", is_flag=True, help="Leave the work tree, or the variants, in place.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where runs are kept; a later call continues from there."
)
@formats()
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CAPTURE OPTIONS] SCRIPT [ARGS]...")
def bisect(
    words: tuple[str, ...],
    good: str | None,
    bad: str,
    changes: tuple[str, str] | None,
    max_runs: int,
    format_: str,
    *,
    until_step: int | None,
    setup: str | None,
    links: tuple[str, ...],
    keep: bool,
    output: Path | None,
) -> int:
    """Find the first commit whose run diverges from a good one's, or what makes two runs diverge.

    Your checkout, index and stash stay as they are. Options not listed here go to `introspect capture`.
    """
    from introspect_cli.commands.capture import capture, split_words
    from introspect_cli.errors import UsageError
    from introspect_cli.render.json import culprit_document, proof_document
    from introspect_cli.render.rerun_text import culprit_blocks, proof_blocks

    if (good is None) == (changes is None):
        raise UsageError("say what to bisect: commits with --good REV, or two runs with --changes RUN_A RUN_B")
    options, rest = split_words(capture, words)
    if changes is not None:
        from introspect_cli.rerun.changes.search import prove

        if rest:
            raise UsageError(f"--changes runs the command that RUN_A recorded: leave {rest[0]!r} out")
        a, b = map(Path, changes)
        proof = prove(a, b, options, output, until_step, tell, most_runs=max_runs, keep=keep)
        answer(format_, lambda: proof_document(proof), lambda: proof_blocks(proof))
        return DIVERGED if proof.proven else UNDECIDED
    from introspect_cli.rerun.bisect import Plan
    from introspect_cli.rerun.bisect import bisect as find

    plan = Plan(str(good), bad, options, rest, until_step, setup, links, keep, output, max_runs)
    culprit = find(plan, tell)
    answer(format_, lambda: culprit_document(culprit), lambda: culprit_blocks(culprit))
    return DIVERGED if culprit.commit else UNDECIDED


@click.group(
    epilog="""\b
Examples:
  introspect golden save -o golden/small --steps 20 train.py
  introspect golden check golden/small
  introspect golden check golden/small --noise""",
)
def golden() -> None:
    """Keep a small run in git, and ask later whether the script still trains the same."""


@golden.command(context_settings=_TO_CAPTURE)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to keep it in.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Run N steps, and keep the first four, the middle and the last.",
)
@rtol_option
@atol_option
@click.option("--tolerance", multiple=True, metavar="KIND=RTOL[,ATOL]", help="Tolerance of one kind; repeatable.")
@force_option("a golden run")
@click.option("--sources/--no-sources", default=False, help="With the text of the source files [default: no].")
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
    """Run a script for some steps and keep what it computes.

    That is some kilobytes of checksums and sketches, to be committed.
    """
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
@click.option("--noise", is_flag=True, help="Run the script twice, and accept four times their difference.")
@click.option("--keep", "keep_run", type=click.Path(path_type=Path), metavar="RUN", help="Keep the new run here.")
def check(path: Path, *, noise: bool, keep_run: Path | None) -> int:
    """Run the script of a golden run again and compare.

    Exit status: 0 it trains the same, 1 it does not, 2 could not tell.
    """
    from introspect_cli.render.console import Screen
    from introspect_cli.render.diff_text import first_blocks
    from introspect_cli.rerun.golden import check as checked

    result = checked(path, noise=noise, keep_run=keep_run)
    Screen().draw(first_blocks(result))
    return exit_code(result.verdict)


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
@link_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the new captures are kept.")
def zoom(
    a: str | None,
    b: str | None,
    output: Path | None,
    links: tuple[str, ...],
    compared: Comparing,
) -> int:
    """Run what A and B recorded again, up to their first divergence, and show which elements differ there.

    This executes what was recorded: zoom only into runs that you trust. Where a run does not repeat its numbers, zoom
    says so and shows what the runs hold.
    """
    from introspect_cli.render.console import Screen
    from introspect_cli.render.rerun_text import zoom_blocks
    from introspect_cli.rerun.zoom import zoom as look

    one, two = map(Path, pair_of(a, b))
    noise = tuple(map(Path, compared.noise))
    zoomed = look(one, two, compared.options(), output, links, tell, noise)
    Screen().draw(zoom_blocks(zoomed))
    return exit_code(zoomed.verdict)
