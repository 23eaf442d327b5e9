"""`introspect check`: look for what usually goes wrong, in one run."""

from __future__ import annotations

import click

from introspect_cli.commands.shared import RunType, answer, engine_option, formats, last_runs
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED


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
@click.option("--rule", "rules", multiple=True, metavar="GLOB", help="Check only these rules; repeatable.")
@click.option("--ignore", multiple=True, metavar="GLOB", help="Leave these rules out; repeatable.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info"]),
    default="warning",
    show_default=True,
    help="Exit with 1 from this level on.",
)
@formats()
@click.option(
    "--copies",
    is_flag=True,
    help="Only find the rank whose copies differ, without reading records.",
)
@engine_option
@click.option("--list", "listed", is_flag=True, help="List the rules: when each finds something.")
def check(
    run: str | None,
    rules: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str,
    format_: str,
    *,
    copies: bool,
    engine: str,
    listed: bool,
) -> int:
    """Look for what usually goes wrong in training, in RUN, or in the last run.

    Rules that lack data are listed as not checked.
    """
    from introspect_cli.engine import engine_of
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.health.check import check as check_run
    from introspect_cli.health.check import choose
    from introspect_cli.health.findings import Level
    from introspect_cli.health.minority import minority_ranks
    from introspect_cli.render.check_text import check_blocks, rules_blocks
    from introspect_cli.render.json import check_document, rules_document

    chosen = choose(rules, ignore)
    if listed:
        answer(format_, lambda: rules_document(chosen), lambda: rules_blocks(chosen))
        return SAME
    if copies and (rules or ignore):
        raise UsageError("--copies applies no rules: leave out --rule and --ignore.")
    with open_any(run or last_runs(1)[0]) as opened, engine_of(engine) as at_work:
        result = minority_ranks(opened, at_work.total) if copies else check_run(opened, chosen, at_work.elsewhere)
    answer(format_, lambda: check_document(result), lambda: check_blocks(result))
    if result.reaches(Level(fail_on)):
        return DIVERGED
    return SAME if result.checked else UNDECIDED
