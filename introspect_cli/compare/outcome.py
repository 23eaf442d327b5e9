"""The outcome of comparing one rank: results that agree, structural differences, and overviews.

Where all results (losses, gradients, parameters, buffers, optimizer state) are recorded in both runs and agree, the
runs are the same whatever else differs: a mask in another form, a batch that is thrown away, a compiled region.

*Structural differences* change no number: names, modules, calls and random states. One-sided records are collected over
steps and told by their outermost module; changes equal in every layer are told once: `Net.blocks.*.body`.

*Overviews* are the map of modules by steps, and the strip of the first diverging step. A cell of the map is the largest
relative distance in its module and step. A module whose forward pass differs in any step is shaded by its forward pass
alone, since one fault changes nearly all gradients; others by tensors and gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import Cause, Known, worst_of
from introspect_cli.compare.match import Correspondence
from introspect_cli.compare.measure import Ids, Mask, nan_throughout
from introspect_cli.compare.names import (
    DISPLACED,
    owner_of,
)
from introspect_cli.compare.result import DivergenceMap, StripCell, StructureChange
from introspect_cli.compare.say import told, what
from introspect_cli.compare.table import (
    DIFFERENT,
    EQUAL,
    KINDS,
    NOT_SEEN,
    ONLY_A,
    ONLY_B,
    UNUSED,
    WITHIN,
    Alignment,
    Learned,
    Table,
)
from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.result import Divergence, Resumption
    from introspect_cli.compare.step import Step
    from introspect_cli.compare.steps import Paired
    from introspect_cli.compare.table import Table


@dataclass
class RankOutcome:
    """Outcome of comparing one rank, or all ranks as one.

    Attributes:
        paired: the steps of both; without readers in what another process compared.
        notes: what a reader must know of it.
        offset: step k of b was compared with step k + offset of a.
        tally: counts by the words of `result.Counts`, and of `blind` records, which only one side could see, of
            `blind_both`, which run a could not see, by estimate, and of steps and records `opened`.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        blind_site: a site that only one side could see, as an example.
        tolerated: the first difference that tolerance or noise let pass, in words.
        changes: what differs in structure, and random states; empty where no step had to be opened.
        unrecorded: whether structure differs in a step of which neither run recorded results.
        match: which name of a is which of b.
        unused_note: the sentence on differences on which nothing rests, of the first step that has any; "" for none.
        results: the kinds of results that agree in every step that was opened; None where none was.
        hidden: the kinds of results of which some are NaN throughout in both runs, until some agree as numbers.
        results_known: what is known of all results of these steps: equal, within tolerance, or not that.
        unopened: common steps after those, which were not compared.
        resumption: what a resumed run goes on with; None where neither run is one.
        origins: other divergences of the first diverging step that rest on nothing that differs, with their causes.
        learned: what the steps have shown, for its notes.
        evaluation: True for what came of evaluation alone, False of training alone, None of both.
        parts: what came of training (False) and, if both evaluate, of evaluation (True) alone; empty if no run does.
    """

    rank: int
    paired: Paired
    match: Correspondence = field(default_factory=Correspondence)
    offset: int = 0
    evaluation: bool | None = None
    notes: list[str] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    listed: list[Divergence] = field(default_factory=list)
    first: Divergence | None = None
    cause: Cause | None = None
    step: Step | None = None
    blind_site: str = ""
    tolerated: str = ""
    heat: Heat | None = None
    changes: tuple[StructureChange, ...] = ()
    unrecorded: bool = False
    unused_note: str = ""
    results: frozenset[Kind] | None = None
    hidden: frozenset[Kind] = frozenset()
    results_known: Known = Known.EQUAL
    unopened: int = 0
    resumption: Resumption | None = None
    origins: list[tuple[Divergence, Cause]] = field(default_factory=list)
    learned: Learned = field(default_factory=Learned)
    parts: dict[bool, RankOutcome] = field(default_factory=dict)

    def see_results(self, table: Table) -> None:
        """Narrow `results` and `results_known` by a step; one without an update does not narrow `results`.

        `hidden` becomes the kinds of which any record is NaN throughout in this step, until there was none once.
        `results_known` becomes DIFFERS if any result, value, collective, saved file or record of evaluation disagrees,
        else WITHIN if any is.
        """
        disagree = np.isin(table.state, _DISAGREEING)
        if self.results is None or self.hidden:
            equal = np.flatnonzero((table.state == EQUAL) & (table.row_a >= 0))
            empty = nan_throughout(table.a, table.layouts[0])[table.row_a[equal]]
            self.hidden = _kinds(table, equal[empty])
        if self.results is None or table.are(Phase.OPTIMIZER).any():
            differ = {KINDS[code] for code in set(table.alignment.kind[table.site[disagree]].tolist())}
            agree = _kinds(table, table.agreeing) - differ - self.hidden
            self.results = agree if self.results is None else self.results & agree
        counted = table.are(*_COUNTED_KINDS) | table.alignment.evaluating[table.site]
        within = Known.WITHIN if (table.state[counted] == WITHIN).any() else Known.EQUAL
        self.results_known = worst_of((self.results_known, Known.DIFFERS if disagree[counted].any() else within))


RESULTS = (Kind.LOSS, Kind.GRAD, Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What a step gives: where these are on record and agree, nothing that one run only has has changed a number."""

