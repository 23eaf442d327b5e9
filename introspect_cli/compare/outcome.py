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
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.evidence import Cause, Known
from introspect_cli.compare.match import Correspondence
from introspect_cli.compare.measure import Ids, nan_throughout
from introspect_cli.compare.names import (
    DISPLACED,
    Renamed,
    class_of_root,
    owner_of,
)
from introspect_cli.compare.result import DivergenceMap, StripCell, StructureChange
from introspect_cli.compare.say import what
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
    phase_code,
)
from introspect_cli.compare.watched import observed_kinds
from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        structural: whether structure differs.
        offset: step k of b was compared with step k + offset of a.
        tally: counts by the words of `result.Counts`, and of `blind` records, which only one side could see, of
            `blind_both`, which run a could not see, by estimate, and of steps and records `opened`.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        blind_site: a site that only one side could see, as an example.
        tolerated: the first difference that tolerance or noise let pass, in words.
        structure: what differs in structure, and random states; None where no step had to be opened.
        unrecorded: a step in which structure differs and neither run recorded results.
        match: which name of a is which of b.
        unused_note: the sentence on differences on which nothing rests, of the first step that has any; "" for none.
        results: the kinds of results that agree in every step that was opened; None where none was.
        hidden: the kinds of results of which some are NaN throughout in both runs, until some agree as numbers.
        results_known: what is known of all results of these steps: equal, within tolerance, or not that.
        evaluated: whether both runs recorded an evaluation that was selected.
        later: records of steps after the first divergence that were opened.
        unopened: common steps after those, which were not compared.
        resumption: what a resumed run goes on with; None where neither run is one.
        origins: other divergences of the first diverging step that rest on nothing that differs, with their causes.
        lost: divergences of the first diverging step that show what a resumed run did not restore.
        learned: what the steps have shown, for its notes.
        evaluation: True for what came of evaluation alone, False of training alone, None of both.
        parts: what came of training (False) and of evaluation (True) alone; empty where no run evaluates.
    """

    rank: int
    paired: Paired
    match: Correspondence = field(default_factory=Correspondence)
    offset: int = 0
    evaluation: bool | None = None
    notes: list[str] = field(default_factory=list)
    structural: bool = False
    tally: Counter[str] = field(default_factory=Counter)
    listed: list[Divergence] = field(default_factory=list)
    first: Divergence | None = None
    cause: Cause | None = None
    step: Step | None = None
    blind_site: str = ""
    tolerated: str = ""
    heat: Heat | None = None
    structure: Structure | None = None
    unrecorded: int | None = None
    unused_note: str = ""
    results: frozenset[Kind] | None = None
    hidden: frozenset[Kind] = frozenset()
    results_known: Known = Known.EQUAL
    evaluated: bool = False
    later: int = 0
    unopened: int = 0
    resumption: Resumption | None = None
    origins: list[tuple[Divergence, Cause]] = field(default_factory=list)
    lost: list[Divergence] = field(default_factory=list)
    learned: Learned = field(default_factory=Learned)
    parts: dict[bool, RankOutcome] = field(default_factory=dict)


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


_DISAGREEING = (DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B)


def results_agree(table: Table) -> bool | None:
    """Whether any result (`_result_kinds`) of the step agrees; results that differ are not looked at.

    Losses alone do not suffice if either run recorded other results. None where neither recorded any.
    """
    agree = _result_kinds(table.alignment, table.site[table.agreeing])
    recorded = frozenset[Kind]().union(*(_result_kinds(table.alignment, half.sites) for half in table.halves))
    return bool(agree - {Kind.LOSS} or (agree and not recorded - {Kind.LOSS})) if recorded else None


def _result_kinds(alignment: Alignment, unions: Ids) -> frozenset[Kind]:
    """Kinds of these sites that are results, after a step's start; where none is, OUTPUT for an output of a root."""
    kinds = _kinds_of(alignment, unions)
    if not kinds:  # a script that trains nothing: what its models give is all there is
        outputs = unions[alignment.are(Kind.OUTPUT, sites=unions)].tolist()
        kinds = frozenset({Kind.OUTPUT} if any("." not in alignment.fqn[union] for union in outputs) else ())
    return kinds


def _kinds_of(alignment: Alignment, unions: Ids) -> frozenset[Kind]:
    """Those of `RESULTS` that are kinds of these sites after a step's start."""
    late = unions[~alignment.are(Phase.START, sites=unions)]
    return frozenset(KINDS[code] for code in set(alignment.kind[late].tolist())) & frozenset(RESULTS)


