"""What seeds and draws before the first step is on record, and the answer names the first of it that differs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

import introspect_cli
from introspect_cli.capture.probes import beginning_events
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.settings.beginning import _events, filled
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.store.read.run import open_run

SCRIPT = """
import random
import numpy as np
import torch
from torch import nn

def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)
        self.apply(self.start)

    def start(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight.data, std=0.02)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

set_seed(1337)
net = Net()
rng, own, made = np.random.default_rng(3), random.Random(4), torch.Generator().manual_seed(5)
with torch.no_grad():
    net.layers[1].bias.add_(float(rng.normal()) + own.random() + torch.rand(1, generator=made))
net.head.bias.data.normal_(0, 0.1)
data = torch.randint(0, 16, (2, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
originals = []
for row in data:
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(row), row).backward()
    optimizer.step()
    functions = nn.init.normal_, random.Random.seed
    found = all("introspect" not in f.__code__.co_filename for f in functions)
    originals.append(found and "normal_" not in vars(torch.Tensor))
print(originals)
"""


@pytest.fixture(scope="module")
def capture(tmp_path_factory, forks):
    def run(text, *options):
        folder = tmp_path_factory.mktemp("run")
        (folder / "train.py").write_text(text)
        done = forks("capture", "-q", "-o", "run", *options, "train.py", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[True, True]\n"  # what looks at draws is gone once the first step has begun
        return folder / "run"

    return run


@pytest.fixture(scope="module")
def base(capture):
    return capture(SCRIPT)


FIRST = "the first draw or seeding that differs is "
SEEN = {
    "another seed": ("set_seed(1337)", "set_seed(1338)", "random.seed 1337 -> 1338 (train.py:8)."),
    "no seed": (
        "    torch.manual_seed(seed)\n",
        "    pass\n",
        FIRST + "torch.manual_seed(1337) (train.py:10), in a only.",
    ),
    "a seeding that comes later": (
        "set_seed(1337)\nnet = Net()",
        "net = Net()\nset_seed(1337)",
        FIRST + "torch.manual_seed(1337) (train.py:10) in a; b has it later",
    ),
    "one initialiser less": (
        "isinstance(module, nn.Embedding)",
        "False",
        FIRST + "normal_ of Net.emb.weight (train.py:24), in a only; 7 draws before it agree.",
    ),
    "one layer more": (
        "range(2)",
        "range(3)",
        FIRST + "kaiming_uniform_ of Net.layers.2.weight (train.py:16), in b only; 5 draws before it agree.",
    ),
    "a layer that is held by another, and one layer more": (  # another name alone is no other draw
        "nn.Embedding(16, 8)\n        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
        "nn.Sequential(nn.Embedding(16, 8))\n        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",
        FIRST + "kaiming_uniform_ of Net.layers.2.weight (train.py:16), in b only; 5 draws before it agree.",
    ),
    "another deviation": (
        "module.weight, std=0.02",
        "module.weight, std=0.2",
        "normal_ of Net.layers.0.weight (train.py:22) initialises it with std=0.02 in a, std=0.2 in b.",
    ),
    "another initialiser": (
        "nn.init.normal_(module.weight, std=0.02)",
        "nn.init.xavier_normal_(module.weight)",
        "(train.py:22) initialises it in a, xavier_normal_ of Net.layers.0.weight (train.py:22) in b.",
    ),
    "tied weights": (
        "        self.apply(self.start)",
        "        self.head.weight = self.emb.weight\n        self.apply(self.start)",
        "Net.head.weight is tied to it",
    ),
    "another draw of the script's": (
        "data = torch.randint",
        "torch.rand(1)\nother = nn.Linear(1, 1)\ndata = torch.randint",
        "after normal_ of Net.head.bias (train.py:37), something else draws differently in a and b; 12 draws",
    ),
    "values drawn by hand": (
        "normal_(0, 0.1)",
        "normal_(0, 0.2)",
        "normal_ of Net.head.bias (train.py:37) initialises it with 0, 0.1 in a, 0, 0.2 in b.",
    ),
}
"""By what was changed: the text, what takes its place, and what the answer says."""


@pytest.mark.parametrize("changed", SEEN)
def test_the_first_draw_that_differs_is_named(base, capture, changed):
    old, new, said = SEEN[changed]
    assert SCRIPT.count(old) == 1
    sentence = introspect_cli.diff(base, capture(SCRIPT.replace(old, new))).sentence
    assert sentence.startswith("First divergence at step 0: ")
    assert said in sentence


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("default_rng(3)", "default_rng(6)", "captured step begins; cause: numpy.random.d"),
        ("random.Random(4)", "random.Random(6)", "begins; cause: random.Random 4 -> 6 (train.py:34)."),
        ("manual_seed(5)", "manual_seed(6)", "torch.Generator made differs already when the first captured step"),
        ("rng.normal()", "rng.normal(size=2)[1]", "numpy.random.Generator rng differs already when the first captured"),
    ],
)
def test_a_generator_that_the_script_made_is_named_where_it_differs(base, capture, old, new, said):
    with open_run(base) as a, open_run(capture(SCRIPT.replace(old, new))) as b:
        answer = compare_runs(a, b, DiffOptions())
    assert said in answer.sentence


def test_a_parameter_that_was_drawn_alike_was_changed_afterwards(base, capture):
    text = SCRIPT.replace("net = Net()", "net = Net()\nwith torch.no_grad():\n    net.head.weight.mul_(2)")
    sentence = introspect_cli.diff(base, capture(text)).sentence
    said = "drew the same values in both runs: the script changed it before"
    assert said in sentence


def test_equal_beginnings_say_nothing(base, capture):
    with open_run(base) as a, open_run(capture(SCRIPT.replace("lr=0.1", "lr=0.2"))) as b:
        result = compare_runs(a, b, DiffOptions())
    assert "draw" not in result.sentence
    assert not any(change.source == "beginning" for change in result.settings)


def test_runs_without_random_states_keep_the_plain_answer(capture):
    lean = ("--record", "param,grad,loss")
    a, b = capture(SCRIPT, *lean), capture(SCRIPT.replace("set_seed(1337)", "set_seed(1338)"), *lean)
    assert not (a / "settings/beginning.yaml").exists()
    assert "left: its initialisation, the seed" in introspect_cli.diff(a, b).sentence


def test_a_deep_model_is_folded(tmp_path, monkeypatch):
    monkeypatch.setattr(beginning_events, "FIRST", 5)
    monkeypatch.setattr(beginning_events, "LAST", 3)
    net = None
    with introspect_cli.recording(None, tmp_path / "run"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    document = yaml.safe_load((tmp_path / "run/settings/beginning.yaml").read_text())
    assert len(document["events"]) == 5
    assert len(document["last"]) == 3
    assert document["left_out"] == 13
    assert re.fullmatch(r"seed torch.manual_seed 0 \S+:\d+", document["events"][0])
    assert re.fullmatch(r"draw torch \w+ uniform_\(.*\) Sequential.9.bias \S+", document["last"][-1])


def begun(events):
    """A run whose document of what drew before the first step has these events."""
    return SimpleNamespace(settings_of=lambda _rank: SimpleNamespace(document={"beginning": {"events": events}}.get))


def test_what_filled_a_parameter_is_known_where_something_was_put_around_its_model():
    draws = [f"draw torch 0 uniform_(0) {name}.a.weight m.py:1" for name in ("Net", "T.net", "Net#2")]
    runs = [begun([draw]) for draw in draws]
    assert [one.code for one in filled((runs[0], runs[1]), 0, "Net.a.weight")] == ["changed-after-draw"]
    assert [one.code for one in filled((runs[0], runs[2]), 0, "Net.a.weight")] == ["filled-in-one"]


@pytest.mark.parametrize("lines", [["seed"], [None], [["draw", 1]], "draw", {"draw": 1}, ["draw torch 0 x"], []])
def test_lines_that_are_no_events_are_passed_over(lines):
    assert not _events(begun(lines), 0, "")


@pytest.mark.parametrize("drawn", ["torch.randn(())", "random.random()"])
def test_workers_that_draw_instead_of_the_main_process_are_named(tmp_path, introspect, drawn):
    script = f"""
import random, sys, torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((4,), float(index)) + {drawn}

if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(Noisy(), batch_size=2, num_workers=int(sys.argv[1])):
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
"""
    (tmp_path / "train.py").write_text(script)
    for name, workers in (("a", 0), ("b", 2)):
        introspect("capture", "-q", "-o", name, "train.py", workers)
    answer = introspect("diff", "a", "b").stdout.split("\n\n")[0]
    assert "DataLoader (train.py:16): num_workers 0 -> 2" in answer.partition("likely")[2], answer
    assert "prefetch_factor" not in answer


def test_a_loader_is_not_blamed_where_another_draw_is_on_record(tmp_path, introspect):
    script = """
import sys, torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
if sys.argv[1] == "2":
    torch.nn.init.normal_(net.weight)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(4, 4), batch_size=int(sys.argv[1])):
    net(batch).sum().backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(script)
    for name, size in (("a", 1), ("b", 2)):
        introspect("capture", "-q", "-o", name, "train.py", size)
    answer = introspect("diff", "a", "b").stdout.split("\n\n")[0]
    assert "normal_ of Linear.weight (train.py:7), in b only" in answer, answer
    assert "DataLoader" not in answer


EVALUATED = """
import sys, torch
from torch.nn.functional import dropout

class Attention(torch.nn.Linear):
    def forward(self, x):
        return dropout(super().forward(x), 0.5, training=self.training or "always" in sys.argv)

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), Attention(4, 4))
if "early" in sys.argv:
    with torch.no_grad():
        net(torch.ones(2, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net.train("training" in sys.argv)
with torch.no_grad():
    net(torch.ones(2, 4))
net.train()
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("training", "Sequential.1, called in train mode before the first step (train.py:17), in b only; 4"),
        ("always", "Sequential.1, called in eval mode before the first step (train.py:17), in b only; 4"),
        ("early", "a draw before train.py:14, in b only; 4"),
    ],
)
def test_an_evaluation_that_draws_before_the_first_step_is_named_by_module_mode_and_line(
    tmp_path, introspect, how, said
):
    (tmp_path / "train.py").write_text(EVALUATED)
    for name in ("silent", how):
        assert introspect("capture", "-q", "-o", name, "train.py", name).returncode == 0
    sentence = introspect_cli.diff(tmp_path / "silent", tmp_path / how).sentence
    assert f"{FIRST}{said} draws before it agree." in sentence
