"""How two runs' optimizers were set up differently: as recorded at a step, and as their settings say.

Group numbers and lists of names say little; what matters is what applies to a parameter. So groups are turned inside
out, parameter to hyper-parameters, and equal changes of many parameters are told once.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.join.sites import KINDS
from introspect_cli.records import SCALER, SETTING_KINDS
from introspect_cli.texts import count

if TYPE_CHECKING:
    from typing_extensions import Self

    from introspect_cli.compare.table import Table


class Label(str):
    """A hyper-parameter as it is shown: `lr (group 1)`.

    Attributes:
        about: its name: `lr`; "" for what is not one.
        of_all: whether it is that of all optimizers.
    """

    __slots__ = ("about", "of_all")

    about: str
    of_all: bool

    def __new__(cls, text: str, about: str = "", *, of_all: bool = True) -> Self:
        """The text, and what it is about."""
        label = super().__new__(cls, text)
        label.about, label.of_all = about, of_all
        return label


Change = tuple[Label, Any, Any]
Changed = dict[Label, tuple[str | None, str | None]]
"""Label to the values in a and in b."""


def hyperparameter_changes(table: Table) -> Changed:
    """Hyper-parameters that differ in a step: name to both values; equal changes of several groups are folded.

    So are those of all optimizers: a container that steps others has groups like theirs.

    All but the learning rate are recorded where they are new or have changed. What one run alone recorded here, and the
    other at another step, is not known to differ.
    """
    alignment = table.alignment
    changed: dict[tuple[str, str], dict[tuple[str | None, str | None], list[str]]] = {}
    groups: dict[tuple[str, str], None] = {}
    in_b = set(alignment.b_ids.tolist())
    for union in dict.fromkeys([*table.rows_of("a"), *table.rows_of("b")]):
        if KINDS[alignment.kind[union]] not in SETTING_KINDS or alignment.fqn[union] == SCALER:
            continue
        match = re.match(r"^\[(\d+)\](.*)$", alignment.path[union])
        group, rest = (match[1], match[2]) if match else ("", alignment.path[union])
        groups[alignment.fqn[union], group] = None
        if table.checksum(union, "a") == table.checksum(union, "b"):
            continue
        name = re.sub(r"^\.", "", re.sub(r"\['?([^'\]]*)'?\]", r".\1", rest))
        values = (table.plain(union, "a"), table.plain(union, "b"))
        elsewhere = union < len(alignment.a) and union in in_b
        if values[0] != values[1] and not (elsewhere and None in values):
            changed.setdefault((alignment.fqn[union], name), {}).setdefault(values, []).append(group)
    owners = dict.fromkeys(fqn for fqn, _ in groups)
    alike: dict[tuple[Label, tuple[str | None, str | None]], list[str]] = {}
    for (fqn, name), by_values in changed.items():
        count = sum(1 for owner, _ in groups if owner == fqn)
        for values, members in by_values.items():
            label = f"{name} (group {', '.join(dict.fromkeys(members))})" if len(members) < count else name
            alike.setdefault((Label(label, name), values), []).append(fqn)
    named: Changed = {
        label
        if len(members) == len(owners)
        else Label(f"{', '.join(members)} {label}", label.about, of_all=False): values
        for (label, values), members in alike.items()
    }
    if "lr" in named:
        named.pop(Label("initial_lr"), None)  # a scheduler's note of where lr began; it says nothing more
    return named


def rates_recorded(table: Table) -> bool:
    """Whether both runs have a learning rate on record in a step."""
    alignment = table.alignment
    return any(
        KINDS[alignment.kind[union]] in SETTING_KINDS and alignment.path[union].endswith("['lr']")
        for union in table.rows_of("a").keys() & table.rows_of("b").keys()
    )


def _optimizers(settings: Any) -> dict[str, dict[str, Any]]:
    optimizers = {}
    for place, optimizer in enumerate(settings if isinstance(settings, (list, tuple)) else ()):
        if isinstance(optimizer, dict):
            optimizers[str(optimizer.get("name", place))] = optimizer
    return optimizers


def _paired(a: Any, b: Any) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The optimizers of both runs, those of b by the names that they have in a.

    Those of one class are numbered as they step for the first time. So where both runs have one of a class with the
    same parameters, that is the same, and only its number is another.
    """
    one, two = _optimizers(a), _optimizers(b)
    held = [
        {(name.partition("#")[0], *sorted(_by_parameter(own))): name for name, own in run.items()} for run in (one, two)
    ]
    if held[0].keys() != held[1].keys() or len(held[0]) != len(one) or len(held[1]) != len(two):
        return one, two
    return one, {held[0][key]: two[name] for key, name in held[1].items()}


