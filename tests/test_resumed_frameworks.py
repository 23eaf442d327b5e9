"""Resumed runs of transformers' Trainer, Lightning and accelerate: restored right, and without a part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from opcapture import compared

from introspect_cli.compare.result import Restored, Verdict

pytestmark = pytest.mark.usefixtures("quick_python")

OPTIMIZER, RATES, TORCH = "optimizer state", "learning rates and schedulers", "random state of torch"

MODEL = """\
import random
import shutil
from pathlib import Path
import numpy as np
import torch
from torch import nn
from opcapture import captured

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, place):
        x = torch.randn(4, generator=torch.Generator().manual_seed(place))
        return {"x": x, "labels": x.sum()[None]}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)
    def forward(self, x, labels=None):
        y = self.last(self.drop(torch.tanh(self.first(x))))
        return {"loss": (y - labels).square().mean(), "logits": y}

def recorded(name, work):
    random.seed()
    captured(Path(name), work)
"""

TRAINER = (
    MODEL
    + """
from transformers import Trainer, TrainingArguments

def train(out, checkpoint=None):
    torch.manual_seed(0)
    asked = TrainingArguments(
        output_dir=out, max_steps=8, per_device_train_batch_size=4, save_steps=4, report_to=[], disable_tqdm=True,
        use_cpu=True, logging_strategy="no", dataloader_pin_memory=False,
    )
    Trainer(model=Net(), args=asked, train_dataset=Data()).train(resume_from_checkpoint=checkpoint)

recorded("whole", lambda: train("out"))
for name, lost in (("right", ()), ("optimizer", ("optimizer.pt",)), ("both", ("optimizer.pt", "rng_state.pth"))):
    shutil.copytree("out/checkpoint-4", f"{name}-4")
    for file in lost:
        Path(f"{name}-4", file).unlink()
    recorded(name, lambda: train(f"out-{name}", f"{name}-4"))
"""
)

LIGHTNING = (
    MODEL
    + """
import lightning.pytorch as L

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        return self.net(**batch)["loss"]
    def on_save_checkpoint(self, checkpoint):
        checkpoint["torch"] = torch.get_rng_state()
    def on_load_checkpoint(self, checkpoint):
        torch.set_rng_state(checkpoint["torch"])  # Lightning does not
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

def train(epochs, checkpoint=None):
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, generator=torch.Generator())  # draws from no other
    trainer.fit(Lit(), loader, ckpt_path=checkpoint, weights_only=False)
    return trainer

train(1).save_checkpoint("half.ckpt")
kept = torch.load("half.ckpt", weights_only=False)
recorded("whole", lambda: train(2))
recorded("right", lambda: train(2, "half.ckpt"))
for state in kept["optimizer_states"]:
    state["state"] = {}
torch.save(kept, "optimizer.ckpt")
recorded("optimizer", lambda: train(2, "optimizer.ckpt"))
"""
)

ACCELERATE = (
    MODEL
    + """
from accelerate import Accelerator
from accelerate.utils import set_seed

def train(checkpoint=None, save=None, lose=False):
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, generator=torch.Generator())  # draws from no other
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    done = 0
    if checkpoint:
        accelerator.load_state(checkpoint)
        if lose:
            optimizer.optimizer.state.clear()
        done = 4
    while done < 9:
        batches = accelerator.skip_first_batches(loader, done % 6) if done % 6 else loader
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            schedule.step()
            done += 1
            if done == 4 and save:
                accelerator.save_state(save)
            if done == 9:
                break

train(save="half")
recorded("whole", train)
recorded("right", lambda: train("half"))
recorded("optimizer", lambda: train("half", lose=True))
"""
)


def run(tmp_path_factory, library, script):
    pytest.importorskip(library)
    place = tmp_path_factory.mktemp(library.partition(".")[0])
    (place / "runs.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{script}")
    done = subprocess.run([sys.executable, "runs.py"], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return run(tmp_path_factory, "transformers", TRAINER)


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    return run(tmp_path_factory, "lightning.pytorch", LIGHTNING)


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory):
    return run(tmp_path_factory, "accelerate", ACCELERATE)


def states(result):
    return {part.part: part.state for part in result.resumed.parts}


def lost(result):
    return [part.part for part in result.resumed.lost]


@pytest.mark.parametrize("framework", ["trainer", "lightning", "accelerate"])
def test_a_run_that_was_resumed_right_is_the_same(framework, request):
    place = request.getfixturevalue(framework)
    result = compared(place / "whole", place / "right")
    assert result.verdict is Verdict.SAME, result.sentence
    assert result.sentence.startswith("Resumed right: run b restored all that is on record"), result.sentence
    found = states(result)
    for part in ("parameters", OPTIMIZER, RATES, TORCH, "place in the data"):
        assert found[part] is Restored.YES, part


def test_what_the_trainer_reads_to_get_to_its_place_is_a_note(trainer):
    result = compared(trainer / "whole", trainer / "right")
    assert result.resumed.thrown_away == 1
    assert any("read 1 batch in its first step and threw it away" in note for note in result.notes)


@pytest.mark.parametrize("framework", ["trainer", "lightning", "accelerate"])
def test_a_lost_optimizer_is_told_with_its_count(framework, request):
    place = request.getfixturevalue(framework)
    result = compared(place / "whole", place / "optimizer")
    assert result.verdict is Verdict.DIVERGED
    assert OPTIMIZER in lost(result)
    part = next(part for part in result.resumed.parts if part.part == OPTIMIZER)
    assert part.text == f"step {result.resumed.at + 1} -> 1"
    assert "did not restore the optimizer state (step " in result.sentence
    found = states(result)
    assert found["parameters"] is found[TORCH] is found["place in the data"] is Restored.YES
    assert (result.first.site.kind.value, result.first.reason) == ("param", "optimizer")


def test_a_trainer_that_lost_both_says_both(trainer):
    """Without `optimizer.pt` the Trainer begins its schedule anew as well."""
    result = compared(trainer / "whole", trainer / "both")
    assert lost(result) == [OPTIMIZER, RATES, TORCH]
    rates = next(part for part in result.resumed.parts if part.part == RATES)
    assert rates.text == "lr 2.5e-05 -> 5e-05"
    assert [origin.part for origin in result.origins] == [TORCH, OPTIMIZER, RATES]
    assert result.origins[0].divergence is result.first
