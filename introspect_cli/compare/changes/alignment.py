"""Two versions of a body: which statement is which of the other.

Equal statements belong together, and definitions of one name. Of what is left between them, the most alike are
taken for one statement that was edited; a statement that left one place and stands at another has moved.
"""

from __future__ import annotations

import ast
import re
from difflib import SequenceMatcher
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


def tree_of(text: str) -> ast.Module | None:
    """The syntax of a file; None where python cannot parse it."""
    try:
        return ast.parse(text)
    except UNREADABLE:
        return None


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
