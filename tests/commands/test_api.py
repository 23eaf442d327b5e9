"""The Python API, its documented examples included."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import row, write_run

import introspect_cli
from introspect_cli.errors import StoreError, UsageError

pytestmark = pytest.mark.usefixtures("quick_python")

DOCS = Path(__file__).parents[2] / "docs"
LEAN = {"packages": False, "source": False}
"""In this process, all files of tests are sources of the training."""


def test_the_examples_of_the_page_run(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / "guides/notebooks.md").read_text(), re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "steps 0 to 4" in done.stdout
    assert "['step', 'rank', 'sequence', 'phase'] 5" in done.stdout
    assert "optimizer" in done.stdout


@pytest.fixture
def train():
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    def run(path, steps=3, fail_at=None, schedule=None, **options):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        criterion = torch.nn.MSELoss()  # a root of its own, called outside the model
        with introspect_cli.recording(model, path, steps=schedule, **{**LEAN, **options}):
            for step in range(steps):
                optimizer.zero_grad()
                criterion(model(torch.ones(3, 2)), torch.zeros(3, 2)).backward()
                if step == fail_at:
                    raise RuntimeError("the script's own")
                optimizer.step()
        return model

    return run


def test_an_optimizer_built_before_the_block_still_makes_the_steps(train, tmp_path):
    train(tmp_path / "run")
    with introspect_cli.open_run(tmp_path / "run") as run:
        assert run.steps == [0, 1, 2]
        assert {record.site.fqn for record in run.records(1) if record.site.kind.value == "output"} == {
            "Net", "Net.layer", "MSELoss",
        }  # fmt: skip


def test_options_are_those_of_the_command(train, tmp_path):
    train(tmp_path / "run", record=["param"], schedule="1:", stats=["mean"])
    with introspect_cli.open_run(tmp_path / "run") as run:
        assert {record.site.kind.value for record in run.records(run.steps[0])} == {"param"}
        assert 0 not in run.steps
    with pytest.raises(UsageError):
        train(tmp_path / "other", record=["nonsense"])


def test_what_is_raised_inside_goes_through_and_the_run_is_readable(train, tmp_path):
    with pytest.raises(RuntimeError, match="own"):
        train(tmp_path / "run", fail_at=1)
    with introspect_cli.open_run(tmp_path / "run") as run:
        assert run.manifest["how"] == "exception"
        assert run.steps[0] == 0
    train(tmp_path / "again")  # nothing is left in the way


def test_one_capture_at_a_time(tmp_path):
    first = introspect_cli.recording(None, tmp_path / "a", **LEAN)
    second = introspect_cli.recording(None, tmp_path / "b", **LEAN)
    with first, pytest.raises(UsageError, match="already running"):
        second.__enter__()
    assert not (tmp_path / "b").exists()


def small(path, value=1.0):
    rows = [
        row("forward", "output", "Net<b>", np.full(3, value, np.float32)),
        row("loss", "loss", "loss", np.array(value, np.float32)),
    ]
    return write_run(path, [rows] * 3)


def test_a_run_is_a_table(tmp_path):
    with introspect_cli.open_run(small(tmp_path / "a")) as run:
        assert run.to_arrow().num_rows == 6
        assert run.to_arrow(steps=[1], kinds=["loss"]).column("step").to_pylist() == [1]
        assert run.to_arrow(steps="1:").column("step").to_pylist() == [1, 1, 2, 2]
        with pytest.raises(UsageError, match="no step of 7"):
            run.to_arrow(steps=[1, 7])
        assert run.to_arrow(modules=["loss"]).num_rows == 3
        assert repr(run).endswith("steps 0 to 2, 1 rank, complete>")


def test_a_run_is_a_data_frame(tmp_path):
    pytest.importorskip("pandas")
    with introspect_cli.open_run(small(tmp_path / "a")) as run:
        frame = run.to_pandas(kinds=["loss"])
    assert frame["mean"].tolist() == [1.0, 1.0, 1.0]


def test_a_comparison_shows_as_html_and_text(tmp_path):
    comparison = introspect_cli.diff(small(tmp_path / "a"), small(tmp_path / "b", 2.0))
    assert comparison.verdict == "diverged"
    assert comparison.divergences[0] == comparison.first
    html = comparison._repr_html_()
    assert "Net&lt;b&gt;" in html
    assert "Net<b>" not in html
    assert "Net<b>" in str(comparison)
    assert "--all" not in str(comparison)


def test_findings_show_as_html_and_text(tmp_path):
    with introspect_cli.open_run(small(tmp_path / "a", np.nan)) as run:
        findings = run.check(ignore=["loss-*"])
    assert [finding.rule for finding in findings] == ["nonfinite"]
    assert "nonfinite" in findings._repr_html_()
    assert "error: nonfinite" in str(findings)
    assert repr(findings) == "<1 finding: nonfinite>"


def test_unknown_options_and_names_are_sentences(tmp_path):
    small(tmp_path / "a")
    with pytest.raises(UsageError, match="takes no option 'tolerance'"):
        introspect_cli.diff(tmp_path / "a", tmp_path / "a", tolerance=1)
    with pytest.raises(AttributeError):
        introspect_cli.nonsense  # noqa: B018 - the look-up is what is tested
    with pytest.raises(StoreError):
        introspect_cli.open_run(tmp_path / "nowhere")


def test_importing_the_package_costs_nothing():
    program = "import sys, introspect_cli; print(sorted({'torch', 'numpy', 'pyarrow', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
