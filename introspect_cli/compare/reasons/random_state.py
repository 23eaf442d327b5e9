"""A random state differs first, or one run drew random numbers that the other did not: where, in words.

An unseeded generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.

A draw that only one run made is no divergence by itself. It is what explains that a random state differs later, or that
a module gives something else; so its place is given, by what was recorded just before and after it. The same draw can
be on record under different names: a capture that was asked to leave a module out, or a module that was written as a
function, notices it at what comes next. So a draw is one run's alone only where the other run looked at the generators
just before and just after, and had no draw in between that has no partner either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from introspect_cli.compare.passes import matched
from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.settings.beginning import begins_later, first_draw, script_generators
from introspect_cli.compare.settings.seedings import set_at, set_words
from introspect_cli.compare.step.rests_on import Place, random_at_start
from introspect_cli.compare.terms.names import generator_of
from introspect_cli.compare.terms.sites import Alignment, Ids, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import EQUAL, OTHER, Table
from introspect_cli.compare.terms.words import although, what
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site, Status
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.evidence import Cause


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


def one_sided_draws(step: Step, table: Table, generator: str = "") -> list[Draw]:
    """Draws that only one run made in a step, of one generator or of all, those of b first, in their order."""
    if not step.comparison.draws_recorded:
        return []
    alignment, draws = step.alignment, []
    a, b = (_Recorded(half.side, alignment, half.sites, half.batch.sequence) for half in table.halves)
    for run, partner in ((b, a), (a, b)):
        for row in run.unmatched(partner):
            site = alignment.site(int(run.unions[row]))
            if generator in {"", generator_of(site)} and _looked(run, partner, row, generator_of(site)):
                draws.append(Draw(run.side, site, run.previous(row, site), int(run.sequence[row])))
    return draws


def draws_before(scene: Scene) -> list[Draw]:
    """Random draws that one run only made in this step, before the divergence; not to get to where it goes on."""
    draws = [] if scene.step.comparison.goes_on_at(scene.table.step) else one_sided_draws(scene.step, scene.table)
    return [draw for draw in draws if draw.sequence < (scene.table.sequence(scene.union, draw.side) or 0)]


@dataclass(frozen=True)
class _Recorded:
    """What one run recorded in a step."""

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

    def unmatched(self, other: _Recorded) -> list[int]:
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


def _looked(run: _Recorded, other: _Recorded, row: int, generator: str) -> bool:
    """Whether the other run looked around the time of a draw, and has none there that could be the same."""
    shared, now = run.looked & np.isin(run.unions, other.unions), run.sequence[row]
    when = dict(zip(other.unions[other.looked].tolist(), other.sequence[other.looked].tolist(), strict=True))
    earlier, later = np.flatnonzero(shared & (run.sequence < now)), np.flatnonzero(shared & (run.sequence > now))
    if not len(later):
        return False
    start = when[int(run.unions[earlier[np.argmax(run.sequence[earlier])]])] if len(earlier) else -1
    end = when[int(run.unions[later[np.argmin(run.sequence[later])]])]
    drawn = ((run.alignment.site(int(other.unions[at])), other.sequence[at]) for at in other.unmatched(run))
    inside = f"{run.alignment.site(int(run.unions[row])).fqn}."  # a compiled region draws as the module that it is in
    there = (site for site, at in drawn if start < at < end or inside.startswith(f"{site.fqn}."))
    return start < end and generator not in map(generator_of, there)


_SEEN = (Kind.INPUT, Kind.OUTPUT, Kind.BATCH)
_PASSING = (Phase.DATA, Phase.FORWARD, Phase.EVAL)


def _next(site: Site) -> str:
    if site.phase is Phase.DATA:
        return f"the batch from {site.fqn}"
    call = f" (call {site.call})" if site.call else ""
    return f"{'the backward pass' if site.phase is Phase.LOSS else site.fqn}{call}"


def side_that_draws(scene: Scene, *, before: bool = False) -> str:
    """The side on which a module's call draws, or what runs before it, and not in the other run; "" for none."""
    call = scene.site.fqn, scene.site.call, scene.site.phase
    at_it = (one for one in draws_before(scene) if (one.site.fqn, one.site.call, one.site.phase) == call)
    return next((one.side for one in at_it if one.site.path.endswith(DRAWN_BEFORE) is before), "")


