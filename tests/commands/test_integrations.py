"""Callbacks record what the frameworks train, under the names that the models have, and end with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import introspect_cli
from introspect_cli.errors import UsageError
from introspect_cli.integrations.window import Window

pytestmark = pytest.mark.usefixtures("quick_python")


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
        fail_at = odd_at = -1

        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            if index == self.fail_at:
                raise RuntimeError("the training's own")
            return self.net(**batch)["loss"] * (2 if index == self.odd_at else 1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(name="run", fail_at=-1, odd_at=-1, **options):
        torch.manual_seed(0)
        model = Lit()
        model.fail_at, model.odd_at = fail_at, odd_at
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
            callbacks=[Introspect(tmp_path / name, source=False, **options)],
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(Data(), batch_size=8))

    return fit


@pytest.mark.filterwarnings("ignore")
def test_a_fit_of_lightning_is_recorded_and_compared(lightning_fit, tmp_path, capfd):
    lightning_fit()
    steps, fqns, kinds, manifest = names(tmp_path / "run")
    assert steps == [0, 1, 2]
    assert {"Lit.net", "Lit.net.layer", "Lit.net.layer.weight"} <= fqns
    assert {"output", "grad", "param", "loss", "batch"} <= kinds
    assert manifest["how"] == "returned"
    lightning_fit("other", odd_at=1, against=str(tmp_path / "run"), quiet=False)
    assert_compared(capfd, step=1)


def assert_compared(capfd, step):
    said = capfd.readouterr().err
    assert f": First divergence at step {step} (epoch 0, batch {step}): " in said, said
    assert "the whole run confirms that divergence" in said


@pytest.mark.filterwarnings("ignore")
def test_a_fit_that_dies_is_recorded_up_to_there(lightning_fit, tmp_path):
    with pytest.raises(RuntimeError, match="own"):
        lightning_fit(fail_at=2)
    steps, _, _, manifest = names(tmp_path / "run")
    assert steps[:2] == [0, 1]
    assert manifest["exception"] == "RuntimeError: the training's own"


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_transformers_is_recorded_and_compared(tmp_path, capfd):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_torch_available():
        pytest.skip("this transformers wants a newer torch")
    from introspect_cli.integrations.transformers import Introspect

    def train(name, rate, **options):
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=8, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, learning_rate=rate,
        )  # fmt: skip
        callbacks = [Introspect(tmp_path / name, source=False, **options)]
        transformers.Trainer(model=Net(), args=arguments, train_dataset=Data(), callbacks=callbacks).train()

    train("run", 1e-3)
    steps, fqns, kinds, manifest = names(tmp_path / "run")
    assert steps == [0, 1, 2]
    assert {"Net", "Net.layer", "Net.layer.weight"} <= fqns
    assert {"output", "grad", "param", "loss"} <= kinds
    assert manifest["how"] == "returned"
    train("other", 2e-3, against=str(tmp_path / "run"), quiet=False)
    assert_compared(capfd, step=0)


def trained(path, **options):
    """A training in a window, as a callback opens one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    window = Window(path, {"source": False, **options})
    window.begin(model)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    window.end()
    return introspect_cli.open_run(path)


def test_the_callback_takes_statistics_steps_and_settings_too(tmp_path):
    stats = "shape,dtype,infs,nans,zeros,med,mean,amean,std,var,uvar,skew,kurt,mode,min,max"
    with trained(tmp_path / "a", stats=stats, steps="0:4:2", record=["param"]) as run:
        assert run.steps == [0, 2]
        summary = next(iter(run.records(2))).summary
        assert {"nans", "zeros", "med", "mean", "amean", "std", "var", "uvar", "mode", "min"} <= set(summary.stats)
        assert summary.checksum
        assert {"environment", "packages"} <= set(run.settings)
    with trained(tmp_path / "b", env=False, packages=False) as run:
        assert not {"environment", "packages"} & set(run.settings)


def test_an_option_that_there_is_not_is_reported_with_the_one_that_was_meant(tmp_path):
    with pytest.raises(UsageError, match="capture has no option 'stat'; did you mean stats"):
        Window(tmp_path / "run", {"stat": ["mean"]}).begin(None)
    with pytest.raises(UsageError, match="seed is for `introspect capture`"):
        Window(tmp_path / "run", {"seed": 1}).begin(None)


def test_ranks_of_a_framework_write_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for rank in (0, 1):
        window = Window(tmp_path / "run", {"packages": False, "source": False})
        window.begin(None, rank, 2)
        window.end()
    assert (tmp_path / "run" / "rank1" / "log.bin").exists()


def test_a_window_opens_and_closes_once(tmp_path):
    window = Window(tmp_path / "run", {"source": False})
    window.end()
    window.begin(None)
    window.begin(None)
    window.end(ValueError("why"))
    window.end()
    with introspect_cli.open_run(tmp_path / "run") as run:
        assert run.manifest["exception"] == "ValueError: why"
