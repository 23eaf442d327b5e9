"""Who may import whom, and what a verb may load.

The imports of every file are read from its syntax, inside functions and under `TYPE_CHECKING` too.
"""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import row, write_run

import introspect_cli
from introspect_cli.cli import VERBS

PACKAGE = Path(introspect_cli.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {
    *("version", "records", "statistics", "derived", "texts", "labels", "schedule", "errors", "exit_codes"),
    *("machine", "sums"),
}
EVERYTHING = {path.stem if path.parent == PACKAGE else path.parent.name for path in FILES}

LAYERS = {
    "version": set(),
    "records": set(),
    "statistics": set(),
    "derived": {"statistics"},
    "texts": set(),
    "labels": {"errors", "schedule"},
    "schedule": {"errors"},
    "errors": {"exit_codes"},
    "exit_codes": set(),
    "sums": {"machine"},
    "machine": set(),
    "script": BASE,
    "tensors": BASE,
    "store": BASE,
    "capture": BASE | {"tensors", "store", "script", "selection"},
    "selection": BASE | {"store"},
    "compare": BASE | {"store", "selection"},
    "inspect": BASE | {"store", "selection"},
    "health": BASE | {"store", "selection"},
    "exchange": BASE | {"store", "inspect", "health", "selection", "tensors"},
    "publish": BASE | {"store", "selection"},
    "rerun": BASE | {"store", "compare", "selection"},
    "workers": BASE | {"store"},
    "render": BASE | {"compare", "inspect", "health", "rerun"},
    "notebook": BASE | {"store", "compare", "health", "render", "exchange", "selection"},
    "api": BASE | {"store", "compare", "capture", "script", "notebook", "exchange", "inspect", "selection"},
    "integrations": BASE | {"api", "capture", "tensors", "store", "script", "rerun", "compare"},
    "commands": EVERYTHING - {"cli", "__main__", "__init__"},
    "cli": BASE | {"commands", "script", "selection"},
    "__main__": {"cli"},
    "__init__": {"version", "script", "api"},
}
"""What each part may import beside itself."""

HOMES = {
    "torch": {"tensors", "capture", "integrations"},
    "triton": {"tensors"},
    "rich": {"render"},
    "deepdiff": {"compare"},
    "click": {"cli", "commands"},
    "pickle": {"exchange"},  # its unpickler with nothing to call, for the metadata of torch.distributed.checkpoint
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
}
"""Parts that may import a module of someone else's; elsewhere it costs a start, or is not safe."""


def part_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path):
    """Dotted names a file imports, with the line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by dots"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def target_of(name):
    """The part of the package that a dotted name belongs to, None for a module of someone else's."""
    words = name.split(".")
    if words[0] != "introspect_cli":
        return None
    return words[1] if len(words) > 1 and words[1] in EVERYTHING else "__init__"


def crossings(path):
    part = part_of(path)
    for name, line in imported(path):
        target = target_of(name)
        if target is not None and target != part and target not in LAYERS[part]:
            yield f"{path.relative_to(PACKAGE)}:{line} imports {target}"
        homes = HOMES.get(name.split(".")[0])
        if homes is not None and part not in homes:
            yield f"{path.relative_to(PACKAGE)}:{line} imports {name.split('.')[0]}"


def test_every_file_keeps_to_its_layer():
    assert {part_of(path) for path in FILES} <= LAYERS.keys(), "a new part needs a line in the table"
    assert [crossing for path in FILES for crossing in crossings(path)] == []


def test_the_map_for_newcomers_has_every_part_and_what_it_imports():
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = page[page.index("| part |") :].partition("\n\n")[0].splitlines()[2:]
    cells = [[set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[1:-1]] for row in rows]
    named = [part for parts, _, _ in cells for part in parts]
    assert sorted(named) == sorted(LAYERS.keys() - {"__main__", "__init__"})
    written = {part: imports for parts, _, imports in cells for part in parts if imports - {"cli", "commands"}}
    assert written == {part: LAYERS[part] - BASE for part in written}


def test_the_walk_finds_what_it_looks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "store").mkdir()
    wrong = tmp_path / "store" / "wrong.py"
    wrong.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.nn\n"
        "def f():\n    from introspect_cli.capture import session\n    import introspect_cli.compare.table\n"
        "from introspect_cli import diff\nfrom introspect_cli.version import __version__\nimport pickle\n"
    )
    assert sorted(crossings(wrong)) == [
        f"{Path('store/wrong.py')}:{line}"
        for line in (
            "3 imports torch",
            "5 imports capture",
            "6 imports compare",
            "7 imports __init__",
            "9 imports pickle",
        )
    ]


