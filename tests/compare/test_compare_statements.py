"""Which statements changed between two versions of a file, and the file with some of the changes."""

from __future__ import annotations

import ast
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from introspect_cli.compare.changes.statements import apply, changed_statements

ROOT = Path(__file__).parents[2]

NET = '''
import torch

class Net(torch.nn.Module):
    """A net."""

    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        if self.training:
            x = torch.dropout(x, 0.1, True)
        x = torch.relu(x)
        return self.second(x)

def train(net):
    for step in range(3):
        net(torch.ones(2, 4)).sum().backward()
'''


def changes(one, two):
    return changed_statements("net.py", one, two)


def said(found):
    return [(change.place, change.scope, change.unit) for change in found]


def test_one_changed_line_of_a_forward_is_one_change():
    (change,) = changes(NET, NET.replace("torch.relu(x)", "torch.tanh(x)"))
    assert said([change]) == [("net.py:16", "Net.forward", "statement")]
    assert (change.a.text, change.b.text) == ("x = torch.relu(x)", "x = torch.tanh(x)")
    assert (change.a.first, change.a.last) == (16, 16)


def test_a_changed_line_inside_a_branch_or_a_loop_is_one_change():
    after = NET.replace("x, 0.1,", "x, 0.2,").replace("ones(2, 4)", "ones(2, 5)")
    assert said(changes(NET, after)) == [("net.py:15", "Net.forward", "statement"), ("net.py:21", "train", "statement")]


def test_comments_docstrings_formatting_and_moved_definitions_are_no_change():
    head, train = NET.split("def train")
    moved = "import torch\n\ndef train" + train + head.replace("import torch\n", "", 1)
    for after in (
        NET.replace("A net.", "A net\nof two layers."),
        NET.replace("x = torch.relu(x)", "x = torch.relu(  # the activation\n            x\n        )"),
        NET.replace("    ", "  "),
        moved,
    ):
        assert changes(NET, after) == ()


def test_added_removed_and_moved_statements():
    added, removed, moved = (
        NET.replace("        x = torch.relu(x)\n", "        x = torch.relu(x)\n        x = x * 2\n"),
        NET.replace("        x = torch.relu(x)\n", ""),
        NET.replace("        x = torch.relu(x)\n", "").replace(
            "        x = self.first(x)\n", "        x = torch.relu(x)\n        x = self.first(x)\n"
        ),
    )
    (change,) = changes(NET, added)
    assert (change.a, change.b.text, change.place) == (None, "x = x * 2", "net.py:17")
    (change,) = changes(NET, removed)
    assert (change.a.text, change.b, change.place) == ("x = torch.relu(x)", None, "net.py:16")
    (change,) = changes(NET, moved)
    assert (change.unit, change.a.text) == ("moved", change.b.text)


@pytest.mark.parametrize("texts", [("x = (", "x = 1\n"), ("x = 1\n", "\0"), (None, "x = 1\n"), ("x = 1\n", None)])
def test_what_does_not_parse_or_is_in_one_version_alone_is_one_change_of_the_whole_file(texts):
    (change,) = changes(*texts)
    assert (change.unit, change.place) == ("file", "net.py")
    assert apply(texts[0], [change], texts[1]) == texts[1]
    assert apply(texts[0], [], texts[1]) == texts[0]


def shape(text):
    """The syntax of a text without docstrings, definitions of a body in the order of their names."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body.pop(0)
        for name in ("body", "orelse", "finalbody"):
            lines = getattr(node, name, None)
            if isinstance(lines, list):
                setattr(node, name, sorted(lines, key=lambda child: getattr(child, "name", "")))
    return ast.dump(tree)


def check(one, two, seed=0):
    """None of the changes leave a, all lead to b, and with some of them the others are what is left."""
    found = changed_statements("f.py", one, two)
    assert apply(one, [], two) == one
    assert shape(apply(one, found, two)) == shape(two)
    if found:
        some = random.Random(seed).sample(found, len(found) // 2)
        between = apply(one, some, two)
        ast.parse(between)
        assert shape(apply(between, changed_statements("f.py", between, two), two)) == shape(two)
    return found


def versions():
    """Pairs of texts of one file that follow one another in the history of this repository."""
    names = ["introspect_cli/compare/diff.py", "introspect_cli/capture/session.py", "introspect_cli/cli.py"]
    for name in names:
        log = subprocess.run(
            ["git", "-C", ROOT, "log", "--format=%H", "-5", "--", name], capture_output=True, text=True, check=False
        )
        texts = [
            subprocess.run(
                ["git", "-C", ROOT, "show", f"{commit}:{name}"], capture_output=True, text=True, check=False
            ).stdout
            for commit in log.stdout.split()
        ]
        yield from zip(texts[1:], texts, strict=False)


def test_every_pair_of_versions_in_a_history_can_be_made_of_its_changes():
    pairs = list(versions())
    if not pairs:
        pytest.skip("no history here")
    for seed, (one, two) in enumerate(pairs):
        check(*((one, two) if seed % 2 else (two, one)), seed)


BLOCK = st.recursive(
    st.sampled_from(["a = 1", "b = 2", "f(a)", "a = f(b)", "x = '''1\n 2'''", "b += a; a = b", "import os"]).map(
        lambda line: [line]
    ),
    lambda inner: st.builds(
        lambda head, bodies: head(bodies),
        st.sampled_from(
            [
                lambda bodies: ["if a:", *tab(bodies)],
                lambda bodies: ["if b: a = 3"],
                lambda bodies: ["if a:", *tab(bodies[:1]), "else:", *tab(bodies[1:] or bodies)],
                lambda bodies: ["if a:", *tab(bodies[:1]), "elif b:", *tab(bodies[1:] or bodies)],
                lambda bodies: ["for i in a:", *tab(bodies)],
                lambda bodies: ["try:", *tab(bodies[:1]), "except ValueError:", *tab(bodies[1:] or bodies)],
                lambda bodies: ["@f", "def f(a):", "    'text'", *tab(bodies)],
                lambda bodies: ["def g(a):", *tab(bodies)],
                lambda bodies: ["def g(a, b):", "    'text'"],
                lambda bodies: ["class C:", *tab(bodies)],
            ]
        ),
        st.lists(inner, min_size=1, max_size=4),
    ),
    max_leaves=12,
)


def tab(bodies):
    return [
        "\n".join("    " + part for part in line.split("\n")) if "'''" not in line else "    x = 3"
        for body in bodies
        for line in body
    ]


PROGRAM = st.lists(BLOCK, max_size=6).map(lambda blocks: "\n".join(line for block in blocks for line in block) + "\n")


@settings(deadline=None)
@example(
    "a = 1\n@f\ndef f(a):\n    b = 2\n    a = 1\n",
    "@f\ndef f(a):\n    b = 2\n    a = 1\na = 1\n@f\ndef f(a):\n    b = 2\n",
    0,
)
@given(PROGRAM, PROGRAM, st.integers())
def test_any_program_can_be_made_of_any_other_by_the_changes_between_them(one, two, seed):
    check(one, two, seed)
