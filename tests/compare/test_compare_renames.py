"""Variables that were renamed and nothing else get the names they had."""

from __future__ import annotations

import ast

import pytest

from introspect_cli.compare.changes.alignment import with_names_of_a
from introspect_cli.compare.changes.statements import changed_statements

A = """
SCALE = 2

class Net:
    def forward(self, x):
        h = self.norm(x)
        for layer in self.layers:
            h = torch.relu(layer(h)) * SCALE
        return h
"""


def left(one, two, *elsewhere):
    return [change.b.text for change in changed_statements("f.py", one, with_names_of_a(one, two, elsewhere))]


def test_a_renamed_variable_is_no_change_and_what_was_changed_beside_it_is_one():
    renamed = A.replace("h =", "hidden =").replace("(h)", "(hidden)").replace("return h", "return hidden")
    assert left(A, renamed) == []
    changed = renamed.replace("relu", "gelu").replace("for layer", "for block").replace("layer(", "block(")
    assert left(A, changed) == ["h = torch.gelu(layer(h)) * SCALE"]
    assert with_names_of_a(A, changed).count("\n") == changed.count("\n")


def test_a_variable_of_the_file_keeps_its_name_where_another_file_mentions_it():
    renamed = A.replace("SCALE", "FACTOR")
    assert left(A, renamed) == []
    assert len(left(A, renamed, "from net import FACTOR")) == 2


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(a):\n    return a\n", "def f(b):\n    return b\n"),
        ("def f():\n    h = 1\n    return locals()\n", "def f():\n    x = 1\n    return locals()\n"),
        ("def f():\n    h = 1\n    g = 2\n    return h, g\n", "def f():\n    h = 1\n    return h, h\n"),
        ("def f():\n    global h\n    h = 1\n", "def f():\n    global x\n    x = 1\n"),
        ("def f():\n    a = 1\n    b = 2\n    g(a, b)\n", "def f():\n    c = 1\n    c = 2\n    g(c, c)\n"),
        ("class C:\n    h = 1\n", "class C:\n    x = 1\n"),
        ("def f():\n    h = g()\n    return h\n", "def f():\n    h = g()\n    return x\n"),
    ],
)
def test_what_may_mean_something_else_is_not_renamed(one, two):
    assert with_names_of_a(one, two) == two


def test_two_variables_that_changed_their_places_are_not_renamed():
    one = "def f(p):\n    a = p[0]\n    b = p[1]\n    return a - b\n"
    two = "def f(p):\n    b = p[0]\n    a = p[1]\n    return a - b\n"
    assert with_names_of_a(one, two) == two


def test_names_in_formatted_strings_and_of_more_bytes_are_renamed_or_the_text_stays_as_it_is():
    one = 'def f():\n    ü = 1\n    h = ü\n    print(f"{h} {h!r:>{h}}", h)\n    return h\n'
    two = one.replace("h", "größe").replace("prgrößeint", "print")
    made = with_names_of_a(one, two)
    assert ast.dump(ast.parse(made)) in {ast.dump(ast.parse(one)), ast.dump(ast.parse(two))}


def test_what_does_not_parse_stays_as_it_is():
    assert with_names_of_a("x = (", "y = 1") == "y = 1"
