"""How two runs' optimizers differ, from records of a step and from settings.

Groups are turned into a mapping of parameter to hyper-parameters; equal changes of many parameters are listed once.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.result import SettingChange
from introspect_cli.compare.say import some
from introspect_cli.compare.settings.differences import on_one_line, unequal
from introspect_cli.compare.table import KINDS
from introspect_cli.records import SCALER, SETTING_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from introspect_cli.compare.table import Table

OPTIMIZERS = "optimizers"
"""The document of a run's optimizers, and the source of what differs in it."""
RECORDED = "hyperparameter"
"""The source of what was recorded at a step."""

_Values = dict[str, Any]
_Hyperparameters = dict[str, _Values]
"""Of an optimizer, parameter to the hyper-parameters of its group; groups without names under their number."""


def hyperparameter_changes(
    table: Table, last_value: Callable[[int, str], str | None], held: tuple[str, str, str] | None = None
) -> list[SettingChange]:
    """Hyper-parameters recorded in a step that differ; equal changes of several groups or optimizers are one.

    The name of a change has its groups and optimizers in it only where not all have the change.

    All but the learning rate are recorded only when new or changed, so a value missing in one run may have been
    recorded in an earlier step; where a rate is missing, the optimizer did not step. `initial_lr` is left out where
    `lr` differs too, and the scaler always.

    Args:
        table: the step.
        last_value: (number of a site, side) to its value recorded last in earlier steps; None leaves the change out.
            Asked only for sites that both runs have; of others the missing value is None.
        held: optimizer, and number of the only group that is meant, in a and in b; None for all. Where the numbers
            differ, what one run alone recorded in the step is left out.
    """
    alignment, in_b = table.alignment, set(table.alignment.b_ids.tolist())
    sites, moved = _recorded(table, held), held is not None and held[1] != held[2]
    alike: dict[tuple[str, tuple[str | None, str | None]], list[tuple[str, str]]] = {}
    for (owner, group, name), unions in sites.items():
        union = next(iter(unions.values()))
        elsewhere = moved or (union < len(alignment.a) and union in in_b)
        one, two = (
            (table.plain(unions[side], side) if side in unions else None)
            or (last_value(union, side) if elsewhere and not moved and name != "lr" else None)
            for side in "ab"
        )
        if one != two and not (elsewhere and None in (one, two)):
            alike.setdefault((name, (one, two)), []).append((owner, group))
    groups = {each[:2] for each in sites}
    named: dict[str, SettingChange] = {}
    for (name, values), members in alike.items():
        owners = list(dict.fromkeys(owner for owner, _ in members))
        of = "" if len(owners) == len({owner for owner, _ in groups}) else ", ".join(owners)
        every = {*members} == {each for each in groups if each[0] in owners}
        label = name if every else f"{name} (group {', '.join(dict.fromkeys(group for _, group in members))})"
        shown = f"{of} {label}" if of else label
        named[shown] = SettingChange(RECORDED, shown, *values, name)
    if "lr" in named:
        named.pop("initial_lr", None)  # a scheduler's note of where lr began; it says nothing more
    return list(named.values())


def _recorded(table: Table, held: tuple[str, str, str] | None = None) -> dict[tuple[str, str, str], dict[str, int]]:
    """Numbers of the sites of a step's hyper-parameters, by side: by optimizer, number of its group and name.

    Where each run has one optimizer that the other lacks, of another class, both are under the name in a. The scaler's
    are left out. `held` is that of `hyperparameter_changes`; the group has its number in a.
    """
    alignment, sites = table.alignment, dict[tuple[str, str, str], dict[str, int]]()
    of_optimizers = [
        [u for u in table.rows_of[side] if KINDS[alignment.kind[u]] in SETTING_KINDS and alignment.fqn[u] != SCALER]
        for side in "ab"
    ]
    of_a, of_b = ({alignment.fqn[union] for union in unions} for unions in of_optimizers)
    replaced = itertools.product(of_b - of_a, of_a - of_b) if len(of_a ^ of_b) == 2 else ()
    renamed = {new: old for new, old in replaced if new.partition("#")[0] != old.partition("#")[0]}
    for place, (side, unions) in enumerate(zip("ab", of_optimizers, strict=True), 1):
        for union in unions:
            owner = renamed.get(alignment.fqn[union], alignment.fqn[union])
            parts = re.findall(r"[^\[\]'.]+", alignment.path[union])
            group = parts.pop(0) if "".join(parts[:1]).isdecimal() else ""
            if held is None or (owner, group) == (held[0], held[place]):
                sites.setdefault((owner, group if held is None else held[1], ".".join(parts)), {})[side] = union
    return sites


