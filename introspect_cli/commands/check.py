"""`introspect check`: look for what usually goes wrong, in one run."""

from __future__ import annotations

from dataclasses import dataclass

import click

from introspect_cli.commands.shared import RunType, Working, Written, answer, last_runs, option, takes
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED


@dataclass(frozen=True)
class CheckOptions(Written, Working):
    """Which rules are applied, and from which level on the exit status is 1."""

    rule: tuple[str, ...] = option((), "Check only these rules; repeatable.", metavar="GLOB")
    ignore: tuple[str, ...] = option((), "Leave these rules out; repeatable.", metavar="GLOB")
    fail_on: str = option(
        "warning", "Level that exits with 1 [default: warning].", choices=("error", "warning", "info")
    )
    copies: bool = option(False, "Only find the rank whose copies differ, by the last step.")
    list_: bool = option(False, "List the rules: when each finds something.")


@click.command(
    epilog="""\b
Examples:
  introspect check runA
  introspect check --list --rule 'loss-*'
  introspect check --ignore one-batch --fail-on error runA
  introspect check --copies run             (thousands of ranks, in seconds)

Exit status: 0 nothing found, 1 a finding at the level of --fail-on or worse, 2 no rule had the data it needs.""",
)
@click.argument("run", type=RunType(), required=False)
@takes(CheckOptions)
def check(run: str | None, asked: CheckOptions) -> int:
    """Look for what usually goes wrong in training, in RUN, or in the last run.

    Rules that lack data are listed as not checked.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.health.check import check as check_run
    from introspect_cli.health.check import choose
    from introspect_cli.health.findings import Level
    from introspect_cli.health.minority import minority_ranks
    from introspect_cli.render.check_text import check_blocks, rules_blocks
    from introspect_cli.render.json import check_document, document
    from introspect_cli.workers import at_work

    chosen = choose(asked.rule, asked.ignore)
    if asked.list_:
        answer(asked.format_, lambda: document(rules=chosen), lambda: rules_blocks(chosen))
        return SAME
    if asked.copies and (asked.rule or asked.ignore):
        raise UsageError("--copies applies no rules: leave out --rule and --ignore.")
    with open_any(run or last_runs(1)[0]) as opened, at_work(asked.workers) as work:
        result = minority_ranks(opened, work or map) if asked.copies else check_run(opened, chosen, work)
    answer(asked.format_, lambda: check_document(result), lambda: check_blocks(result))
    if result.reaches(Level(asked.fail_on)):
        return DIVERGED
    return SAME if result.checked else UNDECIDED
