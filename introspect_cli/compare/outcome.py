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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import Cause, Known, worst_of
from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.match import Correspondence
from introspect_cli.compare.measure import Ids, Mask, nan_throughout
from introspect_cli.compare.names import DISPLACED, grouped, owner_of
from introspect_cli.compare.result import DivergenceMap, StripCell, StructureChange
from introspect_cli.compare.say import told, what
from introspect_cli.compare.table import DIFFERENT, EQUAL, KINDS, NOT_SEEN, ONLY_A, ONLY_B, WITHIN, Alignment, Table
from introspect_cli.records import KIND_CODES, SETTING_KINDS, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
            `blind_both`, which run a could not see, by estimate, of records `opened`, of common steps after those,
            `unopened`, of steps in which structure differs and neither run recorded results, `unrecorded`, and, of two
            implementations, of steps that were left out, `later`.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        blind_site: a site that only one side could see, as an example.
        tolerated: the first difference that tolerance or noise let pass, in words.
        changes: what differs in structure, and random states; empty where no step had to be opened.
        match: which name of a is which of b.
        results: the kinds of results that agree in every step that was opened; None where none was.
        hidden: the kinds of results of which some are NaN throughout in both runs, until some agree as numbers.
        results_known: what is known of all results of these steps: equal, within tolerance, or not that.
        resumption: what a resumed run goes on with; None where neither run is one.
        origins: other divergences of the first diverging step that rest on nothing that differs, with their causes.
        parts: what came of training (False) and, if both evaluate, of evaluation (True) alone; empty if no run does.
    """

    rank: int
    paired: Paired
    match: Correspondence = field(default_factory=Correspondence)
    offset: int = 0
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
    results: frozenset[Kind] | None = None
    hidden: frozenset[Kind] = frozenset()
    results_known: Known = Known.EQUAL
    resumption: Resumption | None = None
    origins: list[tuple[Divergence, Cause]] = field(default_factory=list)
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
        only: for a and for b, the union numbers of sites that it alone had, each with the first step in which it had.
        random: names of random states that differed, each with the first step in which it did.
        evaluations: sides that evaluated alone, each with the first step in which it did.
    """

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


def changes_of(structure: Structure, alignment: Alignment, match: Correspondence) -> tuple[StructureChange, ...]:
    """All changes of structure, in this order: names (those of `match`), one-sided, evaluations, random states.

    Those whose names differ in numbers alone are one change, under `*`.
    """
    renamed = [names for names in match.renamed.items() if not names[1].endswith(DISPLACED)]
    rows = [StructureChange("renamed", old, new, told("renamed", a=old, b=new)) for old, new in renamed]
    rows += _one_sided(structure, alignment, is_port=match.is_port)
    for side, step in structure.evaluations.items():
        rows.append(StructureChange("only", *_of_side(side, "evaluation"), told("evaluates", side=side, step=step)))
    for name, step in structure.random.items():
        rows.append(StructureChange("random", name, name, told("random", name=name, step=step)))
    alike = grouped((_starred(row), row) for row in rows)
    return tuple(pattern if len(members) > 1 else members[0] for pattern, members in alike.items())


def _of_side(side: str, name: str) -> tuple[str | None, str | None]:
    """The name in a and in b of what one run alone has."""
    return (name, None) if side == "a" else (None, name)


def _starred(change: StructureChange) -> StructureChange:
    """The change with numeric components of its names as `*`; as it is where the numbers of the two differ."""
    old, new = change.a or "", change.b or ""
    text = change.text.replace(old, star(old)).replace(new, star(new))
    numbers = {tuple(filter(str.isdecimal, name.split("."))) for name in (old, new) if name}
    return change._replace(a=star(old) or None, b=star(new) or None, text=text) if len(numbers) == 1 else change


def star(name: str) -> str:
    """A dotted name with its numeric components as `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _one_sided(structure: Structure, alignment: Alignment, *, is_port: bool) -> Iterator[StructureChange]:
    """What one run only has, a's first.

    Modules and tensors come before further records of what both have. Inside a module that only one run has, only that
    outermost module is named. Left out are further records of a name whose parent module has further ones too. With
    `is_port` names are said to be there in the step that is compared, as later ones were not matched.
    """
    for side, only, names, around in zip(
        "ab", structure.only, alignment.names[::-1], alignment.around[::-1], strict=True
    ):
        subjects: dict[str, list[int]] = defaultdict(list)
        for union in only:
            name = alignment.fqn[union]
            while owner_of(name) and owner_of(name) not in around:
                name = owner_of(name)
            subjects[name] += [union] * (alignment.fqn[union] == name)
        for name in sorted(subjects, key=names.__contains__):
            unions = subjects[name]
            if name not in names:
                tensor = next((kind.one for kind in TENSORS if KIND_CODES[kind] in alignment.kind[unions]), "")
                cls = alignment.module_class[unions[0]] if unions and not tensor else ""
                said = {"verb": "runs" if name in around else "has", "tensor": tensor, "cls": cls * (cls != name)}
                text = told("only", side=side, name=name, step=is_port and str(min(only.values())), **said)
                yield StructureChange("only", *_of_side(side, name), text)
            elif owner_of(name) not in subjects.keys() & names:
                first = min(unions, key=lambda union: (alignment.call[union], alignment.path[union]))
                more = sum(alignment.kind[u] == alignment.kind[first] and only[u] == only[first] for u in unions) - 1
                text = told("more", side=side, what=what(alignment.site(first)), more=more, step=only[first])
                yield StructureChange("calls", name, name, text)


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
        shown = np.flatnonzero(~alignment.are(*SETTING_KINDS))
        for union in shown[np.argsort(-self.in_forward[shown], kind="stable")].tolist():
            kind, name = KINDS[alignment.kind[union]], alignment.fqn[union]
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
        differs = np.asarray(self.values.any(axis=(0, 2)))
        shown = [row for row, name in enumerate(self.modules) if differs[row] or not name.startswith(_RANDOM)]
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

_RUN = (Kind.BATCH, Kind.OUTPUT, Kind.LOSS, Kind.GRAD_OUTPUT, Kind.GRAD)
"""What the strip has of the phases from the data to the backward pass; of the optimizer's it has the parameters."""

_WORDS = ("", "equal", "within", "differs", "not seen", "only a", "only b", "differs", "", "")
"""What is said of each state of a row; "" of those that count for nothing."""


def strip_of(step: Step, first: Site) -> tuple[StripCell, ...]:
    """Cells of the first diverging step, in a's order: records of `_RUN`, parameters, and the diverging one at `first`.

    Records that count for nothing (ABSENT) are left out. Only cells that differ have a distance, if it is known.
    """
    table = step.table
    shown = table.are(*_RUN, Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    shown |= table.are(Kind.PARAM, Phase.OPTIMIZER)
    shown[table.in_order[step.sites.index(first)]] = True
    measured = zip(table.differing.tolist(), table.relative(table.differing).tolist(), strict=True)
    far = {row: rel for row, rel in measured if np.isfinite(rel)}
    rows = [row for row in np.argsort(table.order, kind="stable").tolist() if shown[row] and _WORDS[table.state[row]]]
    return tuple(StripCell(table.named(row), _WORDS[table.state[row]], far.get(row)) for row in rows)
