"""What of a step is an effect, and what only a cause.

A random state that differs moves no number until somebody draws from it, and a module that only one run has may change
nothing. So records are told apart: values that both runs have are effects, and decide whether the runs diverge. Random
states, and what one run only has because the other has nothing of that name, are causes: they are blamed where an
effect differs and does not explain itself, and told as structure where none does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.coverage import observed_kinds
from introspect_cli.compare.join.sites import kind_code, phase_code
from introspect_cli.compare.reasons.facts import ancestors, with_ancestors
from introspect_cli.compare.reasons.hyperparameters import hyperparameter_changes
from introspect_cli.compare.reasons.step_view import StepRecords
from introspect_cli.compare.result import Role
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment, Ids, Mask
    from introspect_cli.compare.reasons.base import Cause
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.records import ModuleInfo, Site

_ACTIVATIONS = (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.OP_OUTPUT)
"""Of these, one run may have more than the other although both have the module: another call, another path."""

RESULTS = (Kind.LOSS, Kind.GRAD, Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What a step gives: where these are on record and agree, nothing that one run only has has changed a number."""

_FLOWING_BACK = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)

_OWN = frozenset({"batch", "optimizer", "module", "op"})
"""Reasons that say of a record that all that went into it is equal, so that nothing elsewhere is to blame."""


class Causes:
    """Which sites are causes where one run only has them, or where they differ."""

    def __init__(self, alignment: Alignment, trees: tuple[Iterable[ModuleInfo], Iterable[ModuleInfo]]) -> None:
        """Look at all names once, those of the modules and of their tensors included that left no record."""
        self._alignment = alignment
        self._random = alignment.kind == kind_code(Kind.RNG)
        alone = np.isin(alignment.kind, [kind_code(kind) for kind in _ACTIVATIONS])
        alone |= alignment.evaluating
        named = (alignment.names_a, alignment.names_b)
        held = [with_ancestors(names | _named_in(tree)) for names, tree in zip(named, trees, strict=True)]
        missing = {name for name in alignment.names_a | alignment.names_b if not (name in held[0] and name in held[1])}
        if missing:
            alone |= np.fromiter((name in missing for name in alignment.fqn), np.bool_, alignment.size)
        alone &= ~self._random
        self._alone = alone

    def split(self, pair: StepPair) -> tuple[StepPair, StepPair]:
        """The step with its effects alone, and with its causes alone."""
        site_a, site_b = pair.sites(self._alignment)
        random = self._random[site_a[pair.rows_a]]
        alone_a = (self._alone | self._random)[site_a[pair.only_a]]
        alone_b = (self._alone | self._random)[site_b[pair.only_b]]

        def keep(rows: Mask, only_a: Mask, only_b: Mask) -> StepPair:
            return replace(
                pair,
                rows_a=pair.rows_a[rows],
                rows_b=pair.rows_b[rows],
                only_a=pair.only_a[only_a],
                only_b=pair.only_b[only_b],
            )

        return keep(~random, ~alone_a, ~alone_b), keep(random, alone_a, alone_b)

    def is_cause(self, facts: Facts, position: int) -> bool:
        """Whether a divergence of a step is one."""
        union = int(facts.items.union[position])
        one_sided = facts.items.row_a[position] < 0 or facts.items.row_b[position] < 0
        return bool(self._random[union] or (one_sided and self._alone[union]))


def _named_in(tree: Iterable[ModuleInfo]) -> set[str]:
    """FQNs of modules and of the tensors they hold."""
    found = set()
    for module in tree:
        found.add(module.fqn)
        found |= {f"{module.fqn}.{name}" for name in (*module.parameters, *module.buffers)}
    return found


def explains_itself(facts: Facts, effect: int, cause: Cause, before: Iterable[Site]) -> bool:
    """Whether an effect lies at its own place, and not at one of the causes before it.

    Args:
        facts: the step, without what one run only has.
        effect: the first effect, by its place in the step.
        cause: what is known of it.
        before: the sites of the causes before it.
    """
    if cause.role is not Role.ORIGIN or cause.reason not in _OWN:
        return False
    inside = cause.module or facts.sites[effect].fqn
    told = cause.reason == "optimizer" and bool(
        hyperparameter_changes(facts.alignment, StepRecords(facts.alignment, facts.pair))
    )
    back = cause.reason == "op" and facts.sites[effect].phase is Phase.BACKWARD
    return not any(
        (site.kind is Kind.RNG and not told)
        or (back and site.kind in _FLOWING_BACK)  # a gradient that flows in one run only changes those it is added to
        or inside in (site.fqn, *ancestors(site.fqn))
        for site in before
    )


