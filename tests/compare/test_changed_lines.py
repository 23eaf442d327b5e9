"""From two runs to the changed line: which statement `diff` names, and which it does not call likely."""

import json
from concurrent.futures import ThreadPoolExecutor

import cases
import lines
import pytest
from artefacts import ROOT
from kept_runs import key_of
from projects import MODEL, TRAIN


@pytest.fixture
def said(project, introspect, tmp_path):
    """The answer on the plain project and one with these files, as data and as text."""

    def compare(model=MODEL, train=TRAIN, options=(), more=None, base=MODEL, base_train=TRAIN):
        a = project("a", *options, model=base, train=base_train)
        b = project("b", *options, model=model, train=train, more=more)
        document = json.loads(introspect("diff", a, b, "--format", "json").stdout)
        return document, introspect("diff", a, b).stdout

    return compare


def changes(document):
    return [(one["place"], one["scope"], one["likely"]) for one in document["code"]["changes"]]


def test_a_changed_line_is_likely_where_it_rounds_otherwise_and_nothing_else_does(said):
    document, _ = said(MODEL.replace("torch.relu(self.a(x))", "torch.relu(self.a(x)) * (1 + 2 ** -23)"))
    assert document["first"]["size"] == "rounding"
    assert "Likely: model.py:12 (Net.forward)" in document["sentence"]


def test_a_changed_line_is_told_beside_one_that_only_rounds_otherwise(said):
    """A sum in another order comes first and explains nothing of the loss, whose weight changed as well."""
    rounds = MODEL.replace("torch.relu(self.a(x))", "torch.relu(self.a(x)) * (1 + 2 ** -23)")
    document, text = said(rounds, TRAIN.replace(".mean()", ".mean() * 1.1"))
    assert document["first"]["size"] == "rounding"
    assert [place for place, _, likely in changes(document) if likely] == ["model.py:12"]
    assert "First that is more than rounding: the loss, " in text
    assert "; likely: train.py:9." in text
    assert "more than rounding: the loss" not in said(rounds)[1]


LONG = "{0} = self.a(x)\n        return self.b({0}.relu() + {0}.cos() + {0}.tanh() + torch.sin({0}) * {1})"


@pytest.mark.parametrize(
    ("base", "after", "told"),
    [
        (  # a statement that stands twice in b alone is not what b has instead
            "x = torch.relu(self.a(x))\n        x = torch.sin(x)\n        x = torch.tanh(x)\n        return self.b(x)",
            "x = torch.relu((self.a(x)))\n        x = torch.sin(x)\n        x = torch.sin(x)\n        return self.b(x)",
            "x = torch.tanh(x) -> x = torch.sin(x)",
        ),
        (  # what changed stands far behind a name that changed as well
            LONG.format("a_name", 0.1),
            LONG.format("hidden", 0.2),
            "torch.sin(a_name) * 0.1) -> ... torch.sin(hidden) * 0.2)",
        ),
        (  # comments are no code, and functions of other names have what the others had
            "return self.b(self.one(x))  # seen\n\n    def one(self, x):\n        return torch.relu(self.a(x))  # one",
            "return self.b(self.two(x))\n\n    def two(self, x):\n        return torch.relu(self.a(x)) * 3  # two",
            "return torch.relu(self.a(x)) -> return torch.relu(self.a(x)) * 3",
        ),
    ],
)
def test_what_is_shown_of_a_statement_is_what_changed_in_it(said, base, after, told):
    models = (MODEL.replace("return self.b(torch.relu(self.a(x)))", forward) for forward in (base, after))
    base, after = models
    text = " ".join(said(after, base=base)[1].split())
    assert told in text, text


