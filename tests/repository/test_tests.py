"""How the tests are laid out: by layer, with what several use in `tests/support`."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, at any place."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_no_file_imports_a_test():
    tests = {other.stem for other in FILES if other.parent.name != "support"}
    assert [path.name for path in FILES if imported(path) & tests] == []


def test_names_of_files_are_unique():
    names = [path.stem for path in FILES]
    assert sorted(names) == sorted(set(names))
