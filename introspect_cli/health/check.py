"""All rules over all ranks of a run, in one walk over its steps."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.health import collectives, data_parallel, equal, flow, nonfinite, progress, training
from introspect_cli.health.aligned import AlignedStep, Ranks
from introspect_cli.health.findings import LEVELS, CheckResult, Finding, Hit, NotObservedError, Rule
from introspect_cli.health.table import read_table
from introspect_cli.store.tasks import tasks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.health.table import Table
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Task, Work

_FILES = nonfinite, flow, training, progress, equal, collectives, data_parallel
RULES: tuple[Rule, ...] = tuple(rule for file in _FILES for rule in vars(file).values() if isinstance(rule, Rule))
"""Every rule, in the order in which they are written."""

_GATHERED = (progress.Progress, collectives.Collectives, equal.Parts, equal.Equal, data_parallel.RankInputs)
"""What rules about ranks ask for; each step is handed to them in this order."""


def choose(wanted: Sequence[str], ignored: Sequence[str]) -> tuple[Rule, ...]:
    """The rules that match a glob of `wanted` (all where empty) and none of `ignored`.

    Raises:
        UsageError: a glob matches no rule.
    """
    for glob in (*wanted, *ignored):
        if not any(fnmatchcase(rule.id, glob) for rule in RULES):
            names = [rule.id for rule in RULES]
            hint = did_you_mean(glob, names) or "; `introspect check --list` lists all"
            raise UsageError(f"unknown rule {glob!r}{hint}")
    left = (rule for rule in RULES if not any(fnmatchcase(rule.id, glob) for glob in ignored))
    return tuple(rule for rule in left if any(fnmatchcase(rule.id, glob) for glob in wanted or ("*",)))


def check(run: Run, rules: Sequence[Rule] = RULES, work: Work | None = None) -> CheckResult:
    """Check a run by rules about one rank, for every rank, and by rules about all ranks together.

    The latter only of a launch of several ranks with separate records.

    Args:
        run: the run.
        rules: the rules; with `work`, tasks look them up in `RULES` by id, so others are not found.
        work: runs tasks, each for some of several ranks; None to check here.
    """
    several = run.world_size > 1 and bool(run.ranks) and not run.combined_ranks
    over_ranks = [rule for rule in rules if rule.over_ranks and several]
    groups: Iterable[Iterable[_OfRank]] = [(_check_rank(read_table(run.rank(rank)), rules) for rank in run.ranks)]
    if work is not None and several:
        groups = work(_check_group, tasks_of([run], run.ranks, tuple(rule.id for rule in rules)))
    answers = [answer for group in groups for answer in group]
    if over_ranks:
        ranks = _gather(run)
        answers.append(_OfRank(0, 1, 0, {rule.id: _apply_rule(rule, ranks) for rule in over_ranks}))
    result = _check_result(str(run.path), answers, rules)
    notes = (*run.endings, *map(str, run.manifest.get("not_observed", ())), *result.notes)
    return replace(result, notes=notes, checkpoint="checkpoint" in run.manifest)


class _OfRank(NamedTuple):
    """Results of the rules about one rank, or of those about all ranks.

    Attributes:
        stride: every `stride`-th step was looked at, at sites with many records.
        answers: by the id of a rule, its hits, and what it lacks ([] where it could be decided).
    """

    rank: int
    stride: int
    steps: int
    answers: dict[str, tuple[list[Hit], list[str]]]


def _check_group(task: Task) -> list[_OfRank]:
    """Check the ranks of a task by the rules whose ids it gives."""
    rules = [rule for rule in RULES if rule.id in task.given]
    with task.opened() as [run]:
        return [_check_rank(read_table(run.rank(rank)), rules) for rank in run.ranks]


def _check_rank(table: Table, rules: Sequence[Rule]) -> _OfRank:
    """Apply the rules about one rank to its table; rules about all ranks are left out."""
    answers = {rule.id: _apply_rule(rule, table) for rule in rules if not rule.over_ranks}
    return _OfRank(table.reader.rank, table.stride, len(table.moves.steps), answers)


def _gather(run: Run) -> Ranks:
    """`Ranks` of all recorded ranks; each of `_GATHERED` has taken in all steps that every rank has, in order."""
    numbers = [set(run.rank(rank).entries["step"].tolist()) for rank in run.recorded]
    ranks = Ranks(run, run.recorded, sorted(set.intersection(*numbers)))
    ranks.gathered += [kind(ranks) for kind in _GATHERED]
    for step in ranks.steps:
        now = AlignedStep(step, ranks, {rank: run.rank(rank).read(step) for rank in ranks.numbers})
        for gathered in ranks.gathered:
            gathered.step(now)
    return ranks


def check_tables(path: str, tables: Sequence[Table]) -> CheckResult:
    """Check ranks that have been read, each by its table, by all rules about one rank; `path` is that of their run."""
    return _check_result(path, [_check_rank(table, RULES) for table in tables], RULES)


def _check_result(path: str, each: Sequence[_OfRank], rules: Sequence[Rule]) -> CheckResult:
    """The check's result: findings by level, step and rule, rules decided or not, and a note on each rank read in part.

    A rule is decided if it is on any rank; otherwise the first rank's need is given. Rules about all ranks that have no
    results are skipped.

    Args:
        path: of the run.
        each: the results of each rank, and of the rules about all ranks.
        rules: the rules that were asked for.
    """
    findings: list[Finding] = []
    checked: list[str] = []
    unseen: list[tuple[str, str]] = []
    for rule in rules:
        answers = [of.answers[rule.id] for of in each if rule.id in of.answers]
        if rule.over_ranks and not answers:
            continue
        hits = [hit for several, _ in answers for hit in several]
        lacking = [need for _, needs in answers for need in needs] if answers else ["a rank with records"]
        if hits:
            findings.append(finding_of(rule, hits))
        if len(lacking) < len(answers):
            checked.append(rule.id)
        else:
            unseen.append((rule.id, lacking[0]))
    notes = [
        f"rank {of.rank}: only one step in {of.stride} was checked: there are too many for all"
        for of in each
        if of.stride > 1
    ]
    steps = max((of.steps for of in each), default=0)
    findings.sort(key=lambda finding: (LEVELS.index(finding.level), finding.step, finding.rule))
    return CheckResult(path, tuple(findings), tuple(checked), tuple(unseen), tuple(notes), steps)


def _apply_rule(rule: Rule, subject: Any) -> tuple[list[Hit], list[str]]:
    """(hits, needs) of a rule for a table or `Ranks`; `needs` says what was missing where it could not be decided."""
    try:
        with np.errstate(all="ignore"):  # what is not a number is what some rules look for
            hits = list(rule.find(subject))
    except NotObservedError as error:
        return [], [str(error)]
    return hits if rule.over_ranks else [replace(hit, rank=subject.reader.rank) for hit in hits], []


def finding_of(rule: Rule, hits: list[Hit]) -> Finding:
    """One finding of all hits of a rule, at least one: the earliest, with the other sites in `also`, each once.

    Of several hits in the earliest step it is the first one given.
    """
    first = min(hits, key=lambda hit: hit.step)
    also = tuple(dict.fromkeys(hit.site for hit in hits if hit.site != first.site))
    return Finding(rule.id, rule.level, first.step, first.rank, first.site, first.evidence, rule.cause, also)
