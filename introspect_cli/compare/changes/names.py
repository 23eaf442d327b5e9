"""Names that a file uses and nothing in it defines.

A text made of some of the changes between two versions often uses what only another change defines. It would end with a
NameError: that needs no run.
"""

from __future__ import annotations

import ast
import builtins
import functools

_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_OF_MODULES = frozenset({"__file__", "__name__", "__doc__", "__spec__", "__package__", "__class__", "__builtins__"})


@functools.lru_cache(maxsize=256)
def undefined(text: str | None) -> frozenset[str]:
    """Names that are read in a file and bound nowhere in it, in whatever scope; none where that cannot be known."""
    try:
        tree = ast.parse(text or "")
    except _UNREADABLE:
        return frozenset()
    read: set[str] = set()
    bound = {*dir(builtins), *_OF_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return frozenset()
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            bound.update(node.names)
    return frozenset(read - bound)