def test_a_name_that_a_later_loop_fills_without_reading_what_it_was_is_no_change(said):
    loops = """rows, columns = [0, 0], [0, 0]
        for each in range(2):
            part = x[each] * 2
            rows[each] = part + part.tanh()
        for each in range(2):
            part = x[:, each] * 2
            columns[each] = part + part.tanh()
        return self.b(torch.relu(self.a(x + rows[1] + columns[1][:, None])))"""
    base = MODEL.replace("return self.b(torch.relu(self.a(x)))", loops)
    row = "            part = x[each] * 2\n            rows[each] = part + part.tanh()\n"
    document, _ = said(base.replace(row, row.replace("part", "term").replace("* 2", "* 3")), base=base)
    (change,) = changes(document)
    assert change[1:] == ("Net.forward", True), change


def test_a_class_that_is_only_renamed_is_no_cause(said):
    block = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.a(x).relu())

"""
    base = MODEL.replace("torch.nn.Linear(4, 8),", "Block(),").replace("\nclass Net", f"{block}\nclass Net")
    another = base.replace(block, block.replace("Block", "Layer") + block)
    for after, named in ((base.replace("Block", "Layer"), False), (another.replace(" Block(),", " Layer(),"), True)):
        document, text = said(after.replace("relu()", "sigmoid()", 1), base=base)
        assert ("is Block in a and Layer in b" in text) is named, text
        assert any(likely for _, scope, likely in changes(document) if named or scope == "Layer.forward")


def test_a_module_that_one_run_alone_draws_inside_of_one_that_both_have_is_the_origin(said):
    """The random state differs as the step begins, since the module was drawn; the one around it returns otherwise."""
    layer = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = torch.nn.Linear(4, 4)
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x):
        return [self.lin(self.pool(x))]

"""
    base = MODEL.replace(
        "self.a, self.b =", "self.first, self.layer = torch.nn.Linear(4, 4), Layer()\n        self.a, self.b ="
    )
    base = base.replace("self.a(x)", "self.a(self.layer(self.first(x))[0])").replace(
        "\nclass Net", f"{layer}\nclass Net"
    )
    after = base.replace("        self.pool = torch.nn.Linear(4, 4)\n", "").replace(
        "[self.lin(self.pool(x))]", "self.lin(x)"
    )
    document, text = said(after.replace("(self.first(x))[0]", "(self.first(x))"), base=base)
    assert (document["first"]["fqn"], document["first"]["role"]) == ("Net.layer.pool.weight", "origin"), text
    assert "the module Net.layer.pool exists only in a" in text


def test_a_tensor_whose_name_the_other_run_has_for_another_one_is_not_said_to_exist_in_one_alone(said):
    """What is `a.0.weight` in one run is `a.2.weight` in the other, by what it holds."""
    base = MODEL.replace("torch.nn.Linear(4, 8),", "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)),")
    after = base.replace("Linear(4, 8), torch.nn.LayerNorm(8)", "LayerNorm(4), torch.nn.ReLU(), torch.nn.Linear(4, 8)")
    for one, two, side in ((base, after, "b"), (after, base, "a")):
        document, text = said(two, base=one)
        assert document["first"]["fqn"].startswith("Net.a.0.weight"), text
        assert f"only {side} has the parameter Net.a.0.weight" in text
        assert f"Net.a.0 is {'Linear' if side == 'b' else 'LayerNorm'} in a" in text
        assert "exists only" not in text


def test_what_calls_the_function_on_record_comes_before_what_builds_the_model(said):
    norm = "\n\nclass Norm(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
    norm += (
        "self.weight = torch.nn.Parameter(torch.ones(8))\n\n    def forward(self, x):\n        return x * self.weight\n"
    )
    base = MODEL.replace("torch.relu(self.a(x))", "self.norm(self.a(x))").replace("self.a, ", "self.norm, self.a, ")
    base = base.replace("torch.nn.Linear(4, 8)", "torch.nn.LayerNorm(8, bias=False), torch.nn.Linear(4, 8)")
    after = base.replace("torch.nn.LayerNorm(8, bias=False)", "Norm()").replace("\n\nclass Net", f"{norm}\n\nclass Net")
    forward = "\n    def forward(self, x):\n        return self.b"
    after = after.replace(forward, f"        self.apply(self.begin)\n{forward}")
    after += "\n    def begin(self, module):\n        if isinstance(module, torch.nn.Linear):\n"
    after += "            torch.nn.init.normal_(module.weight)\n"
    document, text = said(after, base=base)
    assert document["first"]["phase"] == "start"
    assert "(nothing) -> self.apply(self.begin)" in text.partition("likely")[2].partition("\n")[0], text


