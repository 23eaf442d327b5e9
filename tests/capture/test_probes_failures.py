"""A bug in introspect switches a probe off, is reported once, is recorded, and never reaches the script."""

from __future__ import annotations

import gc
import subprocess
import sys
import zlib

import pytest
import torch
from mistakes import Mistake, broken, called_while, diff, reading, seeded, train, train_compiled
from neutrality import Seen, assert_same, trajectory, watched
from sweeps import sliced
from torch import nn

from introspect_cli.capture.events import Patches
from introspect_cli.compare.result import Verdict
from introspect_cli.errors import StoreError
from introspect_cli.store.rank_writer import RankWriter
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.tensors.summarizer import Summarizer

OPERATORS = {"level": "op", "vjp": ("Model.last:Model.body",)}
INSIDE = {"compile": "keep"}
WORLDS = {"default": (train, {}, 16), "on request": (train, OPERATORS, 4), "compiled": (train_compiled, INSIDE, 2)}
"""A training, options of the capture, and into how many parts the functions that run are divided."""
BOUNDARIES = ("Guard.around", "OpProbe.record_results")
"""What is called by nothing that is guarded: the guard's own, and what is guarded as a whole."""
PARTS = [(name, part) for name, (_, _, parts) in WORLDS.items() for part in range(parts)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """For each, the run without a mistake, and the functions that run and did not in the world before."""
    found, known = {}, set()
    for name, (work, options, _) in WORLDS.items():
        path = tmp_path_factory.mktemp("whole") / "run"
        called = called_while(work, path, **options)
        new = {name: function for name, function in called.items() if name not in known}
        found[name] = path, {name: function for name, function in new.items() if not name.endswith(BOUNDARIES)}
        known |= called.keys()
    assert all(len(functions) > least for (_, functions), least in zip(found.values(), (150, 20, 8), strict=True))
    return found


@pytest.mark.parametrize(("name", "part"), sliced(PARTS, [(name, 1) for name in WORLDS]))
def test_a_mistake_in_capture_never_reaches_the_script(tmp_path, capsys, worlds, name, part):
    """Whichever function raises: the numbers are the same, and what is not observed is said, or nothing is missing."""
    (work, options, parts), (whole, functions) = WORLDS[name], worlds[name]
    bare, harm = trajectory(work), {}
    chosen = [name for name in functions if zlib.crc32(name.encode()) % parts == part]
    assert chosen
    for number, function in enumerate(chosen):
        path = tmp_path / str(number)
        seeded()
        with broken(functions[function], after=number % 2 * 5) as calls, watched(path, quiet=False, **options):
            seen = trajectory(work)
        for left in [each for each in gc.get_objects() if type(each) is Patches]:
            left.remove()  # where that was broken
        said = [line for line in capsys.readouterr().err.splitlines() if "is broken" in line]
        assert_same(bare, seen)
        is_told = any("from here on" in sentence for sentence in Seen(path).manifest["not_observed"])
        beside, alone = diff(whole, path).verdict, diff(path, path).verdict
        wanted = beside is not Verdict.SAME and alone is Verdict.UNDECIDED if is_told else beside is Verdict.SAME
        if not wanted:
            harm[function] = len(calls), beside, alone, said
        assert len(said) == len(set(said)) <= 16, said
    assert harm == {}


def test_value_that_cannot_be_summarised_is_one_gap(tmp_path, monkeypatch):
    class Refuses(torch.Tensor):
        pass

    original = Summarizer._add_unusual

    def special(self, tensor):
        if isinstance(tensor, Refuses):
            raise Mistake("no")
        return original(self, tensor)

    monkeypatch.setattr(Summarizer, "_add_unusual", special)
    net = nn.Sequential(nn.Identity(), nn.Linear(8, 1))
    with watched(tmp_path / "run") as session:
        net(torch.randn(2, 8).as_subclass(Refuses))
    assert session._guard.details == []
    assert "Mistake: no" in Seen(tmp_path / "run").unseen()["Sequential.0"]


def run_with_a_broken_probe(folder):
    """Capture the folder's train.py, with a mistake where a module's call ends."""
    (folder / "broken.py").write_text(
        "import sys\nfrom introspect_cli.capture.probes import modules\n"
        "def fails(*args):\n    raise ZeroDivisionError('planted')\n"
        "modules.ModuleProbe._leave = fails\n"
        "from introspect_cli.cli import main\nsys.argv = ['introspect', 'capture', '-o', 'run', 'train.py']\nmain()\n"
    )
    return subprocess.run([sys.executable, "broken.py"], cwd=folder, capture_output=True, text=True, check=False)


def test_whole_command_with_a_broken_probe(tmp_path):
    """From outside: one line on stderr, the script's own output and code, and the sentence in the run."""
    (tmp_path / "train.py").write_text(
        "import sys, torch\nnet = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(2):\n    net(torch.ones(2)).sum().backward()\n    opt.step()\n    print('step')\nsys.exit(3)\n"
    )
    out = run_with_a_broken_probe(tmp_path)
    assert out.returncode == 3
    assert out.stdout == "step\nstep\n"
    assert out.stderr.count("ZeroDivisionError: planted") == 1
    assert out.stderr.count("\n") == 2
    assert any("planted" in sentence for sentence in Seen(tmp_path / "run").manifest["not_observed"])


def test_a_run_that_is_killed_says_what_a_broken_probe_did_not_see(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, torch\nnet = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(4):\n    net(torch.ones(2)).sum().backward()\n    opt.step()\nos.kill(os.getpid(), 9)\n"
    )
    assert run_with_a_broken_probe(tmp_path).returncode == -9
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.INTERRUPTED
        assert len(run.rank(0).steps) >= 3
    assert Seen(tmp_path / "run").manifest["not_observed"] == [
        "module inputs and outputs are not observed from here on"
    ]
    assert diff(tmp_path / "run", tmp_path / "run").verdict is Verdict.UNDECIDED


# --- what reads the settings and writes the run


@pytest.mark.parametrize("name", ["runtime", "hardware", "packages", "environment"])
def test_settings_that_cannot_be_read(tmp_path, capsys, name):
    bare = trajectory(train)
    (function,) = {each.__code__: each for each in reading(name)}.values()
    with broken(function), watched(tmp_path / "run", quiet=False, env=True, packages=True):
        seen = trajectory(train)
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if f"{name} is broken" in line]
    assert len(said) == 1
    assert said[0].startswith(f"introspect: {name} settings are not observed")
    with open_run(tmp_path / "run") as run:
        assert name not in run.settings
        assert {"runtime", "hardware", "packages", "environment"} - run.settings.keys() == {name}
        assert run.state is RunState.COMPLETE


