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
from introspect_cli.compare.passes import pair
from introspect_cli.compare.reasons.base import cause, evidence_of, is_fed
from introspect_cli.compare.say import BACKWARD_PASS, BATCH_OF, finds, found
from introspect_cli.compare.settings.beginning import SCRIPT, differing_calls, find_first_event
from introspect_cli.compare.table import OTHER, Table
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

    @property
    def finding(self) -> Finding:
        """Finding of what drew, or was recorded after the draw: a loader's batch, the backward pass, a module."""
        site, before = self.site, "before" if self.site.path.endswith(DRAWN_BEFORE) else "in"
        call = f"{site.fqn} #{site.call}" if site.call else site.fqn
        name = {Phase.DATA: f"{BATCH_OF}{site.fqn}", Phase.LOSS: BACKWARD_PASS}.get(site.phase, call)
        return found("draws", before=before, side=self.side, other=OTHER[self.side], name=name)


def one_sided_draws(step: Step, table: Table) -> list[Draw]:
    """Draws that one run alone made in the step of `table`: all of b, then all of a, each in their sequence.

    A draw is one run's alone where the other has no record at its site, and no draw of its own from the same generator
    in the step that this run lacks. [] where a capture did not record draws.

    Args:
        step: gives the alignment and the comparison.
        table: of this step, or of the previous one.
    """
    alignment, (a, b), draws = step.alignment, table.halves, list[Draw]()
    within = alignment.are(Kind.RNG) & ~alignment.are(Phase.START)
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


def find_one_sided_draw(at: View) -> Iterator[Finding]:
    """Finding for the first draw of b alone before the divergence, else of a alone."""
    yield from (draw.finding for draw in draws_before(at)[:1])


# --- a random state that differs


def random_state_cause(step: Step, position: int) -> Cause | None:
    """Cause `rng` of a random state that differs; None where it differs as a consequence.

    At the start of a step that is where it differed in the step before. Later in the step, it is where anything
    diverged before, a random state differs at the start, or any earlier record does.
    """
    site = step.sites[position]
    if site.phase is Phase.START:
        states = step.of(Kind.RNG).tolist()
        states = [union for union in states if generator_of(step.alignment.site(union)) == site.fqn]
        return None if step.differed_before(states) else cause("rng")
    fed = step.begins.diverged or is_fed(step, position)
    return None if fed else cause("rng", *evidence_of("rng", step, position))


def is_resumed_start(at: View) -> bool:
    """Whether the divergence is in the first compared step, and a run resumes there, or has another number of it."""
    resumes = at.step.comparison.is_resume_step(at.first.step)
    return at.is_first_step and (at.first.step != at.first.step_b or resumes)


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
            yield from find_first_event(*who, SCRIPT if by_script else site.fqn)
        return
    set_by = list(differing_calls(at.runs, at.first).finding())
    yield from set_by or find_one_sided_draw(at)


def left_in_state(at: View) -> tuple[str, ...]:
    """The code of the remaining cause of a random state that differs, by when it is recorded."""
    begins = at.site.phase is Phase.START and at.is_first_step
    return ("draws-between" if not begins else "not-restored" if is_resumed_start(at) else "seed",)


# --- generators that nobody seeded


def unseeded_names(at: View) -> tuple[str, ...]:
    """Generators that nobody seeded and that both runs first drew from in one step, with different states after it.

    That is the step of the divergence; for reason `rng`, the step before it.
    """
    step, of_state = at.step, at.cause.reason == "rng"
    now = step.begins.before if of_state else step.table
    states = step.of(Kind.RNG, Phase.START).tolist()
    untouched = [] if now is None else [union for union in states if _of_both(now, "status", union) == {Status.VALUE}]
    steps = step.table.step + 1, step.table.step_b + 1
    is_next = steps[0] in step.comparison.a and steps[1] in step.comparison.b
    if not untouched or not (of_state or is_next):
        return ()
    then = step.table if of_state else pair(step.comparison, *steps)
    drawn = [union for union in untouched if _of_both(then, "status", union) == {Status.OBSERVED}]
    return tuple(step.alignment.fqn[union] for union in drawn if len(_of_both(then, "checksum", union)) > 1)


@finds("*")
def find_unseeded_generators(at: View) -> Iterator[Finding]:
    """Finding that names `unseeded_names`, and the step in which they were first drawn from."""
    if names := unseeded_names(at):
        yield found("unseeded", names=", ".join(names), step=at.first.step - (at.cause.reason == "rng"))


def _of_both(table: Table, name: str, union: int) -> set[int | None]:
    """What `Table.number` gives in both runs; of status, `VALUE` is of an untouched generator."""
    return {table.number(name, union, side) for side in "ab"}