def test_as_the_first_step_begins_no_forward_comes_first(said):
    base = MODEL.replace("return self.b(", "v = x.cos()\n        v = 0.5 * (v + x)\n        return self.b(v.sum() + ")
    base = base.replace("self.a, self.b =", "self.c = torch.nn.Linear(4, 4)\n        self.a, self.b =")
    after = base.replace("self.a, self.b =", "self.to_mix = torch.nn.Linear(4, 4)\n        self.a, self.b =")
    after = after.replace("v = 0.5 * (v + x)", "mix = self.to_mix(x)\n        v = v * mix + x * (1 - mix)")
    document, text = said(after, base=base)
    assert document["first"]["fqn"] == "Net.to_mix.weight"
    assert [scope for _, scope, _ in changes(document)] == ["Net.__init__", "Net.forward", "Net.forward"], text


def test_what_runs_behind_the_place_in_the_first_step_is_no_cause(said):
    forward = "h = torch.relu(self.a(x)){}\n        for _ in range(1):\n            y = self.b(h)\n        return y{}"
    base, after = (
        MODEL.replace("return self.b(torch.relu(self.a(x)))", forward.format(*by))
        for by in (("", ""), (" * 2", " * 3"))
    )
    document, text = said(after, base=base)
    assert [one[0] for one in changes(document) if one[2]] == ["model.py:12"]
    assert "statements may reach this place" not in text


def test_a_mode_of_the_models_own_is_looked_at_where_a_step_was_not_recorded(said):
    model = (
        MODEL
        + "\n    def train(self, mode=True):\n        self.a.weight.data.mul_({})\n        return super().train(mode)\n"
    )
    train = TRAIN.replace("    optimizer.step()", "    optimizer.step()\n    if step == 0:\n        net.train()")
    document, _ = said(model.format(0.9), train, ("--steps", "::2"), base=model.format(0.8), base_train=train)
    assert document["first"]["step"] == 2
    assert "(Net.train): self.a.weight.data.mul_(0.8) -> self.a.weight.data.mul_(0.9)" in document["sentence"]


def test_a_file_that_changed_in_comments_alone_explains_nothing(said, introspect, tmp_path):
    document, _ = said(MODEL.replace("class Net", "# a comment\nclass Net"), TRAIN.replace("seed(0)", "seed(1)"))
    assert document["code"]["unchanged"] == []  # a secret is in that file: more than comments may differ
    assert document["code"]["unread"] == [{"file": "model.py", "why": "secret"}]
    open_model = MODEL.replace("hunter2-is-long", "")
    document, _ = said(open_model, TRAIN)
    assert document["verdict"] == "same"
    assert "model.py" in introspect("diff", "a", "b", "--changes").stdout


@pytest.mark.parametrize("option", [(), ("--no-packages",), ("--no-sources",)])
def test_what_is_left_is_said_where_nothing_on_record_differs_and_both_runs_kept_all(project, introspect, option):
    drawn = TRAIN.replace("torch.manual_seed(0)", "import os\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))")
    project("a", *option, train=drawn)
    project("b", train=drawn if option != ("--no-sources",) else drawn.replace("step in", "number in"))
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert any("differs on record" in line for line in document["evidence"]) is (not option)
    assert document["code"]["unread"] == [{"file": "train.py", "why": "text"}] * (option == ("--no-sources",))


def test_two_scripts_of_two_names_are_laid_beside_one_another(project, introspect, tmp_path):
    project("a")
    home = tmp_path / "a-project"
    (home / "train2.py").write_text(TRAIN.replace("lr=0.1", "lr=0.3"))
    introspect("capture", "-q", "--force", "-o", tmp_path / "b", "train2.py", cwd=home)
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert changes(document) == [("train2.py:7", "", True)]


