"""`introspect bisect`: find the commit, or the changed statements and settings, that made two runs diverge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from introspect_cli.commands.shared import RunType, answer, formats, tell
from introspect_cli.exit_codes import DIVERGED, UNDECIDED

_EPILOG = """\b
Examples:
  introspect bisect --good v1.2 train.py --steps 50
  introspect bisect --good v1.2 --bad HEAD --setup 'pip install -e .' train.py
  introspect bisect --settings runA runB train.py
  introspect bisect --changes runA runB

Exit status: 1 when the culprit is found, 2 when it cannot be told."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=_EPILOG,
)
@click.option("--good", metavar="REV", help="A revision whose run is right.")
@click.option("--bad", metavar="REV", default="HEAD", show_default=True, help="A later revision whose run is wrong.")
@click.option(
    "--settings",
    nargs=2,
    type=RunType(),
    metavar="RUN_A RUN_B",
    help="Bisect over the settings that differ between two runs.",
)
@click.option(
    "--changes",
    nargs=2,
    type=RunType(),
    metavar="RUN_A RUN_B",
    help="Prove which changed statements, files and settings make two runs diverge; the script is that of the runs.",
)
@click.option(
    "--max-runs",
    type=click.IntRange(min=0),
    metavar="N",
    default=50,
    show_default=True,
    help="Run no more than N variants to find the changed statement.",
)
@click.option("--until-step", type=click.IntRange(min=0), metavar="N", help="Look no further than step N.")
@click.option("--setup", metavar="COMMAND", help="Shell command to run before each capture, such as a reinstall.")
@click.option("--link", "links", multiple=True, metavar="PATH", help="Data outside of git that each revision needs.")
@click.option("--keep", is_flag=True, help="Leave the work tree, or the variants, in place at the end.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where runs are kept; a later call continues from there."
)
@formats()
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CAPTURE OPTIONS] SCRIPT [ARGS]...")
def bisect(
    words: tuple[str, ...],
    good: str | None,
    settings: tuple[str, str] | None,
    changes: tuple[str, str] | None,
    max_runs: int,
    format_: str,
    **given: Any,
) -> int:
    """Find the first commit whose run diverges from a good one's, or what makes two runs diverge.

    Revisions are tried in a work tree of their own: your checkout, index and stash stay as they are. Options that are
    not listed here are handed to `introspect capture`.
    """
    from introspect_cli.commands.capture import capture, split_words
    from introspect_cli.errors import UsageError
    from introspect_cli.render.json import culprit_document, proof_document, smallest_document
    from introspect_cli.render.rerun_text import culprit_blocks, proof_blocks, smallest_blocks

    if sum(chosen is not None for chosen in (good, settings, changes)) != 1:
        raise UsageError(
            "say what to bisect: commits with --good REV, or two runs with --settings or --changes RUN_A RUN_B"
        )
    options, rest = split_words(capture, words)
    if changes is not None:
        from introspect_cli.rerun.changes import prove

        if rest:
            raise UsageError(f"--changes runs the command that RUN_A recorded: leave {rest[0]!r} out")
        proof = prove(
            Path(changes[0]),
            Path(changes[1]),
            options,
            given["output"],
            given["until_step"],
            tell,
            most_runs=max_runs,
            keep=given["keep"],
        )
        answer(format_, lambda: proof_document(proof), lambda _: proof_blocks(proof))
        return DIVERGED if proof.proven else UNDECIDED
    if settings is not None:
        from introspect_cli.rerun.minimise import minimise

        smallest = minimise(
            Path(settings[0]), Path(settings[1]), options, rest, given["output"], given["until_step"], tell
        )
        answer(format_, lambda: smallest_document(smallest), lambda _: smallest_blocks(smallest))
        return DIVERGED if smallest.settings else UNDECIDED
    from introspect_cli.rerun.bisect import Plan
    from introspect_cli.rerun.bisect import bisect as find

    culprit = find(Plan(good=str(good), options=options, words=rest, max_runs=max_runs, **given), tell)
    answer(format_, lambda: culprit_document(culprit), lambda _: culprit_blocks(culprit))
    return DIVERGED if culprit.commit else UNDECIDED
