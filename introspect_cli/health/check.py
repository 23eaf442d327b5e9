"""All rules over all ranks of a run, in one walk over its steps."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.health import activations, gradients, inputs, losses, nonfinite, parameters
from introspect_cli.health.aligned import Ranks
from introspect_cli.health.collectives import COLLECTIVES, Collectives
from introspect_cli.health.copies import COPIES_DIFFER, RANK_LAYOUT, Copies
from introspect_cli.health.findings import LEVELS, CheckResult, Finding, Hit, NotObservedError, RankRule, Rule
from introspect_cli.health.given import RANK_SETTINGS, SAME_SAMPLES, UNEVEN_BATCHES, Given
from introspect_cli.health.outputs import RANK_DRAWS, RANK_OUTPUTS, Outputs
from introspect_cli.health.parts import SHARDS, TIED_WEIGHTS, Parts
from introspect_cli.health.progress import LOST_RANK, RANK_GRADIENTS, RANK_STEPS, Progress
from introspect_cli.health.reading import TableBuilder
from introspect_cli.health.reduction import REDUCTION, Reductions
from introspect_cli.health.scaling import LOCAL_CLIP, SUMMED_GRADIENTS, Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.health.table import Table
    from introspect_cli.store.reader import Run

RULES: tuple[Rule, ...] = (
    *nonfinite.RULES,
    *losses.RULES,
    *gradients.RULES,
    *activations.RULES,
    *parameters.RULES,
    *inputs.RULES,
    LOST_RANK,
    REDUCTION,
    SUMMED_GRADIENTS,
    LOCAL_CLIP,
    COPIES_DIFFER,
    SAME_SAMPLES,
    RANK_SETTINGS,
    RANK_LAYOUT,
    COLLECTIVES,
    RANK_STEPS,
    RANK_GRADIENTS,
    RANK_OUTPUTS,
    RANK_DRAWS,
    UNEVEN_BATCHES,
    SHARDS,
    TIED_WEIGHTS,
)
"""Every rule, in the order in which they are documented."""

_GATHERED = (Given, Progress, Parts, Outputs, Copies, Collectives, Reductions, Scaling)
"""What rules about ranks ask for, in the order in which a step is handed to them: outputs are compared where copies
were equal before the step, and reductions explain what copies and collectives show of it."""


def choose(wanted: Sequence[str], ignored: Sequence[str]) -> tuple[Rule, ...]:
    """The rules that match a glob of `wanted` (all where empty) and none of `ignored`.

    Raises:
        UsageError: a glob matches no rule.
    """
    for glob in (*wanted, *ignored):
        if not any(fnmatchcase(rule.id, glob) for rule in RULES):
            names = [rule.id for rule in RULES]
            hint = did_you_mean(glob, names) or f": known are {', '.join(names)}"
            raise UsageError(f"no rule is called {glob!r}{hint}")
    return tuple(
        rule
        for rule in RULES
        if (not wanted or any(fnmatchcase(rule.id, glob) for glob in wanted))
        and not any(fnmatchcase(rule.id, glob) for glob in ignored)
    )


def check(run: Run, rules: Sequence[Rule] = RULES) -> CheckResult:
    """Put every rule to every rank, and those about ranks to all of them together."""
    several = run.world_size > 1 and bool(run.ranks) and not run.whole_of
    tables, ranks = _walk(run, together=several and any(isinstance(rule, RankRule) for rule in rules))
    result = check_tables(str(run.path), tables, rules, ranks)
    unseen = map(str, run.manifest.get("not_observed", ()))
    notes = (*run.endings, *unseen, *result.notes)
    return replace(result, notes=notes, only=run.alone, checkpoint="checkpoint" in run.manifest)


def _walk(run: Run, *, together: bool) -> tuple[list[Table], Ranks | None]:
    """Each rank's table, and the ranks side by side where that is asked for, from reading each step once."""
    readers = {rank: run.rank(rank) for rank in run.ranks}
    builders = {rank: TableBuilder(reader) for rank, reader in readers.items()}
    numbers = {rank: set(reader.entries["step"].tolist()) for rank, reader in readers.items()}
    ranks = None
    if together:
        ranks = Ranks(run, run.recorded, sorted(set.intersection(*(numbers[rank] for rank in run.recorded))))
        ranks.gathered += [kind(ranks) for kind in _GATHERED]
    common = set(ranks.steps) if ranks is not None else set()
    for step in sorted(set().union(*numbers.values())):
        batches = {rank: reader.read(step) for rank, reader in readers.items() if step in numbers[rank]}
        for rank, batch in batches.items():
            builders[rank].take(step, batch)
        if ranks is not None and step in common:
            ranks.take(step, {rank: batches[rank] for rank in ranks.numbers})
    return [builder.table() for builder in builders.values()], ranks


def check_tables(
    path: str, tables: Sequence[Table], rules: Sequence[Rule] = RULES, ranks: Ranks | None = None
) -> CheckResult:
    """Put rules to ranks that have been read; those about several ranks where there are `ranks`."""
    findings: list[Finding] = []
    checked: list[str] = []
    unseen: list[tuple[str, str]] = []
    for rule in rules:
        subjects: Sequence[Any] = tables
        if isinstance(rule, RankRule):
            if ranks is None:
                continue
            subjects = [ranks]
        hits: list[Hit] = []
        lacking = [] if subjects else ["a rank with records"]
        for subject in subjects:
            hits_of_one, needs = _answer(rule, subject)
            hits += hits_of_one
            lacking += needs
        if hits:
            findings.append(_folded(rule, hits))
        if len(lacking) < len(subjects):
            checked.append(rule.id)
        else:
            unseen.append((rule.id, lacking[0]))
    notes = [
        f"rank {table.rank}: only one step in {table.stride} was checked: there are too many for all"
        for table in tables
        if table.stride > 1
    ]
    steps = max((len(table.moves.steps) for table in tables), default=0)
    findings.sort(key=lambda finding: (LEVELS.index(finding.level), finding.step, finding.rule))
    return CheckResult(path, tuple(findings), tuple(checked), tuple(unseen), tuple(notes), steps)


def _answer(rule: Rule, subject: Any) -> tuple[list[Hit], list[str]]:
    """What a rule finds in a table, or in all ranks; or what it lacks."""
    try:
        with np.errstate(all="ignore"):  # what is not a number is what some rules look for
            hits = list(rule.find(subject))
    except NotObservedError as error:
        return [], [str(error)]
    return hits if isinstance(rule, RankRule) else [replace(hit, rank=subject.rank) for hit in hits], []


def _folded(rule: Rule, hits: list[Hit]) -> Finding:
    """One finding for a rule: the earliest of what it found, the other sites beside it."""
    first = min(hits, key=lambda hit: hit.step)
    also = tuple(dict.fromkeys(hit.site for hit in hits if hit.site != first.site))
    return Finding(rule.id, rule.level, first.step, first.rank, first.site, first.evidence, rule.cause, also)