@pytest.mark.parametrize(
    ("model", "train", "begins"),
    [
        (
            MODEL,
            TRAIN.replace("    loss = ", "    if step == 2:\n        raise ValueError('bad batch')\n    loss = "),
            "Run b ended by an exception: ValueError: bad batch, at train.py:10. Could not tell: equal up to",
        ),
        (
            MODEL.replace("self.a(x))", "self.a(x))[:, :5]"),
            TRAIN,
            # its words are those of torch 2.13, or of 2.15
            tuple(
                f"Run b ended by an exception in step 0 where run a goes on: RuntimeError: {name}mat1 and mat2 shapes "
                "cannot "
                for name in ("", "addmm: ")
            ),
        ),
        (
            MODEL,
            TRAIN.replace("Net()", "Net(3)"),
            "Run b ended by an exception: TypeError: ",
        ),
        (
            MODEL,
            TRAIN.replace("lr=0.1)", "lr=0.1"),
            "Run b ended by an exception: SyntaxError: ",
        ),
    ],
)
def test_a_run_that_ended_by_an_exception_is_reported_first(said, model, train, begins):
    document, text = said(model, train)
    assert document["sentence"].startswith(begins)
    assert text.startswith(begins)


@pytest.mark.parametrize("step", [0, 2])
def test_an_assertion_that_ended_a_step_is_named_and_no_rate_of_another_step(said, step):
    moving = TRAIN.replace("zero_grad()", "zero_grad()\n    optimizer.param_groups[0]['lr'] = 0.1 / (step + 1)")
    failing = moving.replace("    loss.backward()", f"    assert step != {step}, 'bad'\n    loss.backward()")
    document, text = said(MODEL, failing, base=MODEL, base_train=moving)
    begins = f"Run b ended by an exception in step {step} where run a goes on: AssertionError: bad, at train.py:12"
    assert text.replace("\n", " ").startswith(begins)
    assert changes(document) == [("train.py:12", "", True)]
    assert not any(one["explains"] for one in document["settings"] if one["source"] == "hyperparameter")


def test_a_draw_that_nobody_saw_is_not_said_to_be_of_the_layer_before_it(said):
    assert "took" not in (text := said(MODEL, TRAIN.replace("Net()", "Net()\nnoise = torch.rand(3)"))[1])
    assert "on, another number was drawn" in " ".join(text.split())


def test_parameters_that_went_to_another_group_leave_an_empty_one_that_optimizes_nothing(said):
    groups = "[{'params': [p for p in net.parameters() if p.ndim > MOST], 'weight_decay': 0.5}, {'params': [p for p in "
    groups += "net.parameters() if p.ndim <= MOST]}]"
    one, two = (TRAIN.replace("net.parameters()", groups.replace("MOST", most)) for most in "10")
    document, text = said(MODEL, two, base=MODEL, base_train=one)
    assert "weight_decay 0 -> 0.5" in text
    assert [one["name"] for one in document["settings"] if "group" in one["name"]] == []


def test_a_kernel_is_not_blamed_where_a_forward_pass_changes_the_parameter_that_it_reads(said):
    lines = ["x = self.b(torch.relu(self.a(x)))", "self.b.weight.data.mul_(0.9)"]
    one, two = (
        MODEL.replace("return self.b(torch.relu(self.a(x)))", "\n        ".join([*order, "return x"]))
        for order in (lines, lines[::-1])
    )
    document, text = said(two, options=("--level", "op"), base=one)
    assert document["first"]["kind"] == "op_output"
    assert document["first"]["role"] == "propagated"
    assert "its parameters at this point of a forward pass that changes them" in text


