"""The statements of one version of the source, and how names lead from one to another.

Names lead to the functions that a statement calls, and to what gives it its values.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias

from introspect_cli.compare.changes.statements import BLOCKS, FUNCTIONS, Definition, Statement, statements_of, tree_of
from introspect_cli.compare.names import ancestors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping


Depths: TypeAlias = dict[Statement, int]
"""Statements, each with how many calls or values lie between it and what was asked for."""


def last_name(node: ast.AST) -> str:
    """Last part of a name or attribute, subscripts dropped: `AdamW` of `torch.optim.AdamW`; "" for other nodes."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_LOGS = re.compile(
    r"print|log|info|debug|warning|add_scalars?|log_dict|log_metrics|plot|write|flush|perf_counter|time|basicConfig"
    r"|savefig|set_description|set_postfix"
)
_EVERYWHERE = frozenset(("self", "cls", "args", "kwargs", "config", "cfg", "torch", "nn", "np", "F"))
"""Names that stand in every other statement and lead everywhere."""
_NAMING = frozenset(("add_argument", "register_buffer", "register_parameter", "add_module", "setattr"))
"""What gives a value to the name that a text among its arguments is."""
OF_EVERY_CLASS = frozenset(("__init__", "forward", "step", "train", "eval", "to", "backward"))
"""Methods whose name does not say whose they are."""


def _string_constants(nodes: Iterable[ast.AST | None]) -> Iterator[str]:
    """Values of the nodes that are constant texts."""
    return (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _nodes_of(statement: ast.stmt) -> Iterator[ast.AST]:
    """Nodes of a statement without its blocks: of a compound one, those of its head, without the statement itself."""
    fields = [value for name, value in ast.iter_fields(statement) if name not in BLOCKS]
    nodes = [node for value in fields for node in (value if isinstance(value, list) else [value])]
    parts = [node for node in nodes if isinstance(node, ast.AST)] if hasattr(statement, "body") else [statement]
    return (each for part in parts for each in ast.walk(part))


def _bound_names(function: ast.AST) -> set[str]:
    """Names that a function binds, parameters included, and those of functions inside it."""
    nodes = [*ast.walk(function)]
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}  # type: ignore[attr-defined] # a function
    return bound - {name for n in nodes if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}


def can_matter(statement: Statement) -> bool:
    """Whether a statement can change a number.

    False for `pass`, an assertion, assignments to dunder names alone, and a call in `_LOGS` that is a statement.
    """
    node, gives = statement.node, statement.gives
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return not _LOGS.fullmatch(last_name(node.value.func))
    if gives and all(name.startswith("__") for name in gives):  # `__version__`
        return False
    return not isinstance(node, (ast.Pass, ast.Assert))


