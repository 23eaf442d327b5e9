"""`introspect bisect`, `golden` and `zoom`: what runs a script again to answer a question."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from introspect_cli.commands.shared import (
    TO_CAPTURE,
    Comparing,
    Linking,
    RunType,
    Tolerating,
    Written,
    answer,
    exit_code,
    option,
    pair_of,
    say,
    takes,
    tell,
)
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

_words = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CAPTURE OPTIONS] SCRIPT [ARGS]...")


@dataclass(frozen=True)
class BisectOptions(Written, Linking):
    """What is bisected, and how it is run."""

    good: str | None = option(None, "A revision whose run is right.", metavar="REV")
    bad: str = option("HEAD", "A later revision whose run is wrong [default: HEAD].", metavar="REV")
    max_runs: int = option(50, "Run no more than N variants to find the change [default: 50].", least=0)
    until_step: int | None = option(None, "Look no further than step N.", least=0)
    setup: str = option("", "Shell command to run before each capture.", metavar="COMMAND")
    output: Path | None = option(None, "Where runs are kept; a later call continues from there.", "-o", metavar="DIR")


@click.command(
    context_settings=TO_CAPTURE,
    epilog="""\b
Examples:
  introspect bisect --good v1.2 train.py --steps 50
  introspect bisect --good v1.2 --bad HEAD --setup 'pip install -e .' train.py
  introspect bisect --changes runA runB

Exit status: 1 when the culprit is found, 2 when it cannot be told.""",
)
@click.option(
    "--changes",
    nargs=2,
    type=RunType(),
    metavar="RUN_A RUN_B",
    help="Find which changed statements, files and settings make two runs diverge.",
)
@takes(BisectOptions)
@_words
def bisect(words: tuple[str, ...], changes: tuple[str, str] | None, asked: BisectOptions) -> int:
    """Find the first commit whose run diverges from a good one's, or what makes two runs diverge.

    Your checkout, index and stash stay as they are. Options not listed here go to `introspect capture`.
    """
    from introspect_cli.commands.capture import split_words
    from introspect_cli.errors import UsageError
    from introspect_cli.render.json import document
    from introspect_cli.render.rerun_text import culprit_blocks, proof_blocks
    from introspect_cli.rerun.bisect import bisect as find
    from introspect_cli.rerun.changes.search import Limits, prove
    from introspect_cli.rerun.commits import Command

    options, rest = split_words(words)
    command = Command(options, rest, asked.link, asked.setup)
    limits = Limits(asked.output, asked.until_step, asked.max_runs)
    if changes is None and asked.good is not None:
        culprit = find(asked.good, asked.bad, command, tell, limits)
        answer(asked.format_, lambda: document(**vars(culprit)), lambda: culprit_blocks(culprit))
        return DIVERGED if culprit.commit else UNDECIDED
    if changes is None or asked.good is not None:
        raise UsageError("say what to bisect: commits with --good REV, or two runs with --changes RUN_A RUN_B")
    if rest or asked.setup:
        raise UsageError(f"--changes runs the command that RUN_A recorded: leave {(*rest, '--setup')[0]!r} out")
    one, two = map(Path, changes)
    proof = prove(one, two, command, tell, limits)
    answer(asked.format_, lambda: document(**vars(proof)), lambda: proof_blocks(proof))
    return DIVERGED if proof.proven else UNDECIDED


@click.group(
    epilog="""\b
Examples:
  introspect golden save -o golden/small --steps 20 train.py
  introspect golden check golden/small --noise""",
)
def golden() -> None:
    """Keep a small run in git, and ask later whether the script still trains the same."""


@dataclass(frozen=True)
class SaveOptions(Tolerating):
    """What a golden run keeps, and with which tolerance it is checked."""

    steps: int = option(20, "Run N steps, and keep the first four, the middle and the last [default: 20].", least=1)
    force: bool = option(False, "Replace a golden run that is there.")


@golden.command(context_settings=TO_CAPTURE)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory to keep it in.")
@takes(SaveOptions)
@_words
def save(words: tuple[str, ...], output: Path, asked: SaveOptions) -> int:
    """Run a script for some steps and keep what it computes.

    That is some kilobytes of checksums and sketches, to be committed.
    """
    from introspect_cli.commands.capture import split_words
    from introspect_cli.rerun.golden import Golden
    from introspect_cli.rerun.golden import save as keep

    options, rest = split_words(words)
    made = Golden(rest, options, asked.steps, asked.rtol, asked.atol)
    size = keep(made, output, force=asked.force)
    say(f"introspect: the golden run in {output} takes {size / 1000:.1f} kB", err=True)
    return SAME


@golden.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="GOLDEN")
@click.option("--noise", is_flag=True, help="Run the script twice, and accept four times their difference.")
def check(path: Path, *, noise: bool) -> int:
    """Run the script of a golden run again and compare.

    Exit status: 0 it trains the same, 1 it does not, 2 could not tell.
    """
    from introspect_cli.render.console import Screen
    from introspect_cli.render.diff_text import first_blocks
    from introspect_cli.rerun.golden import check as checked

    result = checked(path, noise=noise)
    Screen().draw(first_blocks(result))
    return exit_code(result.verdict)


@dataclass(frozen=True)
class ZoomOptions(Linking):
    """Where and from what the new captures are made."""

    output: Path | None = option(None, "Where the new captures are kept.", "-o", metavar="DIR")


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
@takes(Comparing, "compared")
@takes(ZoomOptions)
def zoom(a: str | None, b: str | None, compared: Comparing, asked: ZoomOptions) -> int:
    """Run what A and B recorded again, up to their first divergence, and show which elements differ there.

    This executes what was recorded: zoom only into runs that you trust. Where a run does not repeat its numbers, zoom
    says so and shows what the runs hold.
    """
    from introspect_cli.render.console import Screen
    from introspect_cli.render.rerun_text import zoom_blocks
    from introspect_cli.rerun.zoom import zoom as look

    one, two = map(Path, pair_of(a, b))
    noise = tuple(map(Path, compared.noise))
    zoomed = look(one, two, compared.options(), asked.output, asked.link, tell, noise)
    Screen().draw(zoom_blocks(zoomed))
    return exit_code(zoomed.before.verdict)
