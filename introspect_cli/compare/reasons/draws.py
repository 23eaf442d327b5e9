"""Random states: one that differs first, and draws that one run made and the other did not.

An unseeded generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.

A draw that only one run made is no divergence by itself. It is what explains that a random state differs later, or that
a module gives something else; so its place is given, by what was recorded just after it. The same draw can be on record
under different names: a capture that was asked to leave a module out, or a module that was written as a function,
notices it at what comes next. So where both runs have draws from a generator that the other lacks, none is one run's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.names import generator_of
from introspect_cli.compare.passes import table_of
from introspect_cli.compare.reasons.base import cause, is_fed
from introspect_cli.compare.say import BACKWARD_PASS, BATCH_OF, finds, found
from introspect_cli.compare.settings.beginning import (
    differing_calls,
    find_first_event,
    find_script_seedings,
)
from introspect_cli.compare.step import Place, random_at_start
from introspect_cli.compare.table import OTHER, Table, kind_code, phase_code
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def one_sided_draws(step: Step, table: Table) -> list[Draw]:
    """Draws that one run alone made in the step of `table`: all of b, then all of a, each in their sequence.

    A draw is one run's alone where the other has no record at its site, and no draw of its own from the same generator
    in the step that this run lacks. [] where a capture did not record draws.

    Args:
        step: gives the alignment and the comparison.
        table: of this step, or of the previous one.
    """
    alignment, (a, b), draws = step.alignment, table.halves, list[Draw]()
    within = (alignment.kind == kind_code(Kind.RNG)) & (alignment.phase != phase_code(Phase.START))
    for half, other in ((b, a), (a, b)) if step.comparison.draws_recorded else ():
        rows = np.flatnonzero(within[half.sites] & ~np.isin(half.sites, other.sites))
        for row in rows[np.argsort(half.batch.sequence[rows])].tolist():
            draws.append(Draw(half.side, alignment.site(int(half.sites[row])), int(half.batch.sequence[row])))
    drawn = {(draw.side, generator_of(draw.site)) for draw in draws}
    return [draw for draw in draws if (OTHER[draw.side], generator_of(draw.site)) not in drawn]


def draws_before(at: View) -> list[Draw]:
    """One-sided draws of the step that precede the record in the run that draws; of a random state, its generator's.

    For a state at a step's start, those of the step before. [] in the step at which a run resumes.
    """
    step, of_state = at.step, at.cause.reason == "rng"
    begins = of_state and at.site.phase is Phase.START
    table = step.begins.before if begins else at.table
    if table is None or step.comparison.is_resume_step(at.table.step):
        return []
    return [
        draw
        for draw in one_sided_draws(step, table)
        if (begins or draw.sequence < (at.table.number("sequence", at.union, draw.side) or 0))
        and (not of_state or generator_of(draw.site) == generator_of(at.site))
    ]


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

    It names the module that drew, or what was recorded after the draw: a loader's batch, the backward pass, a module.
    """
    for side, site, _ in draws_before(at)[:1]:
        code = "draw-before" if site.path.endswith(DRAWN_BEFORE) else "draw-by"
        call = f"{site.fqn} #{site.call}" if site.call else site.fqn
        name = {Phase.DATA: f"{BATCH_OF}{site.fqn}", Phase.LOSS: BACKWARD_PASS}.get(site.phase, call)
        yield found(code, side=side, other=OTHER[side], name=name)


# --- a random state that differs


def random_state_cause(step: Step, position: int) -> Cause | None:
    """Cause `rng` of a random state that differs; None where it differs as a consequence.

    At the start of a step that is where it differed in the step before. Later in the step, it is where anything
    diverged before, a random state differs at the start, or any earlier record does.
    """
    site = step.sites[position]
    if site.phase is Phase.START:
        states = step.of(Kind.RNG, frozenset(Phase)).tolist()
        states = [union for union in states if generator_of(step.alignment.site(union)) == site.fqn]
        return None if step.differed_before(states) else cause("rng")
    if step.begins.diverged or is_fed(step, position):
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

    At the start of the first step: the first seeding or draw before it that differs; nothing for resumed runs. Else
    calls that set the state. Without any, the first one-sided draw: of this step, or, for a state at its start, of the
    previous step.
    """
    site, who = at.site, (at.runs, at.first.rank)
    if site.phase is Phase.START and at.is_first_step:
        if not is_resumed_start(at):
            by_script = " " in site.fqn
            yield from find_script_seedings(*who) if by_script else find_first_event(*who, site.fqn)
        return
    set_by = list(differing_calls(at.runs, at.first).finding())
    # nobody sees what draws from a generator of the script's
    drawn = " " not in site.fqn and (site.phase is not Phase.START or site.fqn not in unseeded_names(at))
    yield from set_by or (find_one_sided_draw(at) if drawn else ())


def left_in_state(at: View) -> Iterator[str]:
    """Codes of the remaining causes of a random state that differs: seeds or draws, by when it is recorded.

    None for a state at the start of a later step, of a generator that nobody seeded.
    """
    site = at.site
    if site.phase is Phase.START and at.is_first_step:
        yield from ("not-restored", "drew-before-first") if is_resumed_start(at) else ("seed", "draws-before-state")
    elif " " in site.fqn:
        yield "script-generator"
    elif site.phase is not Phase.START or site.fqn not in unseeded_names(at):
        yield "draws-between"


# --- generators that nobody seeded


def unseeded_names(at: View) -> tuple[str, ...]:
    """Generators that nobody seeded and that both runs first drew from in one step, with different states after it.

    That is the step of the divergence; for reason `rng`, the step before it.
    """
    step, of_state = at.step, at.cause.reason == "rng"
    now = step.begins.before if of_state else step.table
    untouched = _start_states_with(now, Status.VALUE)
    following = (step.table if of_state else _next_table(step)) if untouched else None
    if following is None:
        return ()
    drawn = [union for union in _start_states_with(following, Status.OBSERVED) if union in untouched]
    differs = (u for u in drawn if following.number("checksum", u, "a") != following.number("checksum", u, "b"))
    return tuple(following.alignment.fqn[u] for u in differs)


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
    every, batches = table.alignment.mask(frozenset(), ()), (comparison.a.read(steps[0]), comparison.b.read(steps[1]))
    return table_of(table.alignment, every, steps, batches, comparison.layouts)


def _start_states_with(table: Table | None, status: Status) -> list[int]:
    """Site numbers of random states at a step's start that have `status` in both runs; [] without a table.

    Untouched generators have `Status.VALUE`, those with a recorded state `Status.OBSERVED`.
    """
    if table is None:
        return []
    alignment = table.alignment
    started = (alignment.kind == kind_code(Kind.RNG)) & (alignment.phase == phase_code(Phase.START))
    states = map(int, np.flatnonzero(started))
    return [union for union in states if all(table.number("status", union, side) == status for side in "ab")]
