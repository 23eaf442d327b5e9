"""What differs in structure, and changes no number: names, modules and calls that one run only has, random states.

Records that one run only has are collected while the steps are walked, by what is outermost: a block that only b has
is one change and not a hundred records. Changes that are the same in every layer are told once: `Net.blocks.*.body`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.merged import merge_words, merges_of
from introspect_cli.compare.join.roots import ambiguous, base_of
from introspect_cli.compare.reasons.evidence import listed
from introspect_cli.compare.reasons.facts import owner_of, with_ancestors
from introspect_cli.compare.reasons.words import often, what
from introspect_cli.compare.result import StructureChange
from introspect_cli.records import Kind, Phase, Site, count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from introspect_cli.compare.join.by_value import Correspondence
    from introspect_cli.compare.join.distance import Layouts
    from introspect_cli.compare.join.merged import Merge
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment

SHOWN = 3
"""Changes that the sentence of a comparison names."""


@dataclass
class Apart:
    """What one run only had, and which random states differed, over the steps that were walked.

    Attributes:
        alignment: the runs' sites.
        only: by side, the sites that it alone had, each with its first step.
        random: random states that differed, each with its first step.
        passes: modules that one side only has, and that always gave back what they were given.
        merges: parameters that are one in one run and several in the other.
        evaluations: steps in which one run alone evaluates, each with its side.
    """

    alignment: Alignment
    only: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    random: dict[str, int] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    giving: set[str] = field(default_factory=set)
    merges: list[Merge] = field(default_factory=list)
    evaluations: dict[int, str] = field(default_factory=dict)
    _looked: bool = False

    def see(self, pair: StepPair, layouts: tuple[Layouts, Layouts]) -> None:
        """Take in the causes of a step."""
        alignment = self.alignment
        site_a, site_b = pair.sites(alignment)
        for found, sites in zip(self.only, (site_a[pair.only_a], site_b[pair.only_b]), strict=True):
            for union in sites.tolist():
                found.setdefault(union, pair.step)
        for union in site_a[pair.rows_a].tolist():
            self.random.setdefault(alignment.fqn[union], pair.step)
        for batch, sites, rows in ((pair.a, site_a, pair.only_a), (pair.b, site_b, pair.only_b)):
            self._see_passing(np.asarray(batch.checksum), sites, rows)
        if not self._looked and len(pair.only_a) and len(pair.only_b):
            self._looked = True
            self.merges = merges_of(alignment, pair, layouts)

    def sites(self) -> list[Site]:
        """Sites of what was seen so far."""
        states = [Site(Phase.START, Kind.RNG, name) for name in self.random]
        return [*states, *(self.alignment.site(union) for found in self.only for union in found)]

    def _see_passing(self, checksums: np.ndarray, sites: np.ndarray, rows: np.ndarray) -> None:
        """Which modules of one side gave back what they were given: one input, one output, one checksum."""
        given: dict[tuple[str, int], dict[Kind, list[int]]] = {}
        for row in rows.tolist():
            site = self.alignment.site(int(sites[row]))
            if site.kind in {Kind.INPUT, Kind.OUTPUT} and site.phase is Phase.FORWARD:
                own = given.setdefault((site.fqn, site.call), {Kind.INPUT: [], Kind.OUTPUT: []})
                own[site.kind].append(int(checksums[row]))
        for (fqn, _), own in given.items():
            known = self.giving if own[Kind.INPUT] and own[Kind.INPUT] == own[Kind.OUTPUT] else self.changing
            known.add(fqn)

    @property
    def differs(self) -> bool:
        """Whether anything was seen."""
        return bool(self.only[0] or self.only[1] or self.random or self.evaluations)


def changes_of(apart: Apart, found: Correspondence | None, *, same: bool) -> tuple[StructureChange, ...]:
    """All that differs in structure on a rank, the names first.

    Args:
        apart: what was seen of it.
        found: names of a that are other names of b.
        same: whether no number differs, so that none of it has changed one.
    """
    told = [*_renames(found), *_merged(apart), *_lonely(apart, found, same=same)]
    note = "and nothing recorded depends on it" if same else ""
    for side in "ab":
        steps = [step for step, own in apart.evaluations.items() if own == side]
        if steps:
            more = f" and in {count(len(steps) - 1, 'more step')}" if len(steps) > 1 else ""
            text = f"only {side} evaluates in step {steps[0]}{more}"
            both = ("evaluation", None) if side == "a" else (None, "evaluation")
            told.append(StructureChange("calls", both[0], both[1], text))
    for name, step in apart.random.items():
        text = f"the random state of {name} differs from step {step} on"
        told.append(StructureChange("random", name, name, text, note))
    return tuple(told)


def sentence_of(changes: Sequence[StructureChange]) -> str:
    """The changes in one sentence, the first of them in words: `Names differ: head is head.0 in b`."""
    if not changes:
        return ""
    only_random = all(change.change == "random" for change in changes)
    only_names = all(change.change in {"renamed", "random"} for change in changes)
    head = "" if only_random else "Names differ: " if only_names else "The structure differs: "
    told = [clause_of(change) for change in changes[:SHOWN]]
    more = f"; and {count(len(changes) - SHOWN, 'more change')}" if len(changes) > SHOWN else ""
    text = f"{head}{'; '.join(told)}{more}."
    return f" {text[0].upper()}{text[1:]}"


def clause_of(change: StructureChange) -> str:
    """A change as a clause, with what else is known of it."""
    if not change.note:
        return change.text
    return f"{change.text}{' ' if change.note.startswith('and ') else ', '}{change.note}"


# --- names


def _renames(found: Correspondence | None) -> list[StructureChange]:
    if found is None:
        return []
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for old, new in found.names.items():
        if old != new and not new.endswith("(a)"):
            groups[starred(old, new)].append((old, new))
    told = []
    for pattern, members in groups.items():
        old, new = pattern if len(members) > 1 else members[0]
        votes = sum(found.votes.get(name, 0) for name, _ in members)
        steps = sorted(frozenset.intersection(*(found.steps.get(name, frozenset()) for name, _ in members)))
        near = any(name in found.near for name, _ in members)
        step = f" in step{'s' * (len(steps) > 1)} {listed(list(map(str, steps)))}" if steps else ""
        if near:
            how = f"{'differs' if votes == 1 else 'differ'} by at most {found.close:g}, relative L2{',' * bool(step)}"
        else:
            how = f"{'is' if votes == 1 else 'are'} equal"
        evidence = f"{count(votes, 'value')} under the two names {how}{step}"
        text = f"{_glossed(old, found.variables[0])} is {_glossed(new, found.variables[1])} in b"
        told.append(StructureChange("renamed", old, new, text, evidence=evidence if votes else ""))
    return told


def _glossed(name: str, variables: Mapping[str, str]) -> str:
    """A name, with what the script calls it where its class alone says nothing."""
    return f"{name} ({variables[name]})" if name in variables and ambiguous(variables) & {base_of(name)} else name


def roots_told(name: str, found: Correspondence, rename: Callable[[str], str] | None) -> str:
    """Which of several models of one class the root of a name is, as the scripts call it; "" where nobody asks."""
    root = name.partition(".")[0]
    a, b = ({rename(own) if rename else own: text for own, text in found.variables[0].items()}, found.variables[1])
    if base_of(root) not in ambiguous(a, b) or root not in a or root not in b:
        return ""
    if a[root] == b[root]:
        return f"{root} is {a[root]} of the script."
    return f"{root} is {a[root]} of the script in a, {b[root]} in b."


def starred(old: str, new: str) -> tuple[str, str]:
    """A pair of names with the numbers that both have replaced by a star."""
    one, two = old.split("."), new.split(".")
    numbers = [[part for part in parts if part.isdecimal()] for parts in (one, two)]
    if numbers[0] != numbers[1]:
        same = 0
        while same < min(len(one), len(two)) and one[same] == two[same]:
            same += 1
        return star(one[:same], one[same:]), star(two[:same], two[same:])
    return star(one), star(two)


def star(parts: Sequence[str], rest: Sequence[str] = ()) -> str:
    """A name with its numbers replaced by stars, but for those of the rest."""
    return ".".join(["*" if part.isdecimal() else part for part in parts] + list(rest))


# --- what one run only has


def _merged(apart: Apart) -> list[StructureChange]:
    groups: dict[tuple[str, tuple[str, ...], str], list[Merge]] = defaultdict(list)
    for merge in apart.merges:
        owners = tuple(star(owner_of(name).split(".")) for name in merge.parts)
        groups[star(owner_of(merge.whole).split(".")), owners, merge.side].append(merge)
    told: list[StructureChange] = []
    for (whole, parts, side), members in groups.items():
        several = len({owner_of(merge.whole) for merge in members}) > 1
        one = whole if several else owner_of(members[0].whole)
        many = parts if several else tuple(owner_of(name) for name in members[0].parts)
        parts_told = listed(many)
        text = merge_words(parts_told, one, side)
        names = (parts_told, one) if side == "b" else (one, parts_told)
        told.append(StructureChange("merged" if side == "b" else "split", *names, text))
    return told


def _lonely(apart: Apart, found: Correspondence | None, *, same: bool) -> list[StructureChange]:
    alignment = apart.alignment
    explained = {name for merge in apart.merges for name in (*map(owner_of, merge.parts), owner_of(merge.whole))}
    told = []
    held = (alignment.names_a, alignment.names_b)
    for place, side in enumerate("ab"):
        other = with_ancestors(held[1 - place])
        subjects: dict[str, set[int]] = defaultdict(set)
        calls: dict[str, set[int]] = defaultdict(set)
        for union in apart.only[place]:
            name = alignment.fqn[union]
            if name in held[1 - place]:
                calls[name].add(union)
                continue
            while owner_of(name) and owner_of(name) not in other:
                name = owner_of(name)
            subjects[name].add(union)
        left = {name: own for name, own in subjects.items() if name not in explained}
        variables = found.variables[place] if found is not None else {}
        told += _subjects(apart, side, left, other, variables, same=same)
        told += _calls(apart, side, {name: own for name, own in calls.items() if owner_of(name) not in calls})
    return _two_of_one_name(told)


def _two_of_one_name(changes: Sequence[StructureChange]) -> list[StructureChange]:
    """The changes, a name that means one module in a and another in b told once.

    The one of a was compared under a name that b does not have, which is nobody's outside of a comparison.
    """
    in_b = {change.b for change in changes if change.change == "only" and change.a is None}
    told, both = [], set[str]()
    for change in changes:
        name = (change.a or "").removesuffix("(a)")
        if change.change == "only" and change.a != name and name in in_b:
            both.add(name)
            text = f"{name} is one module in a and another in b, with something else inside it"
            told.append(StructureChange("only", name, name, text))
        elif not (change.change == "only" and change.a is None and change.b in both):
            told.append(change)
    return told


def _subjects(
    apart: Apart,
    side: str,
    subjects: Mapping[str, set[int]],
    other: set[str],
    variables: Mapping[str, str],
    *,
    same: bool,
) -> list[StructureChange]:
    """Modules and tensors that one run only has, those that are alike in every layer told once."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, unions in subjects.items():
        own = [apart.alignment.site(union) for union in unions]
        kinds = {site.kind for site in own if site.fqn == name}
        tensor = "parameter " if Kind.PARAM in kinds else "buffer " if Kind.BUFFER in kinds else ""
        classes = {apart.alignment.module_class[union] for union in unions if apart.alignment.fqn[union] == name}
        told = f" ({next(iter(classes))})" if len(classes) == 1 and not tensor and classes != {name} else ""
        groups[star(name.split(".")), tensor, told].append(name)
    changes = []
    for (pattern, tensor, told), members in groups.items():
        name = pattern if len(members) > 1 else members[0]
        if all(member in other for member in members):
            held = any(f"{members[0]}.{leaf}" in other for leaf in _own_tensors(apart.alignment, members[0]))
            text = f"only {side} {'runs' if held else 'has'} {name}{told}{'' if held else ' around what is inside it'}"
        elif tensor or "." in name:
            text = f"only {side} has {'the ' + tensor if tensor else ''}{name}{told}"
        else:
            again = any(base_of(head) == base_of(name) for head in other if "." not in head)
            called = f" ({variables[name]})" if again and name in variables else ""
            text = f"only {side} also runs {'another ' + base_of(name) + called if again else name}{told}"
        passes = all(member in apart.giving and member not in apart.changing for member in members)
        nothing = "which changes nothing: it" if same else "which"
        note = f"{nothing} gives back what it is given" if passes else ""
        in_a, in_b = (name, None) if side == "a" else (None, name)
        changes.append(StructureChange("only", in_a, in_b, text, note))
    return changes


