"""One batch cut into microbatches in several ways: the same training, unless the cut is where a fault is."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from artefacts import run_of
from laid_out import write_step
from opcapture import compared

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Kind, Layout, ModuleInfo, Phase, Site
from introspect_cli.store.run import open_run

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


def test_what_was_not_compared_is_not_counted_as_equal(split):
    whole, padded = split("", "--micro 2"), split("--padded", "--padded --micro 2")
    assert padded.counts.equal < whole.counts.equal
    assert any(note.startswith("Nothing recorded rests on") for note in padded.notes)


def test_tf32_gets_the_tolerance_of_half_precision_where_a_gpu_computes_in_it(tmp_path):
    param = Site(Phase.OPTIMIZER, Kind.PARAM, "Net.a.weight")

    def computes(device, module="Linear", **switches):
        about = {"settings": {"runtime": switches}, "modules": [ModuleInfo("Net.a", module)]}
        number = len(list(tmp_path.iterdir()))
        runs = []
        for ranks in (1, 2):
            record = (param, Layout((2,), "float32", device, "contiguous"), 5 + ranks, 1.0 + 1e-4 * ranks)
            runs.append(write_step(tmp_path / f"{number} {ranks}", *[[record]] * ranks, **about))
        result = compared(*runs)
        return result.verdict is Verdict.SAME, any("TF32" in note for note in result.notes)

    assert computes("cuda:0", matmul_allow_tf32=True) == (True, True)
    assert computes("cuda:0", "Conv2d", cudnn_allow_tf32=True, matmul_allow_tf32=False) == (True, True)
    assert computes("cuda:0", cudnn_allow_tf32=True, matmul_allow_tf32=False) == (False, False)
    assert computes("cpu", matmul_allow_tf32=True) == (False, False)


def test_runs_without_a_common_rank_are_undecided_and_no_error(tmp_path):
    record = (Site(Phase.OPTIMIZER, Kind.PARAM, "Net.a.weight"), Layout((2,), "float32", "cpu", "contiguous"), 5, 1.0)
    for run, lost in (("a", (0, 1)), ("b", (2, 3))):
        write_step(tmp_path / run, *[[record]] * 4)
        for rank in lost:
            shutil.rmtree(tmp_path / run / f"rank{rank}")
    assert compared(tmp_path / "a", tmp_path / "b").verdict is Verdict.UNDECIDED


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
    assert " tokens, and count alike: weighted " in means.sentence
