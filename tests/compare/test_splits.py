"""One batch cut into microbatches in several ways: the same training, unless the cut is where a fault is."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from artefacts import run_of

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Role, Verdict
from introspect_cli.compare.wholes import _in_tf32
from introspect_cli.records import Kind, Layout, ModuleInfo
from introspect_cli.store.read.run import open_run

SCRIPTS = Path(__file__).parents[2] / "fixtures" / "splits"
QUICK = ("--no-packages", "--no-env", "--no-source", "--quiet")
FOUR = "--micro 2 --accumulate 4"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def split(forks):
    """Compare two captures of a script with some arguments."""

    def run(script, arguments, options):
        options = (*QUICK, *shlex.split(options))
        return run_of(forks, SCRIPTS / f"{script}.py", *shlex.split(arguments), options=options)

    def compared(a, b, *, script="loop", options="", **how):
        with open_run(run(script, a, options)) as one, open_run(run(script, b, options)) as two:
            return compare_runs(one, two, DiffOptions(**how))

    return compared


# --- right


def test_gradients_that_agree_prove_a_split_by_lean_records_whatever_differs_after_them(split):
    result = split("", "--micro 2 --lr 2e-2", options="--record param,grad,loss")
    assert result.first.site.kind is Kind.PARAM, result.sentence
    assert [(one.code, one.fields["name"]) for one in result.explains] == [("hyperparameter", "lr")]
    assert {(one.thing, one.known) for one in result.rests_on} == {("gradient", "within"), ("value_before", "equal")}
    assert any("batch of a step is cut differently" in note for note in result.notes)


@pytest.mark.parametrize(
    "options", ["--record param,grad,loss", "--steps ::2", "--modules mix", "--level op", "--eval"]
)
def test_splits_are_the_same_by_lean_records_too(split, options):
    result = split("--samples 32", "--samples 32 --micro 2", options=options)
    assert result.verdict is Verdict.SAME, result.sentence


def test_results_of_operators_are_not_counted_as_equal(split):
    plain = split("", "--micro 2").counts
    deep = split("", "--micro 2", options="--level op")
    assert deep.counts.within == plain.within
    assert deep.counts.records - deep.counts.equal > 50
    assert "random states and results of operators are not compared" in deep.notes[0]


def test_what_was_not_compared_is_not_counted_as_equal(split):
    whole, padded = split("", "--micro 2"), split("--padded", "--padded --micro 2")
    assert padded.counts.equal < whole.counts.equal
    assert any(note.startswith("Nothing recorded rests on") for note in padded.notes)


def test_tf32_gets_the_tolerance_of_half_precision_where_a_gpu_computes_in_it():
    def computes(device, module="Linear", **switches):
        run = SimpleNamespace(settings=SimpleNamespace(document={"runtime": switches}.get))
        layouts, modules = [Layout((2,), "float32", device)], [ModuleInfo("Net.a", module)]
        return _in_tf32(run, SimpleNamespace(layouts=layouts, modules=modules))

    assert computes("cuda:0", matmul_allow_tf32=True)
    assert computes("cuda:0", "Conv2d", cudnn_allow_tf32=True, matmul_allow_tf32=False)
    assert not computes("cuda:0", cudnn_allow_tf32=True, matmul_allow_tf32=False)
    assert not computes("cpu", matmul_allow_tf32=True)


HALF = """
import sys, torch
from torch import nn

part, since, sample, other = map(int, sys.argv[1:])  # bfloat16 from that step and sample on; when the layer is another
step = 0

class First(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.001 if step == other else 1.0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = First(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=step >= since and second):
            x = self.inner(x)
        return self.last(x.float())

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for batch in torch.randn(3, 8, 4):
    optimizer.zero_grad()
    for number, own in enumerate(batch.split(part)):
        second = number * part >= sample
        (net(own).square().mean() * len(own) / 8).backward()
    optimizer.step()
    step += 1
"""


@pytest.mark.parametrize(
    ("a", "since", "sample", "changed", "said"),
    [
        (8, 0, 0, 0, True),
        (8, 2, 0, 1, True),  # bfloat16 comes a step later
        (8, 1, 0, 1, True),  # what step 1 begins with was computed in float32
        (8, 0, 0, 1, False),  # and here in bfloat16
        (4, 0, 4, 0, True),  # half of each batch, as one rank may
    ],
)
def test_what_comes_before_anything_in_half_precision_gets_the_tolerance_of_float32(
    tmp_path, introspect, a, since, sample, changed, said
):
    (tmp_path / "train.py").write_text(HALF)
    for name, words in {
        "a": (a, since, sample, -1),
        "cut": (2, since, sample, -1),
        "other": (2, since, sample, changed),
    }.items():
        assert introspect("capture", "-q", "-o", name, "train.py", *words).returncode == 0
    cut = introspect("diff", "a", "cut").stdout
    assert cut.startswith("Over the samples of each step, the runs are the same")
    assert "0.0001 of the values; those in bfloat16 or float16, and what comes of them, by 0.03." in cut
    with open_run(tmp_path / "a") as one, open_run(tmp_path / "other") as two:
        first = compare_runs(one, two, DiffOptions()).first
    found = first is not None and (first.step, first.site.kind, first.site.fqn, first.role)
    assert (found == (changed, Kind.OUTPUT, "Net.first", Role.ORIGIN)) is said, found


# --- with a fault


# --- frameworks


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("accelerated", "accelerate"),
        pytest.param("trainer", "transformers", marks=pytest.mark.sweep),
        pytest.param("lightning_loop", "lightning", marks=pytest.mark.sweep),
    ],
)
def test_a_framework_that_accumulates_is_the_same_run_and_its_faults_are_reported(split, script, package):
    pytest.importorskip(package)
    right = split("", FOUR, script=script)
    assert right.verdict is Verdict.SAME, right.sentence
    wrong = split("", f"{FOUR} --fault summed", script=script)
    assert (wrong.verdict, wrong.first.reason) == (Verdict.DIVERGED, "split"), wrong.sentence
    assert "gradients of b are 4 x those of a: " in wrong.sentence
    flag = "--means" if script == "trainer" else "--uneven"
    means = split(flag, f"{flag} {FOUR}", script=script)
    assert (means.verdict, means.first.reason) == (Verdict.DIVERGED, "split"), means.sentence
    assert " tokens, and count alike: weighted by these" in means.sentence


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["", "--fault summed"])
@pytest.mark.parametrize("a", [1, 2, 4, 8])
@pytest.mark.parametrize("b", [1, 2, 4, 8])
def test_every_split_against_every_other(split, a, b, fault):
    result = split(f"--micro {a}", f"--micro {b} {fault}")
    if not fault or b == 8:
        assert result.verdict is Verdict.SAME, result.sentence
    elif a == b:
        assert result.verdict is Verdict.DIVERGED
    else:
        assert (result.verdict, result.first.reason) == (Verdict.DIVERGED, "split"), result.sentence
        assert f"are {8 // b} x those of a" in result.sentence