# --- the reason

_GENERATORS = {"python": "python's random", "numpy": "numpy.random"}


class RandomState(Reason):
    """A random generator is in another state when the step begins, or before something draws from it."""

    word = "rng"
    place = "a random draw"
    kinds = frozenset({Kind.RNG})
    weights: ClassVar = {"sources": 0.7, "command": 0.9, "seeds": 1.0, "options": 0.95}
    names = re.compile(r"seed|worker|shuffle", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """A state comes from the same generator's state before."""
        site = step.sites[position]
        if site.phase is Phase.START:
            return None if site.fqn in step.carried.rng else self.cause()
        if step.carried.rng or step.rng_differs() or step.anything_before(step.order_at(position)):
            return None
        return self.cause(*random_at_start(step, Place(site, step.order_at(position))))

    def sentence(self, scene: Scene) -> str:
        """When the draws must have differed."""
        site = scene.site
        if site.phase is not Phase.START:
            return _within(scene)
        comparison = scene.step.comparison
        goes_on = scene.first.step != scene.first.step_b or comparison.a.entry(0).step != comparison.b.entry(0).step
        if scene.is_first_step and goes_on:
            return (
                f"{what(site)} differs when the later run begins: resuming did not restore it, or the script drew from "
                "it before the first step."
            )
        if scene.is_first_step:
            text = f"{what(site)} differs already when the first captured step begins"
            who = scene.runs, scene.first.rank
            drawn = script_generators(*who, seeds=True) if " " in site.fqn else first_draw(*who, site.fqn)
            seeded = "; the cause is a different seed (or none), or a different number of random draws before it."
            later = begins_later(scene.runs, (scene.first.step, scene.first.step_b))
            return f"{text}: {drawn}.{later}" if drawn else f"{text}{seeded}{_built(scene)}"
        if site.fqn in unseeded(scene):
            return f"{what(site)} differs when the step begins, although {scene.all_before}."
        return f"{what(site)} differs when the step begins, although {scene.all_before}; {_drawn_before(scene)}."


def _built(scene: Scene) -> str:
    """Parameters that one run only has: building them may draw, though nothing equal before them shows the seed."""
    items = scene.step.divergences
    for side, missing in (("a", items.row_b), ("b", items.row_a)):
        alone = [
            site.fqn
            for site, row in zip(scene.step.sites, missing.tolist(), strict=True)
            if row < 0 and site.kind is Kind.PARAM and site.phase is Phase.START
        ]
        if alone:
            rest = f" and {count(len(alone) - 1, 'more parameter')}" if len(alone) > 1 else ""
            return f" Only {side} has {alone[0]}{rest}: if they are drawn at random, that explains it."
    return ""


def _drawn_before(scene: Scene) -> str:
    """Where in the step before one run drew more, as far as the records tell."""
    step, last = scene.step, scene.first.step - 1
    if was_set := set_words(*set_at(scene.runs, scene.first)):
        return was_set
    if " " in scene.site.fqn:  # of the script's: nobody sees what draws from it, or sets it
        return f"since step {last} began, it was seeded, set or drawn from in another way"
    text = "one run drew random numbers that the other did not, "
    if step.before is None:
        return f"{text}since the last recorded step"
    draws = one_sided_draws(step, step.before, scene.site.fqn)
    if draws:
        return f"during step {last}, {draws[0]}"
    losses = step.of(Kind.LOSS, frozenset({Phase.LOSS}))
    if (
        step.comparison.notices_all_draws
        and scene.step.before is not None
        and set(map(int, losses)) & {*scene.step.before.rows_of("a")}
    ):
        return f"{text}after the backward pass of step {last}"
    return f"{text}during step {last}"


def _within(scene: Scene) -> str:
    """A state within a step: which draws came before it in one run only, or whose state it is in the other run."""
    site = scene.site
    generator = generator_of(site)
    text = f"{what(site)} differs{although(scene.cause.evidence)}"
    if was_set := set_words(*set_at(scene.runs, scene.first)):
        return f"{text}: {was_set}."
    draws = [draw for draw in draws_before(scene) if generator_of(draw.site) == generator]
    other = scene.exchanged_with(_draws(scene))
    if other is not None:
        whose = _whose(scene.step.alignment.site(other))
        return f"{text}: in b it is the one {whose} in a, and the other way round. They run in a different order."
    if draws:
        return f"{text}: {draws[0]} (an extra random draw)."
    last = _last_equal(scene, generator)
    since = f"since {last} drew" if last else "since the step began"
    return f"{text}: {since}, one run drew more random numbers than the other, or in another order."


def _whose(site: Site) -> str:
    call = f" (call {site.call})" if site.call else ""
    return f"before {site.fqn}{call}" if site.path.endswith(DRAWN_BEFORE) else f"from which {site.fqn}{call} draws"


def _draws(scene: Scene) -> list[int]:
    """Random states within the step that both runs recorded."""
    step = scene.step
    phases = frozenset(Phase) - {Phase.START}
    return [int(union) for union in step.of(Kind.RNG, phases) if step.state[union]]


def _last_equal(scene: Scene, generator: str) -> str:
    """The module whose random state is the last before this that is equal, where modules drew."""
    step = scene.step
    equal = [
        union
        for union in _draws(scene)
        if step.state[union] == EQUAL and step.table.order_of[union] < scene.first.sequence
    ]
    sites = [step.alignment.site(union) for union in sorted(equal, key=lambda union: step.table.order_of[union])]
    drawn_by_modules = [
        site for site in sites if generator_of(site) == generator and not site.path.endswith(DRAWN_BEFORE)
    ]
    return drawn_by_modules[-1].fqn if drawn_by_modules else ""


def unseeded(scene: Scene) -> tuple[str, ...]:
    """Generators that both runs began to draw from, unseeded, in the diverging step, or before a state that differs."""
    step = scene.step
    if scene.cause.reason == RandomState.word:
        return _began(step.before, lambda: step.table)
    return _began(step.table, lambda: _after(step))


def _after(step: Step) -> Table | None:
    """The step after, where both runs recorded it."""
    table, comparison = step.table, step.comparison
    steps = table.step + 1, table.step_b + 1
    if steps[0] not in comparison.a or steps[1] not in comparison.b:
        return None
    every = table.alignment.mask(frozenset(), ())
    return matched(table.alignment, every, steps, (comparison.a.read(steps[0]), comparison.b.read(steps[1])))


def _began(now: Table | None, after: Callable[[], Table | None]) -> tuple[str, ...]:
    """Generators untouched in both runs when one step begins, and drawn from, differently, when the next does."""
    untouched = _with_status(now, Status.VALUE)
    following = after() if untouched else None
    if following is None:
        return ()
    drawn = [union for union in _with_status(following, Status.OBSERVED) if union in untouched]
    return tuple(following.alignment.fqn[u] for u in drawn if following.checksum(u, "a") != following.checksum(u, "b"))


def _with_status(table: Table | None, status: Status) -> list[int]:
    """Random states at the start of a step that both runs recorded with that status."""
    if table is None:
        return []
    alignment = table.alignment
    started = (alignment.kind == kind_code(Kind.RNG)) & (alignment.phase == phase_code(Phase.START))
    states = map(int, np.flatnonzero(started))
    return [union for union in states if all(table.status(union, side) is status for side in "ab")]


def unseeded_sentence(scene: Scene) -> str:
    """That a generator was drawn from without a seed, where that is so; it differs between any two processes then."""
    names = [_GENERATORS.get(name, name) for name in unseeded(scene)]
    if not names:
        return ""
    step = scene.first.step - (scene.cause.reason == RandomState.word)
    verb = "is" if len(names) == 1 else "are"
    return (
        f" {' and '.join(names)} {verb} drawn from in step {step} without ever having been seeded, so every process "
        "gets different numbers (capture --seed seeds all generators)."
    )