def is_training(table: Table) -> bool:
    """Whether the step has, in either run, a `RESULTS` record after the start or a start value that disagrees."""
    counts = ~table.are(Phase.START) | np.isin(table.state, _DISAGREEING)
    return bool((table.are(*RESULTS) & counts).any())


def agreed_kinds(table: Table) -> frozenset[Kind]:
    """Those of `RESULTS` with an agreeing record after the start, and no disagreeing one in any phase."""
    disagree = set(table.alignment.kind[table.site[np.isin(table.state, _DISAGREEING)]].tolist())
    return frozenset(_kinds_of(table.alignment, table.site[table.agreeing]) - {KINDS[code] for code in disagree})


def nan_kinds(table: Table) -> frozenset[Kind]:
    """Those of `RESULTS` of which any record after the start is EQUAL and NaN in every element."""
    both = np.flatnonzero((table.state == EQUAL) & (table.row_a >= 0))
    return _kinds_of(table.alignment, table.site[both[nan_throughout(table.a, table.layouts[0])[table.row_a[both]]]])


def results_known(table: Table) -> Known:
    """What is known of a step's results together: DIFFERS if any disagrees, else WITHIN if any is, else EQUAL.

    Looked at are `RESULTS`, values, collectives, saved files and all records of evaluation. Disagreeing states are
    DIFFERENT, NOT_SEEN, ONLY_A and ONLY_B. EQUAL for a step that has none of them.
    """
    states = table.state[table.are(*_COUNTED_KINDS) | table.alignment.evaluating[table.site]]
    if np.isin(states, _DISAGREEING).any():
        return Known.DIFFERS
    return Known.WITHIN if (states == WITHIN).any() else Known.EQUAL


SHOWN = 3
"""Changes that the sentence of a comparison names."""


@dataclass
class Structure:
    """One-sided sites and differing random states over the steps walked so far.

    Attributes:
        alignment: the runs' sites.
        match: which name of a is which of b.
        only: for a and for b, the union numbers of sites that it alone had, in the order in which they were added.
        random: names of random states that differed, each with the first step in which it did.
        evaluations: steps in which one run alone evaluates, each with its side.
    """

    alignment: Alignment
    match: Correspondence
    only: tuple[dict[int, None], dict[int, None]] = field(default_factory=lambda: ({}, {}))
    random: dict[str, int] = field(default_factory=dict)
    evaluations: dict[int, str] = field(default_factory=dict)

    def add_causes(self, causes: Table) -> None:
        """Add a step's one-sided sites to `only`, and the names of its random states to `random`.

        A saved file whose name one run alone has is left out. In `causes` nothing else diverges.
        """
        others = self.alignment.names[::-1]
        for only, half, names in zip(self.only, causes.halves, others, strict=True):
            sites = half.sites[half.only]
            saved = set(sites[self.alignment.are(Kind.PRODUCT, sites=sites)].tolist())
            only.update((s, None) for s in sites.tolist() if s not in saved or self.alignment.fqn[s] in names)
        for union in causes.site[causes.differing].tolist():
            self.random.setdefault(self.alignment.fqn[union], causes.step)


def changes_of(structure: Structure, *, same: bool) -> tuple[StructureChange, ...]:
    """All changes of structure, in this order: names, one-sided, evaluations, random states.

    Args:
        structure: what was collected.
        same: whether no value differs; then notes say that a change has no effect.
    """
    changes = [*_rename_changes(structure.match), *_one_sided_changes(structure)]
    for side in "ab":
        steps = [step for step, which in structure.evaluations.items() if which == side]
        if steps:
            more = f" and in {count(len(steps) - 1, 'more step')}" if len(steps) > 1 else ""
            changes.append(_only_change(side, "evaluation", f"only {side} evaluates in step {steps[0]}{more}"))
    note = "and nothing recorded depends on it" if same else ""
    layers: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, step in structure.random.items():
        layers[star(name), step].append(name)
    for (pattern, step), members in layers.items():
        name, one = pattern if members[1:] else members[0], not members[1:]
        text = f"the random state{'s' * (not one)} of {name} differ{'s' * one} from step {step} on"
        changes.append(StructureChange("random", name, name, text, note))
    return tuple(changes)


def _only_change(side: str, name: str, text: str) -> StructureChange:
    """A change that run `side` alone has: `name` in that run, None in the other."""
    return StructureChange("only", name if side == "a" else None, name if side == "b" else None, text)


