"""From two runs to the changed line: which statement `diff` names, and which it does not call likely."""

import json

import pytest
from projects import MODEL, TRAIN

from introspect_cli.capture.environment.sources import Project, named, relative
from introspect_cli.compare.changes.clues import Clues
from introspect_cli.compare.changes.near import ranked
from introspect_cli.compare.changes.project import changed

PAD = "class Pad(torch.nn.Module):\n    def forward(self, x):\n        return x\n\n\n"


def changes_of(file, one, two):
    return changed({file: one}, {file: two})


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


@pytest.mark.parametrize("options", [(), ("--record", "param,grad,loss"), ("--first", "1")])
def test_the_changed_line_of_a_forward_comes_first_and_what_only_prints_is_not_likely(said, options):
    document, text = said(
        MODEL.replace("self.b(torch", "1.01 * self.b(torch"),
        TRAIN.replace("step in", "number in") + "print(1)\n",
        options,
    )
    assert changes(document)[0] == ("model.py:12", "Net.forward", True)
    assert all(not likely for place, _, likely in changes(document) if place == "train.py:13")
    assert "model.py:12 (Net.forward): return self.b(torch.relu(self.a(x))) -> return 1.01 * self.b(" in text
    assert document["code"]["changes"][0]["a"]["text"] == "return self.b(torch.relu(self.a(x)))"


def test_a_changed_line_is_likely_where_it_rounds_otherwise_and_nothing_else_does(said):
    document, _ = said(MODEL.replace("torch.relu(self.a(x))", "torch.relu(self.a(x)) * (1 + 2 ** -23)"))
    assert document["first"]["size"] == "rounding"
    assert "Likely: model.py:12 (Net.forward)" in document["sentence"]


def test_a_mode_of_the_models_own_is_looked_at_where_a_step_was_not_recorded(said):
    model = (
        MODEL
        + "\n    def train(self, mode=True):\n        self.a.weight.data.mul_({})\n        return super().train(mode)\n"
    )
    train = TRAIN.replace("    optimizer.step()", "    optimizer.step()\n    if step == 0:\n        net.train()")
    document, _ = said(model.format(0.9), train, ("--steps", "::2"), base=model.format(0.8), base_train=train)
    assert document["first"]["step"] == 2
    assert "(Net.train): self.a.weight.data.mul_(0.8) -> self.a.weight.data.mul_(0.9)" in document["sentence"]


def test_the_only_change_between_two_steps_is_the_likely_cause(said):
    document, _ = said(
        train=TRAIN.replace("    loss.backward()", "    [torch.rand(1) for _ in range(step)]\n    loss.backward()")
    )
    assert "Likely: train.py:" in document["sentence"]


def test_the_line_that_builds_an_optimizer_comes_first_where_parameters_differ_after_its_step(said):
    document, _ = said(MODEL.replace("Net(torch", "Net(  torch"), TRAIN.replace("lr=0.1", "lr=0.2"))
    assert changes(document)[0] == ("train.py:7", "", True)


def test_the_line_that_divides_a_loss_by_the_number_of_microbatches_comes_first(said):
    train = """
import torch
from model import Net

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
PARTS = {}
for step in range(2):
    optimizer.zero_grad()
    for part in torch.randn(4, {}).split(4 // PARTS):
        loss = net(part).square().mean()
        (loss{}).backward()
    optimizer.step()
"""
    width = "4"
    document, _ = said(train=train.format(2, width, ""), base_train=train.format(1, width, " / PARTS"))
    assert "are added up, not averaged" in document["sentence"]
    assert "(loss / PARTS).backward() -> (loss).backward()" in document["sentence"]


def test_all_lists_a_changed_statement_once_beside_the_sentence(said, introspect):
    said(train=TRAIN.replace("lr=0.1", "lr=0.25"))
    text = introspect("diff", "a", "b", "--all").stdout
    assert text.count("lr=0.25") == 1, text
    assert "(sources)" not in text


def test_the_line_that_seeds_comes_first_where_random_states_differ(said):
    document, _ = said(MODEL.replace("x)))", "x))) + 0"), TRAIN.replace("seed(0)", "seed(1)"))
    assert changes(document)[0] == ("train.py:5", "", True)
    assert changes(document)[1] == ("model.py:12", "Net.forward", False)


