"""Random states: one that differs first, and draws that one run made and the other did not.

An unseeded generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.

A draw that only one run made is no divergence by itself. It is what explains that a random state differs later, or that
a module gives something else; so its place is given, by what was recorded just after it. The same draw can
be on record under different names: a capture that was asked to leave a module out, or a module that was written as a
function, notices it at what comes next. So a draw is one run's alone only where the other run looked at the generators
just before and just after, and had no draw in between that has no partner either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.compare.names import generator_of
from introspect_cli.compare.passes import table_of
from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.say import BACKWARD_PASS, BATCH_OF, finds, found
from introspect_cli.compare.settings.beginning import (
    differing_calls,
    find_first_event,
    find_later_beginning,
    find_script_seedings,
)
from introspect_cli.compare.step import Place, random_at_start
from introspect_cli.compare.table import OTHER, Alignment, Ids, Table, kind_code, of_kinds, phase_code
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step


class Draw(NamedTuple):
    """A draw that one run made and the other did not.

    Attributes:
        side: of the run.
        site: of the random state that they were drawn from.
        sequence: when, in that run.
    """

    side: str
    site: Site
    sequence: int

    @property
    def finding(self) -> Finding:
        """The finding that names the run, and the module that drew, or what was recorded after the draw."""
        code = "draw-before" if self.site.path.endswith(DRAWN_BEFORE) else "draw-by"
        return found(code, side=self.side, other=OTHER[self.side], name=_name_of_drawer(self.site))


def one_sided_draws(step: Step, table: Table, generator: str = "") -> list[Draw]:
    """Draws that one run alone made in the step of `table`: all of b, then all of a, each in their sequence.

    A draw is one run's alone where the other has no record at its site and looked at the generators around it
    (`_is_checked_around`). [] where a capture did not record draws.

    Args:
        step: gives the alignment and the comparison.
        table: of this step, or of the previous one.
        generator: its name; "" for all generators.
    """
    if not step.comparison.draws_recorded:
        return []
    alignment, draws = step.alignment, []
    a, b = (_Recorded(half.side, alignment, half.sites, half.batch.sequence) for half in table.halves)
    for run, partner in ((b, a), (a, b)):
        for row in run.unmatched(partner):
            site = alignment.site(int(run.unions[row]))
            if generator in {"", generator_of(site)} and _is_checked_around(run, partner, row, generator_of(site)):
                draws.append(Draw(run.side, site, int(run.sequence[row])))
    return draws


def draws_before(at: View) -> list[Draw]:
    """One-sided draws of the step that precede the record in the run that draws.

    [] in the step at which a run resumes.
    """
    draws = [] if at.step.comparison.is_resume_step(at.table.step) else one_sided_draws(at.step, at.table)
    return [draw for draw in draws if draw.sequence < (at.table.sequence(at.union, draw.side) or 0)]


@dataclass(frozen=True)
class _Recorded:
    """One run's n records of a step, as arrays.

    Attributes:
        side: `a` or `b`.
        unions: int64 (n,), the number of each record's site in the alignment.
        sequence: int64 (n,), the place of each record in the order of the run.
    """

    side: str
    alignment: Alignment
    unions: Ids
    sequence: Any

    @cached_property
    def drawn(self) -> npt.NDArray[np.bool_]:
        """Mask (n,) of random states within the step, each recorded when something draws."""
        kind, phase = self.alignment.kind[self.unions], self.alignment.phase[self.unions]
        return np.asarray((kind == kind_code(Kind.RNG)) & (phase != phase_code(Phase.START)))

    @cached_property
    def checks(self) -> npt.NDArray[np.bool_]:
        """Mask (n,) of records at which the capture looks at all generators: inputs, outputs, batches, losses."""
        return of_kinds(self.alignment.kind[self.unions], (*_SEEN, Kind.LOSS))

    def unmatched(self, other: _Recorded) -> list[int]:
        """Rows of draws at sites that `other` has no record of, in their sequence."""
        rows = np.flatnonzero(self.drawn & ~np.isin(self.unions, other.unions))
        return [int(row) for row in rows[np.argsort(self.sequence[rows])]]


def _is_checked_around(run: _Recorded, other: _Recorded, row: int, generator: str) -> bool:
    """Whether `other` looked at the generators before and after a draw of `run`, and has no draw of its own between.

    It looks at records of `checks` that both runs have. A draw of its own is one that `run` lacks (`unmatched`), of the
    same generator, between them or in a module around the draw.

    Args:
        run: the run that drew.
        other: the other run.
        row: row of the draw in `run`.
        generator: its name.
    """
    shared, now = run.checks & np.isin(run.unions, other.unions), run.sequence[row]
    when = dict(zip(other.unions[other.checks].tolist(), other.sequence[other.checks].tolist(), strict=True))
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


def _name_of_drawer(site: Site) -> str:
    """What drew or came after a draw: a loader's batch, the backward pass, a module (` #1` for its second call)."""
    if site.phase is Phase.DATA:
        return f"{BATCH_OF}{site.fqn}"
    call = f" #{site.call}" if site.call else ""
    return BACKWARD_PASS if site.phase is Phase.LOSS else f"{site.fqn}{call}"


def side_that_draws(at: View, *, before: bool = False) -> str:
    """The run, `a` or `b`, that alone draws in the module's call of this site; "" for none.

    Args:
        at: the divergence.
        before: look for draws just before the call instead of in it.
    """
    call = at.site.fqn, at.site.call, at.site.phase
    at_it = (one for one in draws_before(at) if (one.site.fqn, one.site.call, one.site.phase) == call)
    return next((one.side for one in at_it if one.site.path.endswith(DRAWN_BEFORE) is before), "")


