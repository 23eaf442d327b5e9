"""A training with Lightning that validates, in a few lines, for tests of what belongs to which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from pathlib import Path


def fit(
    net: nn.Module, place: Path, steps: int, *, scale: float = 1.0, sanity_checks: int = 1, validation_batches: int = 2
) -> None:
    """Train with batches of four and validate after every second one.

    Args:
        net: takes (N, 4) float32, gives scores of two classes.
        place: where Lightning may write.
        steps: of training.
        scale: factor of the scores in validation alone.
        sanity_checks: batches that Lightning validates before training.
        validation_batches: of five samples each; 0 leaves validation out.
    """
    lightning = pytest.importorskip("lightning.pytorch")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = net, nn.CrossEntropyLoss()

        def training_step(self, batch, number):
            del number
            return self.criterion(self.net(batch[0]), batch[1])

        def validation_step(self, batch, number):
            del number
            self.criterion(scale * self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x, y = torch.randn(steps * 4, 4), torch.randint(0, 2, (steps * 4,))
    pairs = list(zip(x, y, strict=True))
    trainer = lightning.Trainer(
        max_epochs=1,
        num_sanity_val_steps=sanity_checks,
        limit_val_batches=validation_batches,
        val_check_interval=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    trainer.fit(
        Lit(),
        DataLoader(pairs, batch_size=4, generator=torch.Generator()),
        DataLoader(pairs, batch_size=5, generator=torch.Generator()),
    )