def test_what_comes_after_the_first_value_that_differs_is_not_likely(said):
    model = MODEL.replace(
        "        return self.b(torch.relu(self.a(x)))",
        "        x = self.a(x{})\n        x = self.b(x)\n        return x{}",
    )
    document, _ = said(model.format(" * 2", " * 1"))
    plain, _ = said(model.format("", ""))
    assert plain["verdict"] == "diverged"
    assert changes(document)[0][2]


def test_a_file_that_changed_in_comments_alone_explains_nothing(said, introspect, tmp_path):
    document, _ = said(MODEL.replace("class Net", "# a comment\nclass Net"), TRAIN.replace("seed(0)", "seed(1)"))
    assert document["code"]["in_comments"] == []  # a secret is in that file: more than comments may differ
    assert document["code"]["unread"] == [{"file": "model.py", "why": "secret"}]
    open_model = MODEL.replace("hunter2-is-long", "")
    document, _ = said(open_model, TRAIN)
    assert document["verdict"] == "same"
    assert "model.py" in introspect("diff", "a", "b", "--changes").stdout


def test_comments_alone_are_said(project, introspect):
    plain = MODEL.replace("API_KEY", "NAME")
    project("a", model=plain, train=TRAIN.replace("seed(0)", "seed(3)"))
    project("b", model=plain + "# more\n", train=TRAIN)
    assert "model.py changed, in comments alone." in introspect("diff", "a", "b", "--changes").stdout
    assert "model.py" not in introspect("diff", "a", "b").stdout.partition("\n")[0]


def test_where_nothing_on_record_differs_that_is_said_with_what_is_left(project, introspect):
    drawn = TRAIN.replace("torch.manual_seed(0)", "import os\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))")
    project("a", train=drawn)
    project("b", train=drawn)
    text = introspect("diff", "a", "b").stdout
    assert "No source file, setting or package on record differs. What is left: randomness" in text


def test_nothing_is_said_of_what_is_left_where_a_run_kept_no_texts(project, introspect):
    drawn = TRAIN.replace("torch.manual_seed(0)", "import os\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))")
    project("a", "--no-packages", train=drawn)
    project("b", train=drawn)
    assert "on record differs" not in introspect("diff", "a", "b").stdout
    project("a", "--no-sources", train=drawn)
    project("b", train=drawn.replace("step in", "number in"))
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert document["code"]["unread"] == [{"file": "train.py", "why": "text"}]
    assert "on record differs" not in " ".join(document["evidence"])


def test_two_scripts_of_two_names_are_laid_beside_one_another(project, introspect, tmp_path):
    project("a")
    home = tmp_path / "a-project"
    (home / "train2.py").write_text(TRAIN.replace("lr=0.1", "lr=0.3"))
    introspect("capture", "-q", "--force", "-o", tmp_path / "b", "train2.py", cwd=home)
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert changes(document) == [("train2.py:7", "", True)]


