"""What changed between two versions of a source or configuration file, and the file with some of it and not the rest.

Both texts are laid beside each other line by line, and what differs is replaced where it stands, so that comments and
formatting stay as somebody wrote them. Each pair of lines that differs is a change by itself where that makes a text
that can be read; else what differs in one place is one, or what differs in the next place belongs to it as well. In
what can be read, comments, docstrings and the order of keys are no change; of anything else the whole file is.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import defaultdict
from pathlib import PurePath
from textwrap import dedent
from typing import TYPE_CHECKING, Any, TypeAlias

from introspect_cli.compare.changes.statements import (
    DEFINITIONS,
    Change,
    Piece,
    Side,
    changed_file,
    first_line,
    statements_of,
    tree_of,
)
from introspect_cli.compare.settings.settings import parsed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

_MOST_LINES = 20_000
_MOST_CHANGES = 400


Edit: TypeAlias = tuple[int, int, int, int]
"""First line and end (the line behind the last, from 0) of lines of a, and of those of b that replace them."""


def edits_of(file: str, text_a: str, text_b: str) -> dict[Change, tuple[Edit, ...]]:
    """The changes that make `text_b` of `text_a`, each with its edits, in the file's order; {} if both parse the same.

    A change is one line where lines of a hunk can be replaced one by one, else a hunk, joined with those after it until
    the text can be parsed; what leaves the parsed text the same is left out.

    The whole file is one change where a text cannot be parsed, there are more than `_MOST_LINES` lines or
    `_MOST_CHANGES` changes, or all changes together do not give b.

    Args:
        file: name of the file, whose ending says how it is parsed.
        text_a: what it holds in a.
        text_b: the same of b.
    """
    a, b, one, two = _parse(file, text_a), _parse(file, text_b), _lines(text_a), _lines(text_b)
    whole: dict[Change, tuple[Edit, ...]] = {changed_file(file, text_a, text_b): ((0, len(one), 0, len(two)),)}
    if text_a == text_b or (a is not None and a == b):
        return {}
    if a is None or b is None or len(one) + len(two) > _MOST_LINES:
        return whole
    edited: dict[Change, tuple[Edit, ...]] = {}
    together: tuple[Edit, ...] = ()
    opcodes = difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    for hunk in [(low, high, start, stop) for tag, low, high, start, stop in opcodes if tag != "equal"]:
        together = (*together, hunk)
        for edits in ([(edit,) for edit in _split_by_line(hunk)] if together == (hunk,) else [], [together]):
            values = [_parse(file, _replace_lines(one, two, edit)) for edit in edits]
            if edits and None not in values:
                changing = (edit for edit, value in zip(edits, values, strict=True) if value != a)
                edited |= {_change(file, one, two, edit): edit for edit in changing}
                together = ()
                break
    every = _parse(file, _replace_lines(one, two, [edit for edits in edited.values() for edit in edits]))
    return edited if every == b and len(edited) <= _MOST_CHANGES else whole


def apply_edits(file: str, edits: Sequence[Edit], text_a: str, text_b: str) -> str:
    """A's text with some edits that `edits_of` gave, whose line ends may be others.

    Raises:
        ValueError: no text that can be parsed comes out, nor that of b.
    """
    one, two = _lines(text_a), _lines(text_b)
    text = _replace_lines(one, two, edits)
    if _parse(file, text) is None and text != "\n".join(two):
        raise ValueError(f"{file}: the chosen changes make no text that can be read")
    return text


def _parse(file: str, text: str) -> Any:
    """A comparable form of a text: for `.py` its syntax (`_syntax_of`), else parsed data.

    None where it cannot be parsed, or the ending of `file` is of no known format.
    """
    return _syntax_of(text) if file.endswith(".py") else parsed(text, PurePath(file).suffix.lower())


def _syntax_of(text: str) -> str | None:
    """A file's syntax as text, without comments and docstrings, definitions sorted by name: to be compared.

    None where Python cannot parse it.
    """
    tree = tree_of(text)
    for node in [] if tree is None else ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body.pop(0)
            node.body.sort(key=lambda each: getattr(each, "name", "") if isinstance(each, DEFINITIONS) else "")
    return None if tree is None else ast.dump(tree)


def _lines(text: str) -> list[str]:
    """The lines of a text, without line ends."""
    return text.replace("\r\n", "\n").split("\n")


def _replace_lines(one: Sequence[str], two: Sequence[str], edits: Iterable[Edit]) -> str:
    """The text of lines `one` with `edits` from lines `two` applied."""
    lines, done = [], 0
    for low, high, start, stop in sorted(edits):
        lines += [*one[done:low], *two[start:stop]]
        done = high
    return "\n".join([*lines, *one[done:]])


def _split_by_line(hunk: Edit) -> list[Edit]:
    """A hunk split into one edit per line where it has as many lines in a as in b; else the hunk alone."""
    low, high, start, stop = hunk
    pairs = zip(range(low, high), range(start, stop), strict=False)
    return [(a, a + 1, b, b + 1) for a, b in pairs] if high - low == stop - start else [hunk]


def _change(file: str, one: Sequence[str], two: Sequence[str], edits: Sequence[Edit]) -> Change:
    """The change that some edits make, with the lines from the first edit to the last in both versions.

    Its scope is the function or class in Python: in b where b has lines, else in a.

    Args:
        file: name of the file.
        one: all lines of a.
        two: all lines of b.
        edits: the edits, in order.
    """
    sides = _side_of(one, edits[0][0], edits[-1][1]), _side_of(two, edits[0][2], edits[-1][3])
    side, lines = (sides[1], two) if sides[1] is not None else (sides[0], one)
    around = _definitions(file, "\n".join(lines)) if file.endswith(".py") else {}
    return Change(file, "" if side is None else _scope(around, side), *sides)


def _side_of(lines: Sequence[str], first: int, last: int) -> Side | None:
    """Lines `first` to before `last` (from 0) without their common indent, as a `Side`, whose lines count from 1.

    None where `last` is not after `first`.
    """
    return Side(first + 1, last, dedent("\n".join(lines[first:last]))) if last > first else None


def _definitions(file: str, text: str) -> dict[str, ast.stmt]:
    """The functions and classes of a file by qualified name, an outer one before those inside it."""
    tree = tree_of(text)
    every = statements_of(file, tree.body if tree is not None else ())
    return {each.scope: each.node for each in every if isinstance(each.node, DEFINITIONS)}


def _scope(definitions: Mapping[str, ast.stmt], side: Side) -> str:
    """Qualified name of the innermost function or class that holds the lines of `side`; "" for the module."""
    spans = {name: (first_line(node), node.end_lineno or 0) for name, node in definitions.items()}
    return ["", *(name for name, (first, last) in spans.items() if first <= side.first and side.last <= last)][-1]


def join_edits(
    edits: Sequence[Change], texts_a: Mapping[str, str], texts_b: Mapping[str, str], computes: Sequence[Change]
) -> list[Change]:
    """Join edits with a key in common (see `_keys`) to one change with `pieces`, in the order of the first of each.

    Edits alone are changes without `pieces`; only those of Python are joined. What is not joined and does not run alone
    costs runs.

    Args:
        edits: the edits of all differing files.
        texts_a: these files in a.
        texts_b: these files in b.
        computes: statements that compute something else; a change is named by the first of its edits that is one.
    """
    versions = _names_of(texts_a), _names_of(texts_b)
    group = list(range(len(edits)))
    first: dict[Hashable, int] = {}
    for place, edit in enumerate(edits):
        for key in _keys(edit, *versions) if edit.unit != "file" and edit.file.endswith(".py") else ():
            one, two = group[first.setdefault(key, place)], group[place]
            group = [one if each == two else each for each in group]
    together = ([edit for edit, at in zip(edits, group, strict=True) if at == one] for one in dict.fromkeys(group))
    return [_joined(pieces, computes) for pieces in together]


def _joined(pieces: Sequence[Change], computes: Sequence[Change]) -> Change:
    """One change of the edits `pieces`: as the piece that overlaps the first of `computes` to do so, else the first.

    Its `line` is that statement's where it lies within the piece in b, else 0; `pieces` is () for one edit.
    """
    computing = [(piece, one) for one in computes for piece in pieces if overlaps(piece, one)]
    head, line = (computing[0][0], computing[0][1].line) if computing else (pieces[0], 0)
    inside = head.b is not None and head.b.first <= line <= head.b.last
    rest = tuple(Piece(piece.file, piece.a, piece.b) for piece in pieces) if len(pieces) > 1 else ()
    return head._replace(pieces=rest, line=line if inside else 0)


def overlaps(edit: Change, other: Change) -> bool:
    """Whether `other` has a line in common, in a or in b, with `edit` or any of its pieces."""
    pieces: tuple[Change | Piece, ...] = edit, *edit.pieces
    sides = [(each.file, each.a, other.file_a or other.file, other.a) for each in pieces]
    sides += [(each.file, each.b, other.file, other.b) for each in pieces]
    return any(
        one and two and file == place and one.first <= two.last and two.first <= one.last
        for file, one, place, two in sides
    )


Words: TypeAlias = "dict[tuple[str, str], set[str]]"
"""Identifiers by (file, qualified name of a function or class): those that it, or what is inside, gives a value.

