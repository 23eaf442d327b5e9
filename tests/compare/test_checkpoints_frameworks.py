"""Checkpoints that transformers, Lightning, accelerate and torch.distributed write are read as what they are."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from artefacts import LEAN, launched
from checkpoint_runs import Net, said
from launches import needs
from opcapture import captured
from sweeps import sliced

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A run of transformers' Trainer, with two of its checkpoints and a sharded copy of the last one."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("trainer")

    def work():
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        rows = [{"input_ids": (ids := torch.randint(0, 32, (8,))), "labels": ids} for _ in range(8)]
        given = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
        quiet = {"report_to": [], "disable_tqdm": True}
        arguments = transformers.TrainingArguments(str(place), **given, **quiet)
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        model.save_pretrained(place / "sharded", max_shard_size="10KB")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured(place / "run", work)
    return place


def test_a_run_of_a_trainer_says_after_which_step_it_saved_each_of_them(trainer):
    for saved, step in ((2, 1), (4, 3)):
        verdict, sentence, _ = said(trainer / "run", trainer / f"checkpoint-{saved}")
        assert verdict == "same"
        assert f"has what run a has after step {step} (" in sentence
        assert sentence.endswith("all 16 tensors of the model and 48 values of the optimizer state are equal.")


def test_a_sharded_checkpoint_is_the_one_that_is_not(trainer):
    assert len(list((trainer / "sharded").glob("*.safetensors"))) > 1
    verdict, sentence, beside = said(trainer / "checkpoint-4", trainer / "sharded")
    assert (verdict, sentence) == ("same", "The checkpoints hold the same: all 16 tensors of the model are equal.")
    assert "only a holds optimizer state and random states: not compared" in beside


def test_lightning_checkpoints_name_their_optimizer_states_and_are_found_in_their_run(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()
            self.net, self.out = torch.nn.Linear(4, width), torch.nn.Linear(width, 1)

        def training_step(self, batch, index):
            del index
            return self.out(torch.relu(self.net(batch))).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def work():
        torch.manual_seed(0)
        keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", save_top_k=-1)
        bars = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        made = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=[keep], default_root_dir=tmp_path, **bars)
        made.fit(Lit(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured(tmp_path / "run", work)
    first, last = sorted((tmp_path / "saved").iterdir())
    verdict, sentence, beside = said(first, last)
    assert (verdict, "4 of 4 tensors of the model differ" in sentence) == ("diverged", True)
    assert "values of the optimizer state differ: exp_avg" in beside
    assert "of optimizer." not in beside
    verdict, sentence, _ = said(tmp_path / "run", last)
    assert verdict == "same"
    assert "what run a has after step 3" in sentence
    assert sentence.endswith("all 4 tensors of the model and 12 values of the optimizer state are equal.")


def saved_by_dcp(place, steps=2):
    """A model after some steps, saved by torch.distributed.checkpoint and by torch.save."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        net(torch.arange(8)).square().mean().backward()
        optimizer.step()
    model, states = get_state_dict(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model, "optim": states, "step": steps}, checkpoint_id=place)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, f"{place}.pt")
    return place


def test_a_distributed_checkpoint_is_the_one_that_torch_saved(tmp_path):
    saved = saved_by_dcp(tmp_path / "dcp")
    verdict, sentence, _ = said(saved, tmp_path / "dcp.pt")
    assert verdict == "same"
    assert sentence == (
        "The checkpoints hold the same: all 9 tensors of the model and 18 values of the optimizer state are equal."
    )
    other = saved_by_dcp(tmp_path / "other", steps=3)
    verdict, sentence, beside = said(saved, other)
    assert (verdict, "9 of 9 tensors of the model differ" in sentence) == ("diverged", True)
    assert "values of the optimizer state differ" in beside


SAVED = Path(__file__).parents[2] / "fixtures" / "ranks" / "saved.py"


@pytest.mark.parametrize("layout", sliced(["ddp", "fsdp2"], ["fsdp2"]))
def test_a_run_of_two_ranks_says_at_which_step_it_was_a_checkpoint_whole_or_in_parts(tmp_path, layout):
    needs(layout)
    made = launched(tmp_path, {"run": (2, layout)}, options=("-q", *LEAN), script=SAVED) / "run"
    folder = made.resolve().parent
    for saved in (f"{layout}.pt", f"{layout}-parts"):
        verdict, sentence, _ = said(tmp_path / "run", folder / saved)
        assert verdict == "same", sentence
        assert "has what run a has after step 2: all 6 tensors of the model and 18 values of" in sentence
    state = torch.load(folder / f"{layout}.pt")
    name = next(name for name in state["model"] if name.endswith("2.weight"))
    state["model"][name][-1, -1] += 1  # what the last rank holds of it, where parts are held
    torch.save(state, tmp_path / "other.pt")
    verdict, sentence, _ = said(tmp_path / "run", tmp_path / "other.pt")
    assert verdict == "diverged"
    assert "nearest is after step 2, where 1 of 6 tensors of the model differs: " in sentence


def test_what_accelerate_saves_is_read(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(net(torch.arange(8)).square().mean())
    optimizer.step()
    accelerator.save_state(str(tmp_path / "saved"))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    verdict, _, beside = said(tmp_path / "saved", tmp_path / "net.pt")
    assert (verdict, "only a holds optimizer state and random states" in beside) == ("same", True)


def test_an_index_that_lacks_a_tensor_says_which(trainer, tmp_path):
    shutil.copytree(trainer / "sharded", tmp_path / "s")
    path = tmp_path / "s" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["no.such"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(Exception, match=r"lacks no\.such, which model\.safetensors\.index\.json says is there"):
        said(tmp_path / "s", trainer / "sharded")
