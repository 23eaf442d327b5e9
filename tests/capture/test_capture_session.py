"""A capture from outside: directories, last words, options that take effect, settings, secrets."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys

import pytest

from introspect_cli.records import Kind, Phase
from introspect_cli.store.run import RunState, open_run

pytestmark = pytest.mark.usefixtures("quick_python")

SCRIPT = """\
import os, random, sys
import numpy as np
import torch
import helper

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.head = torch.nn.Linear(2, 1)
    def forward(self, x):
        return self.head(self.body(x))

if "--unseeded" not in sys.argv:
    torch.manual_seed(1); random.seed(1); np.random.seed(1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
for x, y in torch.utils.data.DataLoader(data, batch_size=2, shuffle=True):
    loss = (net(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        net(x)
print(loss.item(), random.random(), float(np.random.rand()), torch.are_deterministic_algorithms_enabled(),
      os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


@pytest.fixture
def project(tmp_path):
    directory = tmp_path / "a project"
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    (directory / "helper.py").write_text("x = 1\n")
    return directory


@pytest.fixture
def captured(introspect, project):
    """Capture the script with options, and open the run."""
    runs = []

    def capture(*options, args=(), code=0, new_process=False, **settings):
        out = project / f"run{len(runs)}"
        words = ("capture", "-o", str(out), *options, "train.py", *args)
        done = introspect(*words, cwd=project, new_process=new_process, **settings)
        assert done.returncode == code, done.stderr
        runs.append(open_run(out))
        return runs[-1], done

    yield capture
    for run in runs:
        run.close()


def sites(run, step=0):
    reader = run.rank(0)
    batch = reader.read(step)
    return [reader.sites[int(number)][0] for number in batch.site]


def test_default_capture_has_every_kind_at_every_step(captured):
    run, done = captured()
    assert run.state is RunState.COMPLETE
    assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2, 3, 4, 5]
    assert run.manifest["steps"] == 6
    found = sites(run)
    expected = set(Kind) - {Kind.OP_OUTPUT, Kind.BUFFER, Kind.VALUE, Kind.COLLECTIVE, Kind.PRODUCT}
    assert {site.kind for site in found} == expected
    assert len(found) == len(set(found))
    assert {site.phase for site in found} == {
        Phase.START, Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER,
    }  # fmt: skip
    names = {site.fqn for site in found if site.kind is Kind.OUTPUT}
    assert names == {"Net", "Net.body", "Net.body.0", "Net.body.1", "Net.body.2", "Net.head"}
    assert {s.fqn for s in found if s.kind is Kind.GRAD} == {
        "Net.body.0.weight", "Net.body.0.bias", "Net.body.2.weight", "Net.body.2.bias", "Net.head.weight",
        "Net.head.bias",
    }  # fmt: skip
    # The forward without gradients after each step is evaluation, and is not mixed into training.
    assert all(site.call == 0 for site in sites(run, 3) if site.kind is Kind.OUTPUT)
    assert done.stderr.startswith("introspect: recorded 6 steps, ")
    assert str(run.path.name) in done.stderr


def test_a_glob_that_matches_no_module_is_reported(captured):
    run, done = captured("--modules", "body,hed", "--exclude", "nothing.*")
    assert "no module that ran matches hed; did you mean head?" in done.stderr
    assert "no module that ran matches nothing.*" in done.stderr
    assert "matches body" not in done.stderr
    assert any("matches hed" in sentence for sentence in run.manifest["not_observed"])
    assert {site.fqn.split(".")[1] for site in sites(run) if site.kind is Kind.OUTPUT} == {"body"}


def test_schedule_modules_and_depth_narrow_what_is_recorded(captured):
    run, _ = captured("--steps", "2:6:2", "--modules", "body*", "--exclude", "*.1", "--max-depth", "2")
    assert [entry.step for entry in run.rank(0).steps] == [2, 4]
    names = {site.fqn for site in sites(run, 4) if site.kind is Kind.OUTPUT}
    assert names == {"Net.body", "Net.body.0", "Net.body.2"}
    # The step before was not recorded, so what the step starts from is.
    assert any(site.kind is Kind.PARAM and site.phase is Phase.START for site in sites(run, 4))
    shallow, _ = captured("--max-depth", "1")
    assert {s.fqn for s in sites(shallow) if s.kind is Kind.OUTPUT} == {"Net", "Net.body", "Net.head"}


def test_statistics_and_sketch_are_kept_as_asked(captured):
    run, _ = captured("--stats", "none", "--no-sketch")
    batch = run.rank(0).read(0)
    assert not batch.floats
    assert batch.sketch is None
    run, _ = captured("--stats", "all")
    record = next(record for record in run.rank(0).records(0) if record.site.kind is Kind.OUTPUT)
    assert {"med", "mode", "skew", "std", "l2"} <= set(record.summary.stats)


def test_seed_makes_an_unseeded_script_repeat_itself(captured, introspect):
    one, first = captured("--seed", "7", args=("--unseeded",))
    two, second = captured("--seed", "7", args=("--unseeded",))
    three, third = captured("--seed", "8", args=("--unseeded",))
    assert first.stdout == second.stdout != third.stdout
    assert introspect("diff", one.path, two.path).returncode == 0
    answer = introspect("diff", one.path, three.path)
    assert answer.returncode == 1
    assert "seed" in answer.stdout


def test_deterministic_asks_the_libraries(captured):
    assert captured()[1].stdout.split()[-2:] == ["False", "None"]
    run, done = captured("--deterministic")
    assert done.stdout.split()[-2:] == ["True", ":4096:8"]
    assert run.settings["runtime"]["deterministic_algorithms"] is True


def test_until_step_ends_the_script(captured):
    run, done = captured("--until-step", "2")
    assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2]
    assert run.manifest["exit_code"] == 0
    assert done.stdout == ""


def test_a_file_written_just_before_the_start_is_older_than_the_run(captured, project):
    (project / "data.txt").write_text("2")
    run, _ = captured(args=["1"])
    assert (project / "data.txt").stat().st_mtime < run.time("started").timestamp() < run.time("ended").timestamp()


def test_settings_tell_what_ran_on_what(captured, project):
    run, _ = captured(
        args=("--lr", "0.1", "--token", "abc", "--flag"),
        env={**os.environ, "MY_SECRET": "hush", "PLAIN": "seen", "ODD": "hide", "URL": "https://u:pw@host/x"},
    )
    settings = run.settings
    assert settings["command"]["arguments"] == ["--lr", "0.1", "--token", "<redacted>", "--flag"]
    assert settings["environment"]["MY_SECRET"] == "<redacted>"
    assert settings["environment"]["PLAIN"] == "seen"
    assert settings["environment"]["URL"] == "https://<redacted>@host/x"
    assert settings["runtime"]["torch"].startswith("2.")
    places = [place for place in sys.path if not place.endswith("_vendor")]  # setuptools adds those
    answered = [one.metadata for one in importlib.metadata.distributions(path=places)]
    assert settings["packages"] == {one["Name"]: one["Version"] for one in reversed(answered)}
    assert set(settings["sources"]) == {"helper.py", "train.py"}
    (optimizer,) = settings["optimizers"]
    assert optimizer["class"] == "SGD"
    assert optimizer["groups"][0]["momentum"] == 0.9
    assert optimizer["groups"][0]["params"][0] == "Net.body.0.weight"
    files = [path for path in run.path.rglob("*") if path.is_file()]
    for path in files:
        assert not re.search(b"hush|:pw@", path.read_bytes())
        assert path.stat().st_mode & 0o077 == 0


def test_an_existing_run_is_refused_unless_forced_and_what_cannot_be_a_run_always(introspect, project):
    assert introspect("capture", "-o", "run", "train.py", cwd=project).returncode == 0
    before = (project / "run" / "manifest.json").read_bytes()
    again = introspect("capture", "-o", "run", "train.py", cwd=project)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "--force" in again.stderr
    assert again.stdout == ""
    assert (project / "run" / "manifest.json").read_bytes() == before
    assert introspect("capture", "--force", "-o", "run", "train.py", cwd=project).returncode == 0
    assert not list(project.glob(".*")), "what was replaced is gone"
    (project / "precious").mkdir()
    (project / "precious" / "thesis.txt").write_text("x")
    assert introspect("capture", "--force", "-o", "precious", "train.py", cwd=project).returncode == 2
    assert (project / "precious" / "thesis.txt").exists()
    nowhere = introspect("capture", "-o", "/proc/nowhere/x", "train.py", cwd=project)
    assert (nowhere.returncode, nowhere.stdout, nowhere.stderr.count("\n")) == (2, "", 1)
    assert "cannot" in nowhere.stderr


def test_a_script_without_torch_is_run_and_said_to_have_shown_nothing(introspect, project):
    (project / "plain.py").write_text("import sys\nprint('torch' in sys.modules, 'numpy' in sys.modules)\n")
    done = introspect("capture", "-o", "run", "plain.py", cwd=project, new_process=True)
    assert done.stdout == "False False\n"
    assert "never imported torch" in done.stderr
    assert introspect("show", "run", "run", cwd=project).returncode == 0
    assert introspect("diff", "run", "run", cwd=project).returncode == 2


def test_steps_without_an_optimizer_and_by_hand(introspect, project):
    (project / "infer.py").write_text(
        "import torch\nnet = torch.nn.Linear(2, 2)\nfor _ in range(4):\n    net(torch.ones(1, 2))\n"
    )
    introspect("capture", "-o", "infer", "infer.py", cwd=project)
    with open_run(project / "infer") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2, 3]
    (project / "hand.py").write_text(
        "import torch, introspect_cli\nnet = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n    for _ in range(2):\n        net(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n    introspect_cli.step()\n"
    )
    introspect("capture", "-o", "hand", "hand.py", cwd=project)
    with open_run(project / "hand") as run:
        # Until the first call the optimizer ends steps: two of them, the second of which the call confirms.
        assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2, 3]
        assert sum(record.site.kind is Kind.LOSS for record in run.rank(0).records(3)) == 2


def test_a_loss_module_belongs_to_the_step_of_the_model_before_it(introspect, project):
    (project / "byhand.py").write_text(
        "import torch\nnet, criterion = torch.nn.Linear(2, 2), torch.nn.MSELoss()\n"
        "for _ in range(3):\n    criterion(net(torch.ones(1, 2)), torch.zeros(1, 2)).backward()\n"
        "    for p in net.parameters():\n        p.data.add_(p.grad, alpha=-0.1)\n        p.grad = None\n"
    )
    introspect("capture", "-o", "byhand", "byhand.py", cwd=project)
    with open_run(project / "byhand") as run:
        assert [entry.step for entry in run.rank(0).steps] == [0, 1, 2]
        for step in range(3):
            modules = {record.site.fqn for record in run.rank(0).records(step) if record.site.kind is Kind.GRAD_OUTPUT}
            assert modules == {"Linear", "MSELoss"}