def sentence_of(changes: Sequence[StructureChange]) -> str:
    """Sentence, after a blank, with the first `SHOWN` changes and the number of others; "" for none.

    ` Names differ: head is head.0 in b.`
    """
    if not changes:
        return ""
    only_random = all(change.change == "random" for change in changes)
    only_names = all(change.change in {"renamed", "random"} for change in changes)
    head = "" if only_random else "Names differ: " if only_names else "The structure differs: "
    clauses = "; ".join(clause_of(change) for change in changes[:SHOWN])
    more = f"; and {count(len(changes) - SHOWN, 'more change')}" if len(changes) > SHOWN else ""
    text = f"{head}{clauses}{more}."
    return f" {text[0].upper()}{text[1:]}"


def clause_of(change: StructureChange) -> str:
    """A change's text, followed by its note where it has one."""
    if not change.note:
        return change.text
    return f"{change.text}{' ' if change.change == 'random' else ', '}{change.note}"


# --- names


def _rename_changes(match: Correspondence) -> list[StructureChange]:
    """A change per renaming by value.

    Renamings that differ in numbers alone are one change, with `*` for these.
    """
    groups: dict[tuple[str, str], list[tuple[str, Renamed]]] = defaultdict(list)
    for name, renamed in match.renamed.items():
        if not renamed.name.endswith(DISPLACED):
            groups[starred(name, renamed.name)].append((name, renamed))
    changes = []
    for pattern, members in groups.items():
        old, new = pattern if len(members) > 1 else (members[0][0], members[0][1].name)
        votes = sum(member.votes for _, member in members)
        evidence = f"{count(votes, 'value')} under the two names {'is' if votes == 1 else 'are'} equal"
        text = f"{old} is {new} in b"
        changes.append(StructureChange("renamed", old, new, text, evidence=evidence if votes else ""))
    return changes


def starred(old: str, new: str) -> tuple[str, str]:
    """Both names with their numeric components as `*`; unchanged where the numbers of the two differ."""
    one, two = ([part for part in name.split(".") if part.isdecimal()] for name in (old, new))
    return (star(old), star(new)) if one == two else (old, new)


