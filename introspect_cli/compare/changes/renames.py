"""Variables that have another name in another version of a file.

Where a variable was renamed, every statement that uses it differs, and none can be taken without the others. Such a
change does nothing: in b's text the variables get the names that they have in a, and what differs then is what was
changed. Names that could be meant by somebody else are left alone: attributes, parameters, functions, and all of a
function that asks for its variables by name.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, TypeAlias

from introspect_cli.compare.changes.alignment import DEFINITIONS, FUNCTIONS, UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_Owner: TypeAlias = "ast.Module | ast.FunctionDef | ast.AsyncFunctionDef"
_BY_NAME = frozenset({"locals", "globals", "vars", "eval", "exec"})


def with_names_of_a(text_a: str, text_b: str, elsewhere: Collection[str] = ()) -> str:
    """B's text, its variables named as in a's where they were renamed and nothing else; its lines stay where they are.

    A variable of the file itself that another file of b, `elsewhere`, mentions keeps its name.
    """
    try:
        owners_a, owners_b = _owners(ast.parse(text_a)), _owners(ast.parse(text_b))
    except UNREADABLE:
        return text_b
    text = text_b
    for name in owners_a.keys() & owners_b.keys():
        renamed = _renamed(owners_a[name], owners_b[name])
        if not name:
            words = {word for other in elsewhere for word in re.findall(r"\w+", other)} if renamed else set()
            renamed = {new: old for new, old in renamed.items() if new not in words}
        if renamed:
            text = _with(text, name, renamed)
    return text


def _owners(tree: ast.Module) -> dict[str, _Owner]:
    """The file and its functions, by qualified name; none of those of which there are several."""
    owners: dict[str, list[_Owner]] = {"": [tree]}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, DEFINITIONS):
                inner = f"{prefix}{child.name}."
                if isinstance(child, FUNCTIONS):
                    owners.setdefault(prefix + child.name, []).append(child)
            visit(child, inner)

    visit(tree, "")
    return {name: nodes[0] for name, nodes in owners.items() if len(nodes) == 1}


def _renamed(a: _Owner, b: _Owner) -> dict[str, str]:
    """Variables of b's function that are others of a's, by their names in b."""
    words_a, words_b = _words(a), _words(b)
    gone = {name for name in _bound(a) if name not in words_b}
    come = {name for name in _bound(b) if name not in words_a}
    if not gone or not come or _BY_NAME & (words_a | words_b):
        return {}
    lines_a, lines_b = ([*_statements(owner)] for owner in (a, b))
    shapes_a = [_shape(line, gone) for line in lines_a]
    shapes_b = [_shape(line, come) for line in lines_b]
    votes: Counter[tuple[str, str]] = Counter()
    for low, start, size in SequenceMatcher(None, shapes_a, shapes_b, autojunk=False).get_matching_blocks():
        for one, two in zip(lines_a[low : low + size], lines_b[start : start + size], strict=True):
            votes.update(
                (new.id, old.id)
                for old, new in zip(_names(one), _names(two), strict=True)
                if new.id in come and old.id in gone
            )
    news, olds = Counter(new for new, _ in votes), Counter(old for _, old in votes)
    return {new: old for new, old in votes if news[new] == olds[old] == 1}


def _words(owner: _Owner) -> set[str]:
    """All identifiers below a node, attributes left out."""
    words = set()
    for node in ast.walk(owner):
        for field, value in ast.iter_fields(node):
            if field in {"id", "name", "arg", "asname", "rest"} and isinstance(value, str):
                words.add(value)
            elif field == "names" and isinstance(node, ast.Global | ast.Nonlocal):
                words.update(value)
    return words


def _bound(owner: _Owner) -> set[str]:
    """Variables that are assigned to in a function itself and bound by nothing else."""
    bound, other = set(), set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                bound.add(child.id)
            elif isinstance(child, ast.Global | ast.Nonlocal):
                other.update(child.names)
            elif isinstance(child, ast.arg):
                other.add(child.arg)
            elif isinstance(child, ast.alias):
                other.add((child.asname or child.name).partition(".")[0])
            elif isinstance(child, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and child.name:
                other.add(child.name)
            if not isinstance(child, (*DEFINITIONS, ast.Lambda)):
                visit(child)
            elif isinstance(child, DEFINITIONS):
                other.add(child.name)

    visit(owner)
    # names that an inner function gives something else are not one variable
    inner = {
        name for node in ast.walk(owner) if node is not owner and isinstance(node, FUNCTIONS) for name in _given(node)
    }
    return set(bound) - other - inner


def _given(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _statements(owner: _Owner) -> Iterator[ast.AST]:
    """Simple statements, and the expressions at the head of compound ones."""
    for node in ast.walk(owner):
        if isinstance(node, ast.stmt) and node is not owner:
            if not hasattr(node, "body"):
                yield node
            elif not isinstance(node, DEFINITIONS):
                yield from (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _names(node: ast.AST) -> list[ast.Name]:
    return [child for child in ast.walk(node) if isinstance(child, ast.Name)]


def _shape(node: ast.AST, open_names: set[str]) -> str:
    """A statement, the names that are looked for left open."""
    return re.sub(r"id='(\w+)'", lambda match: "id=?" if match[1] in open_names else match[0], ast.dump(node))


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Give a variable its other name."""
        node.id = self.names.get(node.id, node.id)
        return node


def _with(text: str, owner: str, names: Mapping[str, str]) -> str:
    """The text with variables of a function renamed; as it was where that cannot be done in the text."""
    node = _owners(ast.parse(text))[owner]
    lines = [line.encode() for line in text.split("\n")]
    places = sorted(
        {(name.lineno, name.col_offset, name.id) for name in _names(node) if name.id in names}, reverse=True
    )
    for number, column, new in places:
        line = lines[number - 1]
        lines[number - 1] = line[:column] + names[new].encode() + line[column + len(new.encode()) :]
    made = b"\n".join(lines).decode("utf-8", "replace")
    tree = ast.parse(text)
    _Renaming(names).visit(_owners(tree)[owner])
    try:
        return made if ast.dump(ast.parse(made)) == ast.dump(tree) else text
    except UNREADABLE:
        return text