def test_the_page_shows_both_sides(said, introspect, tmp_path):
    said(MODEL.replace("self.b(torch", "1.01 * self.b(torch"))
    introspect("report", "a", "b", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert 'class="good">+ return 1.01 * self.b(torch.relu(self.a(x)))</span>' in page
    assert 'class="bad">- return self.b(torch.relu(self.a(x)))</span>' in page


@pytest.mark.parametrize(
    ("model", "train", "begins"),
    [
        (
            MODEL,
            TRAIN.replace("    loss = ", "    if step == 2:\n        raise ValueError('bad batch')\n    loss = "),
            (
                "Run b ended by an exception where run a goes on: ValueError: bad batch, at train.py:10. Until then, "
                "up to and including step 1, everything that both recorded agrees."
            ),
        ),
        (
            MODEL.replace("self.a(x))", "self.a(x))[:, :5]"),
            TRAIN,
            (
                "Run b ended by an exception in step 0 where run a goes on: RuntimeError: mat1 and mat2 shapes cannot "
                "be multiplied (8x5 and 8x1), at model.py:12 in forward. The last record that agrees is the output of "
                "Net.a."
            ),
        ),
        (
            MODEL,
            TRAIN.replace("Net()", "Net(3)"),
            "Run b ended by an exception before its first step was complete: TypeError: ",
        ),
        (
            MODEL,
            TRAIN.replace("lr=0.1)", "lr=0.1"),
            "Run b ended by an exception before its first step was complete: SyntaxError: ",
        ),
    ],
)
def test_a_run_that_ended_by_an_exception_is_reported_first(said, model, train, begins):
    document, text = said(model, train)
    assert document["sentence"].startswith(begins)
    assert text.startswith(begins)


@pytest.mark.parametrize(
    ("stop", "words"), [("KeyboardInterrupt", "was interrupted"), ("SystemExit(3)", "ended with exit code 3")]
)
def test_what_a_stopped_run_did_not_come_to_is_no_divergence(said, introspect, stop, words):
    forward = f"x = self.a(x)\n        if STOP:\n            raise {stop}\n        return self.b(torch.relu(x))"
    model = MODEL.replace("return self.b(torch.relu(self.a(x)))", forward)
    plain = TRAIN.replace("    loss =", "    sys.modules['model'].STOP = step == 7\n    loss =").replace(
        "import", "import sys,", 1
    )
    stopped = plain.replace("step == 7", "step == 2")
    document, text = said(model, stopped, base=model, base_train=plain)
    assert text.startswith(f"Could not tell: all that both runs recorded agrees until run b {words} within step 2.")
    assert (document["verdict"], document["divergences"]) == ("undecided", [])
    assert "3 (0 to 2; the last did not end)" in introspect("show", "b").stdout
    document, _ = said(model, stopped.replace("lr=0.1", "lr=0.2"), base=model, base_train=plain)
    assert document["sentence"].startswith("First divergence at step 0: the parameter Net.a.weight differs")


def test_an_exception_after_the_first_divergence_is_a_note(said):
    train = TRAIN.replace("lr=0.1", "lr=0.5") + "raise RuntimeError('late token=abcdefgh12345678')\n"
    document, _ = said(train=train)
    assert document["sentence"].startswith("First divergence at step 0")
    (note,) = [note for note in document["notes"] if "exception" in note]
    assert note == (
        "Run b ended by an exception, after the first divergence: RuntimeError: late token=<redacted>, at train.py:13."
    )


def test_of_two_exceptions_the_one_that_cut_off_the_divergence_leads(said):
    base = MODEL.replace("self.a(x)))", "self.a(x)[:, :5]))")
    document, _ = said(MODEL, TRAIN + "raise RuntimeError('late')\n", base=base)
    assert document["sentence"].startswith(
        "Run a ended by an exception in step 0 where run b goes on: RuntimeError: mat1"
    )


def test_runs_that_end_by_the_same_exception_are_the_same(project, introspect):
    for name in "ab":
        project(name, train=TRAIN + "raise SystemError('as planned')\n")
    done = introspect("diff", "a", "b")
    assert done.returncode == 0
    assert done.stdout.startswith("The runs are the same")


@pytest.fixture
def two(project, introspect):
    """The answer on two versions of the script, as data."""

    def compare(train_a, train_b, models=(MODEL, MODEL)):
        for name, model, train in zip("ab", models, (train_a, train_b), strict=True):
            project(name, model=model, train=train)
        return json.loads(introspect("diff", "a", "b", "--format", "json").stdout)

    return compare


def test_where_all_gradients_have_one_factor_the_line_that_clips_comes_before_the_one_that_calls_backward(two):
    backward = "    loss.backward()\n"
    whole = TRAIN.replace(backward, "    (loss if step >= 0 else -loss).backward()\n")
    clipped = TRAIN.replace(backward, f"{backward}    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)\n")
    document = two(whole, clipped)
    assert document["first"]["kind"] == "grad"
    assert changes(document)[0] == ("train.py:12", "", True)


def test_a_setting_of_the_optimizer_is_looked_for_by_name_where_it_shows_some_steps_after_it_was_recorded(two):
    train = TRAIN.replace(
        "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        "rate = {}\nnet = Net()\nextra = dict(momentum={})\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=rate, **extra)",
    )
    document = two(train.format(0.1, 0.9), train.format("0.05 + 0.05", 0.8))
    assert document["first"]["step"] == 1
    assert changes(document)[0] == ("train.py:8", "", True)


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


