"""Every planted illness is named, healthy runs are not, and what was not seen is never called healthy."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path

import numpy as np
import opcapture
import pytest
import torch
from artefacts import decided
from synthetic import batch, row, write_run
from torch import nn

import introspect_cli
from introspect_cli.health.check import RULES, check, choose
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter


def found(path):
    with open_run(path) as run:
        return check(run)


def test_exit_codes_follow_the_level_asked_for(introspect):
    (path,) = decided("ill", "repeated-batch")
    assert introspect("check", path, "--rule", "repeated-batch").returncode == 1
    assert introspect("check", path, "--rule", "repeated-batch", "--fail-on", "error").returncode == 0
    assert introspect("check", path, "--rule", "repeated-*", "--fail-on", "info").returncode == 1
    assert introspect("check", path, "--ignore", "*").returncode == 2
    assert introspect("check", "nowhere").returncode == 2
    done = introspect("check", path, "--rule", "repeated-batc")
    assert done.returncode == 2
    assert "did you mean repeated-batch?" in done.stderr


def test_the_list_says_of_every_rule_when_it_finds_something(introspect):
    done = introspect("check", "--list")
    assert done.returncode == 0
    assert re.findall(r"^([a-z-]+)  (?:error|warning|info)$", done.stdout, re.MULTILINE) == [rule.id for rule in RULES]
    said = " ".join(done.stdout.split())
    assert all(f"{rule.about} when: {rule.when}" in said for rule in RULES)
    rules = json.loads(introspect("check", "--list", "--format", "json", "--rule", "loss-*").stdout)["rules"]
    assert [(each["rule"], each["when"]) for each in rules] == [(rule.id, rule.when) for rule in choose(["loss-*"], [])]


def test_each_number_that_a_rule_tells_is_a_constant_that_its_file_decides_by():
    said = 0
    for path in (Path(introspect_cli.__file__).parent / "health").glob("*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        used = {node.id for each in functions for node in ast.walk(each) if isinstance(node, ast.Name)}
        for each in functions:
            if any(
                isinstance(call, ast.Call) and getattr(call.func, "id", "") == "rule" for call in each.decorator_list
            ):
                words, said = ast.get_docstring(each).partition("Cause: ")[0], said + 1
                plain = re.sub(r"\{[^}]*\}", "", words)
                # Names of types and norms, one over or two to the power of a constant, and years of publication.
                assert not re.search(r"\d", re.sub(r"[Ff]loat(16|32)|L2|1/|2\^-|,\s+(19|20)\d\d\b", "", plain)), words
                assert set(re.findall(r"\{(\w+)", words)) <= used, words
    assert said == len(RULES)


def test_without_data_no_rule_speaks(tmp_path):
    path = write_run(tmp_path / "run", [[row("start", "rng", "python", "x")] for _ in range(40)])
    result = found(path)
    assert result.findings == ()
    assert set(dict(result.unseen)) >= {"loss-stuck", "loss-nonfinite", "vanishing-gradients", "repeated-batch"}


def test_a_run_without_statistics_is_not_called_healthy(tmp_path):
    rows = [row("forward", "output", "Net.act", np.zeros(64, np.float32), module_class="ReLU")]
    path = write_run(tmp_path / "run", [rows] * 20, stats=False)
    assert "nonfinite" in dict(found(path).unseen)
    rule = next(rule for rule in RULES if rule.id == "dead-units")
    assert not any(finding.rule == rule.id for finding in found(path).findings)


def test_a_run_without_steps_is_undecided(tmp_path, introspect):
    write_run(tmp_path / "run", [])
    assert introspect("check", "run").returncode == 2


@pytest.mark.parametrize(("kind", "phase"), [("input", "forward"), ("op_output", "forward"), ("op_output", "backward")])
def test_an_attention_mask_of_minus_infinity_is_no_illness(tmp_path, kind, phase):
    mask = np.array([0, -np.inf], np.float32)
    rows = [row(phase, kind, "Net", mask, path="[0]"), row("forward", "output", "Net", np.ones(2, np.float32))]
    path = write_run(tmp_path / "run", [rows])
    assert any(finding.rule == "nonfinite" for finding in found(path).findings) == (phase == "backward")


def test_a_step_that_a_scaler_skipped_is_a_remark(tmp_path):
    weight, bad = np.ones((4, 4), np.float32), np.full((4, 4), np.inf, np.float32)

    def step(gradient, value):
        return [
            row("optimizer", "grad", "Net.weight", gradient),
            row("optimizer", "param", "Net.weight", value),
        ]

    path = write_run(tmp_path / "run", [step(weight, weight), step(bad, weight), step(weight, weight * 2)])
    result = found(path)
    assert [(f.rule, f.step) for f in result.findings if "steps" in f.rule] == [("skipped-steps", 1)]
    assert "error" not in {finding.level.value for finding in result.findings}


def test_gradients_of_other_steps_are_not_held_against_each_other(tmp_path):
    """Where a gradient at the input is zero, that at the output is not on record, and the other way round."""
    zero, some = np.zeros(64, np.float16), np.ones(64, np.float16)

    def step(number, is_held):
        lost = number % 2 == 0
        given = [row("backward", "grad_input", "Net", zero if lost else some)]
        return [row("backward", "grad_output", "Net", some)] * (is_held or not lost) + given * (is_held or lost)

    for is_held in (True, False):
        path = write_run(tmp_path / f"{is_held}", [step(number, is_held) for number in range(40)])
        assert ("underflow" in {finding.rule for finding in found(path).findings}) == is_held


def test_ranks_are_folded_and_the_first_is_named(tmp_path):
    rows = [row("loss", "loss", "loss", np.array(np.nan, np.float32))]
    result = found(write_run(tmp_path / "run", [rows], ranks=2))
    assert [(f.rule, f.rank) for f in result.findings] == [("loss-nonfinite", 0), ("nonfinite", 0)]


@pytest.mark.parametrize(("cut", "steps"), [(1, 2), (2, 1)], ids=["in the last step of all", "before the others"])
def test_the_rank_that_was_cut_off_is_the_one_named(tmp_path, cut, steps):
    rows = [row("loss", "loss", "loss", np.array(1.0, np.float32))]
    store = StoreWriter.create(tmp_path / "run")
    for number in range(3):
        rank = store.rank(number)
        for step in range(steps if number == cut else 2):
            rank.append(step, batch(rank, rows))
        if number != cut:
            rank.close()
    store.write_manifest({"status": "running", "world_size": 3})
    store.abandon()
    lost = next(finding for finding in found(tmp_path / "run").findings if finding.rule == "lost-rank")
    assert (lost.rank, lost.site, lost.step) == (cut, f"rank {cut}", steps - 1)
    assert lost.evidence == f"Rank {cut} of 3 was cut off after step {steps - 1}"


def test_the_operator_that_made_the_first_nan_is_named_with_its_line(tmp_path):
    from introspect_cli.records import SiteInfo

    op, _, _ = row("forward", "op_output", "Net", 0, path="aten.log.default")
    info = SiteInfo("Net", "aten.log.default", "train.py:7")
    rows = [(op, info, np.array([np.nan], np.float32)), row("forward", "output", "Net", np.array([np.nan], np.float32))]
    finding = found(write_run(tmp_path / "run", [rows])).findings[0]
    assert finding.site == "aten.log.default in Net at train.py:7"


class Idioms(nn.Module):
    """A bound of +Inf, a constant log-determinant beside the output, and an averaged copy of a layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("bound", torch.tensor(float("inf")))

    def forward(self, x):
        return self.net(x), torch.zeros(len(x))


def test_what_is_so_by_construction_is_no_illness(tmp_path):
    def work():
        torch.manual_seed(0)
        model = Idioms()
        optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        for _ in range(25):
            out, volume = model(torch.randn(8, 4))
            (out.square().mean() + volume.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for average, one in zip(model.average.parameters(), model.net.parameters(), strict=True):
                    average.lerp_(one, 0.1)

    opcapture.captured(tmp_path / "run", work)
    assert {finding.rule for finding in found(tmp_path / "run").findings} <= {"tiny-updates", "loss-stuck"}