class Code:
    """All statements of one version of the source, indexed by the names that they give, take and call."""

    def __init__(self, texts: Mapping[str, str], ran: Collection[tuple[str, str]] = (), script: str = "") -> None:
        """Parse and index all files at once, by name; files that Python cannot parse are left out.

        So are classes of the name of one that `ran`, given as (name, file), in other files, and what only runs as
        `__main__` in files that are not named like the script, as its path ends; in none where that is "". Where a file
        is "", it is that which calls of the class mean.
        """
        self.statements: list[Statement] = []
        self.classes: dict[str, list[tuple[str, str, tuple[str, ...]]]] = defaultdict(list)
        """By simple name: file, qualified name, and simple names of the bases."""
        self.functions: dict[str, list[Definition]] = defaultdict(list)
        """By the name that calls them."""
        self.called_as: dict[str, str] = {}
        """By parameter, what calls its function."""
        self.by_definition: dict[Definition, list[Statement]] = defaultdict(list)
        self.givers: dict[str, list[Statement]] = defaultdict(list)
        self.callers: dict[str, list[Statement]] = defaultdict(list)
        self.takers: dict[str, list[Statement]] = defaultdict(list)
        self._bound = cache(_bound_names)
        trees = {file: tree for file, text in texts.items() if (tree := tree_of(text)) is not None}
        statements = [each for file, tree in trees.items() for each in statements_of(file, tree.body)]
        self._files = {file: number for number, file in enumerate(trees)}
        self._imported: dict[tuple[str, str], tuple[str, str]] = {}
        """By file and name in it: path of the module that it is from, and its name there."""
        for statement in statements:
            self._read_names(statement)
        classes = {s.place: s.node for s in statements if isinstance(s.node, ast.ClassDef)}
        defined = {(node.name, file) for (file, _), node in classes.items()}
        called = {name for name, file in ran if not file}
        meant = {(name, self._home(s.file, name)) for s in statements for name in s.calls & called}
        ran = {*ran, *meant}
        bases = {last_name(base) for node in classes.values() for base in node.bases}
        known = {name for name, _ in defined & ran} - bases - {name for name, _ in meant - defined}
        twins = {place for place, node in classes.items() if node.name in known and (node.name, place[0]) not in ran}
        others = {file for file in trees if script and PurePath(file).name != PurePath(script).name}
        for statement in statements:
            is_twin = any((statement.file, name) in twins for name in (statement.scope, *ancestors(statement.scope)))
            as_main = statement.file in others and any("__name__" in around.takes for around in statement.around)
            if not is_twin and not as_main:
                self._add(statement)

    def _add(self, statement: Statement) -> None:
        """Index a statement, and the function or class whose head it is."""
        node = statement.node
        self.statements.append(statement)
        self.by_definition[statement.place].append(statement)
        read = (self.givers, statement.gives), (self.takers, statement.takes), (self.callers, statement.calls)
        for index, names in read:
            for name in names:
                index[name].append(statement)
        if isinstance(node, ast.ClassDef):
            self.classes[node.name].append((*statement.place, tuple(map(last_name, node.bases))))
        if isinstance(node, FUNCTIONS):
            owner = statement.scope.rpartition(".")[0].rpartition(".")[2]
            called = owner if node.name in {"__init__", "__call__"} else node.name
            self.functions[called].append(statement.place)
            self.called_as.update(dict.fromkeys(statement.gives, called))

    def _read_names(self, statement: Statement) -> None:
        """Fill in what a statement gives, takes and calls.

        A name that a function around binds is written `number:function:name`, with the number of its file. A call that
        is a statement also gives what it is a method of and what it is handed, as it may change them; what stores a
        part also gives what that is a part of.
        """
        node, gives, takes, calls = statement.node, statement.gives, statement.takes, statement.calls
        if isinstance(node, ast.ImportFrom):
            folder = statement.file.split("/")[: -node.level] if node.level else []
            path = "/".join([*folder, *filter(None, (node.module or "").split("."))])
            names = {(statement.file, each.asname or each.name): (path, each.name) for each in node.names}
            self._imported |= names

        def key(name: str) -> str:
            """The name, with its file and function in front if it is local."""
            inside = (of for of, node in statement.functions if name in self._bound(node))
            return next((f"{self._files[statement.file]}:{of}:{name}" for of in inside), name)

        changed: list[ast.expr] = []
        for each in _nodes_of(node):
            side = takes if isinstance(getattr(each, "ctx", None), ast.Load) else gives
            if isinstance(each, ast.Name):
                side.add(key(each.id))
            elif isinstance(each, ast.Attribute):
                side.add(each.attr)
            elif isinstance(each, ast.Subscript):
                side.update(_string_constants([each.slice]))
                changed += [each.value] if side is gives else []
            elif isinstance(each, ast.arg):
                gives.add(key(each.arg))
            elif isinstance(each, ast.keyword) and each.arg:
                gives.add(each.arg)
            elif isinstance(each, ast.Dict):
                gives.update(_string_constants(each.keys))
            elif isinstance(each, ast.Call):
                calls.add(last_name(each.func))
                if isinstance(each.func, ast.Attribute) and getattr(each.func.value, "id", "") == "self":
                    calls.add(f"self.{each.func.attr}")
                if last_name(each.func) in _NAMING:
                    gives.update(text.lstrip("-").replace("-", "_") for text in _string_constants(each.args))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            changed += [each for each in node.value.args if isinstance(each, ast.Name)]
            changed += [node.value.func.value] if isinstance(node.value.func, ast.Attribute) else []
        for part in (part for each in changed for part in ast.walk(each)):
            gives.update([part.attr] if isinstance(part, ast.Attribute) else [])
            gives.update([key(part.id)] if isinstance(part, ast.Name) else [])
        takes -= _EVERYWHERE

    def statements_at(self, file: str, first: int, last: int) -> set[Statement]:
        """Statements of a file that have any line from `first` to `last`, both included."""
        return {s for s in self.statements if s.file == file and s.lines[0] <= last and s.lines[1] >= first}

    def callers_of(self, names: Iterable[str]) -> set[Statement]:
        """Statements that call any of these last names."""
        return {statement for name in names for statement in self.callers.get(name, ())}

    def kinds_of(self, class_name: str) -> set[str]:
        """Simple names of a class and of all that it inherits from, as far as these files tell.

        Classes of one simple name in several files are taken together.
        """
        names, pending = set[str](), [class_name]
        while pending:
            name = pending.pop()
            if name not in names:
                names.add(name)
                pending += [base for _, _, bases in self.classes.get(name, ()) for base in bases]
        return names

    def methods(self, class_name: str, *names: str) -> set[Definition]:
        """Places of the methods of a class with any of these names, with those of base classes in these files."""
        kinds = (each for name in self.kinds_of(class_name) for each in self.classes.get(name, ()))
        places = {(file, f"{qualified}.{name}") for file, qualified, _ in kinds for name in names}
        return places & self.by_definition.keys()

    def functions_meant(self, name: str, by: Definition) -> list[Definition]:
        """Functions that a call of `name` in place `by` may mean.

        Those of the same class; else of the file that gives the name there; else all of that name, if they are at most
        `_MOST_MEANT`. [] for names in `OF_EVERY_CLASS`; with `self.` in front, those of the same class alone.
        """
        method = name.removeprefix("self.")
        places = [] if name in OF_EVERY_CLASS else self.functions.get(method, [])
        same_class = [place for place in places if place == (by[0], f"{by[1].rpartition('.')[0]}.{method}")]
        home = self._home(by[0], name)
        same_file = [place for place in places if place[0] == home and method == name]
        return same_class or same_file or (places if len(places) <= _MOST_MEANT and method == name else [])

    def _home(self, file: str, name: str) -> str:
        """The file that gives a name its meaning in `file`: `file` itself, unless it imports it from one of these."""
        met = set[str]()
        while file not in met and (file, name) in self._imported:
            met.add(file)
            path, name = self._imported[file, name]
            homes = [each for each in self._files if f"/{each}".endswith((f"/{path}.py", f"/{path}/__init__.py"))]
            file = homes[0] if len(homes) == 1 else file
        return file

    def statements_after(self, class_name: str, name: str) -> Iterator[Statement]:
        """Statements of a class's methods behind the last one that takes the attribute `name`, in no loop with it."""
        for file, qualified, _ in self.classes.get(class_name, ()):
            methods = [each for each in self.by_definition if each[0] == file and each[1].startswith(f"{qualified}.")]
            for place in methods:
                calling = [s for s in self.by_definition[place] if name in s.takes]
                if calling and not place[1].endswith("__init__"):
                    yield from (s for s in self.by_definition[place] if _is_behind(s, calling[-1]))

    def statements_apart(self, place: Definition, part: int | None, *, first: bool) -> set[Statement]:
        """Statements of a function whose values do not reach what it returns; none where it returns no names.

        Args:
            place: the function.
            part: of the tuple it returns, the part that is meant; None for all.
            first: whether in the first call, when nothing reaches what stands ahead of it; then calls of the object's
                own methods, which may do anything, are not among them.
        """
        inside = {*self.by_definition[place]}
        given = [s.node.value for s in inside if isinstance(s.node, ast.Return) and s.node.value is not None]
        if part is not None and not all(len(getattr(each, "elts", ())) > part for each in given):
            return set()
        parts = given if part is None else [each.elts[part] for each in given]  # type: ignore[attr-defined] # tuples
        names = {n.id for each in parts for n in ast.walk(each) if isinstance(n, ast.Name)}
        seeds = {s: 0 for s in inside if names & {name.rpartition(":")[2] for name in s.gives}}

        def before(statement: Statement) -> Iterator[Statement]:
            """Statements of the function one step behind one of them."""
            found = inside.intersection(self._statements_before(statement, ()))
            return (other for other in found if not (first and _is_behind(other, statement)))

        apart = inside - _closure(seeds, before, len(inside)).keys()
        return {s for s in apart if seeds and not (isinstance(s.node, ast.Return) or (first and _calls_own_method(s)))}

    def reached_from(self, *places: Definition, depth: int = 0, without: Container[Statement] = frozenset()) -> Depths:
        """Statements of these functions and of all that they call or name, each with `depth` plus the calls between.

        Statements in `without` are passed over, and what only these call.
        """
        inside = (s for place in places for s in self.by_definition.get(place, ()) if s not in without)
        return self.with_what_runs(dict.fromkeys(inside, depth))

    def with_what_runs(self, depths: Depths) -> Depths:
        """These statements and those of all functions that they call or name, each with a depth more for each call."""
        return _closure(depths, self._statements_inside, sys.maxsize)

    def _statements_inside(self, statement: Statement) -> Iterator[Statement]:
        """Those of functions that a statement calls or names.

        `forward` and `backward` of a class whose `apply` is called count as called.
        """
        named = statement.calls | statement.takes
        places = {place for name in named for place in self.functions_meant(name, statement.place)}
        for name in statement.takes if "apply" in statement.calls else ():
            places |= self.methods(name, "forward", "backward")
        return (each for place in places for each in self.by_definition.get(place, ()))

    def statements_behind(self, seeds: Iterable[Statement], stop: Container[str]) -> Depths:
        """Statements whose values may reach `seeds`, each with its distance, from 0 for seeds to `_MOST_VALUES` - 1.

        A step leads to the statements around one, to those that give what it takes (what it takes as a parameter comes
        from where the function is handed on), and to returns of what it calls. Names in `stop` lead nowhere.
        """
        return _closure(dict.fromkeys(seeds, 0), partial(self._statements_before, stop=stop), _MOST_VALUES - 1)

    def _statements_before(self, statement: Statement, stop: Container[str]) -> Iterator[Statement]:
        """Statements one step behind."""
        yield from statement.around
        for name in (name for name in statement.takes if name.rpartition(":")[2] not in stop):
            yield from self.givers.get(name, ())
            yield from self.takers.get(self.called_as.get(name, ""), ())
        for name in statement.calls | statement.takes:
            for place in self.functions_meant(name, statement.place):
                yield from (s for s in self.by_definition[place] if isinstance(s.node, (ast.Return, *FUNCTIONS)))

    def training_loops(self) -> set[Statement]:
        """Outermost statements around calls of `backward`, with all statements in them; none for a call outside any."""
        heads = {s.around[0] for s in self.callers.get("backward", ()) if s.around}
        return {s for s in self.statements if s in heads or heads.intersection(s.around)}


def _is_behind(statement: Statement, other: Statement) -> bool:
    """Whether a statement of a function stands behind another one, in no loop with it."""
    both = {*statement.around} & {*other.around, other}
    return statement.lines[0] > other.lines[1] and not any(isinstance(each.node, _LOOPS) for each in both)


def _calls_own_method(statement: Statement) -> bool:
    """Whether a statement is a call of a method by the name of its object alone: `self.begin(x)`."""
    called = getattr(getattr(statement.node, "value", None), "func", None)
    return isinstance(statement.node, ast.Expr) and isinstance(getattr(called, "value", None), ast.Name)


def _closure(seeds: Depths, step: Callable[[Statement], Iterable[Statement]], most: int) -> Depths:
    """Statements that at most so many steps lead to, each with the smallest number of steps, after that of its seed."""
    depths: Depths = {}
    edge = seeds
    while edge and most >= 0:
        depths |= edge
        edge = {other: depth + 1 for s, depth in edge.items() for other in step(s) if other not in depths}
        most -= 1
    return depths


_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MOST_MEANT = 3
_MOST_VALUES = 7