def test_a_function_that_is_called_under_a_condition_alone_comes_after_code_that_ran(two):
    model = (
        "import torch\n\n\nclass Config:\n    def __init__(self, bias=True):\n        self.bias = bias\n\n\n"
        "class Net(torch.nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 8, bias=config.bias), torch.nn.Linear(8, 1)\n\n"
        "    def forward(self, x):\n        return self.b(torch.relu(self.a(x)))\n\n\n"
        "def loaded():\n    return Net(Config({}))\n"
    )
    train = TRAIN.replace("import Net", "import Config, Net, loaded").replace(
        "net = Net()", "if torch.initial_seed() == 5:\n    net = loaded()\nelse:\n    net = Net(Config({}))"
    )
    models = model.format(""), model.format("bias=True")
    document = two(train.format(""), train.format("bias=False"), models)
    assert changes(document)[0] == ("train.py:9", "", True)
    assert "Likely: train.py:9" in document["sentence"]


def test_an_exception_after_the_last_step_is_reported_where_everything_before_agrees(said):
    document, _ = said(train=TRAIN + "raise RuntimeError('late')\n")
    assert document["verdict"] == "same"
    assert document["sentence"].endswith(
        " After that, run b ended by an exception: RuntimeError: late, at train.py:13."
    )


PARTS = """
import torch


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.g = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.g * self.inner(x)


class Part(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.inside(x)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Sequential(Around(Part(4)), Around(Part(4)))
        self.b = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.b(self.parts(x))
"""


def test_a_module_that_one_run_lacks_is_explained_by_the_line_that_gives_it_to_the_one_around_it(two):
    inside = PARTS.replace("Linear(width, width)", "Linear(width, width, bias=True)")
    without = PARTS.replace("        self.inner = inner\n", "").replace("self.g * self.inner(x)", "self.g * x")
    document = two(TRAIN, TRAIN, (without, inside))
    assert "the module Net.parts.0.inner exists only in b (Part)" in document["sentence"]
    assert changes(document)[0] == ("model.py:8", "Around.__init__", True)


def test_a_module_of_another_class_is_reported_as_one_and_the_line_that_builds_it_comes_first(two):
    other = PARTS.replace("Around(Part(4)), Around(Part(4))", "Around(Part(4)), torch.nn.LayerNorm(4)")
    document = two(TRAIN, TRAIN, (PARTS, other.replace("width):", "width, *, more=1):")))
    assert "cause: Net.parts.1 is Around in a and LayerNorm in b; the " in document["sentence"]
    assert changes(document)[0] == ("model.py:27", "Net.__init__", True)


def test_the_forward_of_a_module_of_another_class_is_laid_to_the_line_that_chose_the_class(two):
    other = "\n\nclass Other(Part):\n    def forward(self, x):\n        return self.inside(x + 1)\n"
    model = PARTS.replace("\n\nclass Net", f"{other}\n\nclass Net").replace("Around(Part(4)))", "Around({}(4)))")
    document = two(TRAIN, TRAIN, (model.format("Part"), model.format("Other").replace("x + 1)", "x + 2)")))
    assert document["sentence"].count("is Part in a and Other in b") == 1
    assert changes(document)[0] == ("model.py:32", "Net.__init__", True)


def test_how_often_a_module_runs_points_to_the_number_that_says_so(two):
    train = TRAIN.replace("    loss = net", "    for _ in range(every):\n        loss = net").replace(
        "    loss.backward()\n", "    loss.backward()\n    late = step\n"
    )
    first = train.replace("torch.manual", "every = 1\nif torch.get_num_threads() == 77:\n    every //= 2\ntorch.manual")
    second = train.replace("torch.manual", "every = 1\nevery *= 6\ntorch.manual")
    document = two(first, second)
    assert changes(document)[0] == ("train.py:6", "", True)


def test_the_line_that_raised_comes_first_where_an_exception_cuts_off_the_first_step(two):
    broken = MODEL.replace(
        "return self.b(torch.relu(self.a(x)))", "x = self.a(x)\n        return self.b(x + torch.ones(3))"
    )
    document = two(TRAIN, TRAIN, (broken, MODEL))
    assert document["sentence"].startswith("Run a ended by an exception in step 0 where run b goes on: RuntimeError")
    assert changes(document)[0][2]
    assert changes(document)[0][:2] == ("model.py:12", "Net.forward")


def test_a_parameter_of_another_shape_is_laid_to_the_model_and_to_no_seed(two):
    document = two(TRAIN, TRAIN, (MODEL, MODEL.replace("(4, 8)", "(4, 6)").replace("(8, 1)", "(6, 1)")))
    assert "seed" not in document["sentence"]
    assert "model is built with other sizes" in document["sentence"] or "draws" in document["sentence"]


