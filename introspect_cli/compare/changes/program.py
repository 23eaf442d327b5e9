"""A version of the user's source files as statements: what each defines and uses, what it calls, where it stands.

Which line made two runs diverge is asked of code that is never run here. What can be had without running it is by name:
which function calls which, which statement gives a value its name, which constructor is given a keyword. That is wide
rather than exact: it may take one attribute for another of its name, and is there to rank changes, never to prove one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.alignment import DEFINITIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Key = tuple[str, str]
"""What a statement gives or takes: a name, and where it is one.

That is the function to which it is local, `:` for a name of all files, `.` for an attribute of anything, `=` for what
an option, a keyword or a field is called, a class for an attribute of its `self`.
"""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_SAME_EVERYWHERE = frozenset({"self", "cls", "args", "kwargs", "config", "cfg", "torch", "nn", "np"})
"""Names that stand in every other statement and lead everywhere; their attributes are followed by name."""
_OF_EVERY_CLASS = frozenset({"__init__", "forward", "step", "train", "eval", "to", "backward"})
"""Methods whose name does not say whose they are."""
_OPTIONS = frozenset(
    {"args", "config", "cfg", "opt", "opts", "options", "hparams", "flags", "conf", "settings", "params"}
)
"""Names of what holds options."""
_LOGS = frozenset(
    {
        "print",
        "log",
        "info",
        "debug",
        "warning",
        "add_scalar",
        "add_scalars",
        "log_dict",
        "set_description",
        "set_postfix",
    }
    | {"write", "flush", "perf_counter", "time", "format", "basicConfig", "getLogger", "savefig", "plot", "log_metrics"}
)


@dataclass(frozen=True)
class Statement:
    """One statement, a compound one without its body.

    Attributes:
        number: its place in the program.
        file: its file.
        scope: qualified name of the function or class that it stands in, or whose head it is; "" for the file.
        first: its first line.
        last: its last line.
        defines: what it gives.
        uses: what it takes.
        calls: last names of what it calls.
        around: numbers of the compound statements of its function that it stands in.
        node: its syntax.
    """

    number: int
    file: str
    scope: str
    first: int
    last: int
    defines: frozenset[Key]
    uses: frozenset[Key]
    calls: tuple[str, ...]
    around: tuple[int, ...]
    node: ast.stmt = field(compare=False, repr=False)

    @property
    def place(self) -> tuple[str, str]:
        """File and scope."""
        return self.file, self.scope

    @property
    def only_tells(self) -> bool:
        """Whether it prints or logs and gives nothing that others take."""
        calls = [node for node in ast.walk(self.node) if isinstance(node, ast.Call)]
        return isinstance(self.node, ast.Expr) and bool(calls) and last_name(calls[0].func) in _LOGS


class Program:
    """Statements of all files that can be parsed."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """Parse files."""
        self.statements: list[Statement] = []
        self.classes: dict[str, list[tuple[str, str, tuple[str, ...]]]] = defaultdict(list)
        """By simple name: file, qualified name, and simple names of the bases."""
        self.functions: dict[str, list[tuple[str, str]]] = defaultdict(list)
        """By simple name: file and qualified name."""
        self.parameters: dict[Key, tuple[str, str]] = {}
        for file, text in texts.items():
            try:
                tree = ast.parse(text)
            except _UNREADABLE:
                continue
            _Reader(self, file).body(tree.body, _Scope(file))

    @cached_property
    def by_place(self) -> dict[tuple[str, str], list[int]]:
        """Numbers of the statements of a function or class, by file and qualified name."""
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for statement in self.statements:
            found[statement.place].append(statement.number)
        return found

    @cached_property
    def definers(self) -> dict[Key, list[int]]:
        """Numbers of the statements that give something."""
        return self._index("defines")

    @cached_property
    def callers(self) -> dict[str, list[int]]:
        """Numbers of the statements that call something of a name."""
        found: dict[str, list[int]] = defaultdict(list)
        for statement in self.statements:
            for name in statement.calls:
                found[name].append(statement.number)
        return found

    def callers_of(self, place: tuple[str, str]) -> Iterator[int]:
        """Numbers of the statements that call a function by its name, or hand it on: `model.apply(init)`."""
        name = _called_as(place[1])
        if name and name not in _OF_EVERY_CLASS:
            yield from self.callers.get(name, ())
            yield from (number for key in self._uses_by_name.get(name, ()) for number in self.users[key])

    @cached_property
    def users(self) -> dict[Key, list[int]]:
        """Numbers of the statements that take something."""
        return self._index("uses")

    @cached_property
    def _uses_by_name(self) -> dict[str, list[Key]]:
        found: dict[str, list[Key]] = defaultdict(list)
        for key in self.users:
            found[key[1]].append(key)
        return found

    def _index(self, what: str) -> dict[Key, list[int]]:
        found: dict[Key, list[int]] = defaultdict(list)
        for statement in self.statements:
            for key in getattr(statement, what):
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


@dataclass(frozen=True)
class _Scope:
    """Where statements stand while they are read."""

    file: str
    name: str = ""
    prefix: str = ""
    local: tuple[tuple[str, frozenset[str]], ...] = ()  # of the functions around, the innermost first
    owner: str = ""  # the class around

    def key(self, name: str) -> Key:
        for function, names in self.local:
            if name in names:
                return f"{self.file}:{function}", name
        return ":", name


class _Reader:
    """Reads one file into a program."""

    def __init__(self, program: Program, file: str) -> None:
        self.program, self.file = program, file

    def body(self, nodes: list[ast.stmt], scope: _Scope, around: tuple[int, ...] = ()) -> None:
        for node in nodes:
            self.statement(node, scope, around)

    def statement(self, node: ast.stmt, scope: _Scope, around: tuple[int, ...]) -> None:
        if isinstance(node, DEFINITIONS):
            self.definition(node, scope)
            return
        number = self.add(node, scope, around)
        for block in ("body", "orelse", "finalbody"):
            inner = getattr(node, block, None)
            if inner:
                self.body(inner, scope, (*around, number))
        for handler in getattr(node, "handlers", ()):
            self.body(handler.body, scope, (*around, number))
        for case in getattr(node, "cases", ()):
            self.body(case.body, scope, (*around, number))

    def definition(self, node: ast.stmt, scope: _Scope) -> None:
        assert isinstance(node, DEFINITIONS)
        qualified = scope.prefix + node.name
        if isinstance(node, ast.ClassDef):
            bases = tuple(name for base in node.bases if (name := last_name(base)))
            self.program.classes[node.name].append((self.file, qualified, bases))
            inner = _Scope(self.file, qualified, f"{qualified}.", scope.local, f"{self.file}:{qualified}.self")
            self.add(node, inner, (), scope)
        else:
            self.program.functions[node.name].append((self.file, qualified))
            if node.name == "__init__":
                self.program.functions[qualified.split(".")[-2]].append((self.file, qualified))
            local = (qualified, _assigned(node))
            inner = _Scope(self.file, qualified, f"{qualified}.<locals>.", (local, *scope.local), scope.owner)
            self.add(node, inner, (), scope)
        self.body(node.body, inner)

    def add(self, node: ast.stmt, scope: _Scope, around: tuple[int, ...], outer: _Scope | None = None) -> int:
        number = len(self.program.statements)
        inner_lines = [inner.lineno for block in ("body",) for inner in getattr(node, block, [])[:1]]
        decorators = [d.lineno for d in getattr(node, "decorator_list", ())]
        first = min([node.lineno, *decorators])
        last = max(min(inner_lines) - 1, node.lineno) if inner_lines else node.end_lineno or node.lineno
        found = _Names(scope)
        for part in _direct_parts(node):
            found.visit(part)
        if outer is not None and isinstance(node, FUNCTIONS):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            every += [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
            for argument in every:
                key = scope.key(argument.arg)
                found.defines.add(key)
                self.program.parameters[key] = (self.file, scope.name)
        if outer is not None:
            found.defines.add(outer.key(node.name))  # type: ignore[attr-defined] # a definition
        self.program.statements.append(
            Statement(
                number,
                self.file,
                scope.name,
                first,
                last,
                frozenset(found.defines),
                frozenset(found.uses),
                tuple(dict.fromkeys(found.calls)),
                around,
                node,
            )
        )
        return number


class _Names(ast.NodeVisitor):
    """What an expression or a simple statement gives, takes and calls."""

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self.defines: set[Key] = set()
        self.uses: set[Key] = set()
        self.calls: list[str] = []

    def visit_Name(self, node: ast.Name) -> None:
        (self.uses if isinstance(node.ctx, ast.Load) else self.defines).add(self.scope.key(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        own = self.scope.owner if of == "self" else ""
        if not isinstance(node.ctx, ast.Load):
            self.defines |= {(".", node.attr), *([(own, node.attr)] if own else [])}
        elif own:
            self.uses.add((own, node.attr))
        else:
            self.uses |= {("=", node.attr), *([] if of in _OPTIONS else [(".", node.attr)])}
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            (self.uses if isinstance(node.ctx, ast.Load) else self.defines).add(("=", node.slice.value))
        if not isinstance(node.ctx, ast.Load):
            self._changed(node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._changed(node.target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not self.scope.local and isinstance(node.target, ast.Name):
            self.defines.add(("=", node.target.id))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and self.scope.name and not self.scope.prefix.endswith("<locals>."):
                self.defines |= {("=", target.id), (self.scope.owner, target.id)}  # of a class
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            self._changed(node.value.func.value)  # `rows.append(x)` changes `rows`
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = last_name(node.func)
        if name:
            self.calls.append(name)
        if name == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    self.defines.add(("=", argument.value.lstrip("-").replace("-", "_")))
        for keyword in node.keywords:
            if keyword.arg is not None:
                self.defines.add(("=", keyword.arg))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.defines.add(("=", key.value))
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def _changed(self, node: ast.expr) -> None:
        """What is changed in place is given anew."""
        while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
            if isinstance(node, ast.Attribute):
                self.defines.add((".", node.attr))
                if isinstance(node.value, ast.Name) and node.value.id == "self" and self.scope.owner:
                    self.defines.add((self.scope.owner, node.attr))
        if isinstance(node, ast.Name):
            self.defines.add(self.scope.key(node.id))


def _direct_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What of a statement is its own: all of a simple one, the head of a compound one."""
    if not hasattr(node, "body"):
        yield node
        return
    for name, value in ast.iter_fields(node):
        if name in {"body", "orelse", "finalbody", "handlers", "cases"}:
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part


def _assigned(node: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Names that are local to a function."""
    found = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    elsewhere: set[str] = set()
    pending: list[ast.AST] = list(node.body)
    while pending:
        current = pending.pop()
        if isinstance(current, (ast.Global, ast.Nonlocal)):
            elsewhere |= set(current.names)
        if isinstance(current, DEFINITIONS):
            found.add(current.name)
            continue
        if isinstance(current, ast.Name) and not isinstance(current.ctx, ast.Load):
            found.add(current.id)
        pending += ast.iter_child_nodes(current)
    return frozenset(found - elsewhere)


def last_name(node: ast.expr) -> str:
    """`AdamW` of `torch.optim.AdamW`; "" of what has no name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
