"""Steps under the names that a training framework has for them: the real packages, unmodified scripts and callbacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import introspect_cli
from introspect_cli.errors import StoreError
from introspect_cli.store.documents import decode_labels, encode_labels

pytestmark = pytest.mark.usefixtures("quick_python")

LIGHTNING = """\
import lightning.pytorch as L
import torch

torch.use_deterministic_algorithms(True)

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.rate = 0.01
    def training_step(self, batch, index):
        print("was", self.trainer.global_step, self.trainer.current_epoch, index, flush=True)
        return self.net(batch).square().mean()
    def validation_step(self, batch, index):
        self.net(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)

def fit(epochs, callbacks=(), ckpt=None, accumulate=1, rate=0.01):
    torch.manual_seed(0)
    model = Lit()
    model.rate = rate
    data = torch.utils.data.DataLoader(torch.arange(24.0).reshape(6, 4), batch_size=1)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), accumulate_grad_batches=accumulate, barebones=False,
    )
    trainer.fit(model, data, data, ckpt_path=ckpt)
    return trainer
"""

PLAIN = LIGHTNING + "fit(2, accumulate=2)\n"

RESUMED = (
    LIGHTNING
    + """
from introspect_cli.integrations.lightning import Introspect
fit(1).save_checkpoint("half.ckpt")
fit(2, [Introspect("whole", packages=False)])
fit(2, [Introspect("resumed", packages=False)], ckpt="half.ckpt")
fit(2, [Introspect("faster", packages=False)], rate=0.02)
"""
)

TRAINER = """\
import torch
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        print("was", trainer.state.global_step, trainer.state.epoch, flush=True)
        out = self.layer(x)
        return {"loss": out.square().mean()}

torch.manual_seed(0)
data = [{"x": torch.ones(4) * index} for index in range(10)]
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
    report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no",
)
trainer = Trainer(model=Net(), args=arguments, train_dataset=data)
trainer.train()
"""


def captured(tmp_path_factory, name, text):
    pytest.importorskip({"lightning": "lightning.pytorch"}.get(name, name))
    place = tmp_path_factory.mktemp(name)
    (place / "train.py").write_text(text)
    command = [sys.executable, "-m", "introspect_cli", "capture", "--no-packages", "-o", "run", "train.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("was ")]
    with introspect_cli.open_run(place / "run") as run:
        return place / "run", run.run.rank(0).labels, said


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return captured(tmp_path_factory, "lightning", PLAIN)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    pytest.importorskip("lightning.pytorch")
    place = tmp_path_factory.mktemp("resumed")
    (place / "fit.py").write_text(RESUMED)
    done = subprocess.run([sys.executable, "fit.py"], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place


def test_lightnings_numbers_are_those_that_the_script_itself_prints(plain):
    _, labels, said = plain
    assert list(labels) == [0, 1, 2, 3, 4, 5]
    for step, label in labels.items():
        first, last = said[2 * step], said[2 * step + 1]
        assert label["framework"] == "lightning"
        assert label["stage"] == "train"
        assert [label["global_step"], label["epoch"], label["batch"][0]] == list(map(int, first))
        assert label["batch"][1] == int(last[2])


def test_a_step_is_shown_with_its_frameworks_numbers(plain, introspect):
    path, _, _ = plain
    done = introspect("show", "step", "4", path, "--kinds", "loss")
    assert done.returncode == 0, done.stderr
    assert "Step 4 (epoch 1, batches 2-3)" in done.stdout
    done = introspect("show", "step", "4", path, "--format", "json")
    assert json.loads(done.stdout)["labels"]["batch"] == [2, 3]
    said = " ".join(introspect("show", path).stdout.split())
    assert "lightning, global_step 0, epoch 0, batches 0-1 to global_step 5, epoch 1, batches 4-5" in said


def test_a_resumed_run_is_numbered_and_compared_as_its_framework_counts(resumed):
    with introspect_cli.open_run(resumed / "resumed") as run:
        labels = run.run.rank(0).labels
    assert [each["global_step"] for each in labels.values()] == [6, 7, 8, 9, 10, 11]
    assert {each["epoch"] for each in labels.values()} == {1}
    found = introspect_cli.diff(resumed / "whole", resumed / "resumed")
    assert any("same global_step" in note and "--offset 6" in note for note in found.result.notes)
    assert found.result.counts.steps_compared == 6
    assert "step 11 (epoch 1, batch 5)" in found.sentence, found.sentence


@pytest.mark.sweep
def test_the_trainers_numbers_are_those_that_the_model_sees(tmp_path_factory):
    _, labels, said = captured(tmp_path_factory, "transformers", TRAINER)
    assert [each["global_step"] for each in labels.values()] == [0, 1, 2, 3, 4, 5]
    firsts = {int(each[0]): float(each[1]) for each in reversed(said)}
    assert [each["epoch"] for each in labels.values()] == [int(firsts[step] + 1e-9) for step in labels]
    assert [each["batch"] for each in labels.values()] == [(0, 1), (2, 3), 4] * 2
    assert all(each["accumulation"] == 2 and each["framework"] == "transformers" for each in labels.values())


def test_labels_that_no_capture_writes_are_left_out():
    labels = {"epoch": 1, "batch": (2, 4), "stage": "train"}
    assert decode_labels(encode_labels(labels), "x") == labels
    with pytest.raises(StoreError, match="cannot be read"):
        decode_labels(b"[1]", "x")
    odd = {"epoch": float("inf"), "batch": [1, 2, 3], "stage": "\x1b[31m", "global_step": True, "other": 1}
    assert decode_labels(encode_labels(odd), "x") == {}
