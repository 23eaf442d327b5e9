"""Changed statements of two versions, how near each is to a divergence and by which clues; and helpers for syntax."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


Definition: TypeAlias = tuple[str, str]
"""File, and qualified name of a function or class in it; "" for the file itself."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What python raises of a text that it cannot parse."""
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a compound statement that hold its bodies."""


class Side(NamedTuple):
    """One version of a statement: first and last line, counted from 1, and source text."""

    first: int
    last: int
    text: str


class Piece(NamedTuple):
    """A statement in both versions of a file; None where it is not."""

    file: str
    a: Side | None
    b: Side | None


class Change(NamedTuple):
    """One statement that differs between two versions of a file.

    Of a compound statement (`def`, `class`, `for`, `if`) whose body is compared statement by statement, it is what
    stands before the body.

    Attributes:
        file: the file, as it was named.
        scope: qualified name of the function or class it stands in, or of the definition that it is; "" for the file.
        a: what stands in a's version; None where the statement was added.
        b: what stands in b's version; None where it was removed.
        unit: a `statement` (or a line of a configuration file), one that `moved` within its function, or the whole
            `file`, where a version cannot be parsed or is not there.
        line: which line of the statement is meant: of b's version, or of a's where it was removed; 0 for its first.
        file_a: the file in a, where the statement stands in another one there.
        before: how many characters of a's and of b's statement stand before what changed, on one line.
        pieces: where it does not run without others, as of a variable that was renamed, it and these.
    """

    file: str
    scope: str
    a: Side | None
    b: Side | None
    unit: Literal["statement", "moved", "file"] = "statement"
    line: int = 0
    file_a: str = ""
    before: tuple[int, int] = (0, 0)
    pieces: tuple[Piece, ...] = ()

    @property
    def place(self) -> str:
        """`model.py:41`, the line in b's version, else in a's; the file's name alone for a whole file."""
        side = self.b or self.a
        return self.file if self.unit == "file" or side is None else f"{self.file}:{self.line or side.first}"


def changed_file(file: str, text_a: str | None, text_b: str | None) -> Change:
    """A change of unit `file`: of a file that Python cannot parse, or that one version lacks (its text is None)."""
    a, b = (None if text is None else Side(1, len(text.splitlines()), text) for text in (text_a, text_b))
    return Change(file, "", a, b, "file")


_STRING_OR_COMMENT = re.compile(r"""("[^"\n]*"|'[^'\n]*')|#.*""")


def code_on_one_line(text: str) -> str:
    """Source text on one line, without comments."""
    return " ".join(_STRING_OR_COMMENT.sub(lambda found: found[1] or "", text).split())


def tree_of(text: str) -> ast.Module | None:
    """The syntax of a file; None where Python cannot parse it, or it is nested too deeply."""
    try:
        return ast.parse(text)
    except UNREADABLE:
        return None


def first_line(node: ast.stmt) -> int:
    """The line in which a statement begins, decorators included."""
    decorators = node.decorator_list if isinstance(node, DEFINITIONS) else ()
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


@dataclass(eq=False)
class Statement:
    """One statement; a compound one ends before its body.

    Attributes:
        scope: qualified name of the function or class that it stands in, or whose head it is; "" for the file.
        around: the compound statements of its function that it stands in, the outermost first.
        functions: the functions that it stands in, or whose head it is, the innermost first: qualified name and syntax.
        gives: names that it gives a value, as far as somebody read them (`near.Code`): variables, attributes, keywords,
            parameters, keys, options; a local name has its file and function in front.
        takes: names and attributes that it takes.
        calls: last names of what it calls.
    """

    file: str
    scope: str
    node: ast.stmt
    around: tuple[Statement, ...]
    functions: tuple[tuple[str, ast.AST], ...]
    gives: set[str] = field(default_factory=set)
    takes: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)

    @cached_property
    def lines(self) -> tuple[int, int]:
        """(first line, last line), counted from 1, with decorators."""
        body = getattr(self.node, "body", None)
        last = max(body[0].lineno - 1, self.node.lineno) if body else self.node.end_lineno or self.node.lineno
        return first_line(self.node), last

    @property
    def place(self) -> Definition:
        """File and qualified name of the function or class around the statement: `("model.py", "Block.__init__")`."""
        return self.file, self.scope