def recorded_names(table: Table) -> set[str]:
    """Names of hyper-parameters that both runs recorded at one site in this step: `lr`, and new or changed ones."""
    return {name for (_, _, name), unions in _recorded(table).items() if len(unions) == 2}


class Optimizers:
    """Optimizers of two runs from their settings, each as parameter to hyper-parameters.

    Attributes:
        named: by side, under the names that each run gave them.
        paired: of a and of b, those of b under the names that they have in a. Those of one class are numbered as they
            step for the first time. So where both runs have one of a class with the same parameters, that is the same,
            and only its number is another.
        renumbered: whether those of one class step for the first time in another order.
    """

    def __init__(self, a: Any, b: Any, rename: Callable[[str], str] = str) -> None:
        """Read both runs' settings documents and pair their optimizers.

        By class and parameters where these are the same in both runs and no two optimizers of a run share them, else by
        name. `paired` has b's optimizers under a's names. `rename` maps names of parameters of a to those of b.
        """
        one, two = optimizers_by_name(a, rename), optimizers_by_name(b)
        self.named = {"a": one, "b": two}
        keys = [{(name.partition("#")[0], *sorted(held)): name for name, held in run.items()} for run in (one, two)]
        same = keys[0].keys() == keys[1].keys() and len(keys[0]) == len(one) and len(keys[1]) == len(two)
        self.paired = one, {keys[0][key]: two[name] for key, name in keys[1].items()} if same else two
        self.renumbered = self.paired[1].keys() == two.keys() and self.paired[1] != two

    def has(self, side: str, parameter: str) -> bool | None:
        """Whether any optimizer of run `side` holds a parameter; None where names of parameters are not on record."""
        names = {name for held in self.named[side].values() for name in held}
        return None if not names or all(name.startswith("group ") for name in names) else parameter in names

    def holders(self, side: str, parameters: set[str]) -> list[str]:
        """Names of the optimizers of run `side` that hold any of `parameters`, in the order of its settings."""
        return [name for name, held in self.named[side].items() if parameters & held.keys()]

    def as_in_a(self, names: list[str]) -> list[str]:
        """Names of b's optimizers as those that they are paired with have in a; those without a pair keep theirs."""
        held = {id(values): name for name, values in self.paired[1].items()}
        return [held.get(id(self.named["b"].get(name)), name) for name in names]

    def _held(self, parameter: str) -> tuple[dict[str, _Values], dict[str, _Values]]:
        """The optimizers that hold a parameter, of a and of b, by their names in a; with its group's values."""
        one, two = ({name: held[parameter] for name, held in side.items() if parameter in held} for side in self.paired)
        return one, two

    def changes_for(self, parameter: str) -> list[SettingChange]:
        """Hyper-parameters of one parameter that differ, over all optimizers that hold it in both runs, values as text.

        Where several optimizers differ in one hyper-parameter, one of them is given.
        """
        one, two = self._held(parameter)
        differing = (each for name in one.keys() & two.keys() for each in _differing_values(one[name], two[name]))
        return [*{key: SettingChange(RECORDED, key, *on_one_line(x, y), key) for key, x, y in differing}.values()]

    def groups_of(self, parameter: str) -> tuple[str, str, str] | None:
        """(optimizer, number of the parameter's group in a, in b); None unless it is one, and the same, in both."""
        one, two = self._held(parameter)
        if len(one) != 1 or one.keys() != two.keys():
            return None
        (name,) = one
        groups = [[*dict.fromkeys(map(id, side[name].values()))] for side in self.paired]
        return name, str(groups[0].index(id(one[name]))), str(groups[1].index(id(two[name])))

    def other_holders(self, parameter: str) -> tuple[list[str], list[str]] | None:
        """Optimizers that hold a parameter, of a and of b, where they differ; None where they do not.

        None also unless the runs have the same optimizers, two or more, and each holds the parameter.
        """
        one, two = map(list, self._held(parameter))
        several = len(self.paired[0]) > 1 and self.paired[0].keys() == self.paired[1].keys()
        return (one, two) if several and one and two and one != two else None


