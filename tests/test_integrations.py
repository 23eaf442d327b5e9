"""Callbacks record what the frameworks train, under the names that the models have, and end with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import introspect_cli
from introspect_cli.integrations.window import Window


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out} if labels is not None else out


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        torch.manual_seed(index)
        return {"x": torch.randn(4), "labels": torch.ones(1)}


def names(path):
    with introspect_cli.open_run(path) as run:
        kinds = {record.site.kind.value for record in run.records(run.steps[0])}
        return run.steps, {record.site.fqn for record in run.records(run.steps[0])}, kinds, run.manifest


@pytest.fixture
def lightning_fit(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from introspect_cli.integrations.lightning import Introspect

    class Lit(lightning.LightningModule):
        fail_at = -1

        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            if index == self.fail_at:
                raise RuntimeError("the training's own")
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(fail_at=-1):
        torch.manual_seed(0)
        model = Lit()
        model.fail_at = fail_at
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[Introspect(tmp_path / "run")],
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(Data(), batch_size=8))

    return fit


@pytest.mark.filterwarnings("ignore")
def test_a_fit_of_lightning_is_recorded(lightning_fit, tmp_path):
    lightning_fit()
    steps, fqns, kinds, manifest = names(tmp_path / "run")
    assert steps == [0, 1, 2]
    assert {"Lit.net", "Lit.net.layer", "Lit.net.layer.weight"} <= fqns
    assert {"output", "grad", "param", "loss", "batch"} <= kinds
    assert manifest["how"] == "returned"


@pytest.mark.filterwarnings("ignore")
def test_a_fit_that_dies_is_recorded_up_to_there(lightning_fit, tmp_path):
    with pytest.raises(RuntimeError, match="own"):
        lightning_fit(fail_at=2)
    steps, _, _, manifest = names(tmp_path / "run")
    assert steps[:2] == [0, 1]
    assert manifest["exception"] == "RuntimeError: the training's own"


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_transformers_is_recorded(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from introspect_cli.integrations.transformers import Introspect

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=8, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Net(), args=arguments, train_dataset=Data(), callbacks=[Introspect(tmp_path / "run")]
    )
    trainer.train()
    steps, fqns, kinds, manifest = names(tmp_path / "run")
    assert steps == [0, 1, 2]
    assert {"Net", "Net.layer", "Net.layer.weight"} <= fqns
    assert {"output", "grad", "param", "loss"} <= kinds
    assert manifest["how"] == "returned"


def test_a_window_opens_and_closes_once(tmp_path):
    window = Window(tmp_path / "run", {})
    window.end()
    window.begin(None)
    window.begin(None)
    window.end(ValueError("why"))
    window.end()
    with introspect_cli.open_run(tmp_path / "run") as run:
        assert run.manifest["exception"] == "ValueError: why"