def statements_of(
    file: str,
    nodes: Iterable[ast.AST],
    scope: str = "",
    around: tuple[Statement, ...] = (),
    functions: tuple[tuple[str, ast.AST], ...] = (),
) -> Iterator[Statement]:
    """All statements of a block and of the blocks inside it, in their order.

    Args:
        file: name of the file.
        nodes: the block: statements, handlers and cases.
        scope: attribute of the statements in the block, as the two below.
        around: likewise.
        functions: likewise.
    """
    for node in nodes:
        inner = scope, around, functions
        if isinstance(node, DEFINITIONS):
            local = "<locals>." if functions and functions[0][0] == scope else ""
            name = f"{scope}.{local}{node.name}" if scope else node.name
            inner = name, (), ((name, node), *functions) if isinstance(node, FUNCTIONS) else functions
        if isinstance(node, ast.stmt):
            statement = Statement(file, inner[0], node, *inner[1:])
            yield statement
            if not isinstance(node, DEFINITIONS):
                inner = scope, (*around, statement), functions
        yield from statements_of(file, [each for name in BLOCKS for each in getattr(node, name, ())], *inner)


# --- how near a changed statement is to the first divergence


class Nearness(str, Enum):
    """How near a changed statement is to the divergence, the nearest first."""

    RECORDED = "recorded"
    """The records name its line."""
    COMPUTES = "computes"
    """It is in the code that computes the first value that differs."""
    BUILDS = "builds"
    """It builds that code's objects, or gives them their values."""
    BETWEEN = "between"
    """It may have run between the last record that agreed and the first that did not."""
    ALONE = "alone"
    """Nothing in it reaches the place by name, and it is the only statement that changed: nothing else differs."""
    ELSEWHERE = "elsewhere"


ORDER = list(Nearness)


class Ranked(NamedTuple):
    """A changed statement and how near to the divergence it is.

    Attributes:
        nearness: how near.
        depth: number of calls or values between it and the code that computes the diverging value.
        hits: how many of the names that the records point to are in what changed.
        can_matter: whether it may change a number: it does not only tell, is no import, and calls take what it gives.
    """

    change: Change
    nearness: Nearness
    depth: int = 0
    hits: int = 0
    can_matter: bool = True

    @property
    def likely(self) -> bool:
        """Whether its nearness is not `Nearness.ELSEWHERE`."""
        return self.nearness is not Nearness.ELSEWHERE


class CodeChanges(NamedTuple):
    """Changed statements and files between two runs.

    Attributes:
        ranked: changed statements, the most likely cause first.
        unchanged: files that differ and compute the same: in comments, formatting, order or the names of variables.
        unread: files that differ and of which a text is not there, with why: `text` (a run did not keep it), `secret`
            (only what was redacted can differ, or comments), `binary`.
        compared: how many files either run has a digest of, one that was renamed counted once.
        texts: files of a and of b by their names in b, until the changes are ranked.
        renamed: names that a class has in a and in b, where it is one class with two.
    """

    ranked: tuple[Ranked, ...] = ()
    unchanged: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    compared: int = 0
    texts: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    renamed: frozenset[tuple[str, str]] = frozenset()

    @property
    def likely(self) -> tuple[Ranked, ...]:
        """The ranked changes that are not `Nearness.ELSEWHERE`."""
        return tuple(one for one in self.ranked if one.likely)

    @property
    def files(self) -> int:
        """Number of files with changed statements."""
        return len({one.change.file for one in self.ranked})