def star(name: str) -> str:
    """A dotted name with its numeric components as `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


# --- what one run only has


def _one_sided_changes(structure: Structure) -> list[StructureChange]:
    """Changes for what one run alone has: a's before b's, modules and tensors before further calls.

    Inside a module that only one run has, only that outermost module is named. Left out are further calls of a name
    whose parent module has further calls too. Names that differ in numbers alone are one change, under `*`.
    """
    alignment, changes = structure.alignment, list[StructureChange]()
    for side, only, names, around in zip(
        "ab", structure.only, alignment.names[::-1], alignment.around[::-1], strict=True
    ):
        subjects: dict[str, set[int]] = defaultdict(set)
        for union in only:
            name = alignment.fqn[union]
            while name not in names and owner_of(name) and owner_of(name) not in around:
                name = owner_of(name)
            subjects[name].add(union)
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in sorted(subjects, key=names.__contains__):
            if name not in names or owner_of(name) not in subjects.keys() & names:
                text = _one_sided_text(alignment, side, name, subjects[name], names, around)
                groups[text, star(name)].append(name)
        for (text, pattern), members in groups.items():
            name = pattern if len(members) > 1 else members[0]
            calls, told = members[0] in names, text.replace("{}", name)
            changes.append(StructureChange("calls", name, name, told) if calls else _only_change(side, name, told))
    return list(dict.fromkeys(changes))  # more calls in a in one step and in b in another are one change


def _one_sided_text(
    alignment: Alignment, side: str, name: str, unions: set[int], names: frozenset[str], around: set[str]
) -> str:
    """What run `side` alone has of a name, as a clause with `{}` for the name.

    Args:
        alignment: both runs' sites.
        side: `a` or `b`.
        name: a module or tensor; of one that both have, the run has further calls, paths or records.
        unions: union numbers of the sites that it alone has of it.
        names: all names of the other run.
        around: these with their ancestors.
    """
    if name in names:
        more, others = map(alignment.site, unions), map(alignment.site, {*alignment.by_fqn[name]} - unions)
        called = {(site.phase, site.call) for site in others if site.kind is Kind.OUTPUT}
        first = min(more, key=lambda site: ((site.phase, site.call) in called, site.call, site.path))
        again = called and first.kind in _CALL_KINDS and (first.phase, first.call) not in called
        return "{} runs a different number of times in b" if again else f"only {side} has {what(first)}"
    itself = [union for union in unions if alignment.fqn[union] == name]
    kinds = {KINDS[alignment.kind[union]] for union in itself}
    tensor = "the parameter " if Kind.PARAM in kinds else "the buffer " if Kind.BUFFER in kinds else ""
    classes = {alignment.module_class[union] for union in itself}
    of_class = f" ({next(iter(classes))})" if len(classes) == 1 and not tensor and classes != {name} else ""
    roots = {head for head in around if "." not in head} if "." not in name and name not in around else ()
    if class_of_root(name) in map(class_of_root, roots):
        return f"only {side} also runs another {class_of_root(name)}"
    return f"only {side} {'runs ' if name in around else f'has {tensor}'}{{}}{of_class}"


_CALL_KINDS = frozenset({Kind.INPUT, Kind.OUTPUT})


_OF_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE})
_FORWARD = (Phase.DATA, Phase.FORWARD, Phase.EVAL, Phase.LOSS)
_PHASE_ORDER = {phase_code(phase): place for place, phase in enumerate(_FORWARD)}
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
        self.steps = list(steps)[:: self.fold]
        rows: dict[str, int] = {}
        self.row_of = np.full(len(alignment), -1, dtype=np.int64)
        places = [_PHASE_ORDER.get(phase, 9) for phase in alignment.phase.tolist()]
        for union in np.argsort(places, kind="stable").tolist():
            kind, name = KINDS[alignment.kind[union]], alignment.fqn[union]
            if kind in _OF_TENSORS:
                name = owner_of(name) or name
            elif kind is Kind.RNG:
                name = f"{_RANDOM}{name}"
            if kind not in SETTING_KINDS:
                self.row_of[union] = rows.setdefault(name, len(rows))
        self.modules = tuple(rows)
        self.in_forward = alignment.are(*_FORWARD).astype(np.int64)
        self.values = np.zeros((2, len(rows), len(self.steps)))  # of the rest, of the forward pass

    def add(self, place: int, table: Table) -> None:
        """Raise the cells of a diverging step's column, in place.

        Records of one run alone count as infinitely far, unknown distances as `_UNMEASURED`, others as 1e-12 at least.
        Sites without a row are skipped.

        Args:
            place: index of the step among the compared ones.
            table: the step after all passes.
        """
        rows, rel = np.flatnonzero(table.diverging), np.full(len(table.in_order), np.inf)
        far = table.relative(table.differing)
        rel[table.state[rows] == DIFFERENT] = np.where(np.isfinite(far), np.maximum(far, 1e-12), _UNMEASURED)
        kept = self.row_of[table.site[rows]] >= 0
        unions, column = table.site[rows[kept]], self.values[:, :, place // self.fold]
        np.maximum.at(column, (self.in_forward[unions], self.row_of[unions]), rel[kept])

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
            steps=tuple(self.steps),
            values=tuple(map(tuple, np.where(values == _UNMEASURED, 1.0, values).tolist())),
            behind=tuple(map(tuple, (passes & (forward == 0) & (rest != 0)).tolist())),
            unmeasured=tuple(map(tuple, (values == _UNMEASURED).tolist())),
        )


# --- the first diverging step in a strip

_ROW_OF = {
    (Phase.DATA, Kind.BATCH): "forward",
    (Phase.FORWARD, Kind.OUTPUT): "forward",
    (Phase.LOSS, Kind.LOSS): "forward",
    (Phase.BACKWARD, Kind.GRAD_OUTPUT): "backward",
    (Phase.BACKWARD, Kind.GRAD): "backward",
    (Phase.OPTIMIZER, Kind.PARAM): "update",
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
    """Cells of the first diverging step, in a's order: records with a row in `_ROW_OF`, and a diverging one at `first`.

    Records that count for nothing (ABSENT) are left out. Only cells that differ have a distance, if it is known.
    """
    table, cells = step.table, list[StripCell]()
    far = dict(zip(table.differing.tolist(), table.relative(table.differing).tolist(), strict=True))
    for row in np.argsort(table.order, kind="stable").tolist():
        site, word = table.named(row), _WORDS.get(int(table.state[row]))
        strip = _ROW_OF.get((site.phase, site.kind))
        if strip is None and site == first and table.diverging[row]:
            strip = {Phase.BACKWARD: "backward", Phase.OPTIMIZER: "update"}.get(site.phase, "forward")
        if strip is not None and word is not None:
            rel = far.get(row, np.nan)
            cells.append(StripCell(strip, site, word, rel if np.isfinite(rel) else None))
    return tuple(cells)
