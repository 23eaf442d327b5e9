"""`capture --verify-neutral` and `capture --repeat N`: the script run several times, and what that shows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.commands.shared import say
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from introspect_cli.capture.options.capture_options import CaptureOptions
    from introspect_cli.script.target import Target


def verify_neutral(target: Target, options: CaptureOptions, before_script: Sequence[str], words: Sequence[str]) -> int:
    """Run the script watched and bare, say whether they agree; 0 neutral, 1 not, 2 could not tell."""
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
    """Capture the script several times; 0 if all runs are the same, 1 if two differ, 2 if that could not be told."""
    from introspect_cli.capture.neutrality import run_child
    from introspect_cli.capture.ranks.launchers import fresh_run

    base = options.output or fresh_run(target)
    outputs = [base.with_name(f"{base.name}-{number}") for number in range(1, times + 1)]
    _refuse_existing(outputs, options)
    codes = []
    for number, output in enumerate(outputs):
        outcome = run_child(before_script, words, output=output, show=number == 0)
        codes.append(outcome.aspects["exit code"])
        if not (output / "manifest.yaml").exists():
            raise StoreError(
                f"run {number + 1} of {times} recorded nothing in {output}; it ended with code {codes[-1]}"
            )
    code, sentence = _compared(outputs)
    if code == SAME and len(set(codes)) > 1:
        code, sentence = DIVERGED, f"not deterministic: the exit codes are {', '.join(map(str, codes))}"
    say(f"introspect: {sentence}", err=True)
    say(f"introspect: the runs are in {', '.join(map(str, outputs))}", err=True)
    return code


def _compared(outputs: Sequence[Path]) -> tuple[int, str]:
    """Compare every run with the first; a difference found decides."""
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.compare.terms.result import Verdict
    from introspect_cli.store.read.run import open_run

    steps, undecided, differs = 0, "", ""
    with open_run(outputs[0]) as first:
        for number, output in enumerate(outputs[1:], 2):
            with open_run(output) as other:
                result = compare_runs(first, other, replace(DiffOptions(), limit=1), [])
            if result.verdict is Verdict.DIVERGED or result.counts.diverged:
                differs = differs or f"not deterministic: run {number} differs from run 1. {result.sentence}"
            if result.verdict is Verdict.UNDECIDED:
                undecided = undecided or f"cannot tell: {result.sentence}"
            steps = result.counts.steps_compared
    if differs:
        return DIVERGED, differs
    if undecided:
        return UNDECIDED, undecided
    return SAME, f"deterministic: {len(outputs)} runs agree in all {steps:,} steps"


def _refuse_existing(outputs: Sequence[Path], options: CaptureOptions) -> None:
    """Tell before the script runs, not after, that a directory is taken."""
    for output in outputs:
        if not options.force and output.exists() and any(output.iterdir()):
            raise UsageError(f"{output} exists already; choose another place with -o, or --force to replace it")