def renumbered(a: Any, b: Any) -> bool:
    """Whether optimizers of one class step for the first time in another order."""
    return _paired(a, b)[1].keys() == _optimizers(b).keys() and _paired(a, b)[1] != _optimizers(b)


def first_parameter(settings: Any, name: str) -> str:
    """The first parameter of an optimizer; "" where no names were kept."""
    return next(iter(_by_parameter(_optimizers(settings).get(name, {}))), "")


def _by_parameter(optimizer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameter to the hyper-parameters of its group; groups without names under their number."""
    by_name: dict[str, dict[str, Any]] = {}
    groups = optimizer.get("groups")
    for place, group in enumerate(groups if isinstance(groups, (list, tuple)) else ()):
        if not isinstance(group, dict):
            continue
        values = {str(name): value for name, value in group.items() if name != "params"}
        names = group.get("params")
        for name in names if isinstance(names, (list, tuple)) and names else (f"group {place}",):
            by_name[str(name)] = values
    return by_name


def unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of what is not equal in two mappings; None for what one lacks."""
    return ((name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name))


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    began = a.get("lr") != b.get("lr")  # then a scheduler's note of where lr began says nothing more
    return (change for change in unequal(a, b) if not (began and change[0] == "initial_lr"))


def changes_for(settings: Mapping[str, Any], parameter: str) -> Changed:
    """Hyper-parameters that apply to one parameter and differ; `settings` of the optimizers, by side."""
    changes: Changed = {}
    both_a, both_b = _paired(*settings.values())
    for name in both_a.keys() & both_b.keys():
        one, two = _by_parameter(both_a[name]).get(parameter), _by_parameter(both_b[name]).get(parameter)
        if one is not None and two is not None:
            changes |= {Label(key, key): (_text(x), _text(y)) for key, x, y in _differing(one, two)}
    return changes


def has_parameter(settings: Any, parameter: str) -> bool | None:
    """Whether an optimizer has a parameter; None where no names were kept."""
    names = {name for optimizer in _optimizers(settings).values() for name in _by_parameter(optimizer)}
    return None if not names or all(name.startswith("group ") for name in names) else parameter in names


def names_in(settings: Any) -> set[str]:
    """The optimizers that a run has."""
    return set(_optimizers(settings))


def holders(settings: Any, parameters: set[str]) -> list[str]:
    """The optimizers that have any of some parameters."""
    return [name for name, optimizer in _optimizers(settings).items() if parameters & set(_by_parameter(optimizer))]


def other_optimizer(settings: Mapping[str, Any], parameter: str) -> str:
    """Which of several optimizers steps a parameter in either run, as a clause; "" where it is the same one.

    Only where both runs have the same optimizers, so that it is the parameter that changed hands.
    """
    both = _paired(*settings.values())
    if both[0].keys() != both[1].keys() or len(both[0]) < 2:
        return ""
    one, two = ([name for name, optimizer in side.items() if parameter in _by_parameter(optimizer)] for side in both)
    if not one or not two or one == two:
        return ""
    return f"{' and '.join(one)} {'steps' if len(one) == 1 else 'step'} it in a, {' and '.join(two)} in b"


def _text(value: Any) -> str | None:
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def optimizer_changes(a: Any, b: Any) -> Iterator[Change]:
    """All that differs, each change told once, with how many parameters it is for where not all."""
    both_a, both_b = _paired(a, b)
    if len(both_a) == len(both_b) == 1 and both_a.keys() != both_b.keys():
        yield Label("optimizer"), next(iter(both_a)), next(iter(both_b))
        return
    for name in dict.fromkeys([*both_a, *both_b]):
        if name not in both_a or name not in both_b:
            yield Label(f"optimizer {name}"), "used" if name in both_a else None, "used" if name in both_b else None
            continue
        yield from _one(name if len(both_a) > 1 else "", _by_parameter(both_a[name]), _by_parameter(both_b[name]))


def _one(name: str, a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> Iterator[Change]:
    prefix = f"{name} " if name else ""
    folded: dict[tuple[str, str, str], list[Any]] = {}
    for parameter in a.keys() & b.keys():
        for key, one, two in _differing(a[parameter], b[parameter]):
            entry = folded.setdefault((key, repr(one), repr(two)), [one, two, []])
            entry[2].append(parameter)
    shared = len(a.keys() & b.keys())
    for (key, _, _), (one, two, parameters) in folded.items():
        label = prefix + key
        if len(parameters) < shared:
            first = min(parameters)
            label += f" of {first}" + (f" and {len(parameters) - 1} more" if len(parameters) > 1 else "")
        yield Label(label, key), one, two
    for mine, other, in_a in ((a, b, True), (b, a, False)):
        alone = [parameter for parameter in mine if parameter not in other]
        if alone:
            label = f"{prefix}{alone[0]}" + (f" and {len(alone) - 1} more" if len(alone) > 1 else "")
            yield Label(f"parameter {label}"), "optimized" if in_a else None, None if in_a else "optimized"


def in_words(changed: Changed) -> str:
    """Differing hyper-parameters in brackets after a blank, for the middle of a sentence."""
    if not changed:
        return " (equal where recorded)"
    return f" ({', '.join(f'{name} {a} -> {b}' for name, (a, b) in list(changed.items())[:3])})"


def built_changes(
    a: Any, b: Any, differing: Callable[[Any, Any], Iterable[tuple[str, Any, Any]]]
) -> Iterator[tuple[str, str, Any, Any]]:
    """(kind, name, value in a, value in b) of what differs between things that both runs built, with where that was."""
    for kind in _shared(a, b):
        one_side, other_side = a[kind], b[kind]
        for thing in _shared(one_side, other_side):
            one, two = one_side[thing], other_side[thing]
            if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
                continue
            lines = list(dict.fromkeys(str(built["line"]) for built in (one, two) if "line" in built))
            where = f"{thing} ({' and '.join(lines)})" if lines else str(thing)
            changes = [change for change in differing(one, two) if change[0] != "line"]
            # a sampler of another class has other attributes
            others = tuple(f"{name}{sign}" for name, _, _ in changes for sign in ".[")
            alone = [change for change in changes if not change[0].startswith(others)]
            for name, x, y in _mappings(alone, {*one, *two}):
                yield kind, f"{where}: {name}", x, _reordered(x, y)


def _mappings(changes: Iterable[tuple[str, Any, Any]], names: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Changes, those of one mapping (`stoi.a`, `stoi.b` where `stoi` itself is no value) put together."""
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    for change in changes:
        holder, _, _ = change[0].rpartition(".")
        groups.setdefault(change[0] if not holder or holder in names else holder, []).append(change)
    for holder, members in groups.items():
        if len(members) == 1:
            yield members[0]
            continue
        sides = ({name[len(holder) + 1 :]: own[side] for name, *own in members} for side in (0, 1))
        one, two = ({name: value for name, value in side.items() if value is not None} or None for side in sides)
        yield holder, one, two


def _reordered(one: Any, two: Any) -> Any:
    """The second value, or that it has the items of the first in another order."""
    try:
        a, b = ast.literal_eval(one), ast.literal_eval(two)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return two
    same = isinstance(a, (list, tuple)) and type(a) is type(b) and Counter(map(repr, a)) == Counter(map(repr, b))
    return f"the same {count(len(a), 'item')} in another order" if same else two


def _shared(a: Any, b: Any) -> list[Any]:
    """The keys of two mappings that both have, in the first one's order."""
    return [key for key in a if key in b] if isinstance(a, Mapping) and isinstance(b, Mapping) else []