def test_what_a_constructor_is_given_leads_to_the_line_that_calls_it(two):
    block = (
        "class Block(torch.nn.Module):\n    def __init__(self, groups=2):\n        super().__init__()\n"
        "        self.norm = torch.nn.GroupNorm(groups, 8)\n\n"
        "    def forward(self, x):\n        return self.norm(x)\n\n\n"
    )
    model = MODEL.replace("class Net", block + "class Net").replace(
        "torch.nn.Linear(8, 1)\n", "torch.nn.Linear(8, 1)\n        self.block = Block({})\n"
    )
    model = model.replace("torch.relu(self.a(x))", "self.block(self.a(x))")
    document = two(TRAIN, TRAIN, (model.format(""), model.format("groups=4")))
    assert "num_groups 2 -> 4" in document["sentence"]
    assert changes(document)[0] == ("model.py:19", "Net.__init__", True)


def test_a_statement_that_moved_is_said_to_have_moved(two):
    model = MODEL.replace(
        "        return self.b(torch.relu(self.a(x)))",
        "        x = self.a(x)\n        x = x + 1\n        x = torch.relu(x)\n        return self.b(x)",
    )
    lines = "        x = x + 1\n        x = torch.relu(x)\n"
    document = two(TRAIN, TRAIN, (model, model.replace(lines, "".join(reversed(lines.splitlines(keepends=True))))))
    assert "(Net.forward): x = " in document["sentence"]


CONFIGURED = """
class Options:
    def __init__(self):
        {}
        self.rest = 1

class Net(torch.nn.Module):
    def __init__(self, config):
        self.drop = torch.nn.Dropout(config.rate)

options = Options()
{}
net = Net(options)
"""


@pytest.mark.parametrize("place", [0, 1], ids=["in its class", "on the object"])
def test_an_option_that_a_configuration_object_is_given_is_followed_to_the_module(place):
    lines = "self.rate = {}", "options.rate = {}"
    texts = [
        CONFIGURED.format(*(line.format(n if at == place else 0) for at, line in enumerate(lines))) for n in (1, 2)
    ]
    clues = Clues("module", classes=("Dropout", "Net"), attributes=("drop",))
    found = ranked(changes_of("t.py", *texts), ({"t.py": texts[0]}, {"t.py": texts[1]}), clues)
    assert [one.likely for one in found] == [True]


@pytest.mark.parametrize(
    ("gone", "likely"), [("update_bn(loader, average)", True), ("torch.set_num_threads(2)", False)]
)
def test_what_is_handed_a_saved_model_leads_to_what_is_saved(gone, likely):
    text = "import torch\naverage = Average(net)\n{}torch.save(average.state_dict(), 'a.pt')\n"
    texts = text.format(f"{gone}\n"), text.format("")
    found = ranked(changes_of("t.py", *texts), ({"t.py": texts[0]}, {"t.py": texts[1]}), Clues("product"))
    assert [one.likely for one in found] == [likely]


def test_the_backward_of_an_autograd_function_is_reached_from_the_module_that_applies_it():
    text = (
        "class Clip(Function):\n    @staticmethod\n    def backward(ctx, g):\n        return g * {}\n\n"
        "class Block(Module):\n    def forward(self, x):\n        return Clip.apply(self.fc(x))\n"
    )
    texts = text.format(1), text.format(2)
    clues = Clues("backward", classes=("Linear", "Block"), attributes=("fc",))
    found = ranked(changes_of("t.py", *texts), ({"t.py": texts[0]}, {"t.py": texts[1]}), clues)
    assert [one.likely for one in found] == [True]


def test_what_is_appended_to_an_attribute_leads_to_the_loss_that_is_made_of_it():
    text = "def act(x):\n    policy.saved.append({}(x))\n\ndef learn():\n    sum(policy.saved).backward()\n"
    texts = text.format("log"), text.format("exp")
    clues = Clues("loss", models=frozenset({"policy"}))
    found = ranked(changes_of("t.py", *texts), ({"t.py": texts[0]}, {"t.py": texts[1]}), clues)
    assert [one.likely for one in found] == [True]


INITIALISED = """
def start(module):
    torch.nn.init.normal_(module.weight)

def evaluate():
    net.eval()
    return net(batch)

net.apply(start)
for step in range(3):
    evaluate()
    net(batch).backward()
"""


