"""Random numbers that one run drew within a step and the other did not: where, in words.

A draw that only one run made is no divergence by itself. It is what explains that a random state differs later, or that
a module gives something else; so its place is told, by what was recorded just before and after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.sites import kind_code, phase_code
from introspect_cli.compare.reasons.facts import generator_of
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment, Ids


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
        other = "a" if self.side == "b" else "b"
        if self.site.path.endswith(DRAWN_BEFORE):
            place = f"between {self.after} and {_next(self.site)}"
            return f"random numbers were drawn {place} in {self.side} and not in {other}"
        after = f", after {self.after}," if self.after else ""
        return f"{self.site.fqn}{after} drew random numbers in {self.side} and not in {other}"


def lone_draws(alignment: Alignment, pair: StepPair, generator: str = "") -> list[Draw]:
    """Draws that only one run made in a step, of one generator or of all, those of b first, in their order."""
    found = []
    union_a, union_b = pair.sites(alignment)
    sides = {"a": (pair.a, union_a), "b": (pair.b, union_b)}
    for side, other in ("ba", "ab"):
        batch, unions = sides[side]
        drawn = (alignment.kind[unions] == kind_code(Kind.RNG)) & (alignment.phase[unions] != phase_code(Phase.START))
        rows = np.flatnonzero(drawn & ~np.isin(unions, sides[other][1]))
        sequence = np.asarray(batch.sequence)
        for row in rows[np.argsort(sequence[rows])]:
            site = alignment.site(int(unions[row]))
            if generator in {"", generator_of(site)}:
                found.append(
                    Draw(side, site, _previous(alignment, unions, sequence, int(row), site), int(sequence[row]))
                )
    return found


_SEEN = (Kind.INPUT, Kind.OUTPUT, Kind.BATCH)


def _previous(alignment: Alignment, unions: Ids, sequence: Any, row: int, site: Site) -> str:
    """What was recorded last before a row of a run, in words."""
    known = np.isin(alignment.kind[unions], [kind_code(kind) for kind in _SEEN])
    known &= (sequence < sequence[row]) & np.isin(alignment.phase[unions], [phase_code(p) for p in _PASSING])
    earlier = np.flatnonzero(known)
    own = not site.path.endswith(DRAWN_BEFORE)
    if not len(earlier):
        return "" if own else "the start of the step"
    last = alignment.site(int(unions[earlier[np.argmax(sequence[earlier])]]))
    if own:
        return last.fqn if last.kind is Kind.OUTPUT and last.fqn.startswith(site.fqn + ".") else ""
    if last.kind is Kind.BATCH:
        return f"the batch from {last.fqn}"
    return last.fqn if last.kind is Kind.OUTPUT else f"the start of {last.fqn}"


_PASSING = (Phase.DATA, Phase.FORWARD, Phase.EVAL)


def _next(site: Site) -> str:
    if site.phase is Phase.DATA:
        return f"the batch from {site.fqn}"
    call = f" (call {site.call})" if site.call else ""
    return f"{'the backward pass' if site.phase is Phase.LOSS else site.fqn}{call}"


def drew_alone(draws: Iterable[Draw], site: Site) -> str:
    """The side on which a module's call draws random numbers where it draws none in the other run; "" for none."""
    for draw in draws:
        own = draw.site
        if (own.fqn, own.call, own.phase) == (site.fqn, site.call, site.phase) and not own.path.endswith(DRAWN_BEFORE):
            return draw.side
    return ""


def drew_before(draws: Iterable[Draw], site: Site) -> str:
    """The side on which random numbers are drawn just before a module's call, and not in the other run; "" for none."""
    for draw in draws:
        own = draw.site
        if (own.fqn, own.call, own.phase) == (site.fqn, site.call, site.phase) and own.path.endswith(DRAWN_BEFORE):
            return draw.side
    return ""