TRAINED = frozenset({Kind.LOSS, Kind.GRAD, Kind.PARAM})
"""What a step that trains has of these."""

_COUNTED_KINDS = (*RESULTS, Kind.VALUE, Kind.COLLECTIVE, Kind.PRODUCT)
"""Of these, a difference counts whatever follows: somebody asked for values and collectives, and files stay."""


_DISAGREEING = (DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B)
_LATE = tuple(phase for phase in Phase if phase is not Phase.START)


def _kinds(table: Table, rows: Ids | Mask) -> frozenset[Kind]:
    """Those of `RESULTS` that any of these rows is of, after the step's start."""
    sites = table.site[rows]
    codes = table.alignment.kind[sites[table.alignment.are(*RESULTS, *_LATE, sites=sites)]]
    return frozenset(KINDS[code] for code in set(codes.tolist()))


def results_agree(table: Table) -> bool | None:
    """Whether any result of the step agrees; results that differ are not looked at.

    Losses alone do not suffice if either run recorded other results. Where none is recorded, or agrees, an output of a
    root counts as one: of a script that trains nothing, what its models give is all there is. None where neither run
    recorded any.
    """
    outputs, names = table.are(Kind.OUTPUT), table.alignment.fqn
    found = []
    for rows in (table.agreeing, np.ones(len(table), np.bool_)):
        given = (names[union] for union in table.site[rows & outputs].tolist())
        found.append(_kinds(table, rows) or {Kind.OUTPUT for name in given if "." not in name})
    agree, recorded = found
    return bool(agree - {Kind.LOSS} or (agree and not recorded - {Kind.LOSS})) if recorded else None


@dataclass
class Structure:
    """One-sided sites and differing random states over the steps walked so far.

    Attributes:
        comparison: the rank of both runs.
        only: for a and for b, the union numbers of sites that it alone had, each with the first step in which it had.
        random: names of random states that differed, each with the first step in which it did.
        evaluations: sides that evaluated alone, each with the first step in which it did.
    """

    comparison: Comparison
    only: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    random: dict[str, int] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)

    def add_causes(self, causes: Table) -> None:
        """Add a step's one-sided sites to `only`, and the names of its random states to `random`.

        A saved file whose name one run alone has is left out. In `causes` nothing else diverges.
        """
        fqn, saved = causes.alignment.fqn, causes.alignment.are(Kind.PRODUCT)
        for only, half, names in zip(self.only, causes.halves, causes.alignment.names[::-1], strict=True):
            for site in half.sites[half.only].tolist():
                if not saved[site] or fqn[site] in names:
                    only.setdefault(site, causes.step)
        for union in causes.site[causes.differing].tolist():
            self.random.setdefault(fqn[union], causes.step)