@pytest.mark.parametrize(
    ("gone", "clues"),
    [
        ("net.apply(start)", Clues("rng", lines=((("train.py", 3),), ()))),
        ("    net.eval()", Clues("rng", at_start=False)),
    ],
    ids=["what hands the function of a recorded line on", "the mode in which an evaluation draws"],
)
def test_a_removed_statement_leads_to_a_draw(gone, clues):
    texts = INITIALISED, INITIALISED.replace(f"{gone}\n", "")
    found = ranked(changes_of("train.py", *texts), ({"train.py": texts[0]}, {"train.py": texts[1]}), clues)
    assert [one.likely for one in found] == [True]


CHOSEN = """
class Large(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(4, 4)

def sample(net):
    return torch.multinomial(net(batch), {})

{}def render(query, rays):
    return query(rays * {})

net = {}()
for step in range(3):
    rays = render(net, batch)
    loss(rays, batch).backward()
sample(net)
"""


@pytest.mark.parametrize(
    ("change", "clues", "first"),
    [
        (
            (2, "class Other(nn.Module):\n    table = 0\n\n", 1, "Small"),
            Clues(
                "rng",
                lines=((("t.py", 4),), ()),
                roots=("Large", "Small"),
                words=frozenset({"table"}),
                ran=frozenset({"Large", "Small", "Embedding"}),
            ),
            "net = Small()",
        ),
        ((1, "", 2, "Large"), Clues("script", roots=("Large",)), "return query(rays * 2)"),
    ],
    ids=["of a draw on record, not what draws later, and no class that never ran", "of an input, what a step calls"],
)
def test_the_line_that_is_named_first_is_one_that_ran(change, clues, first):
    texts = CHOSEN.format(1, "", 1, "Large"), CHOSEN.format(*change)
    found = ranked(changes_of("t.py", *texts), ({"t.py": texts[0]}, {"t.py": texts[1]}), clues)
    assert found[0].likely
    assert found[0].change.b.text == first


def test_a_file_on_the_path_of_imports_has_one_name_in_lines_and_among_sources(tmp_path, monkeypatch):
    file = tmp_path / "package" / "model.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Project, "root", str(tmp_path / "elsewhere"))
    assert relative(str(file)) == named(str(file), "package.model") == "package/model.py"


EXPORTED = """
def pack(layers):
    return [layer.table.weight for layer in layers]

net = Net(table={})
sampler = Sampler(table={})
if __name__ == "__main__":
    pack(net)
"""


def test_what_gives_the_model_a_value_comes_before_what_did_not_run_or_gives_it_to_something_else():
    model = "class Net(nn.Module):\n    def __init__(self, table):\n        self.table = nn.Embedding(table, 4)\n"
    texts = (
        EXPORTED.format(4, 4),
        EXPORTED.format(5, 5).replace("[layer.table.weight for", "[1 * layer.table.weight for"),
    )
    clues = Clues(
        "rng",
        lines=((("m.py", 3),), ()),
        roots=("Net",),
        words=frozenset({"table", "weight"}),
        scripts=frozenset({"train.py"}),
    )
    found = ranked(changes_of("t.py", *texts), tuple({"t.py": text, "m.py": model} for text in texts), clues)
    assert [one.change.place for one in found][:2] == ["t.py:5", "t.py:6"]


PENALTY = """
def penalty(critic, images):
    weight = {}
    return critic(weight * images).square().mean()


(net(x).sum() + penalty(net, x)).backward()
"""
OF_ITSELF = """
class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        loss = self.net(x).square().sum()
        loss = loss / {}
        loss.backward()
        return loss


Trained()(x)
"""


@pytest.mark.parametrize(("text", "scope"), [(PENALTY, "penalty"), (OF_ITSELF, "Trained.forward")])
def test_a_line_is_likely_where_a_function_is_handed_the_model_or_a_forward_trains(
    project,
    introspect,
    text,
    scope,
):
    begin = "import torch\nfrom model import Net\n\ntorch.manual_seed(0)\nnet, x = Net(), torch.ones(2, 4)\n"
    begin += "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    for name, value in zip("ab", (2, 3), strict=True):
        project(name, train=begin + text.format(value) + "optimizer.step()\n")
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert [(one, likely) for _, one, likely in changes(document)] == [(scope, True)]


