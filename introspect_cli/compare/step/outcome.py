"""The outcome of comparing one rank, and whether the results of a step agree.

Where all results (losses, gradients, parameters, buffers, optimizer state) are recorded in both runs and agree, the
runs are the same whatever else differs: a mask in another form, a batch that is thrown away, a compiled region.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.correspondence import Correspondence
from introspect_cli.compare.terms.distance import nan_throughout
from introspect_cli.compare.terms.evidence import Cause, Known
from introspect_cli.compare.terms.sites import KINDS, Alignment, Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, NOT_SEEN, ONLY_A, ONLY_B, WITHIN, Learned, Table
from introspect_cli.compare.terms.watched import observed_kinds
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.gathered import Gathered
    from introspect_cli.compare.step.overview import Heat
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.step.structure import Structure
    from introspect_cli.compare.steps import Paired
    from introspect_cli.compare.terms.distance import Layouts
    from introspect_cli.compare.terms.result import Divergence, Resumption


@dataclass
class RankOutcome:
    """Outcome of comparing one rank, or all ranks as one.

    Attributes:
        paired: the steps of both; without readers in what another process compared.
        notes: what a reader must know of it.
        structural: whether structure differs.
        offset: step k of b was compared with step k + offset of a.
        tally: counts by the words of `result.Counts`, and of `blind` records, which only one side could see, of
            `blind_both`, which run a could not see, by estimate, and of steps and records `opened`.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        shared: where one run alone has the first, the first of its step that both have; None where there is none.
        blind_site: a site that only one side could see, as an example.
        tolerated: the first difference that tolerance or noise let pass, in words.
        structure: what differs in structure, and random states; None where no step had to be opened.
        unrecorded: a step in which structure differs and neither run recorded results.
        match: which name of a is which of b.
        gathered: compares what was gathered from ranks; None where ranks are compared one by one.
        agreed: the kinds of results that agree in every step that diverges; None where no step does.
        unused_note: the sentence on differences on which nothing rests, of the first step that has any; "" for none.
        results: the kinds of results that agree in every step that was opened; None where none was.
        hidden: the kinds of results of which some are NaN throughout in both runs, until some agree as numbers.
        results_known: what is known of all results of these steps: equal, within tolerance, or not that.
        foreign: perturbed runs among the noise that do not begin a rounding beside a.
        evaluated: the compared steps in which both runs recorded an evaluation that was selected.
        later: records of steps after the first divergence that were opened.
        unopened: common steps after those, which were not compared.
        resumption: what a resumed run goes on with; None where neither run is one.
        origins: other divergences of the first diverging step that rest on nothing that differs, with their causes.
        lost: divergences of the first diverging step that show what a resumed run did not restore.
        learned: what the steps have shown, for its notes.
        alone: compares evaluation alone (True) or training alone (False); None where no evaluation is on record.
    """

    rank: int
    paired: Paired
    notes: list[str] = field(default_factory=list)
    structural: bool = False
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
    unrecorded: int | None = None
    match: Correspondence = field(default_factory=Correspondence)
    gathered: Gathered | None = None
    agreed: frozenset[Kind] | None = None
    unused_note: str = ""
    results: frozenset[Kind] | None = None
    hidden: frozenset[Kind] = frozenset()
    results_known: Known = Known.EQUAL
    foreign: int = 0
    evaluated: tuple[int, ...] = ()
    later: int = 0
    unopened: int = 0
    resumption: Resumption | None = None
    origins: list[tuple[Divergence, Cause]] = field(default_factory=list)
    lost: list[Divergence] = field(default_factory=list)
    learned: Learned = field(default_factory=Learned)
    alone: Callable[[bool], RankOutcome] | None = None

    def keep_first(self, places: int) -> None:
        """Set `paired` to its first `places` common steps, and `unopened` to the number of the others."""
        paired = self.paired
        self.unopened = len(paired) - places
        self.paired = replace(paired, rows_a=paired.rows_a[:places], rows_b=paired.rows_b[:places])


RESULTS = (Kind.LOSS, Kind.GRAD, Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What a step gives: where these are on record and agree, nothing that one run only has has changed a number."""

TRAINED = frozenset({Kind.LOSS, Kind.GRAD, Kind.PARAM})
"""What a step that trains has of these."""

_COUNTED_KINDS = (*RESULTS, Kind.VALUE, Kind.COLLECTIVE, Kind.PRODUCT)
"""Of these, a difference counts whatever follows: somebody asked for values and collectives, and files stay."""

NAMES = {
    Kind.LOSS: "losses",
    Kind.GRAD: "gradients of the parameters",
    Kind.PARAM: "parameters",
    Kind.BUFFER: "buffers",
    Kind.OPTIMIZER_STATE: "optimizer states",
}


