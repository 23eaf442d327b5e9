"""Differences of the size of rounding, and those of form: attention, compilers and threads of real frameworks."""

from __future__ import annotations

import json
import os

import pytest
import torch
from opcapture import captured, compared
from torch import nn

from introspect_cli.compare.terms.result import Size, Verdict
from introspect_cli.records import Kind

ATTENTION = """\
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
torch.set_num_threads(1)
length = int(sys.argv[2])
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=0, eos_token_id=0, attn_implementation=sys.argv[1],
))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.Generator().manual_seed(1)
for _ in range(2):
    x = torch.randint(0, 32, (2, length), generator=tokens)
    mask = torch.ones_like(x)
    mask[0, length // 2:] = 0
    model(input_ids=x, attention_mask=mask, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

COMPILED = """\
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
call = model if sys.argv[1] == "eager" else torch.compile(model, backend=sys.argv[1])
for _ in range(3):
    nn.functional.mse_loss(call(torch.randn(16, 8)), torch.randn(16, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINER = """\
import sys, torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    def forward(self, x, labels):
        out = self.body(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

torch.manual_seed(0)
torch.set_num_threads(1)
data = [{"x": torch.randn(8), "labels": torch.randn(4)} for _ in range(16)]
more = {} if sys.argv[1] == "eager" else {"torch_compile": True, "torch_compile_backend": sys.argv[1]}
arguments = TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True, logging_strategy="no", **more,
)
Trainer(Net(), arguments, train_dataset=data).train()
"""

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


@pytest.fixture
def pair(tmp_path, forks):
    """The comparison of two captures of a script, each with its words, as JSON with the exit code."""

    def run(script, words_a, words_b, *options, record=()):
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        for name, words in (("a", words_a), ("b", words_b)):
            if not (tmp_path / name).exists():
                done = forks("capture", "-q", "-o", name, *record, "train.py", *words, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
        done = forks("diff", "a", "b", "--format", "json", *options, cwd=tmp_path)
        return done.returncode, json.loads(done.stdout)

    return run


class TestAttention:
    """`attn_implementation="eager"` against `"sdpa"`, the mask in another form."""

    def test_where_all_results_are_equal_the_runs_are_the_same_and_the_mask_is_reported(self, pair):
        pytest.importorskip("transformers")
        code, found = pair(ATTENTION, ["eager", "2"], ["sdpa", "2"])
        assert (code, found["verdict"]) == (0, "same")
        note = next(note for note in found["notes"] if note.startswith("Nothing recorded rests on"))
        assert "float32 in a, 2x1x2x2 bool in b" in note
        assert pair(ATTENTION, [], [], "--strict")[0] == 1

    def test_where_it_rounds_the_first_divergence_is_its_result_and_no_mask(self, pair):
        pytest.importorskip("transformers")
        code, found = pair(ATTENTION, ["eager", "12"], ["sdpa", "12"])
        first = found["first"]
        assert (code, first["kind"], first["fqn"]) == (1, "input", "GPT2LMHeadModel.transformer.h.0.attn.c_proj")
        assert first["size"] == "rounding"
        assert "Rounding alone can make such a difference" in found["sentence"]
        assert any("the same or in another form" in line.lower() for line in found["evidence"]), found["evidence"]
        assert any("bool in b" in note for note in found["notes"])
        code, found = pair(ATTENTION, [], [], "--rtol", "1e-4")
        assert (code, found["verdict"]) == (0, "same")
        assert "within the tolerance" in found["sentence"]
        assert any("bool in b" in note for note in found["notes"])


class TestCompiled:
    def test_where_all_results_are_equal_the_runs_are_the_same_and_the_region_was_not_seen(self, pair):
        code, found = pair(COMPILED, ["eager"], ["aot_eager"])
        assert (code, found["verdict"]) == (0, "same")
        assert "The runs have the same results" in found["sentence"]
        assert "only one run could see (the first: output of Sequential.0 at step 0)" in found["sentence"]

    def test_so_it_is_under_trainer(self, pair):
        pytest.importorskip("transformers")
        code, found = pair(TRAINER, ["eager"], ["aot_eager"])
        assert (code, found["verdict"]) == (0, "same")
        assert "only one run could see" in found["sentence"]

    def test_without_results_on_record_nothing_is_called_the_same(self, pair):
        code, found = pair(COMPILED, ["eager"], ["aot_eager"], record=("--record", "input,output,loss"))
        assert (code, found["verdict"]) == (2, "undecided")

    def test_results_that_agree_within_tolerance_are_reported_as_that(self, pair):
        code, found = pair(COMPILED, ["eager"], ["inductor"])
        assert code == 1
        assert found["first"]["size"] == "rounding"
        code, found = pair(COMPILED, [], [], "--rtol", "1e-4")
        assert (code, found["verdict"]) == (0, "same")
        assert "have the same results within the tolerance or noise given" in found["sentence"]
        assert "not all bit for bit" in found["sentence"]
        assert "Not compared: " in found["sentence"]


class TestThreads:
    def test_the_gradient_of_a_norm_is_rounding_in_its_backward_and_the_threads(self, pair):
        if (os.cpu_count() or 1) < 2:
            pytest.skip("one core here")
        code, found = pair(THREADS, ["1"], ["2"])
        sentence = found["sentence"]
        assert (code, found["first"]["size"]) == (1, "rounding")
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