EPOCHS = """
import torch
from model import Net

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Dropout(0.5), Net())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader([torch.randn(n, 4) for n in range(2, 8)], batch_size=None, shuffle=True)
for _ in range(2):
    net.train()
    for x in loader:
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 4))
"""


def test_a_batch_of_another_shape_is_laid_to_draws_of_an_evaluation_in_the_wrong_mode(project, introspect):
    project("a", train=EPOCHS)
    project("b", train=EPOCHS.replace("    net.eval()\n", ""))
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert "since the step began, one run drew other random numbers" in document["sentence"]
    assert changes(document) == [("train.py:15", "", True)]


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


ALIAS = """
def cosine(x):
    return {} * x

class Net(Module):
    def forward(self, x):
        f = cosine
        return f(x)
"""
TWICE = """
class Twice:
    def __call__(self, x):
        return {}

data = Folder(Compose([Twice()]))
loader = DataLoader(data)
"""
SHIFTED = """
eps = {} / norm
with torch.no_grad():
    for p, d in zip(net.parameters(), ds):
        p += eps * d
"""
RATES = """
def adjust(optimizer, epoch):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / epoch

for epoch in range(3):
    adjust(optimizer, {})
"""


@pytest.mark.parametrize(
    ("text", "clues"),
    [
        (ALIAS, Clues("own_code", classes=("Net",))),
        (TWICE, Clues("batch")),
        (SHIFTED, Clues("outside", models=frozenset({"net"}))),
        (RATES, Clues("optimizer", words=frozenset({"lr"}))),
    ],
    ids=["a function under another name", "a transform of a data set", "an update by hand", "what sets a rate"],
)
def test_values_are_followed_to(text, clues):
    texts = text.format(1), text.format(2)
    found = ranked(changes_of("t.py", *texts), ({"t.py": texts[0]}, {"t.py": texts[1]}), clues)
    assert [one.likely for one in found] == [True]


CODES = """import torch


def moved(old, new, pace):
    old.data.lerp_(new, pace)


class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        moved(self.codes, x.detach().mean(0), 0.1)
        return x


class Codes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        moved(self.codes, x.detach().mean(0), 0.1)
        return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.other, self.inner, self.a = Other(), Codes(), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.a(self.inner(self.other(x))) + self.inner.codes.square().sum()
"""


def test_a_parameter_that_a_module_writes_and_the_code_around_it_uses_is_the_place_with_the_line_that_writes(said):
    head, _, rest = CODES.partition("def moved")
    _, _, rest = rest.partition("\n\n\n")
    model = (head + rest).replace("moved(self.codes, x.detach().mean(0), 0.1)", "self.codes.data.lerp_({}, 0.{})")
    before, _, after = model.partition("class Codes")
    model = before.format("x.detach().mean(0)", 1) + "class Codes" + after.format("x.detach().mean(0)", 2)
    document, _ = said(model, base=CODES)
    first = document["first"]
    assert (first["kind"], first["fqn"], first["phase"]) == ("param", "Net.inner.codes", "forward")
    assert changes(document)[0][1:] == ("Codes.forward", True)
    assert "(Codes.forward): moved(self.codes" in document["sentence"]


def test_what_changed_a_drawn_parameter_comes_before_draws_of_others_that_were_moved(said):
    built = "        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)\n"
    before = (
        "        self.a = torch.nn.Linear(4, 8)\n        b = torch.nn.Linear(8, 1)\n"
        "        self.c = torch.nn.Linear(4, 8)\n        self.b = b\n"
    )
    after = (
        "        self.a = torch.nn.Linear(4, 8)\n        self.c = torch.nn.Linear(4, 8)\n"
        "        self.b = torch.nn.Linear(8, 1)\n        self.a.weight.data.fill_(0.1)\n"
    )
    document, _ = said(MODEL.replace(built, after), base=MODEL.replace(built, before))
    assert "the script changed it before it was recorded" in document["sentence"]
    assert changes(document)[0][0] == "model.py:12"


def test_an_attribute_that_changed_code_sets_is_not_called_the_cause(said):
    document, _ = said(
        MODEL.replace("Linear(8, 1)", "Linear(8, 1)\n        self.causal = False").replace(
            "relu(self.a(x))", "relu(self.a(x)) * 2"
        )
    )
    assert "causal" not in document["sentence"].partition("Likely: ")[0]
    assert "relu(self.a(x)) * 2" in document["sentence"]
