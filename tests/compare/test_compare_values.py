"""What functions compute: rewrites are no change, and what changed beside them has its line."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.rerun.changes.edits import edits_of, join_edits
from introspect_cli.store.run import open_run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import lines


@pytest.fixture
def code(tmp_path):
    """What is said of the code of two runs with equal records, given their files."""

    def compare(a, b):
        for name, files in (("a", a), ("b", b)):
            write_run(tmp_path / name, [[row("forward", "output", "Net", 1.0)]], sources=files, force=True)
        with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
            return compare_runs(one, two, DiffOptions()).code

    return compare


@pytest.fixture
def told(code):
    """The statements of a file that differ, each by its line and both texts."""

    def changed(a, b):
        rows = [one.change for one in code({"f.py": a}, {"f.py": b}).ranked]
        return [(one.line, one.a and one.a.text, one.b and one.b.text) for one in rows]

    return changed


def test_a_rewrite_alone_computes_nothing_else(code):
    pairs = [pair for pair in lines.same() if "added-things" not in pair.name]
    assert len(pairs) > 5
    assert {pair.name: found for pair in pairs if (found := code(pair.a, pair.b).ranked)} == {}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("def f(x):\n    y = g(x)\n    return h(y)", "def f(a):\n    return h(g(a))"),
        ("def f(d):\n    k = lambda v: v.w\n    return sorted(d, key=k)",
         "def f(d):\n    def of(item):\n        return item.w\n    return sorted(d, key=of)"),
        ("def f(x):\n    return [g(i) for i in x if i]",
         "def f(x):\n    out = []\n    for n in x:\n        if n:\n            out.append(g(n))\n    return out"),
        ("def f(x, y):\n    return {a: b for a, b in zip(x, y)}",
         "def f(x, y):\n    d = {}\n    for b, a in zip(y, x, strict=True):\n        d[a] = b\n    return d"),
        ("def f(x):\n    if x > 1:\n        return g(x)\n    return h(x)",
         "def f(x):\n    return h(x) if not 1 < x else g(x)"),
        ("def f(x):\n    a, (b, c) = 1, x\n    g(a, b, c)", "def f(x):\n    p, q = x\n    g(1, p, q)"),
        ("def f(x):\n    return g(x) * 2", "def scaled(v):\n    return v * 2\n\ndef f(x):\n    return scaled(g(x))"),
        ("def f(x):\n    x.data.lerp_(1, 2)",
         "def moved(p, n, k):\n    p.data.lerp_(n, k)\n\ndef f(x):\n    moved(x, 1, 2)"),
        ("import a.b as c\ndef f():\n    return c.d()", "from a import b\ndef f():\n    return b.d()"),
        ("class C:\n    def m(self):\n        self.w = 1\n    def n(self):\n        return self.w",
         "class C:\n    def n(self):\n        return self.value\n    def m(self):\n        self.value = 1"),
        ("def f(x):\n    try:\n        y = g(x)\n    except E as e:\n        y = h(e)\n    return y",
         "def f(x):\n    try:\n        z = g(x)\n    except E as error:\n        z = h(error)\n    return z"),
        ("def f(xs):\n    t = 0\n    for x in xs:\n        t = t + x\n    return t",
         "def f(many):\n    total = 0\n    for each in many:\n        total = total + each\n    return total"),
        ("def f(x):\n    b, n = x.size()\n    return g(b, n)", "def f(x):\n    return g(x.shape[0], x.size(1))"),
        ("def f(x):\n    return [int(e) for e in x]", "def f(x):\n    return list(map(int, x))"),
        ("def f(x, *, b=1):\n    return x * b", "def f(y, *, a=0, b=1, c=2):\n    return y * b"),
        ("def f(x, b=1):\n    return x * b", "def f(y, b=1, c=2):\n    return y * b"),
        ("def f(x):\n    match x:\n        case A(b=1):\n            g(x)",
         "def f(y):\n    match y:\n        case A(b=1):\n            g(y)"),
        ("if main:\n    log = g()\n    f(log).backward()\ndef h(y):\n    rate = 1\n    return y + rate",
         "if main:\n    rate = g()\n    loss = f(rate)\n    loss.backward()\ndef h(y):\n    return y + 1"),
        ("def f(p=ArgumentParser(description='one')):\n    p.add_argument('--n', type=int, help='of it')",
         "def f(q=ArgumentParser(description='two')):\n    q.add_argument('--n', type=int, metavar='N')"),
    ],
)  # fmt: skip
def test_another_way_to_write_it_is_no_change(told, a, b):
    assert told(a, b) == []
    assert told(b, a) == []


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ("def f(x):\n    return g(x).log()", "def f(y):\n    return g(y).exp()", 2),
        ("def f(x):\n    return log(x)", "def f(y):\n    return exp(y)", 2),
        ("def f(x):\n    match x:\n        case A(b=1):\n            g(x)",
         "def f(x):\n    match x:\n        case A(c=1):\n            g(x)", 3),
        ("def f(x):\n    return g(x, p=1)", "def f(y):\n    return g(y, q=1)", 2),
        ("def f(x):\n    x += g(x)\n    return x", "def f(x):\n    x = x + g(x)\n    return x", 2),
        ("def f(x):\n    h(x)\n    g(x)", "def f(y):\n    g(y)\n    h(y)", 2),
        ("def f(x, n=1):\n    return x * n", "def f(y, n=2):\n    return y * n", 1),
        ("@a\ndef f(x):\n    return x", "@b\ndef f(x):\n    return x", 1),
        ("class C(A):\n    w = 1", "class C(B):\n    w = 1", 1),
        ("class C(nn.LayerNorm):\n    w = 1", "class C(nn.RMSNorm):\n    w = 1", 1),
        ("def f():\n    global n\n    n = 1", "def f():\n    global n\n    n = 2", 3),
        ("def f(x):\n    with a():\n        y = g(x)\n    return y", "def f(x):\n    y = g(x)\n    return y", 2),
        ("def f(x):\n    return (\n        g(x)\n        + 1\n        + 2\n    )",
         "def f(y):\n    return (\n        g(y)\n        + 1\n        + 3\n    )", 5),
        ("def f(x):\n    g(x)\n    draw()", "def f(x):\n    g(x)\n    unused = draw()\n    draw()", 3),
        ("def f(x, y):\n    a = g(x)\n    b = h(y)\n    return a @ b",
         "def f(x, y):\n    p = g(x)\n    q = h(y)\n    return p @ p", 4),
        ("def f(x):\n    y = g(x)\n    return y", "def f(x):\n    y = g(x)\n    y = ~y\n    return y", 3),
        ("def f(x, b=1):\n    return x * b", "def f(x, a=0, b=1):\n    return x * b", 1),
        ("def f(x):\n    return max(x)", "max = min\ndef f(x):\n    return max(x)", 1),
        ("def f(p):\n    p.option(n=1, help='a')", "def f(p):\n    p.option(n=2)", 2),
        ("class C:\n    n = lambda x: x", "class C:\n    n = lambda x, y=1: x", 2),
        ("n = lambda x: x", "n = lambda x, y=1: x", 1),
        ("class C:\n    pass", "def C(x=1):\n    return x", 1),
        ("def f(x):\n    return Task(x, description='a')", "def f(x):\n    return Task(x, description='b')", 2),
    ],
)  # fmt: skip
def test_what_differs_has_the_line_of_the_smallest_part(told, a, b, line):
    assert [row[0] for row in told(a, b)][:1] == [line]


def test_a_value_that_went_to_another_statement_is_a_change_of_both(told):
    a = "kept = (One,)\nleft = (Two, Three)\n\ndef f(x):\n    return x in kept, x in left\n"
    assert told(a, a.replace("(One,)", "(One, Three)").replace("(Two, Three)", "(Two,)")) == [
        (1, "kept = (One,)", "kept = (One, Three)"),
        (2, "left = (Two, Three)", "left = (Two,)"),
    ]


def test_a_file_inside_of_a_package_is_not_what_another_package_of_its_name_is(code):
    """`einops/layers/torch.py` is not torch; a file that no package holds may be imported by its name alone."""
    layers = {"einops.py": "", "einops/layers.py": "", "einops/layers/torch.py": ""}
    a = "from torch import nn\n\ndef f():\n    return nn.ModuleList([])\n"
    b = "from torch.nn import ModuleList\n\ndef f():\n    return ModuleList([])\n"
    assert code({"f.py": a, **layers}, {"f.py": b, **layers}).ranked == ()
    own = {"one/parts.py": "def g():\n    return 1\n"}
    a = "import parts\n\ndef f():\n    return parts.g()\n"
    b = "from one.parts import g\n\ndef f():\n    return g()\n"
    assert code({"f.py": a, **own}, {"f.py": b, **own}).ranked == ()


@pytest.mark.parametrize(
    ("one", "two", "called"),
    [
        ("from one import loss", "from two import loss", "loss"),
        ("import one as m", "import two as m", "m.loss"),
        ("from .one import loss", "from .two import loss", "loss"),
        ("from one import *", "from two import *", "loss"),
    ],
)
def test_a_name_that_comes_from_another_file_of_the_project_is_told_by_its_import(code, one, two, called):
    """What does not change has not moved from one file to the other."""
    kept = {"one.py": "def loss(x):\n    return x\n", "two.py": "def loss(x):\n    return x * 2\n"}
    a, b = ({"f.py": f"{way}\ndef f(x):\n    return {called}(x)\n", **kept} for way in (one, two))
    changes = [each.change for each in code(a, b).ranked]
    assert [(each.a.text, each.b.text) for each in changes] == [(one, two)]


def test_a_name_that_a_package_hands_on_may_be_imported_past_it(code):
    own = {"m/__init__.py": "from .one import *\n", "m/one.py": "def loss(x):\n    return x\n"}
    a, b = (
        {"f.py": f"{way}\n\ndef f(x):\n    return loss(x)\n", **own}
        for way in ("from m import loss", "from m.one import loss")
    )
    assert code(a, b).ranked == ()
    assert [each.change.line for each in code(a, {**b, "f.py": b["f.py"].replace("loss(x)", "loss(x, 2)")}).ranked] == [
        4
    ]


def test_lines_in_any_other_order_are_told_in_a_file_that_imports_nothing(told):
    lines = ["y = g(x)", "y = h(y)", "z = k(y)", "z = m(z, y)", "y = p(z)"]
    written = [
        "\n    ".join(["def f(x):", "y = z = x", *order, "return y, z"]) for order in itertools.permutations(lines)
    ]
    assert [told(written[0], other) == [] for other in written] == [True, *[False] * 119]


def test_a_statement_that_both_versions_have_is_not_said_to_be_gone(told):
    """What it is put on changed, in more lines than are named instead."""
    a = (
        "def f(z, k):\n    if k:\n        mask = draw(z)\n        add = like(z)\n"
        "        z = where(mask, z + add, z)\n    return round(bound(z))\n"
    )
    b = a.replace("z", "y").replace("(y, k):", "(z, k):\n    y = bound(z)").replace("bound(y))", "y)")
    assert [(one, two) for _, one, two in told(a, b)] == [
        ("if k:", "if k:"),
        ("return round(bound(z))", "return round(y)"),
    ]


def test_a_statement_is_paired_with_one_other_at_most(told):
    one, two = "rate, decay, low, high = g['rate'], g['decay'], *g['betas']", "if apart:"
    other = "rate, decay, low, high, apart, first = g['rate'], g['decay'], *g['betas'], p.apart, p.first"
    rest = "    p.mul_(1 - rate * decay)\n    p.add_(low, high)\n"
    a = f"def f(g, p):\n    {one}\n{rest}"
    b = f"def f(g, p):\n    {other}\n    {two}\n        decay /= first\n{rest}"
    assert told(a, b) == [(2, one, other), (3, None, two)]


@pytest.mark.parametrize(
    ("a", "b", "moved"),
    [
        (
            "for x in xs:\n    clear()\n    g(x).backward()\nstep()",
            "clear()\nfor x in xs:\n    g(x).backward()\nstep()",
            "clear()",
        ),
        (
            "y = norm(g(x))\nfor k in x:\n    y = k(y)\nuse(y)",
            "y = g(x)\nfor k in x:\n    y = k(y)\ny = norm(y)\nuse(y)",
            None,
        ),
        (
            "y = g(x)\nfor k in x:\n    y = k(y)\ny = norm(y)\nuse(y)",
            "y = g(x)\ny = norm(y)\nfor k in x:\n    y = k(y)\nuse(y)",
            "y = norm(y)",
        ),
        (
            "clip(x)\nif x.own:\n    x.step()\nelse:\n    x.add()\nlog(x)",
            "if x.own:\n    x.step()\nelse:\n    x.add()\nclip(x)\nlog(x)",
            "clip(x)",
        ),
    ],
)
def test_the_head_of_a_block_has_not_moved_where_something_else_has(told, a, b, moved):
    a, b = ("def f(x, xs):\n" + "".join(f"    {line}\n" for line in lines.split("\n")) for lines in (a, b))
    changes = told(a, b)
    assert changes
    assert [one for _, one, two in changes if one == two] == [moved] * (moved is not None)
    assert not [each for each in changes if "for" in str(each) or "if" in str(each)]


def test_what_changed_below_what_was_put_around_it_is_told(told):
    a = "def f(x):\n    dots = join(x)\n    dots = dots.softmax()\n    return last(dots)\n"
    b = "def f(x):\n    dots = join(x) * 2\n    dots = dots.softmax()\n    dots = drop(dots)\n    return last(dots)\n"
    assert told(a, b) == [(2, "dots = join(x)", "dots = join(x) * 2"), (4, None, "dots = drop(dots)")]


def test_what_changed_in_lines_that_went_to_another_function_is_told(told):
    held = "    if not x:\n        return {0}\n    return where(mask({0}), {0} + 1, {0}){1}\n"
    a = f"def part(x):\n    y = bound(x)\n{held.format('y', '')}\ndef whole(x):\n    return last(part(x))\n"
    b = "def part(x):\n    return bound(x)\n\ndef noise(y, x):\n" + held.format("y", ".clamp(1)")
    b += "\ndef whole(x):\n    return last(noise(part(x), x))\n"
    rows = [(one, two) for _, one, two in told(a, b)]
    assert ("return where(mask(y), y + 1, y)", "return where(mask(y), y + 1, y).clamp(1)") in rows
    assert not any(None in row for row in rows)


def test_where_a_new_function_took_the_place_of_a_value_the_call_is_told(told):
    a = "def f(self):\n    w = norm(self.w) / self.n\n    return w\n"
    b = a.replace("norm(self.w)", "scaled(self.w)")
    helper = "def scaled(w):\n    w, shape = pack(w)\n    return unpack(norm(w) * 2, shape)\n\n"
    assert told(a, helper + b)[-1][1:] == ("w = norm(self.w) / self.n", "w = scaled(self.w) / self.n")


def test_a_new_function_of_a_name_that_others_have_is_not_what_they_call(code):
    a = "def given(x):\n    return x\n\ndef f(x):\n    if given(x):\n        g(x)\n    h(x)\n"
    b = {"f.py": a.replace("h(x)", "h(x, 1)"), "new.py": "def given(y):\n    return y is not None\n"}
    changes = [one.change for one in code({"f.py": a}, b).ranked]
    assert [(one.file, one.line) for one in changes] == [("f.py", 7)]


def test_a_file_that_python_cannot_read_is_one_change_and_the_others_are_read(code):
    found = code(
        {"bad.py": "x = (", "m.py": "y = 1", "c.py": "z = 1", "n.py": "def f():\n    a = 1\n    g(a)"},
        {"bad.py": "x = 1", "m.py": "y = 2", "c.py": "z = 1  # one", "n.py": "def f():\n    b = 1\n    g(b)"},
    )
    changes = [one.change for one in found.ranked]
    assert [(one.file, one.unit) for one in changes] == [("bad.py", "file"), ("m.py", "statement")]
    assert found.unchanged == ("c.py", "n.py")


def test_what_is_made_in_hundreds_of_steps_is_compared_in_no_time(told):
    a = "def f(x):\n" + "".join(f"    x = g(x, x, {n})\n" for n in range(400)) + "    return x\n"
    assert told(a, a.replace("x", "y").replace("399", "400"))[0][0] == 401


MOVED = """import torch


