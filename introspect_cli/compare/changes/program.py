"""A version of the user's source files as statements: what each defines and uses, what it calls, where it stands.

Which line made two runs diverge is asked of code that is never run here. What can be had without running it is by name:
which function calls which, which statement gives a value its name, which constructor is given a keyword. That is wide
rather than exact: it may take one attribute for another of its name, and is there to rank changes, never to prove one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from introspect_cli.compare.changes.parsed import FUNCTIONS, Key, Parsed, Statement, last_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

_SAME_EVERYWHERE = frozenset({"self", "cls", "args", "kwargs", "config", "cfg", "torch", "nn", "np"})
"""Names that stand in every other statement and lead everywhere; their attributes are followed by name."""
_OF_EVERY_CLASS = frozenset({"__init__", "forward", "step", "train", "eval", "to", "backward"})
"""Methods whose name does not say whose they are."""


class Program(Parsed):
    """A version's statements, and what leads from one to another."""

    @cached_property
    def by_place(self) -> dict[tuple[str, str], list[int]]:
        """Numbers of the statements of a function or class, by file and qualified name."""
        return self._by(lambda statement: [statement.place])

    @cached_property
    def definers(self) -> dict[Key, list[int]]:
        """Numbers of the statements that give something."""
        return self._by(lambda statement: statement.defines)

    @cached_property
    def callers(self) -> dict[str, list[int]]:
        """Numbers of the statements that call something of a name."""
        return self._by(lambda statement: statement.calls)

    @cached_property
    def takers(self) -> dict[str, list[int]]:
        """Numbers of the statements that take something of a name."""
        return self._by(lambda statement: {name for _, name in statement.uses})

    def callers_of(self, place: tuple[str, str]) -> Iterator[int]:
        """Numbers of the statements that call a function by its name, or hand it on: `model.apply(init)`."""
        name = _called_as(place[1])
        if name and name not in _OF_EVERY_CLASS:
            yield from self.callers.get(name, ())
            yield from self.takers.get(name, ())

    def _by(self, keys: Callable[[Statement], Iterable[T]]) -> dict[T, list[int]]:
        found: dict[T, list[int]] = defaultdict(list)
        for statement in self.statements:
            for key in keys(statement):
                found[key].append(statement.number)
        return found

    def at(self, file: str, first: int, last: int) -> set[int]:
        """Numbers of the statements that stand on lines of a file."""
        return {s.number for s in self.statements if s.file == file and s.first <= last and s.last >= first}

    def calling(self, names: Iterable[str]) -> set[int]:
        """Numbers of the statements that call something of one of these names."""
        return {number for name in names for number in self.callers.get(name, ())}

    def methods(self, class_name: str, *names: str) -> set[tuple[str, str]]:
        """Places of a class's methods, those of its bases in these files included."""
        found, seen, pending = set(), set(), [class_name]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for file, qualified, bases in self.classes.get(name, ()):
                pending += bases
                found |= {
                    (file, f"{qualified}.{method}")
                    for method in names
                    if (file, f"{qualified}.{method}") in self.by_place
                }
        return found

    def gives(self, name: str, qualified: str) -> bool:
        """Whether every call that these files show of a function or class names a parameter or field."""
        calls = [
            (self.statements[number], node)
            for number in self.callers.get(_called_as(qualified), ())
            for node in ast.walk(self.statements[number].node)
            if isinstance(node, ast.Call) and last_name(node.func) == _called_as(qualified)
        ]
        return bool(calls) and all(name in self._keywords(*call) for call in calls)

    def _keywords(self, statement: Statement, call: ast.Call) -> set[str]:
        """What a call names, those of a dictionary `**options` included where all that gives it says which it has."""
        found = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        for options in (keyword.value for keyword in call.keywords if keyword.arg is None):
            keys = {key for key in statement.uses if isinstance(options, ast.Name) and key[1] == options.id}
            given = [
                getattr(self.statements[number].node, "value", None) for key in keys for number in self.definers[key]
            ]
            if given:
                found |= set.intersection(*(_entries(value) for value in given))
        return found

    def is_conditional(self, place: tuple[str, str]) -> bool:
        """Whether all calls of a function that these files show depend on a condition, so that it may not have run."""
        name = place[1].rpartition(".")[2]
        calls = [self.statements[n] for n in self.callers.get(name, ()) if self.statements[n].place != place]
        heads = ([self.statements[number].node for number in call.around] for call in calls)
        return bool(calls) and all(any(isinstance(node, ast.If) for node in around) for around in heads)

    def reached(self, places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """These functions and those that they call, and so on, with how many calls lie between."""
        found: dict[tuple[str, str], int] = {}
        edge, depth = list(places), 0
        while edge:
            fresh = [place for place in dict.fromkeys(edge) if place not in found]
            found.update(dict.fromkeys(fresh, depth))
            edge = [called for place in fresh for called in self._called_by(place)]
            depth += 1
        return found

    def _called_by(self, place: tuple[str, str]) -> Iterator[tuple[str, str]]:
        for number in self.by_place.get(place, ()):
            for name in self.statements[number].calls:
                yield from self.called(name, place)
                if name == "apply":  # of an autograd function
                    for _, used in self.statements[number].uses:
                        yield from self.methods(used, "forward", "backward", "setup_context")
        yield from (other for other in self.by_place if other[0] == place[0] and other[1].startswith(f"{place[1]}.<"))

    def called(self, name: str, by: tuple[str, str]) -> list[tuple[str, str]]:
        """Functions that a call of a name in a function may mean: those of its class or file before any other."""
        if name in _OF_EVERY_CLASS:
            return []
        found = self.functions.get(name, [])
        own_class = by[1].rpartition(".")[0]
        same_class = [place for place in found if own_class and place == (by[0], f"{own_class}.{name}")]
        same_file = [place for place in found if place[0] == by[0]]
        return same_class or same_file or (found if len(found) <= 3 else [])

    def within(self, places: Iterable[tuple[str, str]]) -> dict[int, int]:
        """Numbers of all statements of these functions and of those that they call, with how many calls lie between."""
        reached = self.reached(places)
        return {number: depth for place, depth in reached.items() for number in self.by_place.get(place, ())}

    def behind(self, seeds: Iterable[int], stop: frozenset[str] = frozenset(), most: int = 6) -> dict[int, int]:
        """Statements whose values reach these, by number with how many statements lie between.

        Args:
            seeds: numbers of statements; they come first, with 0.
            stop: names that are not followed, such as the model's.
            most: how far to go.
        """
        found = dict.fromkeys(seeds, 0)
        edge = list(found)
        for depth in range(1, most + 1):
            reached = {other for number in edge for other in self._gives(self.statements[number], stop)}
            edge = [number for number in reached if number not in found]
            found.update(dict.fromkeys(edge, depth))
        return found

    def _gives(self, statement: Statement, stop: frozenset[str]) -> Iterator[int]:
        """What gives a statement its values: definitions, returns of what it calls, callers, and heads around it."""
        yield from statement.around
        for key in statement.uses:
            if key[1] in stop or (key[1] in _SAME_EVERYWHERE and key[0] not in {".", "="}):
                continue
            found = self.definers.get(key, ())
            if not found and key[0].endswith(".self"):  # of a base class
                found = self.definers.get((".", key[1]), ())
            yield from found
            if key in self.parameters:
                yield from self.callers.get(_called_as(self.parameters[key][1]), ())
        for name in statement.calls:
            for place in self.called(name, statement.place):
                for number in self.by_place[place]:
                    if isinstance(self.statements[number].node, (ast.Return, *FUNCTIONS)):
                        yield number

    def forwards(self) -> dict[int, int]:
        """The forward of every module."""
        return self.within({place for name in self.classes for place in self.methods(name, "forward")})

    def loop(self) -> set[int]:
        """What a step runs in the function that calls `backward`: the loops around it."""
        found: set[int] = set()
        for numbers in self.by_place.values():
            own = [self.statements[number] for number in numbers]
            loops = [one.around[0] for one in own if "backward" in one.calls and one.around]
            found |= {one.number for one in own if one.number in loops or set(one.around) & set(loops)}
        return found

    def up_to(self, call: str, places: set[tuple[str, str]]) -> dict[int, int]:
        """Of a function and what it calls, what does not come after its one call of a name."""
        found = self.within(places)
        own = [self.statements[number] for place in places for number in self.by_place[place]]
        calls = [one for one in own if call and call in one.calls and not one.around]
        if len(calls) != 1 or len(places) != 1:
            return found
        after = {one.number for one in own if one.first > calls[0].last}
        return {number: depth for number, depth in found.items() if number not in after}

    def given(self, names: frozenset[str]) -> frozenset[str]:
        """Names of what is given to calls of these."""
        used: set[str] = set()
        for number in self.calling(names):
            for call in ast.walk(self.statements[number].node):
                if isinstance(call, ast.Call) and last_name(call.func) in names:
                    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
                    used |= {own.id for part in arguments for own in ast.walk(part) if isinstance(own, ast.Name)}
        return frozenset(used - names)


def _entries(value: ast.expr | None) -> set[str]:
    """Keys of a dictionary that is written down."""
    if isinstance(value, ast.Dict):
        return {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
    if isinstance(value, ast.Call) and last_name(value.func) == "dict":
        return {keyword.arg for keyword in value.keywords if keyword.arg is not None}
    return set()


def _called_as(qualified: str) -> str:
    """By which name code calls a function: a class by its own, not by that of its constructor."""
    around, _, name = qualified.rpartition(".")
    return around.rpartition(".")[2] if name == "__init__" else name
