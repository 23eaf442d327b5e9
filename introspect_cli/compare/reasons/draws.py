"""Random states: one that differs first, and draws that one run made and the other did not.

An unseeded generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.

A draw that only one run made is no divergence by itself. It is what explains that a random state differs later, or that
a module gives something else; so its place is given, by what was recorded just before and after it. The same draw can
be on record under different names: a capture that was asked to leave a module out, or a module that was written as a
function, notices it at what comes next. So a draw is one run's alone only where the other run looked at the generators
just before and just after, and had no draw in between that has no partner either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.passes import table_of
from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.say import BACKWARD_PASS, BATCH_OF, STEP_BEGINS, finds, found
from introspect_cli.compare.settings.beginning import find_first_event, find_later_beginning, find_script_seedings
from introspect_cli.compare.settings.seedings import differing_calls, find_differing_call
from introspect_cli.compare.step.rests_on import Place, random_at_start
from introspect_cli.compare.terms.evidence import Cause, Known, Thing
from introspect_cli.compare.terms.names import generator_of
from introspect_cli.compare.terms.sites import Alignment, Ids, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, OTHER, Table
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.findings import Finding


@dataclass(frozen=True)
class Draw:
    """A draw that one run made and the other did not.

    Attributes:
        side: of the run.
        site: of the random state that they were drawn from.
        after: what was recorded before; "" where the module itself drew as soon as it was called.
        sequence: when, in that run.
    """

    side: str
    site: Site
    after: str
    sequence: int

    @property
    def found(self) -> Finding:
        """The finding that names the draw's place and run."""
        sides = {"side": self.side, "other": OTHER[self.side], "after": self.after}
        if self.site.path.endswith(DRAWN_BEFORE):
            return found("draw-between", **sides, before=_next(self.site))
        return found("draw-by", **sides, module=self.site.fqn)


def one_sided_draws(step: Step, table: Table, generator: str = "") -> list[Draw]:
    """Draws that one run alone made in a step, b's first; of all generators where `generator` is ""."""
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


def draws_before(at: View) -> list[Draw]:
    """Draws of one run alone before the divergence; none in the step at which a resumed run continues."""
    draws = [] if at.step.comparison.is_resume_step(at.table.step) else one_sided_draws(at.step, at.table)
    return [draw for draw in draws if draw.sequence < (at.table.sequence(at.union, draw.side) or 0)]


@dataclass(frozen=True)
class _Recorded:
    """One run's records of a step, as arrays."""

    side: str
    alignment: Alignment
    unions: Ids
    sequence: Any

    @cached_property
    def drawn(self) -> npt.NDArray[np.bool_]:
        """Mask of random states within the step, each recorded at a draw."""
        kind, phase = self.alignment.kind[self.unions], self.alignment.phase[self.unions]
        return np.asarray((kind == kind_code(Kind.RNG)) & (phase != phase_code(Phase.START)))

    @cached_property
    def looked(self) -> npt.NDArray[np.bool_]:
        """Mask of records at which the capture checks all generators: inputs, outputs, batches, losses."""
        return of_kinds(self.alignment.kind[self.unions], (*_SEEN, Kind.LOSS))

    def unmatched(self, other: _Recorded) -> list[int]:
        """Rows of draws at sites that the other run lacks, in sequence."""
        rows = np.flatnonzero(self.drawn & ~np.isin(self.unions, other.unions))
        return [int(row) for row in rows[np.argsort(self.sequence[rows])]]

    def previous(self, row: int, site: Site) -> str:
        """Name of the last input, output or batch before a row; "" if the module drew right at its call."""
        passing = of_kinds(self.alignment.kind[self.unions], _SEEN) & (self.sequence < self.sequence[row])
        passing &= np.isin(self.alignment.phase[self.unions], [phase_code(phase) for phase in _PASSING])
        earlier, by_itself = np.flatnonzero(passing), not site.path.endswith(DRAWN_BEFORE)
        if not len(earlier):
            return "" if by_itself else STEP_BEGINS
        last = self.alignment.site(int(self.unions[earlier[np.argmax(self.sequence[earlier])]]))
        if by_itself:
            return last.fqn if last.kind is Kind.OUTPUT and last.fqn.startswith(site.fqn + ".") else ""
        return f"{BATCH_OF}{last.fqn}" if last.kind is Kind.BATCH else last.fqn


def _looked(run: _Recorded, other: _Recorded, row: int, generator: str) -> bool:
    """Whether the other run checked the generators before and after a draw and has no unmatched draw between."""
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
    """Name of what follows a draw: `batch from loader`, `backward` or `module #call`."""
    if site.phase is Phase.DATA:
        return f"{BATCH_OF}{site.fqn}"
    call = f" #{site.call}" if site.call else ""
    return BACKWARD_PASS if site.phase is Phase.LOSS else f"{site.fqn}{call}"


def side_that_draws(at: View, *, before: bool = False) -> str:
    """The run that alone draws in the module's call (`before`: just before it); "" for none."""
    call = at.site.fqn, at.site.call, at.site.phase
    at_it = (one for one in draws_before(at) if (one.site.fqn, one.site.call, one.site.phase) == call)
    return next((one.side for one in at_it if one.site.path.endswith(DRAWN_BEFORE) is before), "")


