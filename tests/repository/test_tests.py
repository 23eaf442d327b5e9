"""How the tests are laid out: by layer, with what several use in `tests/support`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import introspect_cli

PACKAGE = Path(introspect_cli.__file__).parent
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


ENTRIES = {
    "the package, its Python functions and its command": "api cli",
    "the words: what is on record, errors, selections": "records errors selection statistics schedule.rules texts",
    "a capture in this process, with the options of the command line": "capture.options capture.session script.ending",
    "taps, as the pages have them": "capture.regions.attach",
    "a comparison, a check, and both as data": "compare.diff compare.result health.check render.json",
    "where the work of a comparison runs": "workers",
    "what exports and what reads checkpoints": "exchange.formats exchange.checkpoints",
    "what frameworks and pytest call": """
        integrations.lightning integrations.transformers integrations.window integrations.pytest_plugin rerun.golden
    """,
    "what writes a store": "store.run_writer store.rank_writer store.batch",
    "what reads it": "store.run store.whole store.verify",
    "its format, which is attacked": "store.files store.frames store.log store.documents store.remote sums",
    "the kernels, and what has them summarise": """
        tensors.summarizer tensors.kernels tensors.cpu tensors.gpu.engine tensors.gpu.kernels
        tensors.gpu.launch tensors.checksum tensors.generators tensors.places tensors.rows tensors.columns
        tensors.intake tensors.parallel
    """,
    "names of torch that have to be where they were": "capture.private_api capture.torch_distributed",
    "the table of what a capture replaces": "capture.events",
    "processes beside a training, for which a busy machine has to wait longer": "capture.background publish.send",
    "one pass of a model, however it was compiled": "capture.run_once",
    "patterns of two arrays: some thirty, of which each would be two runs": "compare.elements",
    "any program made of any other, which is asked of hundreds": "rerun.changes.edits",
    "a search with a rule in place of runs, which would take minutes": "rerun.changes.search",
}
"""The modules of the package that tests reach it by, by what they are there for."""


def modules_of(path: Path) -> set[str]:
    """Modules of the package that a test imports, or replaces something of by name."""
    named = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"introspect_cli(\.\w+)+", str(node.value)):
            named.append(node.value)
    return {longest_module(name) for name in named if name.partition(".")[0] == "introspect_cli"} - {""}


def longest_module(name: str) -> str:
    """The module that a dotted name is in, without the package's name; "" for the package itself."""
    words = name.split(".")[1:]
    while words and not PACKAGE.joinpath(*words).with_suffix(".py").exists():
        words.pop()
    return ".".join(words)


def test_tests_reach_the_package_by_these_modules_alone():
    entries = {module for modules in ENTRIES.values() for module in modules.split()}
    others = [path for path in FILES if path.name != "test_layers.py"]  # which names modules to say who may import whom
    used = {path.name: modules_of(path) for path in others}
    assert {name: modules - entries for name, modules in used.items() if modules - entries} == {}
    assert entries - set().union(*used.values()) == set()


def test_no_private_name_of_the_package_is_imported():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "introspect_cli":
                found += [(path.name, alias.name) for alias in node.names if re.match(r"_(?!_)", alias.name)]
    assert found == []
