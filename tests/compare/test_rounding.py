"""Differences of the size of rounding, and those of form: attention, compilers and threads of real frameworks."""

from __future__ import annotations

import json
import os

import pytest
import torch
from opcapture import captured, compared
from torch import nn

from introspect_cli.compare.result import Size, Verdict
from introspect_cli.records import Kind

THREADS = """\
import sys, torch
from torch import nn
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    nn.functional.mse_loss(model(torch.randn(512, 64)), torch.randn(512, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class TestThreads:
    def test_the_gradient_of_a_norm_is_rounding_in_its_backward_and_the_threads(self, tmp_path, forks):
        if (os.cpu_count() or 1) < 2:
            pytest.skip("one core here")
        (tmp_path / "train.py").write_text(THREADS, encoding="utf-8")
        for name, threads in (("a", "1"), ("b", "2")):
            forks("capture", "-q", "-o", name, "train.py", threads, cwd=tmp_path)
        done = forks("diff", "a", "b", "--format", "json", cwd=tmp_path)
        found = json.loads(done.stdout)
        sentence = found["sentence"]
        assert (done.returncode, found["first"]["size"]) == (1, "rounding")
        assert "left: rounding in the backward pass of its module" in sentence
        causes = [(one["name"], one["a"], one["b"], one["certainty"]) for one in found["causes"]]
        assert causes == [("threads", "1", "2", "likely")]
        assert not any(word in sentence for word in ("clipping", "zero_grad", "accumulation", "by hand"))
        assert found["settings"][0]["name"] == "threads"


class TestSize:
    def test_what_other_sums_make_is_rounding_and_more_is_more(self, tmp_path):
        torch.manual_seed(0)
        x = torch.randn(64, 16)

        def once(scale):
            return lambda: nn.Identity()(x * scale)

        captured(tmp_path / "a", once(1.0))
        sizes = {}
        for name, scale in (("rounding", 1 + 2.5e-7), ("more", 1.001)):
            captured(tmp_path / name, once(scale))
            sizes[name] = compared(tmp_path / "a", tmp_path / name).first.size
        assert sizes == {"rounding": Size.ROUNDING, "more": Size.MORE}

    def test_the_longer_the_sum_the_more_is_rounding(self, tmp_path):
        """By 1e-5 of its size: no rounding of a sum over 8 samples, but one over 65,536."""

        def change(step, net):
            weight = net[0].weight.grad
            weight += weight.abs().mean() * 1e-5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))

        def work(rows, change=lambda step, net: None):
            def run():
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(2, 16))
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                net(torch.randn(rows, 2)).square().mean().backward()
                change(0, net)
                optimizer.step()

            return run

        sizes = []
        for rows in (8, 1 << 16):
            captured(tmp_path / "a", work(rows))
            captured(tmp_path / "b", work(rows, change))
            sizes.append(compared(tmp_path / "a", tmp_path / "b").first.size)
        assert sizes == [Size.MORE, Size.ROUNDING]

    def test_a_gradient_that_is_nothing_but_rounding_is_not_the_first_that_is_more(self, tmp_path):
        """Of a bias before a norm over the batch: it is 0, and what is computed has no digit in common."""

        def work(noise, fault=0.0):
            def run():
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                net(torch.randn(64, 8) * (1 + noise)).square().mean().backward()
                net[2].weight.grad += fault
                optimizer.step()

            return run

        captured(tmp_path / "a", work(0.0))
        said = []
        for name, fault in (("b", 0.0), ("c", 0.1)):
            captured(tmp_path / name, work(2.5e-7, fault))
            result = compared(tmp_path / "a", tmp_path / name, limit=None)
            noise = next(one for one in result.divergences if one.site.fqn == "Sequential.0.bias")
            assert (result.first.size, noise.size) == (Size.ROUNDING, Size.MORE)
            said.append(result.sentence.partition("First that is more than rounding: ")[2].partition(" (")[0])
        assert said == ["", "the gradient of Sequential.2.weight"]


class Reformed(nn.Module):
    """Takes a mask as numbers or as truths, and may take it wrongly."""

    def forward(self, x, mask, gain=1.0):
        weight = mask if mask.is_floating_point() else torch.where(mask, 1.0, 0.0)
        return x * weight * gain


class TestForm:
    def form(self, tmp_path, mask, gain, **options):
        x = torch.arange(8.0)
        for name, given, factor in (("a", torch.tensor([1.0, 0.0] * 4), 1.0), ("b", mask, gain)):
            captured(tmp_path / name, lambda given=given, factor=factor: Reformed()(x, given, factor), **options)
        return compared(tmp_path / "a", tmp_path / "b")

    def test_it_is_no_divergence_where_the_output_is_equal(self, tmp_path):
        result = self.form(tmp_path, torch.tensor([True, False] * 4), 1.0)
        assert result.verdict is Verdict.SAME
        assert any(
            note.startswith("Nothing recorded rests on 1 difference in step 0, first the input [1]")
            for note in result.notes
        )

    def test_it_leads_where_the_output_differs_by_more_than_rounding(self, tmp_path):
        result = self.form(tmp_path, torch.tensor([True, True] * 4), 1.0)
        assert result.first.site.path == "[1]"
        assert not any("Nothing recorded rests on" in note for note in result.notes)

    def test_it_leads_where_no_output_is_on_record(self, tmp_path):
        result = self.form(tmp_path, torch.tensor([True, False] * 4), 1.0, record=frozenset({Kind.INPUT}))
        assert result.verdict is Verdict.DIVERGED
