"""All rules over all ranks of a run."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.errors import UsageError
from introspect_cli.health import activations, gradients, inputs, losses, nonfinite, parameters, peer_rules, ranks
from introspect_cli.health.findings import LEVELS, CheckResult, Finding
from introspect_cli.health.reading import read_table
from introspect_cli.health.replicas import read_replicas
from introspect_cli.health.rule import Hit, RankRule, Rule, Unseen
from introspect_cli.selection import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.health.table import Table
    from introspect_cli.store.reader import Run

RULES: tuple[Rule | RankRule, ...] = (
    *nonfinite.RULES,
    *losses.RULES,
    *gradients.RULES,
    *activations.RULES,
    *parameters.RULES,
    *inputs.RULES,
    *ranks.RULES,
    *peer_rules.RULES,
)
"""Every rule, in the order in which they are documented."""

TABLE_RULES = tuple(rule for rule in RULES if isinstance(rule, Rule))
"""Those that are put to one rank at a time."""


def choose(wanted: Sequence[str], ignored: Sequence[str]) -> tuple[Rule | RankRule, ...]:
    """The rules that match a glob of `wanted` (all where empty) and none of `ignored`.

    Raises:
        UsageError: a glob matches no rule.
    """
    for glob in (*wanted, *ignored):
        if not any(fnmatchcase(rule.id, glob) for rule in RULES):
            known = [rule.id for rule in RULES]
            hint = did_you_mean(glob, known) or f": known are {', '.join(known)}"
            raise UsageError(f"no rule is called {glob!r}{hint}")
    return tuple(
        rule
        for rule in RULES
        if (not wanted or any(fnmatchcase(rule.id, glob) for glob in wanted))
        and not any(fnmatchcase(rule.id, glob) for glob in ignored)
    )


def check(run: Run, rules: Sequence[Rule | RankRule] = RULES) -> CheckResult:
    """Put every rule to every rank, and those about ranks to all of them together.

    Raises:
        StoreError: the run is damaged.
    """
    tables = [read_table(run.rank(number)) for number in run.ranks]
    result = check_tables(str(run.path), tables, [rule for rule in rules if isinstance(rule, Rule)])
    together = [rule for rule in rules if isinstance(rule, RankRule)]
    if run.world_size > 1 and run.ranks and together:
        result = _with_ranks(result, run, together)
    unseen = map(str, run.manifest.get("not_observed", ()))
    return replace(result, notes=(*run.endings, *unseen, *result.notes), only=run.alone)


def _with_ranks(result: CheckResult, run: Run, rules: Sequence[RankRule]) -> CheckResult:
    """The result with what the rules about ranks found."""
    replicas = read_replicas(run)
    findings, checked, unseen = list(result.findings), list(result.checked), list(result.unseen)
    for rule in rules:
        answer = rule.find(replicas)
        if isinstance(answer, Unseen):
            unseen.append((rule.id, answer.needs))
            continue
        checked.append(rule.id)
        if answer:
            findings.append(_folded(rule, answer))
    return replace(result, findings=_ordered(findings), checked=tuple(checked), unseen=tuple(unseen))


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """Findings, the worst first, then by step."""
    return tuple(sorted(findings, key=lambda finding: (LEVELS.index(finding.level), finding.step, finding.rule)))


def check_tables(path: str, tables: Sequence[Table], rules: Sequence[Rule] = TABLE_RULES) -> CheckResult:
    """Put every rule to ranks that have been read."""
    findings: list[Finding] = []
    checked: list[str] = []
    unseen: list[tuple[str, str]] = []
    for rule in rules:
        with np.errstate(all="ignore"):  # what is not a number is what some rules look for
            answers = [(table.rank, rule.find(table)) for table in tables]
        hits = [(rank, hit) for rank, answer in answers if not isinstance(answer, Unseen) for hit in answer]
        if hits:
            findings.append(_folded(rule, hits))
        if any(not isinstance(answer, Unseen) for _, answer in answers):
            checked.append(rule.id)
        else:
            needs = next((answer.needs for _, answer in answers if isinstance(answer, Unseen)), "a rank with records")
            unseen.append((rule.id, needs))
    notes = [
        f"rank {table.rank}: only one step in {table.stride} was checked: there are too many for all"
        for table in tables
        if table.stride > 1
    ]
    steps = max((len(table.moves.steps) for table in tables), default=0)
    return CheckResult(path, _ordered(findings), tuple(checked), tuple(unseen), tuple(notes), steps)


def _folded(rule: Rule | RankRule, hits: list[tuple[int, Hit]]) -> Finding:
    """One finding for a rule: the earliest of what it found, the other sites beside it."""
    rank, first = min(hits, key=lambda found: found[1].step)
    also = tuple(dict.fromkeys(hit.site for _, hit in hits if hit.site != first.site))
    return Finding(rule.id, rule.level, first.step, rank, first.site, first.evidence, rule.cause, also)
