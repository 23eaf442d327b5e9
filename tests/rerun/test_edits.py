"""What changed between two versions of a file, and the file with some of the changes."""

from __future__ import annotations

import ast
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from introspect_cli.rerun.changes.edits import apply_edits, edits_of

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
    return [*edits_of("net.py", one, two)]


def applied(found, some, one, two):
    return apply_edits("f.py", [edit for change in some for edit in found[change]], one, two)


def places(one, two):
    return [(change.place, change.scope, change.unit) for change in changes(one, two)]


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        (NET.replace("relu(x)", "tanh(x)"), [("net.py:16", "Net.forward", "statement")]),
        (
            NET.replace("x, 0.1,", "x, 0.2,").replace("range(3)", "range(4)"),
            [("net.py:15", "Net.forward", "statement"), ("net.py:20", "train", "statement")],
        ),
        (NET.replace("        x = torch.relu(x)\n", ""), [("net.py:16", "Net.forward", "statement")]),
        (NET.replace('"""A net."""', '"""Another."""').replace("x = torch.relu", "# why\n        x = torch.relu"), []),
        (NET.replace("width, 1", "width, 2").replace("x, 1", "x, 2"), [("net.py:10", "Net.__init__", "statement")]),
        (NET + "def more():\n    pass\n", [("net.py:22", "more", "statement")]),
    ],
)
def test_what_changed_is_a_change_each_with_its_place(after, wanted):
    assert places(NET, after) == wanted


@pytest.mark.parametrize("texts", [("x = (", "x = 1\n"), ("x = 1\n", "\0")])
def test_what_does_not_parse_is_one_change_of_the_whole_file(texts):
    found = edits_of("f.py", *texts)
    assert [(change.unit, change.place) for change in found] == [("file", "f.py")]
    assert applied(found, found, *texts) == texts[1]


def shape(text):
    """The syntax of a text without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body.pop(0)
    return ast.dump(tree)


def check(one, two, seed=0):
    """None of the changes leave a, all lead to b, and with some of them the others are what is left."""
    found = edits_of("f.py", one, two)
    assert applied(found, [], one, two) == one
    assert shape(applied(found, found, one, two)) == shape(two) or not found
    some = random.Random(seed).sample([*found], len(found) // 2)
    try:
        between = applied(found, some, one, two)
    except ValueError:  # what does not run answers nothing
        return
    rest = edits_of("f.py", between, two)
    assert shape(applied(rest, rest, between, two)) == shape(two)


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
