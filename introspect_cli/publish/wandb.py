"""Weights & Biases, by its own client, online or offline as `WANDB_MODE` says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import wandb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Project:
    """A run of our own: one that a script writes can be written by no other process."""

    def __init__(self, project: str, name: str) -> None:
        """Begin a run.

        Args:
            project: of the run, perhaps with the group behind an `@`; "" for `WANDB_PROJECT`, or `introspect`.
            name: of the run.
        """
        own, _, group = project.partition("@")
        settings = wandb.Settings(console="off", silent=True, save_code=False, disable_git=True)
        self._run = wandb.init(
            project=own or os.environ.get("WANDB_PROJECT") or "introspect",
            name=name,
            group=group or None,
            job_type="introspect",
            settings=settings,
        )
        self._name = name

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log({f"introspect/{name}": value for name, value in numbers.items()}, step=step)

    def keep(self, file: Path) -> None:
        """Log a file as an artifact."""
        artifact = wandb.Artifact(f"{self._name}-{file.name}".replace("/", "-"), type="introspect")
        artifact.add_file(str(file), name=file.name)
        self._run.log_artifact(artifact)

    def close(self) -> str:
        """Finish the run."""
        place = self._run.url or self._run.dir
        self._run.finish()
        return f"Weights & Biases: {place}"
