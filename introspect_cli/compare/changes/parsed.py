"""Source files parsed into statements: what each defines, uses and calls, by name; nothing of it is run."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.alignment import BLOCKS, DEFINITIONS, FUNCTIONS, UNREADABLE, bodies_of, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Key = tuple[str, str]
"""What a statement gives or takes: a name, and where it is one.

That is the function to which it is local, `:` for a name of all files, `.` for an attribute of anything, `=` for what
an option, a keyword or a field is called, a class for an attribute of its `self`.
"""

_OPTIONS = frozenset(
    {"args", "config", "cfg", "opt", "opts", "options", "hparams", "flags", "conf", "settings", "params"}
)
"""Names of what holds options."""
_OPTIONS_CLASS = re.compile(r"(config|conf|cfg|args|arguments|options|params|settings|flags)\.self$", re.IGNORECASE)
"""The owner of an attribute that is such a class."""
_LOGS = frozenset(
    {"print", "log", "info", "debug", "warning", "add_scalar", "add_scalars", "log_dict", "log_metrics", "plot"}
    | {"write", "flush", "perf_counter", "time", "format", "basicConfig", "getLogger", "savefig", "set_description"}
    | {"set_postfix"}
)


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement, a compound one without its body.

    Attributes:
        scope: qualified name of the function or class that it stands in, or whose head it is; "" for the file.
        defines: what it gives.
        uses: what it takes.
        calls: last names of what it calls.
        around: the compound statements of its function that it stands in.
        node: its syntax.
    """

    file: str
    scope: str
    first: int
    last: int
    defines: frozenset[Key]
    uses: frozenset[Key]
    calls: tuple[str, ...]
    around: tuple[Statement, ...]
    node: ast.stmt

    @property
    def place(self) -> tuple[str, str]:
        """File and scope."""
        return self.file, self.scope

    def changes(self, name: str) -> bool:
        """Whether it gives something of a name, or does something with it for no other value."""
        taken = self.uses if isinstance(self.node, ast.Expr) else ()
        return name in {key[1] for key in (*self.defines, *taken)}

    @property
    def only_tells(self) -> bool:
        """Whether it prints or logs and gives nothing that others take."""
        calls = [node for node in ast.walk(self.node) if isinstance(node, ast.Call)]
        return isinstance(self.node, ast.Expr) and bool(calls) and last_name(calls[0].func) in _LOGS


class Parsed:
    """Statements of all files that can be parsed."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.statements: list[Statement] = []
        self.classes: dict[str, list[tuple[str, str, tuple[str, ...]]]] = defaultdict(list)
        """By simple name: file, qualified name, and simple names of the bases."""
        self.functions: dict[str, list[tuple[str, str]]] = defaultdict(list)
        """By simple name: file and qualified name."""
        self.parameters: dict[Key, tuple[str, str]] = {}
        for file, text in texts.items():
            try:
                tree = ast.parse(text)
            except UNREADABLE:
                continue
            _Reader(self, file).body(tree.body, _Scope(file))


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

    def __init__(self, program: Parsed, file: str) -> None:
        self.program, self.file = program, file

    def body(self, nodes: list[ast.stmt], scope: _Scope, around: tuple[Statement, ...] = ()) -> None:
        for node in nodes:
            if isinstance(node, DEFINITIONS):
                self.definition(node, scope)
                continue
            around_inner = *around, self.add(node, scope, around)
            for _, block in bodies_of(node):
                self.body(block, scope, around_inner)

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, scope: _Scope) -> None:
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

    def add(
        self, node: ast.stmt, scope: _Scope, around: tuple[Statement, ...], outer: _Scope | None = None
    ) -> Statement:
        body = getattr(node, "body", None)
        last = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
        names = _Names(scope)
        for part in _direct_parts(node):
            names.visit(part)
        if outer is not None and isinstance(node, FUNCTIONS):
            for key in (scope.key(part.arg) for part in ast.iter_child_nodes(node.args) if isinstance(part, ast.arg)):
                names.defines.add(key)
                self.program.parameters[key] = (self.file, scope.name)
        if outer is not None:
            names.defines.add(outer.key(node.name))  # type: ignore[attr-defined] # a definition
        defines, uses, calls = frozenset(names.defines), frozenset(names.uses), tuple(dict.fromkeys(names.calls))
        statement = Statement(self.file, scope.name, first_line(node), last, defines, uses, calls, around, node)
        self.program.statements.append(statement)
        return statement


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
        owner = self.scope.owner if of == "self" else ""
        if not isinstance(node.ctx, ast.Load):
            option = _OPTIONS_CLASS.search(owner) if owner else of != "self"
            self.defines |= {(".", node.attr), *([(owner, node.attr)] if owner else [])}
            self.defines |= {("=", node.attr)} if option else set()
        elif owner:
            self.uses.add((owner, node.attr))
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
        """What is changed in place is given anew: `policy.saved` by `policy.saved.append(x)`."""
        held = set()
        while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
            if isinstance(node, ast.Attribute):
                held.add((".", node.attr))
                if isinstance(node.value, ast.Name) and node.value.id == "self" and self.scope.owner:
                    held.add((self.scope.owner, node.attr))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func
            node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Name) and node.id != "torch":
            self.defines |= {*held, self.scope.key(node.id)}


def _direct_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What of a statement is its own: all of a simple one, the head of a compound one."""
    if not hasattr(node, "body"):
        yield node
        return
    for name, value in ast.iter_fields(node):
        if name in BLOCKS:
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part


def _assigned(node: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Names that are local to a function."""
    local = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    elsewhere: set[str] = set()
    pending: list[ast.AST] = list(node.body)
    while pending:
        current = pending.pop()
        if isinstance(current, (ast.Global, ast.Nonlocal)):
            elsewhere |= set(current.names)
        if isinstance(current, DEFINITIONS):
            local.add(current.name)
            continue
        if isinstance(current, ast.Name) and not isinstance(current.ctx, ast.Load):
            local.add(current.id)
        pending += ast.iter_child_nodes(current)
    return frozenset(local - elsewhere)


def last_name(node: ast.expr) -> str:
    """`AdamW` of `torch.optim.AdamW`; "" of what has no name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
