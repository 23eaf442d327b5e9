"""Structural differences that change no number: names, modules, calls and random states.

One-sided records are collected over steps and told by their outermost module; changes equal in every layer are told
once: `Net.blocks.*.body`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.say import listed, what
from introspect_cli.compare.terms.names import (
    Renamed,
    Source,
    ambiguous,
    class_of_root,
    owner_of,
)
from introspect_cli.compare.terms.result import StructureChange
from introspect_cli.compare.terms.sites import Alignment, of_kinds
from introspect_cli.compare.terms.table import EQUAL
from introspect_cli.compare.values import Merge, merge_words, merges_of
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.texts import begin_alike, count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.correspondence import Correspondence
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.distance import Layouts
    from introspect_cli.compare.terms.table import Half, Table

SHOWN = 3
"""Changes that the sentence of a comparison names."""

_SHOWN_SOURCES = (Source.ROOT, Source.VALUE)


@dataclass
class Structure:
    """One-sided sites and differing random states over the steps walked so far.

    Attributes:
        alignment: the runs' sites.
        match: which name of a is which of b.
        only: for a and for b, the union numbers of sites that it alone had, in the order in which they were added.
        random: names of random states that differed, each with the first step in which it did.
        giving: one-sided modules with a call whose outputs equal its inputs.
        changing: one-sided modules with a call for which that is not so; a module may be in both.
        merges: parameters that are one in one run and several in the other.
        evaluations: steps in which one run alone evaluates, each with its side.
    """

    alignment: Alignment
    match: Correspondence
    only: tuple[dict[int, None], dict[int, None]] = field(default_factory=lambda: ({}, {}))
    random: dict[str, int] = field(default_factory=dict)
    giving: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)
    merges: list[Merge] = field(default_factory=list)
    evaluations: dict[int, str] = field(default_factory=dict)
    _looked: bool = False

    def add_causes(self, causes: Table, layouts: tuple[Layouts, Layouts]) -> None:
        """Add a step's one-sided sites to `only`, their modules to `giving` and `changing`, random states to `random`.

        A saved file whose name one run alone has is left out. `merges` are looked for once: in the first step in which
        both runs have one-sided rows.

        Args:
            causes: the step's table, with causes as its only diverging rows.
            layouts: of a and of b.
        """
        others = (self.alignment.names_b, self.alignment.names_a)
        for only, half, names in zip(self.only, causes.halves, others, strict=True):
            sites = half.sites[half.only]
            saved = of_kinds(self.alignment.kind[sites], (Kind.PRODUCT,)).tolist()
            only.update(
                (site, None)
                for site, is_saved in zip(sites.tolist(), saved, strict=True)
                if not is_saved or self.alignment.fqn[site] in names
            )
            self._sort_one_sided_modules(half)
        for union in causes.differing_sites.tolist():
            self.random.setdefault(self.alignment.fqn[union], causes.step)
        if not self._looked and len(causes.only_a) and len(causes.only_b):
            self._looked = True
            self.merges = merges_of(causes, layouts)

    @property
    def differs(self) -> bool:
        """Whether there is any renaming (by root or value), one-sided site or evaluation, random state, or merge."""
        renamed = any(new.source in _SHOWN_SOURCES for new in self.match.renamed.values())
        return bool(renamed or any(self.only) or self.random or self.merges or self.evaluations)

    def sites(self) -> list[Site]:
        """Sites of what was collected: differing random states (as in the phase `start`), then one-sided records."""
        states = [Site(Phase.START, Kind.RNG, name) for name in self.random]
        return [*states, *(self.alignment.site(union) for only in self.only for union in only)]

    def _sort_one_sided_modules(self, half: Half) -> None:
        """Add one-sided modules to `giving` where a forward call gives its inputs back, else to `changing`.

        It does where the checksums of its inputs and outputs are the same list, not empty; per call, so that a module
        may come into both.
        """
        calls: dict[tuple[str, int], dict[Kind, list[int]]] = {}
        for row in half.only.tolist():
            site = self.alignment.site(int(half.sites[row]))
            if site.kind in {Kind.INPUT, Kind.OUTPUT} and site.phase is Phase.FORWARD:
                call = calls.setdefault((site.fqn, site.call), {Kind.INPUT: [], Kind.OUTPUT: []})
                call[site.kind].append(int(half.batch.checksum[row]))
        for (fqn, _), call in calls.items():
            gives_back = call[Kind.INPUT] and call[Kind.INPUT] == call[Kind.OUTPUT]
            (self.giving if gives_back else self.changing).add(fqn)


def changes_of(structure: Structure, *, same: bool) -> tuple[StructureChange, ...]:
    """All changes of structure, in this order: names, merges, one-sided, evaluations, random states.

    Args:
        structure: what was collected.
        same: whether no value differs; then notes say that a change has no effect.
    """
    changes = [*_rename_changes(structure.match), *_merge_changes(structure), *_one_sided_changes(structure, same=same)]
    for side in "ab":
        steps = [step for step, which in structure.evaluations.items() if which == side]
        if steps:
            more = f" and in {count(len(steps) - 1, 'more step')}" if len(steps) > 1 else ""
            changes.append(
                _only_change(side, "evaluation", f"only {side} evaluates in step {steps[0]}{more}", change="calls")
            )
    note = "and nothing recorded depends on it" if same else ""
    layers: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, step in structure.random.items():
        layers[star(name.split(".")), step].append(name)
    for (pattern, step), members in layers.items():
        name = pattern if len(members) > 1 else members[0]
        states = "random states" if len(members) > 1 else "random state"
        text = f"the {states} of {name} {'differ' if len(members) > 1 else 'differs'} from step {step} on"
        changes.append(StructureChange("random", name, name, text, note))
    return tuple(changes)


def _only_change(side: str, name: str, text: str, note: str = "", change: str = "only") -> StructureChange:
    """A change that run `side` alone has: `name` in that run, None in the other."""
    in_a, in_b = (name, None) if side == "a" else (None, name)
    return StructureChange(change, in_a, in_b, text, note)


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
    """A change per renaming by root or value.

    Renamings that differ in numbers alone are one change, with `*` for these.
    """
    groups: dict[tuple[str, str], list[tuple[str, Renamed]]] = defaultdict(list)
    for name, renamed in match.renamed.items():
        if renamed.source in _SHOWN_SOURCES:
            groups[starred(name, renamed.name)].append((name, renamed))
    changes = []
    for pattern, members in groups.items():
        old, new = pattern if len(members) > 1 else (members[0][0], members[0][1].name)
        votes = sum(member.votes for _, member in members)
        evidence = f"{count(votes, 'value')} under the two names {'is' if votes == 1 else 'are'} equal"
        text = f"{_with_variable(old, match.variables[0])} is {_with_variable(new, match.variables[1])} in b"
        changes.append(StructureChange("renamed", old, new, text, evidence=evidence if votes else ""))
    return changes


def _with_variable(name: str, variables: Mapping[str, str]) -> str:
    """A root's name with the variable that holds it, `Net#2 (target)`.

    Alone where its class has one root in the run.
    """
    if name in variables and class_of_root(name) in ambiguous(variables):
        return f"{name} ({variables[name]})"
    return name


def starred(old: str, new: str) -> tuple[str, str]:
    """Both names with their numeric components as `*`.

    Where the numbers of the two differ, only in the components that both names begin with.
    """
    one, two = old.split("."), new.split(".")
    numbers = [[part for part in parts if part.isdecimal()] for parts in (one, two)]
    if numbers[0] != numbers[1]:
        same = begin_alike(one, two)
        return star(one[:same], one[same:]), star(two[:same], two[same:])
    return star(one), star(two)


def star(parts: Sequence[str], rest: Sequence[str] = ()) -> str:
    """Dotted name of `parts`, the numeric ones as `*`, followed by `rest` unchanged."""
    return ".".join(["*" if part.isdecimal() else part for part in parts] + list(rest))


# --- what one run only has


def _merge_changes(structure: Structure) -> list[StructureChange]:
    """A change per merge (several modules of a are one in b) or split.

    Those that differ in numbers alone are one change.
    """
    groups: dict[tuple[str, tuple[str, ...], str], list[Merge]] = defaultdict(list)
    for merge in structure.merges:
        owners = tuple(star(owner_of(name).split(".")) for name in merge.parts)
        groups[star(owner_of(merge.whole).split(".")), owners, merge.side].append(merge)
    changes: list[StructureChange] = []
    for (whole, parts, side), members in groups.items():
        several = len({owner_of(merge.whole) for merge in members}) > 1
        one = whole if several else owner_of(members[0].whole)
        many = listed(parts if several else tuple(owner_of(name) for name in members[0].parts))
        names = (many, one) if side == "b" else (one, many)
        changes.append(StructureChange("merged" if side == "b" else "split", *names, merge_words(many, one, side)))
    return changes


def _one_sided_changes(structure: Structure, *, same: bool) -> list[StructureChange]:
    """Changes for what one run alone has: modules and tensors first, a's before b's, each followed by its run's calls.

    Inside a module that only one run has, only that outermost module is named. Left out are modules and tensors of a
    merge, and further calls of a name whose parent module has further calls too; equal changes are one.
    """
    alignment = structure.alignment
    merged = {name for merge in structure.merges for name in (*map(owner_of, merge.parts), owner_of(merge.whole))}
    names, further = (alignment.names_a, alignment.names_b), list[dict[str, set[int]]]()
    of_sides: list[list[StructureChange]] = []
    for place, side in enumerate("ab"):
        other = alignment.around[1 - place]
        subjects: dict[str, set[int]] = defaultdict(set)
        calls: dict[str, set[int]] = defaultdict(set)
        for union in structure.only[place]:
            name = alignment.fqn[union]
            if name in names[1 - place]:
                calls[name].add(union)
                continue
            while owner_of(name) and owner_of(name) not in other:
                name = owner_of(name)
            subjects[name].add(union)
        subjects = {name: unions for name, unions in subjects.items() if name not in merged}
        variables = structure.match.variables[place]
        of_sides.append(_changes_of_names(structure, side, subjects, other, variables, same=same))
        further.append({name: unions for name, unions in calls.items() if owner_of(name) not in calls})
    changes = []
    for side, told, calls in zip("ab", of_sides, further, strict=True):
        changes += [*told, *_changes_of_calls(alignment, side, calls)]
    return list(dict.fromkeys(changes))  # more calls in a in one step and in b in another are one change


def _changes_of_names(
    structure: Structure,
    side: str,
    subjects: Mapping[str, set[int]],
    other: set[str],
    variables: Mapping[str, str],
    *,
    same: bool,
) -> list[StructureChange]:
    """Changes for modules and tensors that run `side` alone has; names that differ in numbers alone are one change.

    Args:
        structure: what was collected.
        side: `a` or `b`.
        subjects: outermost one-sided names, each with the union numbers of its sites.
        other: all names of the other run, with their ancestors.
        variables: what the script of `side` calls each root.
        same: whether no value differs.
    """
    alignment = structure.alignment
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, unions in subjects.items():
        itself = [union for union in unions if alignment.fqn[union] == name]
        kinds = {alignment.site(union).kind for union in itself}
        tensor = "parameter " if Kind.PARAM in kinds else "buffer " if Kind.BUFFER in kinds else ""
        classes = {alignment.module_class[union] for union in itself}
        of_class = f" ({next(iter(classes))})" if len(classes) == 1 and not tensor and classes != {name} else ""
        groups[star(name.split(".")), tensor, of_class].append(name)
    changes = []
    for (pattern, tensor, of_class), members in groups.items():
        name = pattern if len(members) > 1 else members[0]
        if all(member in other for member in members):
            tensors = np.flatnonzero(of_kinds(alignment.kind, (Kind.PARAM, Kind.BUFFER))).tolist()
            held = {name for name in map(alignment.fqn.__getitem__, tensors) if owner_of(name) == members[0]}
            runs = not held.isdisjoint(other)
            around = "" if runs else " around what is inside it"
            text = f"only {side} {'runs' if runs else 'has'} {name}{of_class}{around}"
        elif tensor or "." in name:
            text = f"only {side} has {'the ' + tensor if tensor else ''}{name}{of_class}"
        else:
            again = any(class_of_root(head) == class_of_root(name) for head in other if "." not in head)
            called = f" ({variables[name]})" if again and name in variables else ""
            text = f"only {side} also runs {'another ' + class_of_root(name) + called if again else name}{of_class}"
        passes = all(member in structure.giving and member not in structure.changing for member in members)
        nothing = "which changes nothing: it" if same else "which"
        changes.append(_only_change(side, name, text, f"{nothing} gives back what it is given" if passes else ""))
    return changes


def _changes_of_calls(alignment: Alignment, side: str, names: Mapping[str, set[int]]) -> list[StructureChange]:
    """Changes for names of both runs of which run `side` alone has further calls, paths or records.

    Names with the same text are one change, under the first name with `*` for numbers.

    Args:
        alignment: both runs' sites.
        side: `a` or `b`.
        names: FQNs, each with the union numbers of the sites that `side` alone has.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name, unions in names.items():
        more, others = map(alignment.site, unions), map(alignment.site, {*alignment.by_fqn[name]} - unions)
        called = {(site.phase, site.call) for site in others if site.kind is Kind.OUTPUT}
        first = min(more, key=lambda site: ((site.phase, site.call) in called, site.call, site.path))
        again = called and first.kind in _CALL_KINDS and (first.phase, first.call) not in called
        groups["" if again else what(first)].append(name)
    changes = []
    for much, members in groups.items():
        name = star(members[0].split(".")) if len(members) > 1 else members[0]
        text = f"only {side} has {much}" if much else f"{name} runs a different number of times in b"
        changes.append(StructureChange("calls", name, name, text))
    return changes


_CALL_KINDS = frozenset({Kind.INPUT, Kind.OUTPUT})


def drawn_one_sided_start(step: Step) -> int | None:
    """Position of the first start tensor that differs, if one run alone has it and a parameter before it is equal.

    None otherwise. Drawing such a tensor moves the generator, so later tensors differ; an equal one before shows that
    the seed is the same.
    """
    for position, site in enumerate(step.sites):
        if site.phase is not Phase.START or site.kind not in frozenset({Kind.PARAM, Kind.BUFFER}):
            continue
        if not step.is_one_sided(position):
            return None
        equal = (step.state == EQUAL) & (step.table.order_of < step.divergences.order[position])
        before = np.isin(step.of(Kind.PARAM, frozenset({Phase.START})), np.flatnonzero(equal))
        return position if before.any() else None
    return None
