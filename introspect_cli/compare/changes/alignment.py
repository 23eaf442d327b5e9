"""Two versions of a body: which statement is which of the other, and which variable.

Equal statements belong together, and definitions of one name. Of what is left between them, the most alike are
taken for one statement that was edited; a statement that left one place and stands at another has moved.

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
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What python raises of a text that it cannot parse."""
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a compound statement that hold its bodies."""
_WORD = re.compile(r"[\w.]+")
_LIKE = 0.4
_SAME_TARGET = 0.3
_MOST_PAIRS = 20_000

Counterpart: TypeAlias = "tuple[int | None, int | None, bool]"
"""A place in a's body, one in b's (None without a counterpart), and whether the statement moved from there to here."""


def _keys(nodes: Sequence[ast.stmt], others: Sequence[ast.stmt], key: Callable[[ast.AST], str]) -> list[str]:
    """What tells statements of a body from one another: a definition's name, if only one has it; else all of it."""
    names = [[node.name for node in body if isinstance(node, DEFINITIONS)] for body in (nodes, others)]
    return [
        _by_name(node)
        if isinstance(node, DEFINITIONS) and all(body.count(node.name) == 1 for body in names)
        else key(node)
        for node in nodes
    ]


def _by_name(node: ast.stmt) -> str:
    return f"{type(node).__name__} {node.name}" if isinstance(node, DEFINITIONS) else ""


def aligned(one: Sequence[ast.stmt], two: Sequence[ast.stmt], key: Callable[[ast.AST], str]) -> list[Counterpart]:
    """Both bodies in b's order: places of what belongs together, None where it has no counterpart, and what moved.

    The key of a statement is a text in which equal ones are equal.
    """
    a, b = _keys(one, two, key), _keys(two, one, key)
    opcodes = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    gone = {a[i]: i for tag, low, high, _, _ in opcodes if tag != "equal" for i in range(low, high)}
    come = {b[j]: j for tag, _, _, start, stop in opcodes if tag != "equal" for j in range(start, stop)}
    moved = {come[text]: i for text, i in gone.items() if text in come and a.count(text) == b.count(text) == 1}
    # where a name is defined twice, the last one counts: none of them can stand elsewhere
    moved = {j: i for j, i in moved.items() if not isinstance(one[i], DEFINITIONS) or a[i] == _by_name(one[i])}
    steps: list[Counterpart] = []
    for tag, low, high, start, stop in opcodes:
        if tag == "equal":
            steps += [(low + n, start + n, False) for n in range(high - low)]
            continue
        left = [i for i in range(low, high) if i not in moved.values()]
        right = [j for j in range(start, stop) if j not in moved]
        region: list[Counterpart] = [(i, j, False) for i, j in _paired(left, right, one, two)]
        for j in range(start, stop):
            if j in moved:
                later = (n for n, (_, other, _) in enumerate(region) if other is not None and other > j)
                region.insert(next(later, len(region)), (moved[j], j, True))
        steps += region
    if one and two and not any(i is not None and j is not None for i, j, _ in steps):
        # something has to stay, or a body would be left empty
        rest_a, rest_b = range(1, len(one)), range(1, len(two))
        return [(0, 0, False), *((i, None, False) for i in rest_a), *((None, j, False) for j in rest_b)]
    return steps


def _paired(
    left: Sequence[int], right: Sequence[int], one: Sequence[ast.stmt], two: Sequence[ast.stmt]
) -> list[tuple[int | None, int | None]]:
    """Statements without an equal one, in order, each beside the one that it became: the most alike together."""
    pairs = [] if len(left) == len(right) == 1 else _alike([one[i] for i in left], [two[j] for j in right])
    together: list[tuple[int | None, int | None]] = []
    done_a = done_b = 0
    for i, j in [*pairs, (len(left), len(right))]:
        gone, come = left[done_a:i], right[done_b:j]
        if len(gone) == len(come):
            together += zip(gone, come, strict=True)
        else:
            together += [*((place, None) for place in gone), *((None, place) for place in come)]
        if i < len(left):
            together.append((left[i], right[j]))
        done_a, done_b = i + 1, j + 1
    return together


def _alike(one: Sequence[ast.stmt], two: Sequence[ast.stmt]) -> list[tuple[int, int]]:
    """Pairs of like statements that keep the order of both and are the most alike in sum."""
    if len(one) * len(two) > _MOST_PAIRS:
        return []
    words_a, words_b = ([frozenset(_WORD.findall(ast.unparse(node))) for node in nodes] for nodes in (one, two))
    best = [[0.0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, j in product(reversed(range(len(one))), reversed(range(len(two)))):
        together = _likeness(one[i], two[j], words_a[i], words_b[j]) + best[i + 1][j + 1]
        best[i][j] = max(best[i + 1][j], best[i][j + 1], together)
    pairs, i, j = [], 0, 0
    while i < len(one) and j < len(two):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs


def _likeness(one: ast.stmt, two: ast.stmt, words: frozenset[str], others: frozenset[str]) -> float:
    """How alike two statements are: by the words they share, and more if they assign to the same; 0 if hardly."""
    likeness = len(words & others) / max(len(words | others), 1)
    targets = _targets(one)
    if targets and targets == _targets(two):
        likeness += _SAME_TARGET
    return likeness if likeness >= _LIKE else 0.0


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [ast.dump(target) for target in node.targets]
    return [ast.dump(node.target)] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def first_line(node: ast.stmt) -> int:
    """The line in which a statement begins, with what decorates it."""
    decorators = node.decorator_list if isinstance(node, DEFINITIONS) else ()
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def bodies_of(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """The bodies of a compound statement, each with what it is the body of."""
    for name in BLOCKS:
        block: list[Any] = getattr(node, name, [])
        if name in {"handlers", "cases"}:
            yield from ((inner, inner.body) for inner in block)
        elif block or (name == "body" and isinstance(node, (ast.Module, *DEFINITIONS))):
            yield node, block


# --- variables

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
        renamed = _renamed_variables(owners_a[name], owners_b[name])
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


def _renamed_variables(a: _Owner, b: _Owner) -> dict[str, str]:
    """Variables of b's function that are others of a's, by their names in b."""
    words_a, words_b = _words(a), _words(b)
    gone = {name for name in _bound(a) if name not in words_b}
    come = {name for name in _bound(b) if name not in words_a}
    if not gone or not come or _BY_NAME & (words_a | words_b):
        return {}
    lines_a, lines_b = ([*_statements(owner)] for owner in (a, b))
    shapes_a = [_open_shape(line, gone) for line in lines_a]
    shapes_b = [_open_shape(line, come) for line in lines_b]
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


def _open_shape(node: ast.AST, open_names: set[str]) -> str:
    """A statement, the names that are looked for left open."""
    return re.sub(r"id='(\w+)'", lambda match: "id=?" if match[1] in open_names else match[0], ast.dump(node))


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
    for name in _names(_owners(tree)[owner]):
        name.id = names.get(name.id, name.id)
    try:
        return made if ast.dump(ast.parse(made)) == ast.dump(tree) else text
    except UNREADABLE:
        return text
