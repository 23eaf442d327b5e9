"""Constants of one rank's comparison: sites, selection, options, and what either capture recorded.

Nothing here changes from step to step, except the noise in `floors`; what steps teach is passed on as `Learned`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.ledger import TENSORS, At
from introspect_cli.compare.names import with_ancestors
from introspect_cli.compare.resumed import ResumePoint, find_resume_point, resumption_of
from introspect_cli.compare.steps import Sides
from introspect_cli.compare.table import ACTIVATIONS, ONLY_A, Alignment, align, among, columns
from introspect_cli.compare.watched import (
    STATE_KINDS,
    chooses_modules,
    covered,
    draws_at_one_moment,
    draws_recorded,
    is_list,
    observed_kinds,
)
from introspect_cli.records import SETTING_KINDS, Kind, Phase, perturbed_by

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.measure import Floats, Mask
    from introspect_cli.compare.names import Rename
    from introspect_cli.compare.result import Resumption
    from introspect_cli.compare.table import Columns, Table
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.reader import Reader


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison(Sides):
    """One rank of both runs, or all ranks as one, with what was selected, watched and covered of them."""

    @cached_property
    def alignment(self) -> Alignment:
        """Both runs' sites under one numbering; computed once."""
        return align(*self.sites)

    # --- what counts

    @property
    def is_whole(self) -> bool:
        """Whether ranks or calls of either run are put together."""
        return self.a.is_whole or self.b.is_whole

    @cached_property
    def compared(self) -> Mask:
        """Mask of sites whose records can be compared, before the user's selection.

        Left out: settings; random states within a step if the captures recorded them at different moments; with ranks
        or calls put together, and of two implementations of one model, all random states; with calls put together
        (`Cut.folds`) results of operators.
        """
        alignment, random = self.alignment, self.alignment.are(Kind.RNG)
        mask = ~alignment.are(*SETTING_KINDS)
        if self.match.is_port or self.is_whole:  # they may draw what the other is given
            mask &= ~random
        elif not self.draws_alike:
            mask &= alignment.are(Phase.START) | ~random
        if self.splits is not None and any(cut.folds for cut in self.splits.cuts):  # operators are numbered through all
            mask &= ~alignment.are(Kind.OP_OUTPUT)
        return np.asarray(mask)

    @cached_property
    def draws_alike(self) -> bool:
        """Whether the captures looked at generators within a step at the same moments."""
        return draws_at_one_moment(*self.manifests, evaluates=bool(self.alignment.evaluating.any()))

    @cached_property
    def chosen(self) -> Mask:
        """Mask of `compared` sites that the options select by kind and module; all if none is given."""
        return self.compared & self.alignment.selected(self.options.kinds, self.options.modules)

    @cached_property
    def covered(self) -> tuple[Mask, Mask]:
        """Masks of sites that are divergences if only a, and if only b, has them.

        By what the captures recorded (`watched.covered`): all False if either failed or either run is a list.
        """
        same_start = self.a.entry(0).step == self.b.entry(0).step + self.offset
        return covered(self.alignment, *self.manifests, same_start=same_start)

    @cached_property
    def lists_starts(self) -> tuple[bool, bool]:
        """Whether a, and whether b, has start values in each step: it is a list, or updates without an optimizer.

        False with ranks put together.
        """
        a, b = (
            not self.is_whole and (is_list(manifest) or _updates_by_hand(reader, sites))
            for reader, sites, manifest in zip((self.a, self.b), self.sites, self.manifests, strict=True)
        )
        return a, b

    @cached_property
    def floors(self) -> list[NoiseFloor]:
        """Noise floor of each noise run, created once; `compare_rank` raises them as it reads steps."""
        return [NoiseFloor(self, reader, manifest) for reader, manifest in self.noise]

    @cached_property
    def causes(self) -> tuple[Mask, Mask] | None:
        """Masks of sites that can be causes but no divergences: (random states, those that are if one-sided).

        None if `strict`. The latter are activations, records of evaluation, and sites whose FQN one of the runs has
        nowhere, neither as a site, module or tensor nor as an ancestor of one. Not where an exception ended one
        run in its first step: it lacks what it did not come to. Computed once.
        """
        if self.options.strict:
            return None
        alignment = self.alignment
        held = _named_in(self.a.modules, self.rename or str), _named_in(self.b.modules, str)
        one, two = (with_ancestors(names | more) for names, more in zip(alignment.names, held, strict=True))
        alone = alignment.are(*ACTIVATIONS) | alignment.evaluating | among(alignment.fqn, one ^ two)
        cut_a, cut_b = (
            len(reader.entries) == 1 and manifest.get("how") == "exception"
            for reader, manifest in zip((self.a, self.b), self.manifests, strict=True)
        )
        return alignment.are(Kind.RNG), (alone & (cut_a == cut_b)) | self.match.is_port

    # --- a run that goes on

    @cached_property
    def resume_point(self) -> ResumePoint | None:
        """The resumed run and its first step; None where neither run is resumed. Computed once."""
        return find_resume_point(self)

    def is_resume_step(self, step: int) -> bool:
        """Whether step `step` of a is compared with, or is, the first step of a resumed run.

        False where there is none.
        """
        point = self.resume_point
        return point is not None and step == (point.there if point.late == "b" else point.begins).step

    @cached_property
    def resumption(self) -> Resumption | None:
        """What the resumed run restored; None where neither run is resumed. Computed once, from steps of both runs."""
        if self.resume_point is None:
            return None
        told = [kinds for kinds in map(observed_kinds, self.manifests) if kinds]  # a run that goes on does not say yet
        unrecorded = frozenset(kind for kind in STATE_KINDS if any(kind.value not in kinds for kinds in told))
        # where ranks or calls are put together, no batch of one run need be a batch of the other
        return resumption_of(self.resume_point, unrecorded, is_cut=self.splits is not None)

    # --- what was watched

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Kinds that both runs have: each was told to record the kind, or has a site of it."""
        sides = [*zip(map(observed_kinds, self.manifests), self.sites, strict=True)]
        return frozenset(kind for kind in Kind if all(kind.value in told or of.are(kind).any() for told, of in sides))

    @cached_property
    def leaves_modules_out(self) -> bool:
        """Whether either capture, or both, was told to leave modules out."""
        return any(map(chooses_modules, self.manifests))

    @cached_property
    def draws_recorded(self) -> bool:
        """Whether both captures recorded draws within steps, and at the same moments, so that they can be compared."""
        return all(map(draws_recorded, self.manifests)) and self.draws_alike

    @cached_property
    def notices_all_draws(self) -> bool:
        """Whether both captures recorded every draw from a default generator, so also left no module out."""
        return all(map(draws_recorded, self.manifests)) and not self.leaves_modules_out

    @cached_property
    def recorded_after_steps(self) -> frozenset[str]:
        """FQNs of parameters and buffers that either run recorded after optimizer steps, in any step."""
        after = self.alignment.are(*TENSORS, Phase.OPTIMIZER)
        return frozenset(self.alignment.fqn[site] for site in np.flatnonzero(after))


def _updates_by_hand(reader: Reader, sites: Columns) -> bool:
    """Whether a run has start values of parameters in its second recorded step, and no record of an optimizer phase."""
    begins = sites.are(Kind.PARAM, Phase.START).any() and not sites.are(Phase.OPTIMIZER).any()
    steps = reader.entries["step"][1:2].tolist() if begins else []
    return any(At(reader, sites, step).rows([Kind.PARAM], Phase.START) for step in steps)


def _named_in(tree: Iterable[ModuleInfo], rename: Rename) -> set[str]:
    """FQNs, after `rename`, of all modules in a tree and of their parameters and buffers."""
    names = set()
    for module in tree:
        fqn = rename(module.fqn)
        names |= {fqn, *(f"{fqn}.{name}" for name in (*module.parameters, *module.buffers))}
    return names


# --- noise

# A run that begins one rounding beside a (`capture --perturb`) differs from it, at each site and in each step, by what
# this training makes of a rounding. A small fault shows against that measure where no fixed tolerance would fit both
# the first layer and the last step. It is the method of TTrace, which perturbs by the machine's epsilon, with nothing
# of the model modelled. A result is rounded itself, so less than one rounding of its dtype is no measure: where a loss
# came out equal by luck, b may still be a rounding beside it.

_FACTOR = 4.0
"""How many times the noise of a run that is not perturbed is let pass."""

_ROUNDING_FACTOR = 6.0
"""How many times what a rounding does is let pass: two perturbed runs of one training are up to 4.3 times as far apart
at some site as a third is from them, and the faults of `benchmarks/perturb.py` that show at all begin at 9."""

_MAX_BEGIN = 4.0
"""Roundings; parameters that begin further from a's than this were not moved by one."""

