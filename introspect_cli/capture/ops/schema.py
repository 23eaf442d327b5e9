"""What an operator's schema says: of its results, looked up once an operator, and of what else it is given.

Whether a result is a view, is memory that was just written in place, or is not yet written at all (`empty`) is in the
schema or the name, never in the values; asking for it at every call would cost more than the call.

A module's options are attributes of it; what is called as a function has none, and `gelu(x, approximate="tanh")` gives
other numbers from equal inputs. So the plain arguments of each operator are noted when its site is new: the document
`settings/operators`, with `--level op`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch

_UNWRITTEN = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "empty_quantized",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
        "record_stream",
    }
)
"""Operators whose results hold whatever the memory held before."""

_ALSO_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach", "detach_", "lift"})
"""Operators that give their input's own numbers without the schema saying so."""


@dataclass(frozen=True, eq=False, slots=True)
class OpFacts:
    """Static facts of an operator, from its schema and name.

    Attributes:
        name: namespace, operator and overload, as in `aten.mm.default`.
        recorded: whether its results are to be recorded.
        unwritten: whether its results are memory that nothing was written to.
        each: whether it works on lists, element by element.
        written: arguments it writes to and does not return: position (-1 for keyword only) and name.
    """

    name: str
    recorded: bool
    unwritten: bool
    each: bool
    written: tuple[tuple[int, str], ...]


def facts_of(func: Any, globs: tuple[str, ...], *, views: bool) -> OpFacts:
    """Work out an operator's facts from its schema and name.

    Results in unwritten memory (`empty`) are never recorded, whatever the globs. A higher-order operator has no schema:
    it is recorded if its name is wanted, and counts as writing to no argument.

    Args:
        func: an overload, or a higher-order operator.
        globs: of operators to record, as `_is_wanted` reads them; all where empty.
        views: whether results that share their input's memory are recorded.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        name = f"higher_order.{getattr(func, '__name__', type(func).__name__)}"
        return OpFacts(name, _is_wanted(name, globs), unwritten=False, each=False, written=())
    name = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
    base = name.split(".")[1]
    unwritten = base in _UNWRITTEN
    aliases = [value.alias_info for value in schema.returns]
    view = base in _ALSO_VIEWS or any(alias is not None and not alias.is_write for alias in aliases)
    returned = set().union(*(alias.before_set for alias in aliases if alias is not None and alias.is_write))
    written = tuple(
        (-1 if argument.kwarg_only else position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.alias_info.before_set & returned
    )
    recorded = not unwritten and (views or not view) and _is_wanted(name, globs)
    return OpFacts(name, recorded, unwritten, base.startswith("_foreach_"), written)


def _is_wanted(name: str, globs: tuple[str, ...]) -> bool:
    """Whether any glob matches any form of an operator's name (`mm`, `aten.mm`, `mm.default`, `aten.mm.default`).

    True without globs.
    """
    if not globs:
        return True
    namespace, _, rest = name.partition(".")
    operator = rest.partition(".")[0]
    names = (name, f"{namespace}.{operator}", rest, operator)
    return any(fnmatch.fnmatchcase(form, glob) for glob in globs for form in names)


_PLAIN = frozenset({bool, int, float, str})
_NAMED = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
_MOST_ITEMS = 8


def plain_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """An operator's arguments by name, as `_plain_value` gives them, with defaults of those that were not given.

    Arguments for which that is None are left out. Of a higher-order operator, those by keyword alone.
    """
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    # what is left at its default is not handed on
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= zip((argument.name for argument in arguments), args, strict=False)
    plain = {name: _plain_value(value) for name, value in (given | (kwargs or {})).items()}
    return {name: value for name, value in plain.items() if value is not None}


def _plain_value(value: Any) -> Any:
    """A value as plain data: a boolean, number or text as it is, a dtype, device, layout or memory format as its text.

    A list or tuple of 1 to 8 booleans, numbers and texts becomes text too. None for anything else, and for an integer
    of 64 bits or more.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not int or value.bit_length() < 64 else None
    if kind in _NAMED:
        return str(value)
    if kind in (list, tuple) and 0 < len(value) <= _MOST_ITEMS and all(type(item) in _PLAIN for item in value):
        return str(list(value))
    return None
