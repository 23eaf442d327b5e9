"""What came out of comparing one rank: counts, listed divergences, and what the answer needs of the first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Cause, Known
from introspect_cli.compare.match.correspondence import Correspondence

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.join.gathered import Gathered
    from introspect_cli.compare.join.steps import Paired
    from introspect_cli.compare.overview import Heat
    from introspect_cli.compare.passes.form import Form
    from introspect_cli.compare.result import Divergence, Reach, Resumption
    from introspect_cli.compare.step import Step
    from introspect_cli.compare.structure import Structure
    from introspect_cli.records import Kind


@dataclass
class RankOutcome:
    """What came out of comparing one rank.

    Attributes:
        rank: process.
        paired: the steps of both.
        offset: step k of b was compared with step k + offset of a.
        tally: counts by the words of `result.Counts`, and of `blind` records, which only one side could see, of
            `blind_both`, which run a could not see, by estimate, and of `causes`, which nothing equal stands beside.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        shared: where one run alone has the first, the first of its step that both have; None where there is none.
        cause: why the first one is what it is.
        step: the first diverging step.
        blind_site: a site that only one side could see, as an example.
        tolerated: the first difference that tolerance or noise let pass, in words.
        heat: the divergence map in the making.
        structure: what differs in structure, and random states; None where no step had to be opened.
        one_sided_step: a step in which structure differs and no result is common to both runs.
        unrecorded: a step in which structure differs and neither run recorded results.
        match: which name of a is which of b.
        gathered: compares what was gathered from ranks; None where ranks are compared one by one.
        agreed: the kinds of results that agree in every step that diverges; None where no step does.
        forms: inputs of the first step that has any which have another form in b, in their order.
        results: the kinds of results that agree in every step that was opened; None where none was.
        results_known: what is known of all results of these steps: equal, within tolerance, or not that.
        reach: how far rounding carries a, and b beside it; None without perturbed runs among the noise.
        foreign: perturbed runs among the noise that do not begin a rounding beside a.
        evaluated: the compared steps in which both runs recorded an evaluation that was selected.
        later: records of steps after the first divergence that were opened.
        unopened: common steps after those, which were not compared.
        resumption: what a resumed run goes on with; None where neither run is one.
        origins: other divergences of the first diverging step that rest on nothing that differs, with their causes.
        lost: divergences of the first diverging step that show what a resumed run did not restore.
        alone: compares evaluation alone (True) or training alone (False); None where no evaluation is on record.
    """

    rank: int
    paired: Paired
    offset: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    listed: list[Divergence] = field(default_factory=list)
    first: Divergence | None = None
    shared: Divergence | None = None
    cause: Cause | None = None
    step: Step | None = None
    blind_site: str = ""
    tolerated: str = ""
    heat: Heat | None = None
    structure: Structure | None = None
    one_sided_step: int | None = None
    unrecorded: int | None = None
    match: Correspondence = field(default_factory=Correspondence)
    gathered: Gathered | None = None
    agreed: frozenset[Kind] | None = None
    forms: tuple[Form, ...] = ()
    results: frozenset[Kind] | None = None
    results_known: Known = Known.EQUAL
    reach: Reach | None = None
    foreign: int = 0
    evaluated: tuple[int, ...] = ()
    later: int = 0
    unopened: int = 0
    resumption: Resumption | None = None
    origins: list[tuple[Divergence, Cause]] = field(default_factory=list)
    lost: list[Divergence] = field(default_factory=list)
    alone: Callable[[bool], RankOutcome] | None = None

    def cut(self, places: int) -> None:
        """Compare no more than so many of the common steps."""
        paired = self.paired
        self.unopened = len(paired) - places
        self.paired = replace(paired, rows_a=paired.rows_a[:places], rows_b=paired.rows_b[:places])