By (file, "") all of the file, by ("", "") all.
"""


def _names_of(texts: Mapping[str, str]) -> Words:
    """The identifiers of files (texts by name); names that are only read count for a file, not for its functions."""
    words: Words = defaultdict(set)
    for file, text in texts.items():
        every = {"": tree_of(text) or ast.Pass(), **_definitions(file, text)}
        for scope, node in every.items():
            for inner in ast.walk(node):
                if not scope or not isinstance(getattr(inner, "ctx", None), ast.Load):
                    found = (getattr(inner, key, None) for key in ("id", "attr", "arg", "name", "asname"))
                    words[file, scope].update(part for name in found if name for part in str(name).split("."))
        words["", ""] |= words[file, ""]
    return words


def _keys(edit: Change, one: Words, two: Words) -> Iterator[Hashable]:
    """Keys of an edit: each identifier in it that its function, its file or the project has in one version alone.

    Of an edit that only adds or only removes, its text, too, since that may have moved.
    """
    if edit.a is None or edit.b is None:
        yield edit.file, (edit.b or edit.a or Side(0, 0, "")).text.strip()
    words = {word for side in (edit.a, edit.b) if side is not None for word in re.findall(r"[^\W\d]\w*", side.text)}
    for place in (("", ""), (edit.file, ""), (edit.file, edit.scope)):
        yield from ((*place, word) for word in words & (one[place] ^ two[place]))
