"""A version of the user's source files as statements: what each defines and uses, what it calls, where it stands.

Which line made two runs diverge is asked of code that is never run here. What can be had without running it is by name:
which function calls which, which statement gives a value its name, which constructor is given a keyword. That is wide
rather than exact: it may take one attribute for another of its name, and is there to rank changes, never to prove one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

from introspect_cli.compare.changes.alignment import FUNCTIONS
from introspect_cli.compare.changes.parsed import Key, Parsed, Statement, last_name

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Iterator

T = TypeVar("T")

Definition = tuple[str, str]
"""File and qualified name of a function or class."""
Depths = dict[Statement, int]
"""Statements, each with how many calls or values lie between it and what was asked for."""

_SAME_EVERYWHERE = frozenset({"self", "cls", "args", "kwargs", "config", "cfg", "torch", "nn", "np"})
"""Names that stand in every other statement and lead everywhere; their attributes are followed by name."""
_OF_EVERY_CLASS = frozenset({"__init__", "forward", "step", "train", "eval", "to", "backward"})
"""Methods whose name does not say whose they are."""


class Program(Parsed):
    """A version's statements, and what leads from one to another."""

    @cached_property
    def by_place(self) -> dict[Definition, list[Statement]]:
        """The statements of a function or class."""
        return self._by(lambda statement: [statement.place])

    @cached_property
    def definers(self) -> dict[Key, list[Statement]]:
        """The statements that give something."""
        return self._by(lambda statement: statement.defines)

    @cached_property
    def callers(self) -> dict[str, list[Statement]]:
        """The statements that call something of a name."""
        return self._by(lambda statement: statement.calls)

    @cached_property
    def takers(self) -> dict[str, list[Statement]]:
        """The statements that take something of a name."""
        return self._by(lambda statement: {name for _, name in statement.uses})

    def _by(self, keys: Callable[[Statement], Iterable[T]]) -> dict[T, list[Statement]]:
        index: dict[T, list[Statement]] = defaultdict(list)
        for statement in self.statements:
            for key in keys(statement):
                index[key].append(statement)
        return index

    def callers_of(self, place: Definition) -> Iterator[Statement]:
        """The statements that call a function by its name, or hand it on: `model.apply(init)`."""
        name = _called_as(place[1])
        if name and name not in _OF_EVERY_CLASS:
            yield from self.callers.get(name, ())
            yield from self.takers.get(name, ())

    def at(self, file: str, first: int, last: int) -> set[Statement]:
        """The statements that stand on lines of a file."""
        return {
            statement
            for statement in self.statements
            if statement.file == file and statement.first <= last and statement.last >= first
        }

    def calling(self, names: Iterable[str]) -> set[Statement]:
        """The statements that call something of one of these names."""
        return {statement for name in names for statement in self.callers.get(name, ())}

    def calling_like(self, pattern: re.Pattern[str]) -> set[Statement]:
        """The statements that call something in whose name a pattern is found."""
        return self.calling(filter(pattern.search, self.callers))

    def methods(self, class_name: str, *names: str) -> set[Definition]:
        """A class's methods, those of its bases in these files included."""
        methods, seen, pending = set(), set(), [class_name]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for file, qualified, bases in self.classes.get(name, ()):
                pending += bases
                places = {(file, f"{qualified}.{method}") for method in names}
                methods |= places & self.by_place.keys()
        return methods

    def gives(self, name: str, qualified: str) -> bool:
        """Whether every call that these files show of a function or class names a parameter or field."""
        calls = [
            (statement, node)
            for statement in self.callers.get(_called_as(qualified), ())
            for node in ast.walk(statement.node)
            if isinstance(node, ast.Call) and last_name(node.func) == _called_as(qualified)
        ]
        return bool(calls) and all(name in self._keywords(*call) for call in calls)

    def _keywords(self, statement: Statement, call: ast.Call) -> set[str]:
        """What a call names, those of a dictionary `**options` included where all that gives it says which it has."""
        keywords = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        for options in (keyword.value for keyword in call.keywords if keyword.arg is None):
            keys = {key for key in statement.uses if isinstance(options, ast.Name) and key[1] == options.id}
            given = [getattr(definer.node, "value", None) for key in keys for definer in self.definers[key]]
            if given:
                keywords |= set.intersection(*map(_entries, given))
        return keywords

    def is_conditional(self, place: Definition) -> bool:
        """Whether all calls of a function that these files show depend on a condition, so that it may not have run."""
        calls = [caller for caller in self.callers.get(place[1].rpartition(".")[2], ()) if caller.place != place]
        return bool(calls) and all(any(isinstance(head.node, ast.If) for head in call.around) for call in calls)

    def reached(self, places: Iterable[Definition]) -> dict[Definition, int]:
        """These functions and those that they call, and so on, with how many calls lie between."""
        depths: dict[Definition, int] = {}
        edge, depth = list(places), 0
        while edge:
            fresh = [place for place in dict.fromkeys(edge) if place not in depths]
            depths.update(dict.fromkeys(fresh, depth))
            edge = [called for place in fresh for called in self._called_by(place)]
            depth += 1
        return depths

    def _called_by(self, place: Definition) -> Iterator[Definition]:
        for statement in self.by_place.get(place, ()):
            handed_on = {key[1] for key in statement.uses if key[0] not in {".", "="} and self._is_function(key)}
            for name in dict.fromkeys((*statement.calls, *sorted(handed_on))):  # `criterion = cosine`
                yield from self.called(name, place)
                if name == "apply":  # of an autograd function
                    for _, used in statement.uses:
                        yield from self.methods(used, "forward", "backward", "setup_context")
        yield from (other for other in self.by_place if other[0] == place[0] and other[1].startswith(f"{place[1]}.<"))

    def _is_function(self, key: Key) -> bool:
        return all(isinstance(definer.node, FUNCTIONS) for definer in self.definers.get(key, ()))

    def called(self, name: str, by: Definition) -> list[Definition]:
        """Functions that a call of a name in a function may mean: those of its class or file before any other."""
        if name in _OF_EVERY_CLASS:
            return []
        places = self.functions.get(name, [])
        class_name = by[1].rpartition(".")[0]
        same_class = [place for place in places if class_name and place == (by[0], f"{class_name}.{name}")]
        same_file = [place for place in places if place[0] == by[0]]
        return same_class or same_file or (places if len(places) <= 3 else [])

    def within(self, places: Iterable[Definition]) -> Depths:
        """All statements of these functions and of those that they call, with how many calls lie between."""
        reached = self.reached(places)
        return {statement: depth for place, depth in reached.items() for statement in self.by_place.get(place, ())}

    def behind(self, seeds: Iterable[Statement], stop: frozenset[str] = frozenset(), most: int = 6) -> Depths:
        """Statements whose values reach these, with how many statements lie between; the seeds come first, with 0.

        Names to stop at, such as the model's, are not followed.
        """
        depths = dict.fromkeys(seeds, 0)
        edge = list(depths)
        for depth in range(1, most + 1):
            reached = dict.fromkeys(giver for statement in edge for giver in self._gives(statement, stop))
            edge = [giver for giver in reached if giver not in depths]
            depths.update(dict.fromkeys(edge, depth))
        return depths

    def _gives(self, statement: Statement, stop: frozenset[str]) -> Iterator[Statement]:
        """What gives a statement its values: definitions, returns of what it calls, callers, and heads around it."""
        yield from statement.around
        for key in statement.uses:
            if key[1] in stop or (key[1] in _SAME_EVERYWHERE and key[0] not in {".", "="}):
                continue
            definers = self.definers.get(key, ())
            if not definers and key[0].endswith(".self"):  # of a base class
                definers = self.definers.get((".", key[1]), ())
            yield from definers
            if key in self.parameters:
                yield from self.callers.get(_called_as(self.parameters[key][1]), ())
        for name in statement.calls:
            for place in self.called(name, statement.place):
                yield from (inner for inner in self.by_place[place] if isinstance(inner.node, (ast.Return, *FUNCTIONS)))

    def forwards(self) -> Depths:
        """The forward of every module."""
        return self.within({place for name in self.classes for place in self.methods(name, "forward")})

    def loop(self) -> set[Statement]:
        """What a step runs in the function that calls `backward`: the loops around it."""
        inside: set[Statement] = set()
        for statements in self.by_place.values():
            loops = {
                statement.around[0] for statement in statements if "backward" in statement.calls and statement.around
            }
            inside |= {
                statement for statement in statements if statement in loops or loops.intersection(statement.around)
            }
        return inside

    def in_steps(self) -> set[Statement]:
        """What a step runs: those loops, and the functions that they call, without the forwards of modules."""
        loop = self.loop()
        places = {place for inside in loop for name in inside.calls for place in self.called(name, inside.place)}
        return loop | (self.within(places).keys() - self.forwards().keys())

    def unmentioned(self, scripts: Collection[str]) -> set[Statement]:
        """What none of these scripts runs, by its names.

        That is functions that nothing mentions which may run, and what other files do as scripts. Methods and what is
        decorated are called in ways that names do not show.
        """
        alone = {each for each in self.statements if PurePath(each.file).name not in scripts and _as_script(each)}
        heads = {each.place for each in self.statements if getattr(each.node, "decorator_list", ())}
        left = {
            each
            for each in self.statements
            if each.scope.partition(".")[0] in self.functions and each.place not in heads and each not in alone
        }
        edge = {*self.statements} - left - alone
        while edge:
            names = {name for each in edge for name in (*each.calls, *(name for _, name in each.uses))}
            edge = {each for each in left if each.scope.partition(".")[0] in names}
            left -= edge
        return left | alone

    def up_to(self, call: str, places: set[Definition]) -> Depths:
        """Of a function and what it calls, what does not come after its one call of a name."""
        depths = self.within(places)
        inside = [statement for place in places for statement in self.by_place[place]]
        calls = [inner for inner in inside if call and call in inner.calls and not inner.around]
        if len(calls) != 1 or len(places) != 1:
            return depths
        after = {inner for inner in inside if inner.first > calls[0].last}
        return {inner: depth for inner, depth in depths.items() if inner not in after}

    def handed(self, names: frozenset[str]) -> frozenset[str]:
        """What functions call these that they are handed: `D` of `def penalty(D, real)` for `penalty(critic, x)`."""
        taken: set[str] = set()
        for statement in {taker for name in names for taker in self.takers.get(name, ())}:
            for call in ast.walk(statement.node):
                if not isinstance(call, ast.Call):
                    continue
                for place in self.called(last_name(call.func), statement.place):
                    heads = (inner.node for inner in self.by_place[place] if isinstance(inner.node, FUNCTIONS))
                    for head in heads:
                        taken |= {name for name, value in _bound(head, call) if last_name(value) in names}
        return frozenset(taken)

    def given(self, names: frozenset[str]) -> frozenset[str]:
        """Names of what is given to calls of these."""
        used: set[str] = set()
        for statement in self.calling(names):
            for call in ast.walk(statement.node):
                if isinstance(call, ast.Call) and last_name(call.func) in names:
                    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
                    used |= {name.id for part in arguments for name in ast.walk(part) if isinstance(name, ast.Name)}
        return frozenset(used - names)


def _as_script(statement: Statement) -> bool:
    """Whether it stands behind `if __name__ == "__main__"`."""
    heads = (head.node.test for head in (*statement.around, statement) if isinstance(head.node, ast.If))
    return any("__name__" in {name.id for name in ast.walk(test) if isinstance(name, ast.Name)} for test in heads)


def _bound(head: ast.AST, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The parameters of a function and what a call gives each."""
    arguments = getattr(head, "args", None)
    if isinstance(arguments, ast.arguments):
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        yield from zip(names[names[:1] in (["self"], ["cls"]) :], call.args, strict=False)
        yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)


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