def is_drawn_otherwise(at: View) -> bool:
    """Whether the generator was equal at the start, and the next draw after the batch is from another state."""
    step, order = at.step, at.table.order_of
    drawn = step.of(Kind.RNG, frozenset(Phase) - {Phase.START})
    drawn = drawn[(order[drawn] > at.first.sequence) & (step.state[drawn] > 0)]
    at_start = at.known(Thing.RANDOM_AT_START) is Known.EQUAL
    return at_start and bool(len(drawn)) and step.state[drawn[np.argmin(order[drawn])]] == DIFFERENT


def find_one_sided_draw(at: View) -> Iterator[Finding]:
    """Finding for the first draw of one run alone before the divergence; for a random state, of its generator."""
    generator = generator_of(at.site) if at.cause.reason == "rng" else ""
    draws = [draw for draw in draws_before(at) if generator in {"", generator_of(draw.site)}]
    yield from (draw.found for draw in draws[:1])


# --- a random state that differs


def random_state_cause(step: Step, position: int) -> Cause | None:
    """Cause of a differing random state; None where an earlier state or record differs."""
    site = step.sites[position]
    if site.phase is Phase.START:
        return None if site.fqn in step.carried.rng else cause("rng")
    if step.carried.rng or step.rng_differs() or step.anything_before(step.order_at(position)):
        return None
    return cause("rng", *random_at_start(step, Place(site, step.order_at(position))))


def is_resumed_start(at: View) -> bool:
    """Whether this is the first compared step, but not the first of both runs."""
    comparison = at.step.comparison
    begins_elsewhere = comparison.a.entry(0).step != comparison.b.entry(0).step
    return at.is_first_step and (at.first.step != at.first.step_b or begins_elsewhere)


@finds("rng")
def find_random_cause(at: View) -> Iterator[Finding]:
    """Findings on what set or drew from the state in one run alone, or with another seed."""
    site, who = at.site, (at.runs, at.first.rank)
    if site.phase is Phase.START and at.is_first_step:
        if not is_resumed_start(at):
            by_script = " " in site.fqn
            yield from find_script_seedings(*who, seeds=True) if by_script else find_first_event(*who, site.fqn)
            yield from find_later_beginning(at.runs, (at.first.step, at.first.step_b))
        return
    set_by = list(find_differing_call(*differing_calls(at.runs, at.first)))
    yield from set_by
    if set_by or " " in site.fqn:  # nobody sees what draws from a generator of the script's
        return
    if site.phase is not Phase.START:
        yield from find_one_sided_draw(at)
    elif at.step.before is not None and site.fqn not in unseeded_names(at):
        draws = one_sided_draws(at.step, at.step.before, site.fqn)
        yield from (draw.found for draw in draws[:1])


def left_in_state(at: View) -> Iterator[str]:
    """Remaining causes of a differing random state: seeds or draws, by when it is recorded."""
    site, step = at.site, at.step
    if site.phase is Phase.START and at.is_first_step:
        yield from ("not-restored", "drew-before-first") if is_resumed_start(at) else ("seed", "draws-before-state")
    elif " " in site.fqn:
        yield "script-generator"
    elif site.phase is Phase.START and site.fqn not in unseeded_names(at):
        losses = set(map(int, step.of(Kind.LOSS, frozenset({Phase.LOSS}))))
        seen = step.before is not None and step.comparison.notices_all_draws and losses & {*step.before.rows_of("a")}
        yield "draws-after-backward" if seen else "draws-in-step-before"
    elif site.phase is not Phase.START:
        yield "draws-in-step"


# --- generators that nobody seeded


def unseeded_names(at: View) -> tuple[str, ...]:
    """Generators that both runs first drew from, unseeded, in the diverging step, or the one before a state."""
    step = at.step
    if at.cause.reason == "rng":
        return _began(step.before, lambda: step.table)
    return _began(step.table, lambda: _after(step))


_GENERATORS = {"python": "python's random", "numpy": "numpy.random"}


@finds("*")
def find_unseeded_generators(at: View) -> Iterator[Finding]:
    """Finding where a generator was drawn from without a seed."""
    if names := unseeded_names(at):
        yield found(
            "unseeded",
            names=", ".join(_GENERATORS.get(name, name) for name in names),
            step=at.first.step - (at.cause.reason == "rng"),
        )


def _after(step: Step) -> Table | None:
    """The table of the following step; None unless both runs recorded it."""
    table, comparison = step.table, step.comparison
    steps = table.step + 1, table.step_b + 1
    if steps[0] not in comparison.a or steps[1] not in comparison.b:
        return None
    every = table.alignment.mask(frozenset(), ())
    return table_of(table.alignment, every, steps, (comparison.a.read(steps[0]), comparison.b.read(steps[1])))


def _began(now: Table | None, after: Callable[[], Table | None]) -> tuple[str, ...]:
    """Generators untouched as `now` starts in both runs, and drawn from, in different states, at the next start."""
    untouched = _with_status(now, Status.VALUE)
    following = after() if untouched else None
    if following is None:
        return ()
    drawn = [union for union in _with_status(following, Status.OBSERVED) if union in untouched]
    return tuple(following.alignment.fqn[u] for u in drawn if following.checksum(u, "a") != following.checksum(u, "b"))


def _with_status(table: Table | None, status: Status) -> list[int]:
    """Sites of start-of-step random states with `status` in both runs."""
    if table is None:
        return []
    alignment = table.alignment
    started = (alignment.kind == kind_code(Kind.RNG)) & (alignment.phase == phase_code(Phase.START))
    states = map(int, np.flatnonzero(started))
    return [union for union in states if all(table.status(union, side) is status for side in "ab")]