_SUM_KINDS = (Kind.LOSS, Kind.GRAD, Kind.OPTIMIZER_STATE)
_SUM_ROUNDINGS = 256**0.5 / _ROUNDING_FACTOR
"""Roundings; with the factor by which a divergence must exceed the floor, those of a sum over 256: sqrt(n) u."""


class NoiseFloor:
    """Largest relative distance of a noise run from a so far, per site of a.

    Attributes:
        reader: of the noise run's rank.
        alignment: the sites of a and of that run.
        is_perturbed: whether it begins one rounding beside a (`--perturb`), as far as was seen.
        floor: float64 (sites of a,), the distances.
        unmeasured: bool (sites of a,), whether the run differed by an unknown distance, or lacked the site.
    """

    def __init__(self, comparison: Comparison, reader: Reader, manifest: dict[str, Any]) -> None:
        """Begin with a floor of 0 everywhere; `learn` raises it.

        Args:
            comparison: of a with b.
            reader: of the noise run's rank.
            manifest: of the noise run.
        """
        self.reader, self.is_perturbed = reader, perturbed_by(manifest) is not None
        self.alignment = align(comparison.alignment.a, columns(reader.sites, comparison.rename))
        self.floor: Floats = np.zeros(len(self.alignment.a))
        self.unmeasured: Mask = np.zeros(len(self.alignment.a), dtype=np.bool_)

    def learn(self, table: Table) -> None:
        """Raise `floor` in place by one step, to at least float32's epsilon for each differing site.

        Marks sites in `unmeasured` whose distance is unknown, or that a alone has. Sets `is_perturbed` to False if the
        parameters at the start are too far apart for a run perturbed by a rounding.

        Args:
            table: the step of a and of the noise run.
        """
        differ = table.of(table.differing)
        rel, start = differ.relative(), differ.are(Kind.PARAM, Phase.START)
        # unless all that differs at the start is a rounding away, it is no run that begins beside a
        self.is_perturbed &= bool((rel <= _MAX_BEGIN * differ.of_layouts("unit")[0])[start].all())
        finite = np.isfinite(rel)
        np.maximum.at(self.floor, differ.site[finite], np.maximum(rel[finite], np.finfo(np.float32).eps))
        self.unmeasured[differ.site[~finite]] = True
        self.unmeasured[table.site[table.state == ONLY_A]] = True

    def within(self, differ: Table, rel: Floats) -> Mask:
        """Mask of rows that this noise explains.

        Those with a floor above 0 and a distance of at most `_FACTOR` times it (`_ROUNDING_FACTOR` if perturbed);
        and those of unknown distance whose site the noise run could not be measured at.

        Args:
            differ: those rows of a step of a and b that differ.
            rel: relative distance of each; NaN where unknown.
        """
        floor, factor = np.asarray(self.floor[differ.site]), _FACTOR
        if self.is_perturbed:  # at least one rounding of a's dtype; of losses, gradients and states, that of a sum
            factor = _ROUNDING_FACTOR
            roundings = np.where(differ.are(*_SUM_KINDS), _SUM_ROUNDINGS, 1.0)
            floor = np.maximum(floor, roundings * differ.of_layouts("unit")[0])
        with np.errstate(invalid="ignore"):
            small = (floor > 0) & (rel <= factor * floor)
        return np.asarray(small | (self.unmeasured[differ.site] & ~np.isfinite(rel)))
