"""Edits of two versions joined to changes that run one without the other.

A statement that uses a renamed variable does not run without the one that gives it. So edits with a key in common are
one change: see `_keys`. Edits that are joined without need only make the change larger; edits that would need another
and were not joined cost a run that answers nothing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import FUNCTIONS, Change, Piece, Side, tree_of
from introspect_cli.rerun.changes.edits import definitions

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

_DEFINES = re.compile(r"(?m)^(?:async )?(?:def|class) (\w+)")
_IMPORTS = re.compile(r"(?m)^(?:from\s+\S+\s+)?import\s+(.*)")


def join_edits(
    edits: Sequence[Change], texts_a: Mapping[str, str], texts_b: Mapping[str, str], computes: Sequence[Change]
) -> list[Change]:
    """Join edits with a key in common (see `_keys`) to one change with `pieces`, in the order of the first of each.

    An edit alone is a change without `pieces`; a whole-file edit is never joined.

    Args:
        edits: the edits of all differing files.
        texts_a: these files in a.
        texts_b: these files in b.
        computes: statements that compute something else; a change is named by the first of its edits that is one.
    """
    versions = _Names.of(texts_a), _Names.of(texts_b)
    group = list(range(len(edits)))
    first: dict[Hashable, int] = {}
    for place, edit in enumerate(edits):
        for key in _keys(edit, versions) if edit.unit != "file" else ():
            one, two = group[first.setdefault(key, place)], group[place]
            group = [one if each == two else each for each in group]
    together: dict[int, list[Change]] = defaultdict(list)
    for place, edit in enumerate(edits):
        together[group[place]].append(edit)
    return [_joined(pieces, computes) for pieces in together.values()]


def _joined(pieces: Sequence[Change], computes: Sequence[Change]) -> Change:
    """One change of the edits `pieces`: as the piece that overlaps the first of `computes` to do so, else the first.

    Its `line` is that statement's where it lies within the piece in b, else 0; `pieces` is () for one edit.
    """
    computing = [(piece, one) for one in computes for piece in pieces if overlaps(piece, one)]
    head, line = (computing[0][0], computing[0][1].line) if computing else (pieces[0], 0)
    inside = head.b is not None and head.b.first <= line <= head.b.last
    rest = tuple(Piece(piece.file, piece.a, piece.b) for piece in pieces) if len(pieces) > 1 else ()
    return replace(head, pieces=rest, line=line if inside else 0)


def overlaps(edit: Change, other: Change) -> bool:
    """Whether `other` has a line in common, in a or in b, with `edit` or any of its pieces."""
    pieces: tuple[Change | Piece, ...] = edit, *edit.pieces
    for each in pieces:
        sides = ((each.a, other.a, other.file_a or other.file), (each.b, other.b, other.file))
        for one, two, file in sides:
            if one and two and each.file == file and one.first <= two.last and two.first <= one.last:
                return True
    return False


@dataclass
class _Names:
    """Identifiers of one version's files.

    Attributes:
        words: by (file, qualified name of a function or class) those that it, or what is inside, gives a value; by
            (file, "") all of the file, by ("", "") all.
        parameters: syntax of the parameters by (file, function); `Net` stands for `Net.__init__`.
    """

    words: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    parameters: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> _Names:
        """Collect the identifiers of files (texts by name); all words of a file that cannot be parsed, as words of all.

        Names that are only read count for a file, not for a function or class.
        """
        names = cls()
        for file, text in texts.items():
            tree = tree_of(text)
            names.words["", ""] |= set(re.findall(r"\w+", text)) if tree is None else set()
            for scope, node in [] if tree is None else [("", tree), *definitions(tree)]:
                for inner in ast.walk(node):
                    if scope and isinstance(getattr(inner, "ctx", None), ast.Load):
                        continue
                    found = (getattr(inner, key, None) for key in ("id", "attr", "arg", "name", "asname"))
                    names.words[file, scope].update(part for name in found if name for part in str(name).split("."))
                if isinstance(node, FUNCTIONS):
                    names.parameters[file, scope.removesuffix(".__init__")] = ast.dump(node.args)
            names.words["", ""] |= names.words[file, ""]
        return names


def _keys(edit: Change, versions: tuple[_Names, _Names]) -> Iterator[Hashable]:
    """Keys of an edit; edits with one in common are joined.

    They are: the text of an edit that only adds or only removes, since it may have moved; each identifier in it that
    its function, its file or the project has in one version alone; a name that it defines or imports; the name in it of
    a function of the same file whose parameters differ.
    """
    if edit.a is None or edit.b is None:
        yield edit.file, "moved", (edit.b or edit.a or Side(0, 0, "")).text.strip()
    function = edit.scope.partition(".<locals>.")[0]
    one, two = versions
    changed = {scope for place, scope in one.parameters.keys() & two.parameters.keys()
               if place == edit.file and one.parameters[place, scope] != two.parameters[place, scope]}  # fmt: skip
    called = {scope.rpartition(".")[2] for scope in changed}
    for text in (side.text for side in (edit.a, edit.b) if side is not None):
        words = set(re.findall(r"[^\W\d]\w*", text))
        for place in (("", ""), (edit.file, ""), (edit.file, edit.scope), (edit.file, function)):
            yield from ((*place, word) for word in words & (one.words[place] ^ two.words[place]))
        defined = {name: edit.scope.removesuffix(name).rstrip(".") for name in _DEFINES.findall(text)}
        imported = dict.fromkeys(re.findall(r"\w+", " ".join(_IMPORTS.findall(text))), "")
        yield from ((edit.file, outer, "binds", name) for name, outer in (imported | defined).items() if name != "as")
        yield from (("called", word) for word in words & called)
