"""Golden runs: small, kept beside a test, checked by running again; another machine's rounding is told apart."""

from __future__ import annotations

import importlib
import shutil
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from opcapture import captured

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun import golden
from introspect_cli.rerun.golden import Golden, compare_golden, pack_golden

pytestmark = pytest.mark.usefixtures("quick_python")

pytest_plugins = ["pytester"]
TRAIN = """\
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(50):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def train(scale=1.0, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(scale * torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def kept(tmp_path):
    def run(**about):
        pack_golden(captured(tmp_path / "a", train), Golden(steps=3, **about), tmp_path / "golden")
        return tmp_path / "golden"

    return run


def test_the_golden_run_of_a_script_is_small_and_checked_by_running_it_again(tmp_path, introspect):
    (tmp_path / "train.py").write_text(TRAIN)
    done = introspect("golden", "save", "-o", "gold", "train.py", "0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "gold").iterdir()) == ["golden.json", "run.zip"]
    assert sum(path.stat().st_size for path in (tmp_path / "gold").iterdir()) < 50_000
    assert introspect("golden", "check", "gold").returncode == 0
    (tmp_path / "train.py").write_text(TRAIN.replace("lr=float(sys.argv[1])", "lr=0.2"))
    done = introspect("golden", "check", "gold")
    assert done.returncode == 1
    assert "First divergence at step 0" in done.stdout
    assert "lr 0.1 -> 0.2" in done.stdout
    assert "--all" not in done.stdout, "golden check has no such option"
    assert "train.py" in introspect("show", "gold").stdout, "every verb reads a golden run"


def test_what_is_within_tolerance_passes(kept, tmp_path):
    other = captured(tmp_path / "b", lambda: train(scale=1.001))
    path = kept()
    assert compare_golden(path, Golden(), other).verdict.value == "diverged"
    assert compare_golden(path, Golden(rtol=0.01, atol=0.01), other).verdict.value == "same"


def test_rounding_on_another_machine_is_distinguished_from_a_change(kept, tmp_path):
    path = kept()
    b = captured(tmp_path / "b", lambda: train(scale=1 + 2e-7))
    said = compare_golden(path, Golden(), b)
    assert said.verdict.value == "diverged", "the machine is the same"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        b = captured(tmp_path / "c", lambda: train(scale=1 + 2e-7))
        said = compare_golden(path, Golden(), b)
        assert said.verdict.value == "undecided"
        assert f"as small as rounding, and the golden run is of another machine (threads {threads}" in said.sentence
        assert (
            compare_golden(path, Golden(), captured(tmp_path / "d", lambda: train(scale=1.1))).verdict.value
            == "diverged"
        )
    finally:
        torch.set_num_threads(threads)


def test_noise_that_repeats_show_is_let_pass(kept, tmp_path):
    path = kept()
    new = captured(tmp_path / "b", lambda: train(scale=1.0001))
    again = captured(tmp_path / "c", lambda: train(scale=1.0002))
    assert compare_golden(path, Golden(), new).verdict.value == "diverged"
    said = compare_golden(path, Golden(), new, [again])
    assert (said.verdict.value, said.a, said.b) == ("same", str(new), str(path))


def test_what_is_no_golden_run_is_reported(tmp_path, kept):
    with pytest.raises(StoreError, match="no golden run at"):
        golden.check(tmp_path / "none")
    path = kept()
    with pytest.raises(UsageError, match="run that test to check it"):
        golden.check(path)
    (path / "run.zip").write_bytes(b"no zip")
    with pytest.raises(StoreError, match="is not a run"):
        compare_golden(path, Golden(), captured(tmp_path / "b", train))
    (path / "golden.json").write_text('{"steps": "x"}')
    with pytest.raises(StoreError, match="save it again with --force"):
        golden.check(path)


TESTS = """\
import pytest, torch

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def test_training(introspect):
    introspect.assert_same_training("gold", train)

def test_numbers(introspect):
    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    other = net()
    introspect.assert_same_numbers(net(), other, torch.ones(2, 4))
    other[1] = torch.nn.GELU(approximate="tanh")
    with pytest.raises(AssertionError, match="1 .GELU."):
        introspect.assert_same_numbers(net(), other, torch.ones(2, 4))
    introspect.assert_same_numbers(net(), other, torch.ones(2, 4), rtol=0.1)
"""


# An installation brings the plugin by its entry point; a work tree on PYTHONPATH alone does not.
PLUGIN = (
    () if entry_points(group="pytest11", name="introspect") else ("-p", "introspect_cli.integrations.pytest_plugin")
)


@pytest.fixture
def loaded():
    """An optimizer's first step loads a compiler, which ends a process that loads it twice: pytester forgets it."""
    importlib.import_module("torch._dynamo")


@pytest.mark.usefixtures("loaded")
def test_the_pytest_plugin_saves_checks_and_says_what_diverged(pytester):
    def run(lr, *words):
        pytester.makepyfile(test_it=f"LR = {lr}\n{TESTS}")
        done = pytester.runpytest_inprocess("-q", *PLUGIN, *words)
        return done.ret, done.stdout.str()

    code, said = run(0.1)
    assert code == 1
    assert "no golden run at" in said
    assert "--introspect-update" in said
    assert run(0.1, "--introspect-update")[0] == 0
    assert run(0.1)[0] == 0
    code, said = run(0.2)
    assert code == 1
    assert "First divergence at step 0" in said
    assert "lr 0.1 -> 0.2" in said
    assert "pytest_plugin.py" not in said, "the failure is the test's"


FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "golden"


def test_the_golden_run_in_fixtures_is_small_and_still_the_same(tmp_path, introspect):
    place = shutil.copytree(FIXTURE, tmp_path / "golden")
    assert sum(path.stat().st_size for path in (place / "gpt").iterdir()) < 50_000
    done = introspect("golden", "check", "gpt", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "up to and including step 19" in done.stdout
    text = (place / "train.py").read_text()
    (place / "train.py").write_text(text.replace("nn.GELU()", "nn.GELU(approximate='tanh')"))
    done = introspect("golden", "check", "gpt", cwd=place)
    assert done.returncode == 1, done.stdout
    assert "step 0: the output of GPT.blocks.0.act (GELU)" in " ".join(done.stdout.split())
