"""Modules that are called past `nn.Module.__call__` are seen, and what ran of a model unseen is never called equal."""

from __future__ import annotations

import json

from artefacts import REPOSITORY

from introspect_cli.store.run import open_run

BEGIN = """
import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(8, 4)


def train(model, run, steps=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(data).square().mean().backward()
        optimizer.step()


def evaluate(model, run):
    model.eval()
    with torch.no_grad():
        return run(data).mean().item()
"""


def test_a_model_that_is_seen_in_whole_has_nothing_unseen(tmp_path, introspect):
    (tmp_path / "train.py").write_text(
        BEGIN
        + "layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)\n"
        + "model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), layer)\n"
        + "train(model, lambda x: model(x[None]))\nevaluate(model, lambda x: model(x[None]))\n"
    )
    introspect("capture", "-q", "--eval", "-o", "run", "train.py")
    assert open_run(tmp_path / "run").manifest["ran_unseen"] == {}
    shown = introspect("show", "run").stdout
    assert "calls of" in shown
    assert "without being seen" not in shown


def test_modules_that_a_capture_left_out_are_not_said_to_be_equal(tmp_path, introspect):
    script = REPOSITORY / "fixtures" / "train_gpt.py"
    for name, fault in (("a", "none"), ("b", "scaled-attention")):
        introspect("capture", "-q", "--modules", "GPT.wte", "-o", name, script, "--steps", "1", "--fault", fault)
    found = json.loads(introspect("diff", "a", "b", "--format", "json").stdout)
    assert (found["first"]["kind"], found["first"]["role"]) == ("loss", "propagated")
    known = {one["thing"]: one["known"] for one in found["rests_on"]}
    assert known["left_out"] == "unseen"
    assert "outputs" not in known