@pytest.mark.parametrize(
    ("stop", "words"), [("KeyboardInterrupt", "ended (interrupt)"), ("SystemExit(3)", "ended (exit)")]
)
def test_what_a_stopped_run_did_not_come_to_is_no_divergence(said, introspect, stop, words):
    forward = f"x = self.a(x)\n        if STOP:\n            raise {stop}\n        return self.b(torch.relu(x))"
    model = MODEL.replace("return self.b(torch.relu(self.a(x)))", forward)
    plain = TRAIN.replace("    loss =", "    sys.modules['model'].STOP = step == 7\n    loss =").replace(
        "import", "import sys,", 1
    )
    stopped = plain.replace("step == 7", "step == 2")
    document, text = said(model, stopped, base=model, base_train=plain)
    assert text.startswith(f"Could not tell: all that both runs recorded agrees, but run b {words} within step 2.")
    assert (document["verdict"], document["divergences"]) == ("undecided", [])
    assert "3 (0 to 2; the last did not end)" in introspect("show", "b").stdout
    document, _ = said(model, stopped.replace("lr=0.1", "lr=0.2"), base=model, base_train=plain)
    assert document["sentence"].startswith(
        "First divergence at step 0: the parameter Net.a.weight at the optimizer step"
    )


@pytest.mark.parametrize(("rate", "verdict"), [("0.5", "diverged"), ("0.1", "same")])
def test_an_exception_after_the_last_step_or_the_first_divergence_is_told_beside_it(said, rate, verdict):
    train = TRAIN.replace("lr=0.1", f"lr={rate}") + "raise RuntimeError('late token=abcdefgh12345678')\n"
    document, _ = said(train=train)
    assert document["verdict"] == verdict
    (told,) = [text for text in (*document["notes"], document["sentence"]) if "exception" in text]
    assert "RuntimeError: late token=<redacted>, at train.py:13." in told


def test_runs_that_end_by_the_same_exception_are_the_same(said):
    ends = "net(torch.ones(2, 4)).mul({})\nraise SystemError('as planned')\n"  # in a step that does not end
    document, text = said(train=TRAIN + ends.format(2), base_train=TRAIN + ends.format(1))
    assert document["verdict"] == "same"
    assert "Both runs ended by an exception: SystemError: as planned" in " ".join(text.split())


def test_code_and_settings_of_modules_that_were_not_recorded_belong_to_the_one_around_them(project, introspect):
    """As in a compiled model, of which nothing inside is on record."""
    inner = (
        "class Inner(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.drop = torch.nn.Dropout({p})\n\n"
        "    def forward(self, x):\n        return self.drop(x) * {by}\n\n\n"
    )
    model = MODEL.replace("class Net", inner + "class Net").replace("torch.relu(", "self.some[0](")
    model = model.replace("        self.a", "        self.some = torch.nn.ModuleList([Inner()])\n        self.a")
    for name, p, by in (("a", 0.1, 1), ("b", 0.1, 2), ("c", 0.2, 1)):
        project(name, "--max-depth", "0", model=model.format(p=p, by=by))
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert document["first"]["fqn"] == "Net"
    assert changes(document)[0] == ("model.py:12", "Inner.forward", True)
    assert "p 0.1 -> 0.2 of Net.some.0.drop" in introspect("diff", "a", "c").stdout


def test_the_line_that_raised_comes_first_where_an_exception_cuts_off_the_first_step(said):
    broken = MODEL.replace(
        "return self.b(torch.relu(self.a(x)))", "x = self.a(x)\n        return self.b(x + torch.ones(3))"
    )
    document, _ = said(base=broken)
    assert document["sentence"].startswith("Run a ended by an exception in step 0 where run b goes on: RuntimeError")
    assert changes(document)[0][2]
    assert changes(document)[0][:2] == ("model.py:12", "Net.forward")