def find_one_sided_draw(at: View) -> Iterator[Finding]:
    """Finding for the first draw of b alone before the divergence, else of a alone.

    For reason `rng` of its generator only.
    """
    generator = generator_of(at.site) if at.cause.reason == "rng" else ""
    draws = [draw for draw in draws_before(at) if generator in {"", generator_of(draw.site)}]
    yield from (draw.finding for draw in draws[:1])


# --- a random state that differs


def random_state_cause(step: Step, position: int) -> Cause | None:
    """Cause `rng` of a random state that differs; None where it differs as a consequence.

    At the start of a step that is where it differed in an earlier step already. Later in the step, it is where a random
    state differs at the start, or any earlier record does.
    """
    site = step.sites[position]
    if site.phase is Phase.START:
        return None if site.fqn in step.carried.rng else cause("rng")
    if step.carried.rng or step.rng_differs() or step.anything_before(step.order_at(position)):
        return None
    return cause("rng", *random_at_start(step, Place(site, step.order_at(position))))


def is_resumed_start(at: View) -> bool:
    """Whether the divergence is in the first compared step, and the runs begin with other step numbers.

    An offset between them counts as that, too.
    """
    comparison = at.step.comparison
    begins_elsewhere = comparison.a.entry(0).step != comparison.b.entry(0).step
    return at.is_first_step and (at.first.step != at.first.step_b or begins_elsewhere)


@finds("rng")
def find_random_cause(at: View) -> Iterator[Finding]:
    """Findings on what set the state, or drew from it, in one run alone or otherwise.

    At the start of the first step: the first seeding or draw before it that differs, and models that one run ran first;
    nothing for resumed runs. Else calls that set the state. Without any, the first one-sided draw: of this step, or,
    for a state at its start, of the previous step.
    """
    site, who = at.site, (at.runs, at.first.rank)
    if site.phase is Phase.START and at.is_first_step:
        if not is_resumed_start(at):
            by_script = " " in site.fqn
            yield from find_script_seedings(*who) if by_script else find_first_event(*who, site.fqn)
            yield from find_later_beginning(at.runs, (at.first.step, at.first.step_b))
        return
    set_by = list(differing_calls(at.runs, at.first).finding())
    yield from set_by
    if set_by or " " in site.fqn:  # nobody sees what draws from a generator of the script's
        return
    if site.phase is not Phase.START:
        yield from find_one_sided_draw(at)
    elif at.step.before is not None and site.fqn not in unseeded_names(at):
        draws = one_sided_draws(at.step, at.step.before, site.fqn)
        yield from (draw.finding for draw in draws[:1])


def left_in_state(at: View) -> Iterator[str]:
    """Codes of the remaining causes of a random state that differs: seeds or draws, by when it is recorded.

    None for a state at the start of a later step, of a generator that nobody seeded.
    """
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
    """Generators that nobody seeded and that both runs first drew from in one step, with different states after it.

    That is the step of the divergence; for reason `rng`, the step before it.
    """
    step = at.step
    if at.cause.reason == "rng":
        return _first_drawn_from(step.before, lambda: step.table)
    return _first_drawn_from(step.table, lambda: _next_table(step))


_GENERATORS = {"python": "python's random", "numpy": "numpy.random"}


@finds("*")
def find_unseeded_generators(at: View) -> Iterator[Finding]:
    """Finding that names `unseeded_names`, and the step in which they were first drawn from."""
    if names := unseeded_names(at):
        yield found(
            "unseeded",
            names=", ".join(_GENERATORS.get(name, name) for name in names),
            step=at.first.step - (at.cause.reason == "rng"),
        )


def _next_table(step: Step) -> Table | None:
    """Table of the step after this one, with all its sites; None unless both runs recorded it."""
    table, comparison = step.table, step.comparison
    steps = table.step + 1, table.step_b + 1
    if steps[0] not in comparison.a or steps[1] not in comparison.b:
        return None
    every = table.alignment.mask(frozenset(), ())
    return table_of(table.alignment, every, steps, (comparison.a.read(steps[0]), comparison.b.read(steps[1])))


def _first_drawn_from(now: Table | None, after: Callable[[], Table | None]) -> tuple[str, ...]:
    """Generators still untouched as a step starts, in both runs, and in different states as the next one starts.

    Args:
        now: table of the step; None gives ().
        after: makes the table of the next step; called only if a generator is untouched.
    """
    untouched = _start_states_with(now, Status.VALUE)
    following = after() if untouched else None
    if following is None:
        return ()
    drawn = [union for union in _start_states_with(following, Status.OBSERVED) if union in untouched]
    return tuple(following.alignment.fqn[u] for u in drawn if following.checksum(u, "a") != following.checksum(u, "b"))


def _start_states_with(table: Table | None, status: Status) -> list[int]:
    """Site numbers of random states at a step's start that have `status` in both runs; [] without a table.

    Untouched generators have `Status.VALUE`, those with a recorded state `Status.OBSERVED`.
    """
    if table is None:
        return []
    alignment = table.alignment
    started = (alignment.kind == kind_code(Kind.RNG)) & (alignment.phase == phase_code(Phase.START))
    states = map(int, np.flatnonzero(started))
    return [union for union in states if all(table.status(union, side) is status for side in "ab")]
