"""`capture --verify-neutral` and `capture --repeat N`: the script run several times, and what that shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.commands.shared import exit_code, say
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.script.target import Target


def verify_neutral(target: Target, options: CaptureOptions, before_script: Sequence[str], words: Sequence[str]) -> int:
    """Run the script under a capture and without one, and say on stderr whether both train the same.

    The captured run is kept, and its directory named on stderr, if it was made.

    Args:
        target: what is run.
        options: the capture options.
        before_script: the words of the command line before the script.
        words: the script and its arguments.

    Returns:
        exit code: 0 they do, 1 they do not, 2 it cannot be told.

    Raises:
        UsageError: the run's directory exists and is not empty, and `--force` was not given.
    """
    from introspect_cli.capture import neutrality
    from introspect_cli.capture.ranks.launchers import new_run

    output = options.output or new_run(target)
    _refuse_existing([output], options)
    finding = neutrality.verify_neutral(before_script, words, output)
    say(f"introspect: {finding.sentence}", err=True)
    if output.exists():
        say(f"introspect: the captured run is in {output}", err=True)
    return finding.exit_code


def repeat(
    target: Target, options: CaptureOptions, before_script: Sequence[str], words: Sequence[str], times: int
) -> int:
    """Capture the script several times, one after the other, and say on stderr whether all runs are the same.

    All runs are kept. Only the first one's output is shown.

    Args:
        target: what is run.
        options: the capture options.
        before_script: the words of the command line before the script.
        words: the script and its arguments.
        times: how often; the runs are OUT-1, OUT-2, ...

    Returns:
        exit code: 0 all runs are the same, 1 two differ, in values or in the exit code, 2 it cannot be told.

    Raises:
        UsageError: a run's directory exists and is not empty, and `--force` was not given.
        StoreError: a run recorded nothing; further ones are not started.
    """
    from introspect_cli.capture.neutrality import run_child
    from introspect_cli.capture.ranks.launchers import fresh_run
    from introspect_cli.compare.groups import group_runs
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.exchange.checkpoints import opened

    base = options.output or fresh_run(target)
    outputs = [base.with_name(f"{base.name}-{number}") for number in range(1, times + 1)]
    _refuse_existing(outputs, options)
    codes = []
    for number, output in enumerate(outputs):
        outcome = run_child(before_script, words, output=output, show=number == 0)
        codes.append(outcome.aspects["exit code"])
        if not (output / "manifest.json").exists():
            raise StoreError(
                f"run {number + 1} of {times} recorded nothing in {output}; it ended with code {codes[-1]}"
            )
    with opened(*outputs) as runs:
        groups = group_runs(runs, DiffOptions(limit=1))
    sentence = f"{groups.sentence} {groups.differences[0].sentence if groups.differences else ''}".rstrip()
    code = exit_code(groups.verdict)
    if code == SAME and len(set(codes)) > 1:
        code, sentence = DIVERGED, f"The exit codes are {', '.join(map(str, codes))}."
    said = {SAME: "deterministic", DIVERGED: "not deterministic", UNDECIDED: "cannot tell"}[code]
    say(f"introspect: {said}: {sentence}", err=True)
    say(f"introspect: the runs are in {', '.join(map(str, outputs))}", err=True)
    return code


def _refuse_existing(outputs: Sequence[Path], options: CaptureOptions) -> None:
    """Check before the script runs that each directory of a run is missing or empty, unless `--force` is given.

    Raises:
        UsageError: one has something in it.
    """
    for output in outputs:
        if not options.force and output.exists() and any(output.iterdir()):
            raise UsageError(f"{output} exists already; choose another place with -o, or --force to replace it")
