"""What one rank's comparison knows from its start: both runs' sites, what counts, what either capture watched.

None of it changes from step to step: what is learned on the way is passed on (`passes/learned.py`), but for the noise
that `floors` and `reached` measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.resumed import Goes, goes_on, resumption_of
from introspect_cli.compare.steps import Sides
from introspect_cli.compare.terms.at import At
from introspect_cli.compare.terms.distance import Layouts
from introspect_cli.compare.terms.names import owner_of, with_ancestors
from introspect_cli.compare.terms.reach import NoiseFloor
from introspect_cli.compare.terms.sites import (
    ACTIVATIONS,
    KINDS,
    Alignment,
    Ids,
    Mask,
    align,
    columns,
    kind_code,
    of_kinds,
    phase_code,
)
from introspect_cli.compare.terms.watched import (
    chooses_modules,
    covered,
    draws_at_other_moments,
    draws_recorded,
    notices_all_draws,
    observed_kinds,
    passes_over,
    ran_unseen,
)
from introspect_cli.records import Kind, Phase, perturbed_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.compare.gathered import Gathered
    from introspect_cli.compare.terms.findings import Resumption
    from introspect_cli.compare.terms.names import Rename
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.records import ModuleInfo

_TENSORS = (Kind.PARAM, Kind.BUFFER)


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison(Sides):
    """One rank of both runs, and what counts of it.

    Attributes:
        options: what counts.
        offset: step k of b is compared with step k + offset of a.
    """

    options: DiffOptions
    offset: int = 0
    _layouts: list[tuple[Layouts, Layouts]] = field(default_factory=list, init=False)

    @cached_property
    def alignment(self) -> Alignment:
        """Both runs' sites under one numbering."""
        return align(*self.sites)

    @property
    def layouts(self) -> tuple[Layouts, Layouts]:
        """Lookup tables over the layouts of both; where ranks are put together, a step may have brought new ones."""
        one, two = self.a.layouts, self.b.layouts
        last = self._layouts[-1] if self._layouts else None
        if last is None or len(last[0].numel) < len(one) or len(last[1].numel) < len(two):
            last = Layouts(one), Layouts(two)
            self._layouts[:] = [last]
        return last

    # --- what counts

    @cached_property
    def gathered(self) -> Gathered | None:
        """Compares what was gathered from several ranks; None where ranks are compared one by one."""
        if not (self.a.is_whole or self.b.is_whole):
            return None
        from introspect_cli.compare.gathered import Gathered

        return Gathered(self)

    @cached_property
    def compared(self) -> Mask:
        """By site, which are compared at all: no settings, nor random states that were not looked at alike."""
        alignment = self.alignment
        mask = alignment.mask(frozenset(), ())
        if self.gathered is not None:
            mask = mask & (alignment.kind != kind_code(Kind.RNG))
            if self.splits is not None and self.splits.folded:  # operators are numbered through all calls
                mask = mask & (alignment.kind != kind_code(Kind.OP_OUTPUT))
        return np.asarray(mask & ~draws_at_other_moments(alignment, *self.manifests))

    @cached_property
    def chosen(self) -> Mask:
        """By site, which of these were selected."""
        alignment, options = self.alignment, self.options
        mask = self.compared & alignment.mask(options.kinds, options.modules)
        return mask if options.evaluation is None else mask & (alignment.evaluating == options.evaluation)

    @property
    def entire(self) -> bool:
        """Whether nothing was selected, so that everything counts."""
        return not (self.options.kinds or self.options.modules) and self.options.evaluation is None

    @cached_property
    def covered(self) -> tuple[Mask, Mask]:
        """By site, whether it is a divergence that a alone has it, and that b alone has it."""
        same_start = self.a.entry(0).step == self.b.entry(0).step + self.offset
        one, two = covered(self.alignment, *self.manifests, same_start=same_start)
        before = self.alignment.phase != phase_code(Phase.OPTIMIZER)
        return (one & before if self.by_hand[1] else one), (two & before if self.by_hand[0] else two)

    @cached_property
    def by_hand(self) -> tuple[bool, bool]:
        """Whether a, and whether b, has no optimizer and updates parameters by hand: each step begins with them."""
        sides: list[bool] = []
        for reader, sites in ((self.a, self.alignment.a), (self.b, self.alignment.b)):
            steps = reader.entries["step"].tolist()
            params = (sites.kind == kind_code(Kind.PARAM)) & (sites.phase == phase_code(Phase.START))
            updates = params.any() and not (sites.phase == phase_code(Phase.OPTIMIZER)).any() and not self.gathered
            begins = updates and len(steps) > 1 and At(reader, sites, steps[1]).rows([Kind.PARAM], Phase.START)
            sides.append(bool(begins))
        return sides[0], sides[1]

    @cached_property
    def floors(self) -> list[NoiseFloor]:
        """What each noise run differs from a by, as far as it was read."""
        sites_a = self.alignment.a
        return [
            NoiseFloor(align(sites_a, columns(noise.sites, self.rename)), len(sites_a), perturbed_by(manifest))
            for noise, manifest in self.noise
        ]

    @cached_property
    def causes(self) -> tuple[Mask, Mask] | None:
        """By site, which explain and decide nothing: random states, and what does where one run alone has it.

        Of activations, one run may have more than the other although both have the module: another call, another path.
        Else one run has to lack the name, in its module tree too. None where all count.
        """
        if self.options.strict:
            return None
        alignment = self.alignment
        random = alignment.kind == kind_code(Kind.RNG)
        alone = of_kinds(alignment.kind, ACTIVATIONS) | alignment.evaluating
        named = (alignment.names_a, alignment.names_b)
        held = _named_in(self.a.modules, self.rename or str), _named_in(self.b.modules, str)
        one, two = (with_ancestors(names | more) for names, more in zip(named, held, strict=True))
        missing = (named[0] | named[1]) - (one & two)
        if missing:
            alone |= np.fromiter((name in missing for name in alignment.fqn), np.bool_, alignment.size)
        alone |= self._saved(missing)
        return random, alone & ~random

    def _saved(self, missing: frozenset[str] | set[str]) -> Mask:
        """Which sites are tensors in files that bear such a name, as in what `state_dict` gives.

        Or that bear another name since what they are saved of has one, or one run saves a model with what is around it,
        as `DataParallel` is.
        """
        alignment = self.alignment
        mask = alignment.kind == kind_code(Kind.PRODUCT)
        keys = {f"['{name.partition('.')[2]}']" for name in missing}
        sites = np.flatnonzero(mask).tolist()
        renamed = {old.partition(".")[2]: new.name.partition(".")[2] for old, new in self.match.renamed.items()}
        plain = {site: (alignment.fqn[site], _unwrapped(alignment.path[site], renamed)) for site in sites}
        one_sided = [site for site in sites if not alignment.in_both[site]]
        of_a, of_b = ({plain[s] for s in one_sided if (s < len(alignment.a)) is is_a} for is_a in (True, False))
        wrapped = {site for site in one_sided if plain[site] in of_a & of_b}
        for site, (_, path) in plain.items():
            mask[site] = path[path.rfind("[") :] in keys or site in wrapped
        return np.asarray(mask)

    # --- a run that goes on

    @cached_property
    def goes(self) -> Goes | None:
        """Which run goes on from where the other has been; None where neither does."""
        return goes_on(self, self.offset, asked=self.options.offset is not None)

    def goes_on_at(self, step: int) -> bool:
        """Whether a step of a is the one at which a resumed run goes on."""
        goes = self.goes
        return goes is not None and step == (goes.at if goes.late == "b" else goes.first)

    @cached_property
    def _resumptions(self) -> dict[bool, Resumption | None]:
        """What was asked of `resumption` so far: held here, for a cache of the class would keep the runs open."""
        return {}

    def resumption(self, *, is_cut: bool = False) -> Resumption | None:
        """What the later run goes on with; None where neither run is resumed.

        Args:
            is_cut: whether the runs cut batches otherwise.
        """
        if self.goes is None:
            return None
        is_cut |= self.splits is not None  # ranks put together: no batch of one need be a batch of the other
        if is_cut not in self._resumptions:
            bits = " in bits" if self.options.tolerant or self.floors else ""
            self._resumptions[is_cut] = resumption_of(self.goes, bits, is_cut=is_cut)
        return self._resumptions[is_cut]

    # --- what was watched

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Kinds that both runs watched for, as far as is known."""
        of_each = []
        for manifest, recorded in zip(self.manifests, (self.alignment.a, self.alignment.b), strict=True):
            watched = observed_kinds(manifest)
            present = {KINDS[code] for code in np.flatnonzero(np.bincount(recorded.kind))}
            of_each.append({kind for kind in Kind if kind.value in watched} | present)
        return frozenset(of_each[0] & of_each[1])

    @cached_property
    def modules_chosen(self) -> bool:
        """Whether one of the captures was told to leave modules out."""
        return any(map(chooses_modules, self.manifests))

    @cached_property
    def draws_recorded(self) -> bool:
        """Whether both captures looked for draws within a step, and at the same moments."""
        return (
            all(map(draws_recorded, self.manifests))
            and not draws_at_other_moments(self.alignment, *self.manifests).any()
        )

    @cached_property
    def notices_all_draws(self) -> bool:
        """Whether both captures noticed every draw from a default random generator."""
        return all(map(notices_all_draws, self.manifests))

    def ran_unseen(self, phase: Phase) -> list[str]:
        """What of the models ran in a phase of either run without being seen, in words."""
        return list(dict.fromkeys(name for run in self.manifests for name in ran_unseen(run, phase)))

    def passes_over(self, step: int, step_b: int) -> bool:
        """Whether an evaluation ran in a step of either run that is not on record."""
        return any(passes_over(run, at) for run, at in zip(self.manifests, (step, step_b), strict=True))

    @cached_property
    def ended(self) -> frozenset[str]:
        """FQNs of the parameters and buffers that optimizer steps leave on record."""
        after = of_kinds(self.alignment.kind, _TENSORS) & (self.alignment.phase == phase_code(Phase.OPTIMIZER))
        return frozenset(self.alignment.fqn[site] for site in np.flatnonzero(after))

    @cached_property
    def began(self) -> frozenset[str]:
        """FQNs of the parameters and buffers that both captures began with."""
        readers = (self.a, self.alignment.a), (self.b, self.alignment.b)
        codes = [kind_code(kind) for kind in _TENSORS]
        one, two = ({fqn for kind, fqn, _ in At.first(*side).tensors(Phase.START) if kind in codes} for side in readers)
        return frozenset(one & two)

    @cached_property
    def _tensors_of_owner(self) -> dict[str, set[str]]:
        by_owner: dict[str, set[str]] = {}
        for site in np.flatnonzero(of_kinds(self.alignment.kind, _TENSORS)):
            name = self.alignment.fqn[site]
            by_owner.setdefault(owner_of(name), set()).add(name)
        return by_owner

    def tensors_in(self, fqn: str) -> set[str]:
        """FQNs of the parameters and buffers recorded of a module, without those of modules inside it."""
        return self._tensors_of_owner.get(fqn, set())

    def of(self, kind: Kind, phases: frozenset[Phase], fqn: str | None = None) -> Ids:
        """The sites of a kind, in these phases."""
        if fqn is not None:
            sites = np.array(self.alignment.by_fqn.get(fqn, []), dtype=np.int64)
        else:
            sites = np.arange(self.alignment.size, dtype=np.int64)
        mask = self.alignment.kind[sites] == kind_code(kind)
        mask &= np.isin(self.alignment.phase[sites], [phase_code(phase) for phase in phases])
        return np.asarray(sites[mask])


def _unwrapped(path: str, renamed: Mapping[str, str]) -> str:
    """Where a tensor is saved, under the name that it has in b and without what is around the model."""
    at = path.rfind("['") + 2
    key = path[at:].removeprefix("module.")
    parts = key.removesuffix("']").split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if renamed.get(name):
            return path[:at] + renamed[name] + key[len(name) :]
    return path[:at] + key


def _named_in(tree: Iterable[ModuleInfo], rename: Rename) -> set[str]:
    """FQNs of modules and of the tensors they hold, as they are compared."""
    names = set()
    for module in tree:
        fqn = rename(module.fqn)
        names |= {fqn, *(f"{fqn}.{name}" for name in (*module.parameters, *module.buffers))}
    return names
