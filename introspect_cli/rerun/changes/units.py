"""What differs between two versions, in units that run one without the other.

A statement that uses a renamed variable does not run without the one that gives it. So statements that mention one name
that only one of the versions has are one change; so are those that bind one name of a file, as a class that moved and
the import that brings it, and a function whose parameters changed with its calls.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import DEFINITIONS, FUNCTIONS, Change, Piece, Side, tree_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence


def units(
    edits: Sequence[Change], texts_a: Mapping[str, str], texts_b: Mapping[str, str], computes: Sequence[Change]
) -> list[Change]:
    """Join changes that do not run one without the other, named by the one that changes what is computed.

    Args:
        edits: the statements that differ as texts.
        texts_a: the files of a.
        texts_b: those of b.
        computes: the statements that compute something else.
    """
    versions = _Version(texts_a), _Version(texts_b)
    group = list(range(len(edits)))
    first: dict[Hashable, int] = {}
    for place, edit in enumerate(edits):
        for key in _needs(edit, versions) if edit.unit != "file" else ():
            other = first.setdefault(key, place)
            one, two = group[other], group[place]
            group = [one if each == two else each for each in group]
    together: dict[int, list[Change]] = defaultdict(list)
    for place, edit in enumerate(edits):
        together[group[place]].append(edit)
    made = []
    for pieces in together.values():
        meant = [(piece, one) for one in computes for piece in pieces if overlap(piece, one)]
        head, line = (meant[0][0], meant[0][1].line) if meant else (pieces[0], 0)
        inside = head.b is not None and head.b.first <= line <= head.b.last
        rest = tuple(Piece(piece.file, piece.a, piece.b) for piece in pieces) if len(pieces) > 1 else ()
        made.append(replace(head, pieces=rest, line=line if inside else 0))
    return made


def overlap(edit: Change, other: Change) -> bool:
    """Whether `other` has a line, in a or in b, in common with `edit` or one of its pieces."""
    pieces: tuple[Change | Piece, ...] = edit, *edit.pieces
    for each in pieces:
        sides = ((each.a, other.a, other.file_a or other.file), (each.b, other.b, other.file))
        for one, two, file in sides:
            if one and two and each.file == file and one.first <= two.last and two.first <= one.last:
                return True
    return False


class _Version:
    """Names in one version's files: `words` (all), `bound` (by file and function), `parameters` (of each function)."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.words: set[str] = set()
        self.bound: dict[tuple[str, str], set[str]] = {}
        self.parameters: dict[tuple[str, str], str] = {}
        for file, text in texts.items():
            tree = tree_of(text)
            if tree is None:
                self.words |= set(re.findall(r"\w+", text))
            else:
                self._read(file, tree, "")

    def _read(self, file: str, node: ast.AST, prefix: str, scope: str = "") -> None:
        """Collect the names below a node; `scope` is the function around it, `prefix` begins its inner names."""
        bound = self.bound.setdefault((file, scope), set())
        for child in ast.iter_child_nodes(node):
            self.words |= {name for field in ("id", "attr", "arg", "name") if (name := getattr(child, field, None))}
            if isinstance(child, ast.arg):
                bound.add(child.arg)
            elif isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
                bound.add(child.id)
            elif isinstance(child, ast.alias):
                bound.add((child.asname or child.name).partition(".")[0])
            if isinstance(child, DEFINITIONS):
                bound.add(child.name)
                name = prefix + child.name
                if isinstance(child, FUNCTIONS):
                    self.parameters[file, name] = ast.dump(child.args)
                inner = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
                self._read(file, child, inner, name)
            else:
                self._read(file, child, prefix, scope)

    def binds(self, file: str, scope: str, name: str) -> str | None:
        """The innermost function from `scope` outwards that binds `name`; "" for the module, None where none does."""
        while name not in self.bound.get((file, scope), ()):
            if not scope:
                return None
            scope = scope.rpartition(".<locals>.")[0] if ".<locals>." in scope else ""
        return scope


_BINDS = r"(?m)^(?:(?:from|import)\b.*\b{0}\b|(?:async )?(?:def|class) {0}\b|{0}\s*[=:,])"
"""Lines that bind a name, where they stand outside of functions."""


def _needs(edit: Change, versions: tuple[_Version, _Version]) -> Iterator[Hashable]:
    """Keys of an edit; edits with a key in common are joined.

    Moved lines, names bound or used in only one version, module-level names, and functions with changed parameters.
    """
    if edit.a is None or edit.b is None:  # what left one place may have come to another
        yield edit.file, "moved", (edit.b or edit.a or Side(0, 0, "")).text.strip()
    for side, (here, other) in zip((edit.a, edit.b), (versions, versions[::-1]), strict=True):
        for word in set(re.findall(r"[^\W\d]\w*", side.text if side is not None else "")):
            scope = here.binds(edit.file, edit.scope, word)
            if scope is not None and word not in other.bound.get((edit.file, scope), ()):
                yield (edit.file, scope, word) if scope else word
            elif word in here.words - other.words:
                yield word
            elif scope == "" and side is not None and re.search(_BINDS.format(word), side.text):
                yield edit.file, "", word
            if _takes_others(edit.file, word, versions):
                yield "called", word


def _takes_others(file: str, name: str, versions: tuple[_Version, _Version]) -> bool:
    """Whether the function `name`, or the class's `__init__`, has other parameters in the other version."""
    forms = [(file, name), (file, f"{name}.__init__")]
    return any(form in one.parameters and form in two.parameters and one.parameters[form] != two.parameters[form]
               for form in forms for one, two in [versions])  # fmt: skip