def learning_rates(settings: Any) -> Iterator[float]:
    """`lr` and `initial_lr` of all parameters in a settings document; more than 1e6 is given as 1e6.

    Values that are no number are skipped.
    """
    for held in optimizers_by_name(settings).values():
        for values in held.values():
            rates = (values.get(name) for name in ("lr", "initial_lr"))
            yield from (float(min(rate, 1e6)) for rate in rates if isinstance(rate, (int, float)))


def optimizers_by_name(settings: Any, rename: Callable[[str], str] = str) -> dict[str, _Hyperparameters]:
    """Hyper-parameters of its group by optimizer, then by parameter; `rename` maps the parameters' names.

    An optimizer without a name has its number. Where no parameter has a name, a group is under `group 0`; malformed
    ones are left out.
    """
    optimizers: dict[str, _Hyperparameters] = {}
    for place, optimizer in enumerate(_listed(settings)):
        if isinstance(optimizer, dict):
            held = optimizers[str(optimizer.get("name", place))] = {}
            groups = [group if isinstance(group, dict) else {} for group in _listed(optimizer.get("groups"))]
            named = any(_listed(group.get("params")) for group in groups)  # then one without parameters has none
            for number, group in enumerate(groups):
                if group:
                    values = {str(name): value for name, value in group.items() if name != "params"}
                    names = _listed(group.get("params")) or (f"group {number}",) * (not named)
                    held |= {rename(str(name)): values for name in names}
    return optimizers


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _differing_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of hyper-parameters that differ; None where one run lacks it.

    `initial_lr` is left out where `lr` differs too, or where one run has no scheduler and so no `initial_lr`.
    """
    began = a.get("lr") != b.get("lr")  # then a scheduler's note of where lr began says nothing more
    noted = "initial_lr" in a and "initial_lr" in b  # else one run has no scheduler, which moves lr if anything
    return (change for change in unequal(a, b) if change[0] != "initial_lr" or (noted and not began))


def optimizer_differences(optimizers: Optimizers) -> Iterator[SettingChange]:
    """All differences of the optimizers of two runs.

    An equal change of several parameters is one; it names the first, and how many, if not all have it. An optimizer of
    one run alone has the value `used` there. Where each run has one optimizer, of other classes, that is the only
    difference.
    """
    one, two = optimizers.paired
    if len(one) == len(two) == 1 and one.keys() != two.keys():
        yield SettingChange(OPTIMIZERS, "optimizer", next(iter(one)), next(iter(two)))
        return
    for name, x, y in unequal(one, two):
        if x is None or y is None:
            yield SettingChange(
                OPTIMIZERS, f"optimizer {name}", None if x is None else "used", None if y is None else "used"
            )
        else:
            yield from _folded_differences(f"{name} " if len(one) > 1 else "", x, y)


def _folded_differences(prefix: str, a: _Hyperparameters, b: _Hyperparameters) -> Iterator[SettingChange]:
    """Differences of two optimizers: of hyper-parameters, then parameters that one alone holds; `prefix` begins names.

    An equal change of several parameters is one.
    """
    folded: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for parameter in a.keys() & b.keys():
        for key, one, two in _differing_values(a[parameter], b[parameter]):
            folded.setdefault((key, repr(one), repr(two)), (one, two, []))[2].append(parameter)
    shared = len(a.keys() & b.keys())
    for (key, _, _), (one, two, parameters) in folded.items():
        of = f" of {some(sorted(parameters), 1)}" if len(parameters) < shared else ""
        yield SettingChange(OPTIMIZERS, f"{prefix}{key}{of}", one, two, key)
    for mine, other, values in ((a, b, ("optimized", None)), (b, a, (None, "optimized"))):
        alone = [parameter for parameter in mine if parameter not in other]
        if alone:
            yield SettingChange(OPTIMIZERS, f"parameter {prefix}{some(alone, 1)}", *values)