def watches_results(*manifests: dict[str, Any]) -> bool:
    """Whether every one of these captures was told to record any of losses, gradients and parameters."""
    wanted = {kind.value for kind in (Kind.LOSS, Kind.GRAD, Kind.PARAM)}
    return all(wanted & observed_kinds(manifest) for manifest in manifests)


def results_agree(table: Table) -> bool:
    """Whether any result (`_is_result`) of the step is EQUAL or WITHIN; results that differ are not looked at.

    Losses alone do not suffice if either run recorded other results. If no agreeing record is of `RESULTS`, an agreeing
    output of a root module suffices.
    """
    alignment, sites = table.alignment, agreeing_sites(table)
    results = sites[_is_result(alignment, sites)]
    recorded = table.sites_a, table.sites_b
    tensors = any((_is_result(alignment, unions) & ~_is_loss(alignment, unions)).any() for unions in recorded)
    return bool(len(results)) and not (tensors and _is_loss(alignment, results).all())


def _is_loss(alignment: Alignment, unions: Ids) -> Mask:
    """Mask of union numbers that are sites of losses."""
    return np.asarray(alignment.kind[unions] == kind_code(Kind.LOSS))


def records_results(table: Table) -> bool:
    """Whether either run recorded in the step a result after its start, or else an output of a root module."""
    return any(_is_result(table.alignment, sites).any() for sites in (table.sites_a, table.sites_b))


def is_training(table: Table) -> bool:
    """Whether the step has, in either run, a `RESULTS` record after the start or a start value that disagrees.

    Disagreeing states are DIFFERENT, NOT_SEEN, ONLY_A and ONLY_B.
    """
    alignment = table.alignment
    started = alignment.phase[table.site] == phase_code(Phase.START)
    counts = ~started | np.isin(table.state, (DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B))
    return bool((of_kinds(alignment.kind[table.site], RESULTS) & counts).any())


def has_updates(table: Table) -> bool:
    """Whether either run has a record of the optimizer phase in the step."""
    alignment, recorded = table.alignment, table.site
    return bool((alignment.phase[recorded] == phase_code(Phase.OPTIMIZER)).any())


def _is_result(alignment: Alignment, unions: Ids) -> Mask:
    """Mask of those of `unions` that are of a kind in `RESULTS` and not of the phase `start`.

    If none is, mask of those that are outputs of root modules, in any phase.
    """
    result = of_kinds(alignment.kind[unions], RESULTS)
    result &= alignment.phase[unions] != phase_code(Phase.START)
    if not result.any():  # a script that trains nothing: what its models give is all there is
        roots = [union for union in unions.tolist() if "." not in alignment.fqn[union]]
        result = np.isin(unions, roots) & (alignment.kind[unions] == kind_code(Kind.OUTPUT))
    return np.asarray(result)


def agreeing_sites(table: Table) -> Ids:
    """Union numbers of the sites of all rows that are EQUAL or WITHIN."""
    return np.asarray(table.site[(table.state == EQUAL) | (table.state == WITHIN)])


def _result_kinds(alignment: Alignment, unions: Ids) -> frozenset[Kind]:
    """Those of `RESULTS` that are kinds of these sites."""
    return frozenset(KINDS[code] for code in set(alignment.kind[unions].tolist())) & frozenset(RESULTS)


def agreed_kinds(table: Table) -> frozenset[Kind]:
    """Those of `RESULTS` with an agreeing record (EQUAL, WITHIN) after the start, and no disagreeing one in any phase.

    Disagreeing states are DIFFERENT, NOT_SEEN, ONLY_A and ONLY_B.
    """
    alignment, agree = table.alignment, agreeing_sites(table)
    disagree = table.site[np.isin(table.state, (DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B))]
    agree = agree[alignment.phase[agree] != phase_code(Phase.START)]
    return _result_kinds(alignment, agree) - _result_kinds(alignment, disagree)


def nan_kinds(table: Table, layouts: Layouts) -> frozenset[Kind]:
    """Those of `RESULTS` of which any record after the start is EQUAL and NaN in every element.

    `layouts` are those of a.
    """
    both = np.flatnonzero((table.state == EQUAL) & (table.row_a >= 0))
    sites = table.site[both[nan_throughout(table.a, layouts)[table.row_a[both]]]]
    return _result_kinds(table.alignment, sites[table.alignment.phase[sites] != phase_code(Phase.START)])


def results_known(table: Table) -> Known:
    """What is known of a step's results together: DIFFERS if any disagrees, else WITHIN if any is, else EQUAL.

    Looked at are `RESULTS`, values, collectives, saved files and all records of evaluation. Disagreeing states are
    DIFFERENT, NOT_SEEN, ONLY_A and ONLY_B. EQUAL for a step that has none of them.
    """
    counted = of_kinds(table.alignment.kind, _COUNTED_KINDS) | table.alignment.evaluating
    states = table.state[counted[table.site]]
    if np.isin(states, (DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B)).any():
        return Known.DIFFERS
    return Known.WITHIN if (states == WITHIN).any() else Known.EQUAL
