"""Random numbers that one run drew within a step and the other did not: where, in words.

A draw that only one run made is no divergence by itself. It is what explains that a random state differs later, or that
a module gives something else; so its place is told, by what was recorded just before and after it.

The same draw can be on record under different names: a capture that was told to leave a module out, or a module that
was written as a function, notices it at what comes next. So a draw is one run's alone only where the other run looked
at the generators just before and just after, and had no draw in between that has no partner either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.sites import Alignment, Ids, kind_code, of_kinds, phase_code
from introspect_cli.compare.match.names import generator_of
from introspect_cli.compare.table import OTHER
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from introspect_cli.compare.step import Step
    from introspect_cli.compare.table import Table


@dataclass(frozen=True)
class Draw:
    """Draws that one run made and the other did not.

    Attributes:
        side: of the run.
        site: of the random state that they were drawn from.
        after: what was recorded before, in words; "" where the module itself drew as soon as it was called.
        sequence: when, in that run.
    """

    side: str
    site: Site
    after: str
    sequence: int

    def __str__(self) -> str:
        """A clause: `random numbers were drawn between GPT.0 and GPT.1 in b and not in a`."""
        other = OTHER[self.side]
        if self.site.path.endswith(DRAWN_BEFORE):
            place = f"between {self.after} and {_next(self.site)}"
            return f"random numbers were drawn {place} in {self.side} and not in {other}"
        after = f", after {self.after}," if self.after else ""
        return f"{self.site.fqn}{after} drew random numbers in {self.side} and not in {other}"


def lone_draws(step: Step, table: Table, generator: str = "") -> list[Draw]:
    """Draws that only one run made in a step, of one generator or of all, those of b first, in their order."""
    if not step.comparison.draws_recorded:
        return []
    alignment, draws = step.alignment, []
    a, b = (_Side(half.side, alignment, half.sites, half.batch.sequence) for half in table.halves)
    for run, partner in ((b, a), (a, b)):
        for row in run.unmatched(partner):
            site = alignment.site(int(run.unions[row]))
            if generator in {"", generator_of(site)} and _looked(run, partner, row, generator_of(site)):
                draws.append(Draw(run.side, site, run.previous(row, site), int(run.sequence[row])))
    return draws


@dataclass(frozen=True)
class _Side:
    """What one run recorded in a step.

    Attributes:
        side: a or b.
        alignment: the runs' sites.
        unions: the site of each record.
        sequence: when each was recorded.
    """

    side: str
    alignment: Alignment
    unions: Ids
    sequence: Any

    @cached_property
    def drawn(self) -> npt.NDArray[np.bool_]:
        """Which records are states that were drawn from within the step."""
        kind, phase = self.alignment.kind[self.unions], self.alignment.phase[self.unions]
        return np.asarray((kind == kind_code(Kind.RNG)) & (phase != phase_code(Phase.START)))

    @cached_property
    def looked(self) -> npt.NDArray[np.bool_]:
        """Which records were made where the generators are looked at."""
        return of_kinds(self.alignment.kind[self.unions], (*_SEEN, Kind.LOSS))

    def unmatched(self, other: _Side) -> list[int]:
        """Draws at places where the other run has none, in their order."""
        rows = np.flatnonzero(self.drawn & ~np.isin(self.unions, other.unions))
        return [int(row) for row in rows[np.argsort(self.sequence[rows])]]

    def previous(self, row: int, site: Site) -> str:
        """What was recorded last before a row, in words."""
        passing = of_kinds(self.alignment.kind[self.unions], _SEEN) & (self.sequence < self.sequence[row])
        passing &= np.isin(self.alignment.phase[self.unions], [phase_code(phase) for phase in _PASSING])
        earlier, by_itself = np.flatnonzero(passing), not site.path.endswith(DRAWN_BEFORE)
        if not len(earlier):
            return "" if by_itself else "the start of the step"
        last = self.alignment.site(int(self.unions[earlier[np.argmax(self.sequence[earlier])]]))
        if by_itself:
            return last.fqn if last.kind is Kind.OUTPUT and last.fqn.startswith(site.fqn + ".") else ""
        if last.kind is Kind.BATCH:
            return f"the batch from {last.fqn}"
        return last.fqn if last.kind is Kind.OUTPUT else f"the start of {last.fqn}"


def _looked(run: _Side, other: _Side, row: int, generator: str) -> bool:
    """Whether the other run looked around the time of a draw, and has none there that could be the same."""
    shared, now = run.looked & np.isin(run.unions, other.unions), run.sequence[row]
    when = dict(zip(other.unions[other.looked].tolist(), other.sequence[other.looked].tolist(), strict=True))
    earlier, later = np.flatnonzero(shared & (run.sequence < now)), np.flatnonzero(shared & (run.sequence > now))
    if not len(later):
        return False
    start = when[int(run.unions[earlier[np.argmax(run.sequence[earlier])]])] if len(earlier) else -1
    end = when[int(run.unions[later[np.argmin(run.sequence[later])]])]
    between = (int(other.unions[at]) for at in other.unmatched(run) if start < other.sequence[at] < end)
    return start < end and all(generator_of(run.alignment.site(union)) != generator for union in between)


_SEEN = (Kind.INPUT, Kind.OUTPUT, Kind.BATCH)


_PASSING = (Phase.DATA, Phase.FORWARD, Phase.EVAL)


def _next(site: Site) -> str:
    if site.phase is Phase.DATA:
        return f"the batch from {site.fqn}"
    call = f" (call {site.call})" if site.call else ""
    return f"{'the backward pass' if site.phase is Phase.LOSS else site.fqn}{call}"


def drew_alone(draws: Iterable[Draw], site: Site, *, before: bool = False) -> str:
    """The side on which a module's call draws, or what runs before it, and not in the other run; "" for none."""
    call = site.fqn, site.call, site.phase
    at_it = (one for one in draws if (one.site.fqn, one.site.call, one.site.phase) == call)
    return next((one.side for one in at_it if one.site.path.endswith(DRAWN_BEFORE) is before), "")