class Part:
    w = 1


def f(x):
    y = g(x)
    z = h(y)
    print(z)
    return k(x)
"""


def test_the_pieces_of_a_rename_and_of_a_move_are_one_unit(code):
    b = MOVED.replace("y", "renamed").replace("import torch\n\n\nclass Part:\n    w = 1\n", "from part import Part\n")
    b = b.replace("k(x)", "k(x) + 1").replace("print", "tell")
    edits = [*edits_of("f.py", MOVED, b)]
    changes = [one.change for one in code({"f.py": MOVED}, {"f.py": b}).ranked]
    made = join_edits(edits, {"f.py": MOVED}, {"f.py": b}, changes)
    by_text = {frozenset((piece.b or piece.a).text for piece in one.pieces or (one,)) for one in made}
    assert frozenset({"renamed = g(x)", "z = h(renamed)"}) in by_text
    assert frozenset({"return k(x) + 1"}) in by_text
    assert frozenset({"from part import Part"}) in by_text


TWO = "import torch\nfrom nets import Net, train\none = {}\ntwo = {}\ntrain({}, {})\n"
BUMPED = "def forward(self, x):\n    {}\n    {}\n    return x * calls\n"
SCALED = (
    "import torch\ndef scaled(x, by):\n    with torch.no_grad():\n        y = x.relu()\n{}z = x * by\n    return y, z\n"
)


@pytest.mark.parametrize(
    ("a", "b", "unit"),
    [
        (TWO.format("Net(3)", "Net(3)", "one", "two"), TWO.format("Net(3)", "Net(3)", "one", "one"), "statement"),
        (TWO.format("[]", "[]", "one", "two"), TWO.format("[]", "[]", "two", "one"), "statement"),
        (
            "import torch\na = torch.rand(4)\nb = torch.randn(4)\nprint(a, b)\n",
            "import torch\nb = torch.randn(4)\na = torch.rand(4)\nprint(a, b)\n",
            "moved",
        ),
        (
            BUMPED.format("calls = self.calls", "self.calls += 1"),
            BUMPED.format("self.calls += 1", "calls = self.calls"),
            "moved",
        ),
        (SCALED.format("    "), SCALED.format("        "), "moved"),
        (
            "def f():\n    a, b = batch()\n    c, d = batch()\n    return a, b, c, d\n",
            "def f():\n    a, b = batch()\n    c, d = batch()\n    return c, d, a, b\n",
            "statement",
        ),
        (
            "from nets import A, B, fit\na, b = A(), B()\nfit(a, b)\n",
            "from nets import A, B, fit\nb, a = B(), A()\nfit(a, b)\n",
            "statement",
        ),
        (
            "def f(x):\n    if not x:\n        g(1)\n    else:\n        h(self.k(2), self.by)\n",
            "def f(x):\n    if x:\n        t = self.k(2)\n        h(t, self.by)\n    else:\n        g(1)\n",
            None,
        ),
        ("a = 1\nb = 2\nprint(a, b)\n", "b = 2\na = 1\nprint(a, b)\n", None),
        (
            "from nets import train\ntrain(m.parameters())\ntrain(m.parameters())\n",
            "from nets import train\np = m.parameters()\ntrain(p)\nq = m.parameters()\ntrain(q)\n",
            None,
        ),
        (
            TWO.format("Net(3)", "Net(3)", "one", "two"),
            TWO.format("Net(3)", "Net(3)", "one", "two").replace("one", "first").replace("two", "second"),
            None,
        ),
    ],
)
def test_what_is_made_twice_and_what_runs_in_another_order_is_told_apart(code, a, b, unit):
    found = [one.change for one in code({"t.py": a}, {"t.py": b}).ranked]
    assert {change.unit for change in found} == ({unit} if unit else set())