def brings_values(alignment: Alignment, causes: StepPair) -> bool:
    """Whether something that one run only has brings a value into the forward pass that the other has nowhere.

    A wrapper gives what is inside it, and an identity what it is given: neither can be to blame.
    """
    site_a, site_b = causes.sites(alignment)
    giving = [kind_code(kind) for kind in (Kind.OUTPUT, Kind.OP_OUTPUT, Kind.PARAM, Kind.BUFFER)]
    late = [phase_code(phase) for phase in (Phase.BACKWARD, Phase.OPTIMIZER)]
    for batch, sites, rows, other in (
        (causes.a, site_a, causes.only_a, causes.b),
        (causes.b, site_b, causes.only_b, causes.a),
    ):
        early = rows[~np.isin(alignment.phase[sites[rows]], late)]
        own = early[np.isin(alignment.kind[sites[early]], giving)]
        if not np.isin(np.asarray(batch.checksum)[own], np.asarray(other.checksum)).all():
            return True
        given, gave = (
            {alignment.fqn[union] for union in sites[early][alignment.kind[sites[early]] == kind_code(kind)].tolist()}
            for kind in (Kind.INPUT, Kind.OUTPUT)
        )
        if given - gave:
            return True  # what it gave was not seen
    return False


def watches_results(*manifests: dict[str, Any]) -> bool:
    """Whether both captures were told to record results, so that a script without any has none."""
    wanted = {kind.value for kind in (Kind.LOSS, Kind.GRAD, Kind.PARAM)}
    return all(wanted & observed_kinds(manifest) for manifest in manifests)


def results_agree(alignment: Alignment, pair: StepPair) -> bool:
    """Whether both runs recorded results of the step under one name, and these are equal or let pass.

    A loss alone tells nothing of what an update made of the parameters: where either run recorded tensors of the
    model, some of these have to be among them.
    """
    unions, _, agree = matched_sites(alignment, pair)
    results = unions[agree & _is_result(alignment, unions)]
    tensors = any((_is_result(alignment, own) & ~_is_loss(alignment, own)).any() for own in pair.sites(alignment))
    return bool(len(results)) and not (tensors and _is_loss(alignment, results).all())


def _is_loss(alignment: Alignment, unions: Ids) -> Mask:
    return np.asarray(alignment.kind[unions] == kind_code(Kind.LOSS))


def records_results(alignment: Alignment, pair: StepPair) -> bool:
    """Whether either run recorded results of the step at all."""
    site_a, site_b = pair.sites(alignment)
    return bool(_is_result(alignment, site_a).any() or _is_result(alignment, site_b).any())


def _is_result(alignment: Alignment, unions: Ids) -> Mask:
    found = np.isin(alignment.kind[unions], [kind_code(kind) for kind in RESULTS])
    found &= alignment.phase[unions] != phase_code(Phase.START)
    if not found.any():  # a script that trains nothing: what its models give is all there is
        roots = [union for union in unions.tolist() if "." not in alignment.fqn[union]]
        found = np.isin(unions, roots) & (alignment.kind[unions] == kind_code(Kind.OUTPUT))
    return np.asarray(found)


def matched_sites(alignment: Alignment, pair: StepPair) -> tuple[Ids, Ids, Mask]:
    """Sites that both runs have in the step, and which of them agree, or differ by no more than was let pass."""
    site_a, site_b = pair.sites(alignment)
    place = np.full(alignment.size, -1, dtype=np.int64)
    place[site_b] = np.arange(len(site_b))
    rows_a = np.flatnonzero(place[site_a] >= 0)
    rows_b = place[site_a[rows_a]]
    agree = np.asarray(pair.a.checksum)[rows_a] == np.asarray(pair.b.checksum)[rows_b]
    agree &= ~np.isin(rows_a, pair.unseen_a)
    agree |= np.isin(rows_a, pair.within_a)
    return site_a[rows_a], site_b[rows_b], agree