def module_of(path, package):
    """The dotted name of a file, that of its package for an `__init__`."""
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def longest_known(target, files):
    """The file that a dotted name leads to, which may be of something in it; "" for a stranger's."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target


def import_graph(package):
    """Which files of a package each of its files imports, by dotted name.

    The `__init__` of every package on the way is no edge: those below the first hold no code, and the first imports
    nothing heavy before it is asked.
    """
    files = {module_of(path, package): path for path in sorted(package.rglob("*.py"))}
    graph = {}
    for name, path in files.items():
        found = {longest_known(target, files) for target, _ in imported(path)}
        graph[name] = found - {name, ""}
    return graph


def circles(graph):
    """Every set of modules that import one another, directly or through others."""
    reached = {}
    for name in graph:
        seen, waiting = set(), [name]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        reached[name] = seen
    return {
        frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items() if name in seen
    }


def test_no_files_import_one_another_in_a_circle():
    assert circles(import_graph(PACKAGE)) == set()


def in_rooms(graph, part):
    """The graph of a part's folders and of the files beside them, each folder as one."""

    def room(name):
        return ".".join(name.split(".")[:3])

    inside = {name for name in graph if name.startswith(f"{PACKAGE.name}.{part}.")}
    rooms = {room(name): set() for name in inside}
    for name in inside:
        rooms[room(name)] |= {room(target) for target in graph[name] & inside} - {room(name)}
    return rooms


@pytest.mark.parametrize("part", ["capture", "compare", "rerun", "store", "tensors"])
def test_folders_of_a_part_import_in_one_direction(part):
    rooms = in_rooms(import_graph(PACKAGE), part)
    assert sum(map(bool, rooms.values())) > 4
    assert circles(rooms) == set()


def test_a_circle_is_found_inside_functions_and_under_type_checking(tmp_path):
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "one.py").write_text("def f():\n    from house.room.two import x\n")
    (package / "room" / "__init__.py").touch()
    (package / "room" / "two.py").write_text("from house.three import y\n")
    (package / "three.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.one\n")
    (package / "four.py").write_text("import house.one\n")
    assert circles(import_graph(package)) == {frozenset({"house.one", "house.room.two", "house.three"})}


def test_packages_hold_no_code():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != PACKAGE:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert [type(node).__name__ for node in tree.body] == ["Expr"], path


def loaded_by(code):
    """Which of the heavy modules are imported once `code` has run in a fresh process."""
    heavy = ("torch", "numpy", "numpy.ma", "pyarrow", "rich", "deepdiff", "yaml")
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint('|', *[n for n in {heavy} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.rpartition("|")[2].split()


def called(*words):
    return f"from introspect_cli.cli import main; sys.argv[1:] = {list(words)!r}; main()"


@pytest.mark.parametrize("words", [["--version"], [], ["nosuchverb"], ["capture", "--help"]], ids=" ".join)
def test_the_command_and_its_help_load_nothing_heavy(words):
    assert loaded_by(called(*words)) == []


def test_a_diff_loads_what_it_needs_alone(tmp_path):
    def run(name, value):
        return str(write_run(tmp_path / name, [[row("forward", "output", "Net", np.full(3, value))]] * 2))

    runs = [run("a", 1.0), run("b", 2.0)]
    assert loaded_by(called("diff", *runs)) == ["numpy", "rich", "yaml"]  # np.unique would bring numpy.ma


def test_no_verb_loads_torch_to_be_found():
    assert "torch" not in loaded_by(f"from introspect_cli import cli; [cli.command_of(verb) for verb in {[*VERBS]}]")


def cpu_seconds(*words):
    """The least processor time that python takes for it, of several goes."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(12))


def test_help_costs_little_more_than_importing_click():
    ratios = []
    for _ in range(3):  # another process on the machine can spoil a measurement, but not improve it
        ratios.append(cpu_seconds("-m", "introspect_cli", "--help") / cpu_seconds("-c", "import click"))
        if ratios[-1] <= 1.5:
            return
    raise AssertionError(f"--help costs {min(ratios):.2f} times an import of click")


def test_nothing_that_runs_beside_the_script_enters_catch_warnings():
    """Once it was entered, warnings that the script has shown already are shown again.

    `subprocess` enters it in some versions of python: the three files that start processes do so before the script, or
    in place of it.
    """
    beside = {"tensors", "store", "capture", "script", "records", "statistics", "texts", "errors", "integrations"}
    allowed = {"capture/environment/sources.py", "capture/neutrality.py", "capture/follow/launcher.py"}
    found = set()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        code = "\n".join(
            ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
        )
        if part_of(path) in beside and any(
            word in code for word in ("subprocess", "catch_warnings", "simplefilter", "filterwarnings")
        ):
            found.add(str(path.relative_to(PACKAGE)))
    assert found <= allowed
    assert "capture/environment/sources.py" in found
