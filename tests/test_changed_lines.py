"""From two runs to the changed line: which statement `diff` names, and which it does not call likely."""

import json

import pytest
from test_source_texts import MODEL, TRAIN, project  # noqa: F401 - a fixture

PAD = "class Pad(torch.nn.Module):\n    def forward(self, x):\n        return x\n\n\n"


@pytest.fixture
def told(project, introspect, tmp_path):  # noqa: F811 - the fixture
    """The answer on the plain project and one with these files, as data and as text."""

    def compare(model=MODEL, train=TRAIN, options=(), more=None):
        a, b = project("a", *options), project("b", *options, model=model, train=train, more=more)
        document = json.loads(introspect("diff", a, b, "--format", "json").stdout)
        return document, introspect("diff", a, b).stdout

    return compare


def changes(document):
    return [(one["place"], one["scope"], one["likely"]) for one in document["code"]["changes"]]


@pytest.mark.parametrize("options", [(), ("--record", "param,grad,loss"), ("--every-seconds", "3600")])
def test_the_changed_line_of_a_forward_comes_first_and_what_only_prints_is_not_likely(told, options):
    document, text = told(
        MODEL.replace("self.b(torch", "1.01 * self.b(torch"),
        TRAIN.replace("step in", "number in") + "print(1)\n",
        options,
    )
    assert changes(document)[0] == ("model.py:12", "Net.forward", True)
    assert all(not likely for place, _, likely in changes(document) if place == "train.py:13")
    assert "- return self.b(torch.relu(self.a(x)))\n    + return 1.01 * self.b(torch.relu(self.a(x)))" in text
    assert document["code"]["changes"][0]["a"]["text"] == "return self.b(torch.relu(self.a(x)))"


def test_the_line_that_builds_an_optimizer_comes_first_where_parameters_differ_after_its_step(told):
    document, _ = told(MODEL.replace("Net(torch", "Net(  torch"), TRAIN.replace("lr=0.1", "lr=0.2"))
    assert changes(document)[0] == ("train.py:7", "", True)


def test_the_line_that_seeds_comes_first_where_random_states_differ(told):
    document, _ = told(MODEL.replace("x)))", "x))) + 0"), TRAIN.replace("seed(0)", "seed(1)"))
    assert changes(document)[0] == ("train.py:5", "", True)
    assert changes(document)[1] == ("model.py:12", "Net.forward", False)


def test_what_comes_after_the_first_value_that_differs_is_not_likely(told):
    model = MODEL.replace(
        "        return self.b(torch.relu(self.a(x)))",
        "        x = self.a(x{})\n        x = self.b(x)\n        return x{}",
    )
    document, _ = told(model.format(" * 2", " * 1"))
    plain, _ = told(model.format("", ""))
    assert plain["verdict"] == "diverged"
    assert changes(document)[0][2]


def test_a_file_that_changed_in_comments_alone_explains_nothing(told, introspect, tmp_path):
    document, _ = told(MODEL.replace("class Net", "# a comment\nclass Net"), TRAIN.replace("seed(0)", "seed(1)"))
    assert document["code"]["in_comments"] == []  # a secret is in that file: more than comments may differ
    assert document["code"]["unread"] == [{"file": "model.py", "why": "secret"}]
    open_model = MODEL.replace("hunter2-is-long", "")
    document, _ = told(open_model, TRAIN)
    assert document["verdict"] == "same"
    assert "model.py" in introspect("diff", "a", "b", "--changes").stdout


def test_comments_alone_are_said(project, introspect):  # noqa: F811 - the fixture
    plain = MODEL.replace("API_KEY", "NAME")
    project("a", model=plain, train=TRAIN.replace("seed(0)", "seed(3)"))
    project("b", model=plain + "# more\n", train=TRAIN)
    done = introspect("diff", "a", "b", "--settings").stdout
    assert "model.py changed, in comments alone" in done
    assert "model.py changed, in comments alone." in introspect("diff", "a", "b", "--changes").stdout
    assert "model.py" not in introspect("diff", "a", "b").stdout.partition("\n")[0]


def test_where_nothing_on_record_differs_that_is_said_with_what_is_left(project, introspect):  # noqa: F811 - the fixture
    drawn = TRAIN.replace("torch.manual_seed(0)", "import os\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))")
    project("a", train=drawn)
    project("b", train=drawn)
    text = introspect("diff", "a", "b").stdout
    assert "No source file, setting or package on record differs. What is left: randomness" in text


def test_nothing_is_said_of_what_is_left_where_a_run_kept_no_texts(project, introspect):  # noqa: F811 - the fixture
    drawn = TRAIN.replace("torch.manual_seed(0)", "import os\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))")
    project("a", "--no-packages", train=drawn)
    project("b", train=drawn)
    assert "on record differs" not in introspect("diff", "a", "b").stdout
    project("a", "--no-sources", train=drawn)
    project("b", train=drawn.replace("step in", "number in"))
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert document["code"]["unread"] == [{"file": "train.py", "why": "text"}]
    assert "on record differs" not in " ".join(document["evidence"])


def test_two_scripts_of_two_names_are_laid_beside_one_another(project, introspect, tmp_path):  # noqa: F811 - the fixture
    project("a")
    home = tmp_path / "a-project"
    (home / "train2.py").write_text(TRAIN.replace("lr=0.1", "lr=0.3"))
    introspect("capture", "-q", "--force", "-o", tmp_path / "b", "train2.py", cwd=home)
    document = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert changes(document) == [("train2.py:7", "", True)]


def test_the_page_shows_both_sides(told, introspect, tmp_path):
    told(MODEL.replace("self.b(torch", "1.01 * self.b(torch"))
    introspect("report", "a", "b", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<pre class="b"><small>b 12</small>\nreturn 1.01 * self.b(torch.relu(self.a(x)))</pre>' in page


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
def test_a_run_that_ended_by_an_exception_is_told_first(told, model, train, begins):
    document, text = told(model, train)
    assert document["sentence"].startswith(begins)
    assert text.startswith(begins)


def test_an_exception_after_the_first_divergence_is_a_note(told):
    train = TRAIN.replace("lr=0.1", "lr=0.5") + "raise RuntimeError('late token=abcdefgh12345678')\n"
    document, _ = told(train=train)
    assert document["sentence"].startswith("First divergence at step 0")
    (note,) = [note for note in document["notes"] if "exception" in note]
    assert note == (
        "Run b ended by an exception, after the first divergence: RuntimeError: late token=<redacted>, at train.py:13."
    )


def test_runs_that_end_by_the_same_exception_are_the_same(project, introspect):  # noqa: F811 - the fixture
    for name in "ab":
        project(name, train=TRAIN + "raise SystemError('as planned')\n")
    done = introspect("diff", "a", "b")
    assert done.returncode == 0
    assert done.stdout.startswith("The runs are the same")