CHOSEN = """
import torch
from torch import nn

class Large(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Linear(width, 4)

    def forward(self, x):
        return self.table(x)

class Small(Large):
    def __init__(self, width):
        nn.Linear(2, 2)
        super().__init__(width)
{other}
def sample(net):
    return torch.multinomial(net(torch.ones(4)).softmax(0), {draws})

def render(query, rays):
    return query(rays * {scale})

def rate(step):
    return {later} if "lr" else 0

def report(net):
    return [{scale} * part.table.weight for part in [net]]

torch.manual_seed(0)
net = {model}(width=4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {warm})
later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step))
for step in range(3):
    render(net, torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
sample(net)
"""
OTHER = """
class Other(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Linear(width, 4)
"""
PLAIN = {"other": "", "draws": 1, "scale": 1, "model": "Large", "warm": 1, "later": 1}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"other": OTHER, "draws": 2, "model": "Small"}, "net = Small(width=4)"),
        ({"draws": 2, "scale": 2}, "return query(rays * 2)"),
    ],
    ids=[
        "of a draw on record, not what draws later, and no class that never ran",
        "of an input, what a step calls, and not what calls the model after the training",
    ],
)
def test_the_line_that_is_named_first_is_one_that_ran(said, change, first):
    document, _ = said(train=CHOSEN.format(**PLAIN | change), base_train=CHOSEN.format(**PLAIN))
    found = document["code"]["changes"]
    assert [(one["b"]["text"], one["likely"]) for one in found][:1] == [(first, True)]
    assert not any(one["likely"] for one in found if one["scope"] == "report")
    assert [one["b"]["text"].startswith("class Other") for one in found][:-1] == [False] * (len(found) - 1)


STEPPED = """
import torch
from torch import nn

class Slow(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {{"lr": lr{more}}})

class Fast(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {{"lr": lr{more}}})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * {scale})

torch.manual_seed(0)
net = nn.Linear(4, 4)
optimizer = Fast(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
"""


def test_statements_of_optimizers_of_which_none_was_built_are_behind(said):
    train, base = STEPPED.format(more=', "boost": 0', scale=2), STEPPED.format(more="", scale=1)
    document, _ = said(train=train, base_train=base)
    scopes = [one["scope"] for one in document["code"]["changes"]]
    assert scopes == ["Fast.step", "Fast.__init__", "Slow.__init__"]


def test_of_two_changes_as_near_as_each_other_the_one_in_which_more_of_what_differs_is_named_comes_first(said):
    document, _ = said(train=CHOSEN.format(**PLAIN | {"warm": 2, "later": 2}), base_train=CHOSEN.format(**PLAIN))
    found = document["code"]["changes"]
    assert [one["place"] for one in found] == ["train.py:25", "train.py:33"]
    assert {one["nearness"] for one in found} == {"computes"}


ONLY = """
import torch
from model import Net

torch.manual_seed(0)
net, powers = Net(), []
powers.append(2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.randn(8, 4)).pow(powers[0]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_only_statement_that_changed_is_likely_where_nothing_else_differs_though_no_name_leads_from_it(said):
    train, also = ONLY.replace("powers.append(2)", "powers.append(4)"), "other = []\nother.append(1)\n"
    document, _ = said(train=train, base_train=ONLY)
    assert "Likely: train.py:7: powers.append(2) -> powers.append(4)" in document["sentence"]
    assert changes(document)[0][2]
    document, _ = said(train=train + also, base_train=ONLY)
    assert "Likely cause" not in document["sentence"]
    document, _ = said(train=train.replace("manual_seed(0)", "initial_seed()"), base_train=ONLY)
    assert all(change["nearness"] != "alone" for change in document["code"]["changes"])
    # a package that b alone has changes nothing by being there, unless it is one that others make use of
    for name, is_likely in (("torch-helpers", True), ("flash-attn", False)):
        metadata = {f"{name}-1.0.dist-info/METADATA": f"Name: {name}\nVersion: 1.0\n"}
        document, _ = said(train=train, base_train=ONLY, more=metadata)
        assert [name, None, "1.0"] in [[one[key] for key in ("name", "a", "b")] for one in document["settings"]]
        assert changes(document)[0][2] is is_likely


@pytest.mark.longest
def test_the_planted_statement_is_named_first(forks):
    """`benchmarks/lines.py` asks all: pairs of projects, planted faults alone and beside rewrites."""
    planted = [*lines.own(), *lines.single(every=24), *lines.mixed(every=20)]
    directory = ROOT / f"lines-{key_of(cases.FIXTURES)}"
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda pair: lines.answer(pair, directory, forks), planted))
    assert {pair.name: said for pair, said in zip(planted, answers, strict=True) if said[0] != "first"} == {}


def test_a_seed_that_is_set_too_late_is_named(said):
    late = TRAIN.replace("torch.manual_seed(0)\nnet = Net()\n", "net = Net()\ntorch.manual_seed(0)\n")
    _, text = said(train=late)
    assert "(moved)" in text
    assert "What is left" not in text


TWIN = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.factor = width**-POWER

    def forward(self, x):
        return self.proj(x) * self.factor


if __name__ == "__main__":
    Attention(POWER)
"""
TWO_CLASSES = """
import torch
import one, two

torch.manual_seed(0)
net = torch.nn.Sequential(two.Attention(4), torch.nn.Linear(4, 1))
net(torch.randn(5, 4)).sum().backward()
torch.optim.SGD(net.parameters(), 0.1).step()
"""