def _own_tensors(alignment: Alignment, name: str) -> set[str]:
    """Names, within their module, of the tensors that either run recorded of a module itself."""
    tensors = [union for union in range(alignment.size) if owner_of(alignment.fqn[union]) == name]
    return {
        alignment.fqn[union].rpartition(".")[2]
        for union in tensors
        if alignment.site(union).kind in {Kind.PARAM, Kind.BUFFER}
    }


def _calls(apart: Apart, side: str, names: Mapping[str, set[int]]) -> list[StructureChange]:
    """Modules that both have, of which one run recorded more: further calls, or other paths."""
    alignment = apart.alignment
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, unions in names.items():
        sites = [alignment.site(union) for union in unions]
        first = min(sites, key=lambda site: (site.call, site.path))
        forward = {site.call for site in sites if site.kind in {Kind.INPUT, Kind.OUTPUT}}
        both = [alignment.site(union) for union in alignment.by_fqn[name]]
        shared = {site.call for site in both if site.kind is Kind.OUTPUT} - forward
        if forward and shared:
            much = f"{often(len(shared | forward))} in a step of {side}, {often(len(shared))} in the other run"
            groups["runs", much].append(name)
        else:
            groups["record", what(first)].append(name)
    changes = []
    for (sort, told), members in groups.items():
        name = star(members[0].split(".")) if len(members) > 1 else members[0]
        text = f"{name} runs {told}" if sort == "runs" else f"only {side} has {told}"
        changes.append(StructureChange("calls", name, name, text))
    return changes