@pytest.mark.parametrize(("owner", "name"), [(RankWriter, "close"), (StoreWriter, "_close_ranks")])
def test_mistake_at_the_very_end(tmp_path, monkeypatch, capsys, owner, name):
    """What fails when all is written is told, and costs none of it."""
    bare = trajectory(train)

    def fails(self):
        raise Mistake(f"{name} is broken")

    monkeypatch.setattr(owner, name, fails)
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    assert sum(f"{name} is broken" in line for line in capsys.readouterr().err.splitlines()) >= 1
    with open_run(tmp_path / "run") as run:
        assert run.state is not RunState.COMPLETE
        assert len(run.rank(0).steps) == 3


@pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("name", ["append", "modules"])
def test_a_store_that_fails_ends_the_run_and_not_the_script(tmp_path, monkeypatch, capsys, name, error):
    """A store that cannot be written is told once, and ends; the script does not notice."""
    bare = trajectory(train)
    original, calls = getattr(RankWriter, name), []

    def fails(self, *args):
        calls.append(name)
        if len(calls) > 1:
            raise error
        return original(self, *args)

    monkeypatch.setattr(RankWriter, name, fails)
    seeded()
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("introspect: ")]
    assert 1 <= len(said) <= 3
    assert len(said) == len(set(said))