def test_a_class_of_the_same_name_and_what_runs_as_main_of_an_imported_file_compute_nothing(introspect, tmp_path):
    (tmp_path / "train.py").write_text(TWO_CLASSES)
    for run, power in ("a", "0.5"), ("b", "1"):
        for twin in "one", "two":
            (tmp_path / f"{twin}.py").write_text(TWIN.replace("POWER", power))
        assert introspect("capture", "-q", "-o", run, "train.py").returncode == 0
    changes = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)["code"]["changes"]
    assert [(each["place"], each["nearness"]) for each in changes] == [
        ("two.py:10", "computes"),
        ("one.py:10", "elsewhere"),
        ("one.py:17", "elsewhere"),
        ("two.py:17", "elsewhere"),
    ]


@pytest.fixture
def near(project, introspect):
    """How near to the divergence each changed statement is, of two projects of these files."""

    def compare(model, train, edits, more=None):
        files = {"model.py": model, "train.py": train, **(more or {})}
        runs = []
        for name in "ab":
            rest = dict(files)
            runs.append(project(name, model=rest.pop("model.py"), train=rest.pop("train.py"), more=rest))
            for file, before, after in edits if name == "a" else ():
                assert before in files[file], before
                files[file] = files[file].replace(before, after)
        document = json.loads(introspect("diff", *runs, "--format", "json").stdout)
        return {each["place"]: each["nearness"] for each in document["code"]["changes"]}

    return compare


def test_a_forward_pass_that_a_model_is_built_by_may_give_its_buffers_their_first_values(near):
    model = MODEL.replace(
        "torch.nn.Linear(4, 8),", "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)),"
    )
    model = model.replace("\n    def forward", "        self.try_out()\n\n    def forward")
    model += "\n    def try_out(self):\n        self.forward(torch.ones(5, 4))\n"
    model = model.replace("self.a(x)", "self.a(x * 1.5)")
    assert near(model, TRAIN, [("model.py", "x * 1.5", "x * 2.5")]) == {"model.py:13": "between"}


def test_a_function_that_is_passed_by_its_name_reaches_a_place_as_a_called_one_does(near):
    model = MODEL.replace(
        "torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)", "made(4, 8), made(8, 1)\n        self.c = made(1, 1)"
    )
    model += """

def once(make):
    kept = {}
    def cached(*sizes):
        key = sizes
        if key not in kept:
            kept[key] = make(*sizes)
        return kept[key]
    return cached


(made,) = map(once, (torch.nn.Linear,))
"""
    model = model.replace("made(8, 1)\n", "made(4, 8)\n").replace("self.b(torch.relu(self.a(x)))", "self.b(x).sum(1)")
    found = near(model, TRAIN, [("model.py", "key = sizes", "key = sizes, len(kept)")])
    assert set(found.values()) <= {"builds", "computes"}, found
    assert found


