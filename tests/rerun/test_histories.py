"""The table of neighbouring commits: what `diff` says of them beside what they changed."""

from __future__ import annotations

import json
import subprocess

import histories
import pytest
from repositories import git

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
"""
COMMITS = {
    "start": SCRIPT,
    "a comment": SCRIPT + "# the end\n",
    "another rate | step": SCRIPT.replace("lr=0.1", "lr=0.2"),
    "broken": "raise SystemExit('no such thing')\n",
}


@pytest.mark.usefixtures("quick_python")
def test_each_commit_is_captured_once_and_reported_beside_its_lines(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    git(source, "init", "-q")
    for subject, text in COMMITS.items():
        (source / "train.py").write_text(text)
        git(source, "add", ".")
        git(source, "commit", "-q", "-m", subject)
    words = [str(source), "HEAD~3..HEAD", "-o", str(tmp_path / "out"), "--json", str(tmp_path / "pairs.json")]
    assert histories.main([*words, "--", "train.py"]) == 1  # one commit cannot be captured
    same, rate, broken = json.loads((tmp_path / "pairs.json").read_text())
    assert (same["verdict"], same["place"], same["changed"]) == ("same", "", ["train.py", "+ # the end"])
    assert rate["place"] == "step 0, param Sequential.0.weight"
    assert "the cause is SGD's lr 0.1 -> 0.2." in rate["answer"]
    assert rate["named"].startswith("train.py:7: optimizer = ")
    assert rate["likely"]
    assert (broken["verdict"], broken["answer"]) == ("failed", "no such thing")
    said = capsys.readouterr().out
    assert "another rate \\| step | step 0, param Sequential.0.weight | First divergence at step 0" in said
    assert "3 pairs: 1 same, 1 diverged, 1 failed; a statement is called likely in 1 of those that diverged." in said
    made = {run.name: run.stat().st_mtime_ns for run in (tmp_path / "out" / "runs").iterdir() if run.is_dir()}
    histories.main([*words, "--", "train.py"])
    assert made.items() <= {run.name: run.stat().st_mtime_ns for run in (tmp_path / "out" / "runs").iterdir()}.items()
    left = subprocess.run(["git", "worktree", "list"], cwd=source, check=True, capture_output=True, text=True)
    assert len(left.stdout.splitlines()) == 1
