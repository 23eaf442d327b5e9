"""Models of which a run has several of one class: the order in which they came says nothing of which is which.

A root is named by its class, and numbered where there are more. Those that hold the same values are the same model;
where values tell nothing, or tell the same of two (a target network is a copy at first), the variable does that holds
them in the script.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from introspect_cli.compare.join.holdings import Feature, Side
    from introspect_cli.store.rank_reader import RankReader

_NUMBERED = re.compile(r"#\d+$")

Variables = tuple["Mapping[str, str]", "Mapping[str, str]"]
"""Of a and of b, what the script calls each root."""


def base_of(root: str) -> str:
    """The class that a root is named by: `Net` of `Net#2`."""
    return _NUMBERED.sub("", root)


def ambiguous(*runs: Iterable[str]) -> set[str]:
    """Classes of which a run has more than one root, so that the class says nothing of which is which."""
    counts = [Counter(map(base_of, roots)) for roots in runs]
    return {base for own in counts for base, number in own.items() if number > 1}


def variables_of(reader: RankReader, rename: Callable[[str], str] | None) -> dict[str, str]:
    """What the script calls each root, by the root's name as it is compared."""
    return {rename(own.fqn) if rename else own.fqn: own.variable for own in reader.modules if own.variable}


def matched_roots(sides: tuple[Side, Side], variables: Variables) -> dict[str, str]:
    """Roots of a that hold what another root of the same class holds in b; else those that one variable holds."""
    if not any("#" in side.sites.text for side in sides):
        return {}
    doubtful = ambiguous(*(side.tree.roots() for side in sides))
    if not doubtful:
        return {}
    held = [_of_roots(side, doubtful) for side in sides]
    called = [{root: _last(name) for root, name in names.items()} for names in variables]
    unique = [{name for name, times in Counter(names.values()).items() if times == 1} for names in called]
    scores = []
    for one, features in held[0].items():
        for two, others in held[1].items():
            if base_of(one) != base_of(two):
                continue
            score, name = len(features & others), called[0].get(one)
            alike = name is not None and name == called[1].get(two) and name in unique[0] & unique[1]
            if score or alike:
                scores.append((-score, not alike, one != two, one, two))
    found: dict[str, str] = {}
    for *_, one, two in sorted(scores):
        if one not in found and two not in found.values():
            found[one] = two
    return {old: new for old, new in found.items() if old != new}


def _last(variable: str) -> str:
    """What is left of a variable without the object that it is an attribute of."""
    return variable.rpartition(".")[2]


def _of_roots(side: Side, bases: set[str]) -> dict[str, set[tuple[str, Feature]]]:
    found: dict[str, set[tuple[str, Feature]]] = defaultdict(set)
    wanted = {name for name in side.names if base_of(name.partition(".")[0]) in bases}
    held = side.held(wanted)
    for name in held.names:
        root, _, rest = name.partition(".")
        found[root] |= {(rest, feature) for feature in held.of(name)}
    return found