def test_an_optimizer_class_of_the_same_name_that_the_script_does_not_use_computes_nothing(near):
    one = """
import torch


def moved(p, rate):
    p.add_(p.grad, alpha=-rate)


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                moved(p, group["lr"] * 1.5)
"""
    train = TRAIN.replace("torch.optim.SGD", "Plain").replace("import Net", "import Net\nfrom rules.two import Plain")
    files = {"rules/__init__.py": "from .one import Plain\n", "rules/one.py": one, "rules/two.py": one}
    edits = [
        (f"rules/{name}.py", *each) for name in ("one", "two") for each in (("1.5", "2"), ("=-rate", "=-1.1 * rate"))
    ]
    found = near(MODEL, train, edits, files)
    assert found == {
        "rules/one.py:6": "elsewhere",
        "rules/one.py:17": "elsewhere",
        "rules/two.py:6": "computes",
        "rules/two.py:17": "computes",
    }


@pytest.mark.parametrize(
    ("base", "after", "told"),
    [
        (  # what a value goes through, statement by statement, and what is changed inside of it
            ["q = torch.tanh(self.a(x)) * 2", "return self.b(q)"],
            [
                "q = self.a(x) * 2",
                "r, s = q[:, :4], q[:, 4:]",
                "r = r.sigmoid()",
                "q = torch.cat((r, s), 1)",
                "return self.b(q)",
            ],
            [12, 13, 14, 15],
        ),
        (  # a function's other arguments are the same ones, whatever comes before them
            ["def of(*x, **y): return max(*x, **y)", "return self.b(of(self.a(x), key=len) * 2)"],
            ["def of(*x, new=1, **y): return max(*x, **y)", "return self.b(of(self.a(x), key=len) * 3)"],
            [12, 13],
        ),
    ],
)
def test_every_statement_that_computes_something_else_is_listed(near, base, after, told):
    base, after = ("\n        ".join(lines) for lines in (base, after))
    found = near(MODEL.replace("return self.b(torch.relu(self.a(x)))", base), TRAIN, [("model.py", base, after)])
    assert {*found} == {f"model.py:{line}" for line in told}


def test_a_buffer_that_the_script_averages_in_place_may_be_written_by_the_script(said):
    begun = "super().__init__()"
    model = MODEL.replace(begun, f"{begun}\n        self.register_buffer('seen', torch.zeros(1))")
    train = TRAIN.replace("    optimizer.step", "    net.seen.data.lerp_(torch.ones(1), 0.25)\n    optimizer.step")
    document, text = said(model, train.replace("0.25", "0.3"), base=model, base_train=train)
    assert changes(document)[0] == ("train.py:12", "", True), text
    assert "the script changes it by hand" in " ".join(text.split()), text


def test_of_two_changed_statements_that_which_writes_the_state_that_differs_is_first(said):
    rule = """
class Rule(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.ones_like(p))
            update = mean.clone()
            mean.add_(p.grad, alpha=0.1)
            p.add_(update, alpha=-0.01)
"""
    train = TRAIN.replace("torch.optim.SGD", "Rule").replace("\ntorch.manual", f"{rule}\ntorch.manual")
    after = train.replace("mean.clone()", "mean.clone().abs()").replace("alpha=0.1", "alpha=0.2")
    document, text = said(train=after, base_train=train)
    assert [place for place, _, _ in changes(document)] == ["train.py:14", "train.py:13"], text
    assert "['mean']" in text


def test_the_script_is_read_however_much_was_imported_beside_a_changed_file(near):
    train = TRAIN.replace("import Net", "import Net\nfrom parts import of").replace("net(torch", "net(of(torch")
    train = train.replace("4)).pow", "4))).pow")
    files = {
        "parts/__init__.py": "from parts import much\nfrom parts.own import of\n",
        "parts/much.py": "# much\n" * 80_000,
        "parts/own.py": "def of(x):\n    return x * 1.5\n",
    }
    assert near(MODEL, train, [("parts/own.py", "1.5", "2.5")], files) == {"parts/own.py:2": "computes"}
