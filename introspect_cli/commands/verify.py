"""`introspect verify`: recompute what a run says of itself."""

from __future__ import annotations

import click

from introspect_cli.commands.shared import RunType
from introspect_cli.exit_codes import DIVERGED, SAME
from introspect_cli.store.reader import RunState
from introspect_cli.store.verify import VerifyReport, verify_run
from introspect_cli.texts import count


@click.command(
    epilog="""\b
Exit codes: 0 sound, 1 damage was found, 2 there is no run to check.""",
)
@click.argument("run", type=RunType())
def verify(run: str) -> int:
    """Check that a run on disk is whole.

    Reads every byte of RUN, computes its digests and checks again, and says what is damaged and what is sound.
    """
    report = verify_run(run)
    for line in lines(report):
        click.echo(line)
    return SAME if report.sound else DIVERGED


def lines(report: VerifyReport) -> list[str]:
    """The report as text."""
    kept = (
        f"{count(report.steps, 'step')} with {count(report.records, 'record')}, {count(report.documents, 'document')}"
    )
    if report.tensors:
        kept += f", {count(report.tensors, 'tensor')}"
    out = [f"damaged: {finding}" for finding in report.findings]
    if report.omitted:
        out.append(f"damaged: {count(report.omitted, 'more finding')} not listed")
    end = f"last whole step {report.last_step}" if report.last_step is not None else "no whole step"
    return [*out, f"{'sound' if report.sound else 'still sound'}: {kept}; {_ENDS[report.state]}, {end}"]


_ENDS = {
    RunState.COMPLETE: "closed properly",
    RunState.RUNNING: "still being written",
    RunState.INTERRUPTED: "not closed by its writer",
}
