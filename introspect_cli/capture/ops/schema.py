"""What an operator's schema says about its results, looked up once an operator.

Whether a result is a view, is memory that was just written in place, or is not yet written at all (`empty`) is in the
schema or the name, never in the values; asking for it at every call would cost more than the call.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """What is known of an operator beforehand.

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


class Operators:
    """The facts of every operator met so far."""

    def __init__(self, globs: tuple[str, ...], *, views: bool) -> None:
        self._globs = globs
        self._views = views
        self.known: dict[int, tuple[Callable[..., Any], OpFacts]] = {}

    def __call__(self, func: Callable[..., Any]) -> OpFacts:
        """The facts of an operator (an overload, or a higher-order operator, which has no schema)."""
        known = self.known.get(id(func))
        if known is None:
            known = self.known[id(func)] = (func, self._learn(func))
        return known[1]

    def _learn(self, func: Any) -> OpFacts:
        schema = getattr(func, "_schema", None)
        if schema is None:
            name = f"higher_order.{getattr(func, '__name__', type(func).__name__)}"
            return OpFacts(name, self._wanted(name), unwritten=False, each=False, written=())
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
        recorded = not unwritten and (self._views or not view) and self._wanted(name)
        return OpFacts(name, recorded, unwritten, base.startswith("_foreach_"), written)

    def _wanted(self, name: str) -> bool:
        """A glob names an operator with or without namespace and overload: `mm`, `aten.mm`, `aten.mm.default`."""
        if not self._globs:
            return True
        namespace, _, rest = name.partition(".")
        operator = rest.partition(".")[0]
        names = (name, f"{namespace}.{operator}", rest, operator)
        return any(fnmatch.fnmatchcase(form, glob) for glob in self._globs for form in names)