def changes_of(structure: Structure) -> tuple[StructureChange, ...]:
    """All changes of structure, in this order: names, one-sided, evaluations, random states.

    Those whose names differ in numbers alone are one change, under `*`.
    """
    renamed = [(old, new) for old, new in structure.comparison.match.renamed.items() if not new.endswith(DISPLACED)]
    rows = [("renamed", "", told("renamed", a="{a}", b="{b}"), *names) for names in renamed]
    rows += _one_sided(structure)
    for side, step in structure.evaluations.items():
        rows.append(("only", side, told("evaluates", side=side, step=step), "evaluation", "evaluation"))
    for name, step in structure.random.items():
        rows.append(("random", "", told("random", name="{a}", step=step), name, name))
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for *how, a, b in rows:
        groups.setdefault((*how, *_starred(a, b)), []).append((a, b))
    changes = []
    for (change, side, text, *pattern), members in groups.items():
        a, b = pattern if len(members) > 1 else members[0]
        names = a if side != "b" else None, b if side != "a" else None
        changes.append(StructureChange(change, *names, text.replace("{a}", a).replace("{b}", b)))
    return tuple(changes)


def _starred(a: str, b: str) -> tuple[str, str]:
    """Both names with their numeric components as `*`; unchanged where the numbers of the two differ."""
    one, two = ([part for part in name.split(".") if part.isdecimal()] for name in (a, b))
    return (star(a), star(b)) if one == two else (a, b)


