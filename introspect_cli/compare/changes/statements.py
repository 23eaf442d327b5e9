"""A changed statement of two versions, and helpers for Python's syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Definition: TypeAlias = tuple[str, str]
"""File, and qualified name of a function or class in it; "" for the file itself."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What python raises of a text that it cannot parse."""
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a compound statement that hold its bodies."""


@dataclass(frozen=True)
class Side:
    """One version of a statement: first and last line, counted from 1, and source text."""

    first: int
    last: int
    text: str


@dataclass(frozen=True)
class Piece:
    """A statement in both versions of a file; None where it is not."""

    file: str
    a: Side | None
    b: Side | None


@dataclass(frozen=True)
class Change:
    """One statement that differs between two versions of a file.

    Of a compound statement (`def`, `class`, `for`, `if`) whose body is compared statement by statement, it is what
    stands before the body.

    Attributes:
        file: the file, as it was named.
        scope: qualified name of the function or class it stands in, or of the definition that it is; "" for the file.
        a: what stands in a's version; None where the statement was added.
        b: what stands in b's version; None where it was removed.
        unit: a `statement`, one that `moved` within its function, a `value` of a configuration file (its keys are the
            scope), or the whole `file`, where a version cannot be parsed or is not there.
        line: which line of the statement is meant: of b's version, or of a's where it was removed; 0 for its first.
        file_a: the file in a, where the statement stands in another one there.
        pieces: where it does not run without others, as of a variable that was renamed, it and these.
    """

    file: str
    scope: str
    a: Side | None
    b: Side | None
    unit: Literal["statement", "moved", "value", "file"] = "statement"
    line: int = 0
    file_a: str = ""
    pieces: tuple[Piece, ...] = ()

    @property
    def place(self) -> str:
        """`model.py:41`, the line in b's version, else in a's; `config.yaml: model.dropout` for a value.

        A whole file's name.
        """
        if self.unit == "value":
            return f"{self.file}: {self.scope}"
        side = self.b or self.a
        return self.file if self.unit == "file" or side is None else f"{self.file}:{self.line or side.first}"


def changed_file(file: str, text_a: str | None, text_b: str | None) -> Change:
    """A change of a whole file that Python cannot parse or that one version lacks (its text is None)."""
    a, b = (None if text is None else Side(1, len(text.splitlines()), text) for text in (text_a, text_b))
    return Change(file, "", a, b, "file")


def tree_of(text: str) -> ast.Module | None:
    """The syntax of a file; None where Python cannot parse it."""
    try:
        return ast.parse(text)
    except UNREADABLE:
        return None


def first_line(node: ast.stmt) -> int:
    """The line in which a statement begins, decorators included."""
    decorators = node.decorator_list if isinstance(node, DEFINITIONS) else ()
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def bodies_of(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Blocks of a compound statement, a definition or a file, each with its owner: the node, a handler or a case."""
    for name in BLOCKS:
        block: list[Any] = getattr(node, name, [])
        if name in {"handlers", "cases"}:
            yield from ((inner, inner.body) for inner in block)
        elif block or (name == "body" and isinstance(node, (ast.Module, *DEFINITIONS))):
            yield node, block
