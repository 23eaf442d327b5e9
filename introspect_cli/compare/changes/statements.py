"""Which statements of a python file changed, and the file with some of these changes and not the others.

A difference of two texts counts comments and formatting, and calls a function that moved two changes. What ran is
statements: both versions are parsed, and each body (of the file, a class, a function, a loop, a branch) is laid beside
its counterpart. Statements that are equal as syntax are no change, definitions of one name belong together wherever
they stand, and what is left of both sides is paired by likeness, so that an edited line is one change and not two.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from dataclasses import dataclass, replace
from textwrap import dedent
from typing import TYPE_CHECKING, Literal, NamedTuple

from introspect_cli.compare.changes.alignment import (
    BLOCKS,
    DEFINITIONS,
    UNREADABLE,
    aligned,
    bodies_of,
    first_line,
    tree_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Side:
    """What stands in one of the versions: its first and last line, counted from 1, and its source."""

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
        """`model.py:41`, its line in b's version, or else in a's; `config.yaml: model.dropout`; a whole file's name."""
        if self.unit == "value":
            return f"{self.file}: {self.scope}"
        side = self.b or self.a
        return self.file if self.unit == "file" or side is None else f"{self.file}:{self.line or side.first}"


def changed_statements(file: str, text_a: str | None, text_b: str | None) -> tuple[Change, ...]:
    """The statements in which two versions of a python file differ, in the order of b's; None for no such file.

    Comments, docstrings, formatting and definitions that moved within their body are no change.
    """
    if text_a == text_b:
        return ()
    if text_a is None or text_b is None:
        return (changed_file(file, text_a, text_b),)
    try:
        return tuple(edited.change for edited in _TwoVersions(_Version(text_a), _Version(text_b), file).edited)
    except UNREADABLE:
        return (changed_file(file, text_a, text_b),)


def changed_file(file: str, text_a: str | None, text_b: str | None) -> Change:
    """The change of a whole file: of one that is no python, or that only one version has."""
    a, b = (None if text is None else Side(1, len(text.splitlines()), text) for text in (text_a, text_b))
    return Change(file, "", a, b, "file")


def apply(text_a: str | None, changes: Iterable[Change | Piece], text_b: str | None) -> str | None:
    """Make a's text with some of the changes that lead to b's; None where the file is not there then.

    Lines that no change touches stay as they are. Where a statement shares its line with another (`if x: y`), or the
    versions are indented in different ways, both are written anew first, without comments.

    Raises:
        ValueError: no text that python can parse comes out.
    """
    chosen = set(changes)
    if not chosen:
        return text_a
    if text_a is None or text_b is None or any(isinstance(one, Change) and one.unit == "file" for one in chosen):
        return text_b
    file = next(iter(chosen)).file
    sides = {(change.a, change.b) for change in chosen}
    comparison = _TwoVersions(_Version(text_a), _Version(text_b), file)
    places = [place for place, edited in enumerate(comparison.edited) if (edited.change.a, edited.change.b) in sides]
    if comparison.plain:
        text = comparison.applied(places)
        if tree_of(text):
            return text
    comparison = _TwoVersions(_Version(_anew(text_a)), _Version(_anew(text_b)), file)
    text = comparison.applied(places)
    if not tree_of(text):
        raise ValueError(f"{file}: the chosen changes make no text that python can parse")
    return text


def _anew(text: str) -> str:
    return ast.unparse(ast.parse(text))


class _Version:
    """One version of a file, parsed, its docstrings taken out of their bodies."""

    def __init__(self, text: str) -> None:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        self.text = text
        self.lines = text.split("\n")
        self.tree = ast.parse(text)
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]
        self.plain = not any(self.before(node).strip() for node in nodes)
        self.docstrings: dict[ast.AST, ast.stmt] = {}
        for node in [self.tree, *nodes]:
            if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None:
                self.docstrings[node] = node.body.pop(0)

    def before(self, node: ast.stmt) -> str:
        """What stands before a statement in its line."""
        return self.lines[first_line(node) - 1][: node.col_offset]

    def side(self, first: int, last: int) -> Side:
        return Side(first, last, dedent("\n".join(self.lines[first - 1 : last])))

    def side_of(self, node: ast.stmt) -> Side:
        if not self.before(node).strip():
            return self.side(first_line(node), _last(node))
        return Side(first_line(node), _last(node), ast.get_source_segment(self.text, node) or "")

    def header(self, node: ast.stmt) -> Side:
        """The lines of a compound statement before its body."""
        inner = self.docstrings.get(node) or node.body[0]  # type: ignore[attr-defined] # a compound statement
        return self.side(first_line(node), max(first_line(inner) - 1, first_line(node)))


class Edit(NamedTuple):
    """Lines of a's from `low` (counted from 0) up to `high` become those of b's from `start` up to `stop`."""

    low: int
    high: int
    start: int
    stop: int


def with_edits(one: Sequence[str], two: Sequence[str], edits: Iterable[Edit]) -> str:
    """The text of a's lines with some edits that lead to b's."""
    lines, done = [], 0
    for edit in sorted(edits):
        lines += [*one[done : edit.low], *two[edit.start : edit.stop]]
        done = edit.high
    return "\n".join([*lines, *one[done:]])


@dataclass(frozen=True)
class _Edited:
    """A change and how it is made in a's text."""

    change: Change
    edits: tuple[Edit, ...]

    @property
    def place(self) -> tuple[str, str]:
        """In which function, and what stands there: in b's version, or in a's where it was removed."""
        side = self.change.b or self.change.a
        return self.change.scope, "" if side is None else side.text