def star(name: str) -> str:
    """A dotted name with its numeric components as `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _one_sided(structure: Structure) -> Iterator[tuple[str, str, str, str, str]]:
    """(change, side, words with `{a}` for the name, the name twice) of what one run only has, a's first.

    The side is "" for further records of a name that both have.

    Modules and tensors come before further records of what both have. Inside a module that only one run has, only that
    outermost module is named. Left out are further records of a name whose parent module has further ones too.
    """
    alignment = structure.comparison.alignment
    for side, only, names, around in zip(
        "ab", structure.only, alignment.names[::-1], alignment.around[::-1], strict=True
    ):
        subjects: dict[str, list[int]] = defaultdict(list)
        for union in only:
            name = alignment.fqn[union]
            while name not in names and owner_of(name) and owner_of(name) not in around:
                name = owner_of(name)
            subjects[name] += [union] * (alignment.fqn[union] == name)
        for name in sorted(subjects, key=names.__contains__):
            unions = subjects[name]
            if name not in names:
                kinds = {KINDS[code] for code in alignment.kind[unions].tolist()}
                tensor = next((kind.one for kind in (Kind.PARAM, Kind.BUFFER) if kind in kinds), "")
                cls = alignment.module_class[unions[0]] if unions and not tensor else ""
                said = {"verb": "runs" if name in around else "has", "tensor": tensor, "cls": cls * (cls != name)}
                yield "only", side, told("only", side=side, name="{a}", **said), name, name
            elif owner_of(name) not in subjects.keys() & names:
                first = min(unions, key=lambda union: (alignment.call[union], alignment.path[union]))
                site = replace(alignment.site(first), fqn="{a}")
                yield "calls", "", told("more", side=side, what=what(site), step=only[first]), name, name


_OF_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE})
_FORWARD = (Phase.DATA, Phase.FORWARD, Phase.EVAL, Phase.LOSS)
_MOST_COLUMNS = 400
_UNMEASURED = float(np.nextafter(1.0, 2.0))  # differs, by how much is not known: told as 1
_RANDOM = "random state: "


class Heat:
    """Builds the divergence map; with more than `_MOST_COLUMNS` steps, neighbouring ones share a column."""

    def __init__(self, alignment: Alignment, steps: Sequence[int]) -> None:
        """Lay out an empty map: a row per module or generator in forward order, a column per `fold` steps.

        A column is named by its first step. Tensors and gradients are in the row of their module; settings have no row.

        Args:
            alignment: both runs' sites.
            steps: numbers of all compared steps in a, in order.
        """
        self.fold = max(1, -(-len(steps) // _MOST_COLUMNS))
        self.steps, self.in_forward = tuple(steps[:: self.fold]), alignment.are(*_FORWARD).astype(np.int64)
        rows: dict[str, int] = {}
        self.row_of = np.zeros(len(alignment), np.int64)
        for union in np.argsort(-self.in_forward, kind="stable").tolist():
            kind, name = KINDS[alignment.kind[union]], alignment.fqn[union]
            if kind in SETTING_KINDS:
                continue
            if kind is Kind.RNG:
                name = f"{_RANDOM}{name}"
            elif kind in _OF_TENSORS:
                name = owner_of(name) or name
            self.row_of[union] = rows.setdefault(name, len(rows))
        self.modules = tuple(rows)
        self.values = np.zeros((2, len(rows), len(self.steps)))  # of the rest, of the forward pass

    def add(self, place: int, table: Table) -> None:
        """Raise the cells of a diverging step's column, in place.

        Records of one run alone count as infinitely far, unknown distances as `_UNMEASURED`, others as 1e-12 at least.

        Args:
            place: index of the step among the compared ones.
            table: the step after all passes.
        """
        far, alone = table.relative(table.differing), table.site[table.diverging & table.one_sided]
        rel = np.where(np.isfinite(far), np.maximum(far, 1e-12), _UNMEASURED)
        for unions, cells in ((table.site[table.differing], rel), (alone, np.inf)):
            column = self.values[:, :, place // self.fold]
            np.maximum.at(column, (self.in_forward[unions], self.row_of[unions]), cells)

    def result(self) -> DivergenceMap:
        """The finished map; rows of generators that never differ are left out.

        A module whose forward pass differs in any step has the distances of its forward pass alone in every column;
        `behind` is True in columns where that leaves 0, though something else of it differs. `unmeasured` is True where
        the value stands for an unknown distance.
        """
        shown = [
            row for row, name in enumerate(self.modules) if not name.startswith(_RANDOM) or self.values[:, row].any()
        ]
        rest, forward = self.values[:, shown]
        passes = forward.any(axis=1, keepdims=True)
        values = np.where(passes, forward, rest)
        return DivergenceMap(
            modules=tuple(self.modules[row] for row in shown),
            steps=self.steps,
            values=tuple(map(tuple, np.where(values == _UNMEASURED, 1.0, values).tolist())),
            behind=tuple(map(tuple, (passes & (forward == 0) & (rest != 0)).tolist())),
            unmeasured=tuple(map(tuple, (values == _UNMEASURED).tolist())),
        )


# --- the first diverging step in a strip

_ROWS = {Phase.BACKWARD: "backward", Phase.OPTIMIZER: "update"}
_IN_STRIP = {
    Kind.BATCH: Phase.DATA,
    Kind.OUTPUT: Phase.FORWARD,
    Kind.LOSS: Phase.LOSS,
    Kind.GRAD_OUTPUT: Phase.BACKWARD,
    Kind.GRAD: Phase.BACKWARD,
    Kind.PARAM: Phase.OPTIMIZER,
}
_WORDS = {
    EQUAL: "equal",
    WITHIN: "within",
    NOT_SEEN: "not seen",
    DIFFERENT: "differs",
    UNUSED: "differs",
    ONLY_A: "only a",
    ONLY_B: "only b",
}


def strip_of(step: Step, first: Site) -> tuple[StripCell, ...]:
    """Cells of the first diverging step, in a's order: records of `_IN_STRIP`, and a diverging one at `first`.

    Records that count for nothing (ABSENT) are left out. Only cells that differ have a distance, if it is known.
    """
    table, cells = step.table, list[StripCell]()
    far = dict(zip(table.differing.tolist(), table.relative(table.differing).tolist(), strict=True))
    for row in np.argsort(table.order, kind="stable").tolist():
        site, word, rel = table.named(row), _WORDS.get(int(table.state[row])), far.get(row, np.nan)
        if word and (_IN_STRIP.get(site.kind) is site.phase or (site == first and table.diverging[row])):
            cells.append(StripCell(_ROWS.get(site.phase, "forward"), site, word, rel if np.isfinite(rel) else None))
    return tuple(cells)
