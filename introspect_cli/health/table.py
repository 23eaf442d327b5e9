"""One rank of a run as columns over its steps, which is what rules ask questions of.

A rule looks along time at one site, the store is ordered by step, and ten thousand sites by a thousand steps of
everything do not fit. One pass over the steps fills float32 matrices of the few statistics that rules use. Sites of
which there are few (losses, batches, learning rates) keep every step; of the others every k-th step is kept where there
are too many. What must not be missed between kept steps (the first NaN, how far each parameter moved) is gathered from
every step during the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.health.findings import Hit
from introspect_cli.records import Kind
from introspect_cli.store.reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Layout, ModuleInfo, Phase

STATS = ("min", "max", "mean", "amean", "var")
"""Statistics that are kept as they were recorded; a plain number is its mean."""

SHARES = ("zeros", "bad")
"""Statistics that are kept as shares of the elements: those that are exactly zero, those that are not finite."""

SiteName = tuple[str, str, str, int, str]
"""Phase, kind, FQN, call, path."""

_FLOATS = ("float", "bfloat")


@dataclass(frozen=True)
class NonFinite:
    """The first time a site held a value that is not finite."""

    step: int
    site: int
    sequence: int
    nans: int
    posinfs: int
    neginfs: int
    numel: int


class Column(NamedTuple):
    """One site over some steps.

    Attributes:
        steps: int64 (T,), step numbers.
        layout: int32 (T,), number of the layout; -1 where nothing was measured.
        checksum: uint64 (T,), 0 where not observed.
        floats: float32 (T,) by name of `STATS` and `SHARES`, NaN where absent.
    """

    steps: NDArray[np.int64]
    layout: NDArray[np.int32]
    checksum: NDArray[np.uint64]
    floats: dict[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Columns:
    """Some sites over some steps: as `Column`, with (T, S) in place of (T,).

    Attributes:
        sites: int64 (S,), numbers of the sites in the rank's table.
    """

    steps: NDArray[np.int64]
    sites: NDArray[np.int64]
    layout: NDArray[np.int32]
    checksum: NDArray[np.uint64]
    floats: dict[str, NDArray[np.float32]]

    @classmethod
    def empty(cls, steps: NDArray[np.int64], sites: NDArray[np.int64]) -> Columns:
        """Columns to be filled: statistics NaN, layouts -1, checksums 0."""
        shape = len(steps), len(sites)
        floats = {name: np.full(shape, np.nan, np.float32) for name in (*STATS, *SHARES)}
        return cls(steps, sites, np.full(shape, -1, np.int32), np.zeros(shape, np.uint64), floats)

    @cached_property
    def place(self) -> dict[int, int]:
        """Column number by site number."""
        return {int(site): column for column, site in enumerate(self.sites)}

    def column(self, site: int) -> Column:
        """The column of one site, as views of these arrays; KeyError for a site that is not in them."""
        place = self.place[site]
        floats = {name: values[:, place] for name, values in self.floats.items()}
        return Column(self.steps, self.layout[:, place], self.checksum[:, place], floats)


@dataclass(frozen=True, eq=False)
class Moves:
    """Change of each trained parameter in every step.

    Attributes:
        steps: int64 (T,), step numbers.
        names: FQN of each parameter.
        changed: int8 (T, P), 1 where the parameter's bits changed, 0 where not, -1 where it was not observed.
        relative: float32 (T, P), L2 length of the change over that of the parameter, NaN where unknown.
    """

    steps: NDArray[np.int64]
    names: list[str]
    changed: NDArray[np.int8]
    relative: NDArray[np.float32]

    @cached_property
    def skipped(self) -> set[int]:
        """Steps with observed parameters in which none changed, as where a gradient scaler skips."""
        seen = (self.changed >= 0).any(axis=1)
        return set(self.steps[seen & ~(self.changed == 1).any(axis=1)].tolist())


@dataclass(frozen=True, eq=False)
class Table:
    """All records of one rank as columns over steps.

    Attributes:
        stride: every `stride`-th step is kept in `many`.
        phase, kind, fqn, call, path, module_class, op, source: of each site, by number.
        order: int64, sequence of each site when it was first seen.
        few: losses, batches and hyper-parameters, in every step.
        many: all other sites, in every `stride`-th step.
        moves: changes of parameters.
        nonfinite: the first record of each site that is not finite, by step and sequence.
    """

    rank: int
    stride: int
    phase: Sequence[str]
    kind: Sequence[str]
    fqn: Sequence[str]
    call: Sequence[int]
    path: Sequence[str]
    module_class: Sequence[str]
    op: Sequence[str]
    source: Sequence[str]
    order: NDArray[np.int64]
    layouts: Sequence[Layout]
    modules: Sequence[ModuleInfo]
    few: Columns
    many: Columns
    moves: Moves
    nonfinite: list[NonFinite]

    @cached_property
    def numel(self) -> NDArray[np.float64]:
        """Elements of each layout; the last entry, which -1 picks, is NaN."""
        return np.array([*(float(layout.numel) for layout in self.layouts), np.nan])

    @cached_property
    def numbers(self) -> dict[SiteName, int]:
        """Number of each site by its name."""
        sites = zip(self.phase, self.kind, self.fqn, self.call, self.path, strict=True)
        return {site: number for number, site in enumerate(sites)}

    def site(self, phase: Phase, kind: Kind, fqn: str, call: int = 0, path: str = "") -> int | None:
        """Number of a site; None where there is none."""
        return self.numbers.get((phase.value, kind.value, fqn, call, path))

    def pick(self, *kinds: Kind, phase: Phase | None = None) -> list[int]:
        """Numbers of all sites of these kinds, in `phase` (all for None), in the order they were first recorded."""
        wanted = {kind.value for kind in kinds}
        numbers = [
            number
            for number, kind in enumerate(self.kind)
            if kind in wanted and (phase is None or self.phase[number] == phase.value)
        ]
        return sorted(numbers, key=lambda number: int(self.order[number]))

    def rates(self) -> list[int]:
        """Sites of learning rates: hyper-parameters whose path ends in `['lr']`."""
        return [site for site in self.pick(Kind.HYPERPARAMETER) if self.path[site].endswith("['lr']")]

    def column(self, site: int) -> Column:
        """A site over the steps of `few` or `many`, whichever has it."""
        return (self.few if site in self.few.place else self.many).column(site)

    def name(self, site: int) -> str:
        """A site in words: `output GPT.h.0[0] call 1`, or `aten.mm in GPT.h.0 at model.py:41`."""
        call = f" call {self.call[site]}" if self.call[site] else ""
        if self.op[site]:
            where = f" at {self.source[site]}" if self.source[site] else ""
            return f"{self.op[site]} in {self.fqn[site]}{where}{call}"
        kind, fqn = self.kind[site], self.fqn[site]
        return f"{kind if kind == fqn else f'{kind} {fqn}'}{self.path[site]}{call}"

    def hit(self, site: int, step: int, evidence: str) -> Hit:
        """A hit at a site, which is named as `name` has it; its rank is left at 0."""
        return Hit(int(step), self.name(site), evidence)

    def layout(self, site: int) -> Layout | None:
        """The layout of a site in the first kept step in which it was measured; None where it never was."""
        seen = self.column(site).layout
        seen = seen[seen >= 0]
        return self.layouts[int(seen[0])] if len(seen) else None

    def tensors(self, *kinds: Kind, phase: Phase | None = None, floats: bool = True) -> list[int]:
        """As `pick`, of sites with more than one element; of floating point dtypes alone unless `floats` is False."""
        sites = []
        for site in self.pick(*kinds, phase=phase):
            layout = self.layout(site)
            if layout is not None and layout.numel > 1 and (not floats or layout.dtype.startswith(_FLOATS)):
                sites.append(site)
        return sites

    def norms(self, sites: Sequence[int]) -> NDArray[np.float64]:
        """float64 (T, n), L2 norms of the finite elements of sites in `many`; NaN where not measured."""
        places = [self.many.place[site] for site in sites]
        mean, var, bad = (self.many.floats[name][:, places].astype(np.float64) for name in ("mean", "var", "bad"))
        return l2_norm(mean, var, self.numel[self.many.layout[:, places]] * (1 - np.nan_to_num(bad)))

    def total_norm(self, sites: Sequence[int]) -> NDArray[np.float64]:
        """float64 (T,), L2 norm over the finite elements of all these sites, by step.

        NaNs and infinities are left out (see `norms`), as are sites that were not measured in a step.

        Args:
            sites: numbers of sites, each in `many`.
        """
        total: NDArray[np.float64] = np.sqrt(np.nansum(self.norms(sites) ** 2, axis=1))
        return total

    def stat(self, site: int, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Step numbers and values of one statistic at the steps where it is present."""
        steps, values = self.stats(site, name)
        return steps, values[0]

    def stats(self, site: int, *names: str) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """Step numbers, and values of several statistics, at the steps where all are present."""
        column = self.column(site)
        values = [column.floats[name].astype(np.float64) for name in names]
        rows = np.flatnonzero(~np.isnan(values).any(axis=0))
        return column.steps[rows], [value[rows] for value in values]


def first_rise(
    values: NDArray[np.float64], limit: Callable[[NDArray[np.float64]], float], least: int, most: int
) -> int | None:
    """First position whose value exceeds the limit that the values before it set; None where there is none.

    Args:
        values: one per step.
        limit: the limit, given the values before a position.
        least: how many values must stand before a position.
        most: how many of them `limit` is given at most: the last ones.
    """
    return next((at for at in range(least, len(values)) if values[at] > limit(values[max(0, at - most) : at])), None)


def lasting(flags: NDArray[np.bool_], least: int) -> int | None:
    """Start of the stretch of true flags that ends the array; None where it has fewer than `least` (1 or more)."""
    others = np.flatnonzero(~flags)
    start = int(others[-1]) + 1 if len(others) else 0
    return start if len(flags) - start >= least else None