class _TwoVersions:
    """Two versions of a file laid side by side."""

    def __init__(self, a: _Version, b: _Version, file: str) -> None:
        self.a, self.b, self.file = a, b, file
        self.plain = a.plain and b.plain
        self.key = functools.cache(ast.dump)
        self.edited: list[_Edited] = []
        self._bodies(a.tree, b.tree, _Scope())
        self._join_moved()
        self.edited.sort(key=lambda edited: max((edit.start, edit.low) for edit in edited.edits))

    def _join_moved(self) -> None:
        """Make one change of a statement that left one block of a function and came into another."""
        gone, come = ([one for one in self.edited if getattr(one.change, other) is None] for other in "ba")
        times = Counter(one.place for one in gone), Counter(one.place for one in come)
        left = {one.place: one for one in gone if times[0][one.place] == times[1][one.place] == 1}
        for one in come:
            if one.place in left:
                before = left[one.place]
                self.edited = [other for other in self.edited if other not in {one, before}]
                change = replace(one.change, a=before.change.a, unit="moved")
                self.edited.append(_Edited(change, (*before.edits, *one.edits)))

    def applied(self, places: Sequence[int]) -> str:
        """Make a's text with the changes that stand at these places in the list."""
        edits = (edit for place in places for edit in self.edited[place].edits)
        return with_edits(self.a.lines, self.b.lines, edits)

    def _bodies(self, a: ast.AST, b: ast.AST, scope: _Scope) -> None:
        """Compare each body of two nodes of one shape."""
        for (owner_a, one), (owner_b, two) in zip(bodies_of(a), bodies_of(b), strict=True):
            if [*map(self.key, one)] != [*map(self.key, two)]:
                self._body(_Body(self.a, owner_a, one), _Body(self.b, owner_b, two), scope)

    def _body(self, one: _Body, two: _Body, scope: _Scope) -> None:
        self.plain &= one.indent == two.indent
        place_a = place_b = 0
        for i, j, moved in aligned(one.nodes, two.nodes, self.key):
            a = None if i is None else one.nodes[i]
            b = None if j is None else two.nodes[j]
            at = one.line_after(place_a)
            if a is not None and b is not None:
                if moved and not isinstance(a, DEFINITIONS):
                    self._note(
                        scope, a, b, Edit(*_span(a), _span(b)[0], _span(b)[0]), Edit(at, at, *_span(b)), moved=True
                    )
                else:
                    self._pair(a, b, scope)
            elif a is not None:
                line = two.line_after(place_b)
                self._note(scope, a, None, Edit(*_span(a), line, line))
            elif b is not None:
                self._note(scope, None, b, Edit(at, at, *_span(b)))
            place_a = place_a if i is None or moved else i + 1
            place_b = place_b if j is None else j + 1

    def _pair(self, a: ast.stmt, b: ast.stmt, scope: _Scope) -> None:
        if self.key(a) == self.key(b):
            return
        if _shape(a) is None or _shape(a) != _shape(b):
            self._note(scope, a, b, Edit(*_span(a), *_span(b)))
            return
        inner = scope.inside(b)
        if _header(a) != _header(b):
            one, two = self.a.header(a), self.b.header(b)
            edit = Edit(one.first - 1, one.last, two.first - 1, two.last)
            self.edited.append(_Edited(Change(self.file, inner.name, one, two), (edit,)))
        self._bodies(a, b, inner)

    def _note(self, scope: _Scope, a: ast.stmt | None, b: ast.stmt | None, *edits: Edit, moved: bool = False) -> None:
        change = Change(
            file=self.file,
            scope=scope.inside(b or a).name,
            a=None if a is None else self.a.side_of(a),
            b=None if b is None else self.b.side_of(b),
            unit="moved" if moved else "statement",
        )
        self.edited.append(_Edited(change, edits))


@dataclass(frozen=True)
class _Scope:
    """Where statements stand: the qualified name, and what python puts before the name of a definition in there."""

    name: str = ""
    prefix: str = ""

    def inside(self, node: ast.stmt | None) -> _Scope:
        """The scope of a definition's body; this one for another statement."""
        if not isinstance(node, DEFINITIONS):
            return self
        name = self.prefix + node.name
        return _Scope(name, f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>.")


class _Body:
    """The statements of one body, and where they stand in the text."""

    def __init__(self, version: _Version, owner: ast.AST, nodes: list[ast.stmt]) -> None:
        self.nodes = nodes
        docstring = version.docstrings.get(owner)
        first = nodes[0] if nodes else docstring
        self.indent = "" if first is None else version.before(first)
        self._start = first_line(nodes[0]) - 1 if nodes else _last(docstring) if docstring is not None else 0

    def line_after(self, place: int) -> int:
        """The line, counted from 0, at which something can be put before the statement at a place."""
        return _last(self.nodes[place - 1]) if place else self._start


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _span(node: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, counted from 0, without the last."""
    return first_line(node) - 1, _last(node)


def _shape(node: ast.stmt) -> tuple[object, ...] | None:
    """What two compound statements have in common if their bodies can be compared; None for a simple statement."""
    if not hasattr(node, "body"):
        return None
    blocks: list[object] = [type(node), bool(node.body)]  # empty where it has a docstring alone
    for name in BLOCKS[1:]:
        block = getattr(node, name, ())
        if name in {"handlers", "cases"}:
            blocks += [(name, _header(inner)) for inner in block]
        elif block:
            is_elif = isinstance(node, ast.If) and len(block) == 1 and isinstance(block[0], ast.If)
            blocks.append("elif" if is_elif else name)
    return tuple(blocks)


def _header(node: ast.AST) -> tuple[object, ...]:
    """A compound statement without its bodies."""
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in BLOCKS]
    return tuple((name, _dumped(value)) for name, value in fields)


def _dumped(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_dumped, value))
    return ast.dump(value) if isinstance(value, ast.AST) else value
